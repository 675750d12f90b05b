//! Picking and adding by index on GPUs. Where one list of indices serves all, tokens are first arranged by place, in the
//! order in which they stand, so that each place is one sum in the stated order; only integers are added atomically.

use crate::dtype::DType;
use crate::gpu::{Grid, GridArg, Plan, bits_name, type_name};
use std::borrow::Cow;

pub(in crate::op) const SOURCE: &str = include_str!("gpu.cu");

/// As in the source.
const THREADS: usize = 256;
const SCAN_THREADS: usize = 1024;

/// A launch of either kernel, or of one for rows of a table.
#[derive(Clone, Copy, Debug)]
pub(in crate::op) struct Indexed {
    /// What is picked from or added up.
    pub(in crate::op) dtype: DType,
    /// Extents: the whole operand is (a, v, c), the picked one (a, n, c).
    pub(in crate::op) extents: [usize; 4],
    /// Whether one list of indices serves every a and c.
    pub(in crate::op) is_shared: bool,
    /// The first place here and the places of the whole dim.
    pub(in crate::op) starts: [i64; 2],
    /// Where the whole and the picked operand begin.
    pub(in crate::op) offsets: [usize; 2],
}

impl Indexed {
    /// y = the picked elements. Inputs `x` and `index`.
    pub(in crate::op) fn gather(&self, plan: &mut Plan, x: usize, index: usize) {
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
        self.grid(plan, "gather", (a * n * c / vector, THREADS), vector, args.to_vec());
    }

    /// dx = the sums. Inputs `index` and `dy`.
    pub(in crate::op) fn scatter_add(&self, plan: &mut Plan, index: usize, dy: usize) {
        let [a, n, v, c] = self.extents;
        if !self.is_shared || a * v * c == 0 {
            self.check(plan, index);
            let args = [GridArg::Input(index), GridArg::Input(dy), GridArg::Output(0), self.numbers(1)];
            return self.grid(plan, "sum_elements", (a * v * c, THREADS), 1, args.to_vec());
        }
        let vector = self.vector();
        let (counts, starts, order) = (plan.scratch(4 * v), plan.scratch(4 * (v + 1)), plan.scratch(4 * n));
        let (index, dy, numbers) = (GridArg::Input(index), GridArg::Input(dy), self.numbers(vector));
        let args = vec![counts.clone(), GridArg::I64(v as i64)];
        self.grid(plan, "clear", (v, THREADS), vector, args);
        let args = vec![index.clone(), counts.clone(), GridArg::Fault, numbers.clone()];
        self.grid(plan, "count", (n, THREADS), vector, args);
        let args = vec![counts, starts.clone(), GridArg::I64(v as i64)];
        self.grid(plan, "scan", (1, SCAN_THREADS), vector, args);
        let args = vec![index, starts.clone(), order.clone(), numbers.clone()];
        self.grid(plan, "arrange", (n, THREADS), vector, args);
        let args = vec![dy, starts, order, GridArg::Output(0), numbers];
        self.grid(plan, "sum_tokens", (a * v * c / vector, THREADS), vector, args);
    }

    /// Looks at the indices of a launch that picks nothing.
    fn check(&self, plan: &mut Plan, index: usize) {
        let [a, n, _, c] = self.extents;
        let count = if self.is_shared { n } else { a * n * c };
        let args = vec![
            GridArg::Input(index),
            GridArg::Fault,
            GridArg::I64(count as i64),
            GridArg::I64(self.starts[1]),
        ];
        self.grid(plan, "check", (count, THREADS), 1, args);
    }

    /// How many neighbours along c are moved at once.
    fn vector(&self) -> usize {
        let vector = 16 / self.dtype.size();
        let is_whole = |n: &usize| n.is_multiple_of(vector);
        if is_whole(&self.extents[3]) && self.offsets.iter().all(is_whole) { vector } else { 1 }
    }

    /// The source's `Extents`.
    fn numbers(&self, vector: usize) -> GridArg {
        let [a, n, v, c] = self.extents.map(|n| n as i64);
        GridArg::I64s(vec![a, n, v, c / vector as i64, self.starts[0], self.starts[1]])
    }

    fn grid(
        &self,
        plan: &mut Plan,
        entry: &'static str,
        (items, threads): (usize, usize),
        vector: usize,
        args: Vec<GridArg>,
    ) {
        let moves = entry == "gather" || entry == "check";
        let [a, n, v, c] = self.extents;
        let is_small = u32::try_from(a * n.max(v) * c).is_ok();
        let defines: Vec<(&'static str, Cow<'static, str>)> = vec![
            ("S", if moves { bits_name(self.dtype).into() } else { type_name(self.dtype).into() }),
            ("A", type_name(self.dtype.accumulator()).into()),
            ("SUMS", if moves { "0".into() } else { "1".into() }),
            ("VEC", vector.to_string().into()),
            ("SHARED", if self.is_shared { "1".into() } else { "0".into() }),
            ("INDEX", if is_small { "u32".into() } else { "u64".into() }),
        ];
        let blocks = u32::try_from(items.div_ceil(threads)).expect("fewer than 2^39 elements fit a device");
        let (blocks, threads) = ([blocks, 1, 1], threads as u32);
        plan.grid(Grid { entry, defines, blocks, threads, shared_bytes: 0, args });
    }
}
