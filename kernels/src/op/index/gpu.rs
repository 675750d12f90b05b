//! Gather and scatter-add on GPUs. For scatter-add, tokens are first sorted by target row (a stable sort), so that each row is one sum in
//! the documented order.

use crate::dtype::DType;
use crate::gpu::{Grid, GridArg, LaunchPlan, bits_name, type_name};
use crate::op::gpu_sort::SortPlan;
use std::borrow::Cow;

pub(in crate::op) const GATHER_SOURCE: &str = concat!(include_str!("extents.cu"), include_str!("gather.cu"));
pub(in crate::op) const SCATTER_ADD_SOURCE: &str =
    concat!(include_str!("../gpu_sort.cu"), include_str!("extents.cu"), include_str!("scatter_add.cu"));

/// Equals the constant in the CUDA source.
const THREADS: usize = 256;
/// The longest list of indices that each target row scans as a whole, if every element has an index; longer lists are sorted.
const SCAN_MAX: usize = 32;

/// A launch of gather, scatter-add or embedding.
#[derive(Clone, Copy, Debug)]
pub(in crate::op) struct IndexLaunch {
    /// The operand that is gathered from or summed.
    pub(in crate::op) dtype: DType,
    /// Extents: the whole operand is (a, v, c), the picked one (a, n, c).
    pub(in crate::op) extents: [usize; 4],
    /// Whether all a and c share one list of indices.
    pub(in crate::op) is_shared: bool,
    /// The first local index and the global extent of the dim.
    pub(in crate::op) starts: [i64; 2],
    /// The offsets of the whole and the picked operand.
    pub(in crate::op) offsets: [usize; 2],
}

impl IndexLaunch {
    /// Plans y = the picked elements. Inputs `x` and `index`.
    pub(in crate::op) fn gather(&self, plan: &mut LaunchPlan, x: usize, index: usize) {
        let [a, n, _, c] = self.extents;
        if a * n * c == 0 {
            return self.check(plan, index);
        }
        let vector = if self.is_shared { self.vector() } else { 1 };
        let args = [
            GridArg::Input(x),
            GridArg::Input(index),
            GridArg::Output(0),
            GridArg::Fault,
            self.numbers(vector),
        ];
        self.grid(plan, "gather", a * n * c / vector, vector, args.to_vec());
    }

    /// Plans dx = the sums of dy. Inputs `index` and `dy`.
    pub(in crate::op) fn scatter_add(&self, plan: &mut LaunchPlan, index: usize, dy: usize) {
        let [a, n, v, c] = self.extents;
        let (dx, one) = (GridArg::Output(0), self.numbers(1));
        if a * v * c == 0 || n == 0 || (!self.is_shared && n <= SCAN_MAX) {
            self.check(plan, index);
            let args = [GridArg::Input(index), GridArg::Input(dy), dx, one];
            return self.grid(plan, "sum_few", a * v * c, 1, args.to_vec());
        }
        let dy = GridArg::Input(dy);
        let rows = if self.is_shared { 1 } else { a * c };
        let sorting = SortPlan { rows, n, k: n, is_wide: false };
        assert!(sorting.fits() && u32::try_from(v).is_ok(), "places and tokens are counted in 32 bits");
        let vector = if self.is_shared { self.vector() } else { 1 };
        let numbers = self.numbers(vector);
        let keys = [GridArg::Input(index), GridArg::Fault, numbers.clone()];
        let items = sorting.plan(plan, &self.defines("tiles", vector), &keys, None);
        let items = items.expect("there are tokens");
        if !self.is_shared {
            return self.grid(plan, "sum_many", a * v * c, 1, vec![dy, items, dx, numbers]);
        }
        let starts = plan.scratch(4 * (v + 1));
        let args = vec![items.clone(), starts.clone(), numbers.clone()];
        self.grid(plan, "find_starts", v + 1, vector, args);
        let args = vec![dy, items, starts, dx, numbers];
        self.grid(plan, "sum_tokens", a * v * c / vector, vector, args);
    }

    /// Plans the check of the indices of a launch that gathers nothing.
    fn check(&self, plan: &mut LaunchPlan, index: usize) {
        let [a, n, _, c] = self.extents;
        let count = if self.is_shared { n } else { a * n * c };
        let args = vec![
            GridArg::Input(index),
            GridArg::Fault,
            GridArg::I64(count as i64),
            GridArg::I64(self.starts[1]),
        ];
        self.grid(plan, "check", count, 1, args);
    }

    /// Returns the elements per vector along c.
    fn vector(&self) -> usize {
        let vector = 16 / self.dtype.size();
        let is_whole = |n: &usize| n.is_multiple_of(vector);
        if is_whole(&self.extents[3]) && self.offsets.iter().all(is_whole) { vector } else { 1 }
    }

    /// Returns the source's `Extents`.
    fn numbers(&self, vector: usize) -> GridArg {
        let [a, n, v, c] = self.extents.map(|n| n as i64);
        GridArg::I64s(vec![a, n, v, c / vector as i64, self.starts[0], self.starts[1]])
    }

    fn grid(
        &self,
        plan: &mut LaunchPlan,
        entry: &'static str,
        items: usize,
        vector: usize,
        args: Vec<GridArg>,
    ) {
        let blocks = u32::try_from(items.div_ceil(THREADS)).expect("fewer than 2^39 elements fit a device");
        let (blocks, threads) = ([blocks, 1, 1], THREADS as u32);
        let defines = self.defines(entry, vector);
        plan.grid(Grid { entry, defines, blocks, threads, shared_bytes: 0, args });
    }

    fn defines(&self, entry: &str, vector: usize) -> Vec<(&'static str, Cow<'static, str>)> {
        let moves = entry == "gather";
        let [a, n, v, c] = self.extents;
        let is_small = u32::try_from(a * n.max(v) * c).is_ok();
        let mut defines = vec![
            ("S", if moves { bits_name(self.dtype).into() } else { type_name(self.dtype).into() }),
            ("A", type_name(self.dtype.accumulator()).into()),
            ("VEC", vector.to_string().into()),
            ("SHARED", if self.is_shared { "1".into() } else { "0".into() }),
            ("INDEX", if is_small { "u32".into() } else { "u64".into() }),
        ];
        if !moves {
            defines.push(("WIDE", "0".into()));
        }
        defines
    }
}
