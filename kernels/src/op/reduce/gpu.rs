//! Reductions on GPUs, in the documented order. The number of blocks of elements per thread block depends on the extents, and does not
//! change the order.

use crate::dtype::DType;
use crate::gpu::{Grid, GridArg, LaunchPlan, PaddedDims, padded_dims, type_name};
use crate::kernel::{Arg, ArgMut};
use crate::op::strided_iter::StridedIter;
use std::borrow::Cow;

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Equals the constant in the CUDA source.
const THREADS: usize = 256;
const LANES: usize = 16;
const BLOCK: usize = 256;
/// The most parts of one result that a thread combines, and results that are combined by one block.
const PARTS: usize = 16;
const COLUMNS: usize = 32;
/// Thread blocks that occupy a large GPU; launches with fewer blocks reduce less per block.
const BUSY: usize = 1024;

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fold {
    /// The sum, times the factor.
    Sum(f64),
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// The sum of squares in f64.
    Squares,
}

type Defines = Vec<(&'static str, Cow<'static, str>)>;

/// The parameters that all grids of a launch share.
struct Reduction {
    defines: Defines,
    iter: Vec<i64>,
    factor: GridArg,
    accumulator: DType,
    results: usize,
    count: usize,
    /// Elements per load.
    vector: usize,
}

pub(super) fn plan(plan: &mut LaunchPlan, x: &Arg<'_>, num_reduced: usize, y: &ArgMut<'_>, fold: Fold) {
    let num_kept = x.view.ndim() - num_reduced;
    let kept = StridedIter::over([x.view], 0..num_kept, [0]);
    let reduced = StridedIter::over([x.view], num_kept..x.view.ndim(), [0]);
    let (results, count) = (kept.numel(), reduced.numel());
    if results == 0 {
        return;
    }
    let accumulator = if fold == Fold::Squares { DType::F64 } else { x.dtype.accumulator() };
    let (kept_dims, reduced_dims) = (padded_dims(kept.dims()), padded_dims(reduced.dims()));
    let (neighbours, step) = kept.dims()[kept.dims().len() - 1];
    let is_across = step == [1] && neighbours >= LANES && reduced.steps() != [1];
    let vector = vector(x, &kept, &reduced, is_across);
    let mut defines = defines(x, y, accumulator, fold, &kept_dims, &reduced_dims);
    defines.push(("VEC", vector.to_string().into()));
    let reduction = Reduction {
        defines,
        iter: [kept_dims.numbers(), reduced_dims.numbers()].concat(),
        factor: match (fold, accumulator) {
            (Fold::Sum(c), DType::F64) => GridArg::F64(c),
            (Fold::Sum(c), _) => GridArg::F32(c as f32),
            (_, DType::F64) => GridArg::F64(1.0),
            _ => GridArg::F32(1.0),
        },
        accumulator,
        results,
        count,
        vector,
    };
    if is_across {
        reduction.across(plan, neighbours);
    } else {
        reduction.along(plan);
    }
}

/// Returns the elements per load: 16 bytes of contiguous elements, or of a row, if all of these are aligned, else 1.
fn vector(x: &Arg<'_>, kept: &StridedIter<1>, reduced: &StridedIter<1>, is_across: bool) -> usize {
    let vector = 16 / x.dtype.size();
    let is_whole = |n: &usize| n.is_multiple_of(vector);
    let (inner, outer) = kept.dims().split_last().expect("a iter has a dim");
    let steps_are_whole =
        |dims: &[(usize, [usize; 1])]| dims.iter().all(|(extent, [step])| *extent == 1 || is_whole(step));
    let fits = if is_across {
        is_whole(&inner.0) && steps_are_whole(outer) && steps_are_whole(reduced.dims())
    } else {
        matches!(reduced.dims(), [(_, [1])]) && steps_are_whole(kept.dims())
    };
    if fits && is_whole(&x.view.offset) { vector } else { 1 }
}

fn defines(
    x: &Arg<'_>,
    y: &ArgMut<'_>,
    accumulator: DType,
    fold: Fold,
    kept: &PaddedDims<1>,
    reduced: &PaddedDims<1>,
) -> Defines {
    let (join, empty) = match fold {
        Fold::Sum(_) | Fold::Squares => ("Sum", "A(0)"),
        Fold::Max => ("Larger", "(-infinity<A>())"),
        Fold::Min => ("Smaller", "infinity<A>()"),
    };
    let flag = |is_set: bool| if is_set { "1".into() } else { "0".into() };
    let is_small = u32::try_from(x.view.numel()).is_ok();
    vec![
        ("S", type_name(x.dtype).into()),
        ("A", type_name(accumulator).into()),
        ("JOIN", join.into()),
        ("EMPTY", empty.into()),
        ("SQUARES", flag(fold == Fold::Squares)),
        ("FACTOR", flag(matches!(fold, Fold::Sum(_)))),
        ("Y", type_name(y.dtype).into()),
        ("KEPT", kept.extents.len().to_string().into()),
        ("REDUCED", reduced.extents.len().to_string().into()),
        ("INDEX", if is_small { "u32".into() } else { "u64".into() }),
    ]
}

impl Reduction {
    /// Plans each result separately; long rows are cut into branches of the tree.
    fn along(&self, plan: &mut LaunchPlan) {
        let blocks = self.count.div_ceil(BLOCK).max(1);
        // Groups of a thread block.
        let most = THREADS / (LANES / self.vector);
        let groups = blocks.next_power_of_two().min(most);
        let each = each(blocks.div_ceil(groups), |each| {
            self.results * blocks.div_ceil(groups * each) / (most / groups)
        });
        let branches = blocks.div_ceil(groups * each);
        let parts = self.parts(plan, branches);
        let args = vec![
            GridArg::Input(0),
            GridArg::Output(0),
            parts.clone(),
            GridArg::I64s(self.iter.clone()),
            GridArg::I64(self.results as i64),
            GridArg::I64(self.count as i64),
            GridArg::I32(groups as i32),
            GridArg::I32(each as i32),
            GridArg::I64(branches as i64),
            self.factor.clone(),
        ];
        self.grid(plan, "reduce_rows", (self.results * branches).div_ceil(most / groups), args);
        self.join(plan, parts, branches);
    }

    /// Plans results that are contiguous in memory.
    fn across(&self, plan: &mut LaunchPlan, neighbours: usize) {
        let blocks = self.count.div_ceil(BLOCK).max(1);
        let outer = self.results / neighbours;
        let tile = if self.vector == 1 { 32 } else { 16 * self.vector };
        let tiles = outer * neighbours.div_ceil(tile);
        let each = each(blocks, |each| tiles * blocks.div_ceil(each));
        let branches = blocks.div_ceil(each);
        let parts = self.parts(plan, branches);
        let args = vec![
            GridArg::Input(0),
            GridArg::Output(0),
            parts.clone(),
            GridArg::I64s(self.iter.clone()),
            GridArg::I64(neighbours as i64),
            GridArg::I64(outer as i64),
            GridArg::I64(self.count as i64),
            GridArg::I32(each as i32),
            GridArg::I64(branches as i64),
            self.factor.clone(),
        ];
        self.grid(plan, "reduce_columns", tiles * branches, args);
        self.join(plan, parts, branches);
    }

    /// Plans combining parts until one is left for each result.
    fn join(&self, plan: &mut LaunchPlan, mut parts: GridArg, mut count: usize) {
        while count > 1 {
            let columns = if self.results < COLUMNS { 1 } else { COLUMNS };
            let groups = count.next_power_of_two().min(THREADS / columns);
            let each = count.div_ceil(groups).next_power_of_two().min(PARTS);
            let branches = count.div_ceil(groups * each);
            let to = self.parts(plan, branches);
            let args = vec![
                parts,
                GridArg::Output(0),
                to.clone(),
                GridArg::I64(self.results as i64),
                GridArg::I64(count as i64),
                GridArg::I32(columns as i32),
                GridArg::I32(groups as i32),
                GridArg::I32(each as i32),
                GridArg::I64(branches as i64),
                self.factor.clone(),
            ];
            self.grid(plan, "combine_parts", self.results.div_ceil(columns) * branches, args);
            (parts, count) = (to, branches);
        }
    }

    /// Allocates scratch memory for the parts of each result; none if results need no second grid.
    fn parts(&self, plan: &mut LaunchPlan, branches: usize) -> GridArg {
        let count = if branches == 1 { 0 } else { branches * self.results };
        plan.scratch(count * self.accumulator.size())
    }

    fn grid(&self, plan: &mut LaunchPlan, entry: &'static str, blocks: usize, args: Vec<GridArg>) {
        plan.grid(Grid {
            entry,
            defines: self.defines.clone(),
            blocks: [u32::try_from(blocks).expect("fewer than 2^31 blocks cover what a device holds"), 1, 1],
            threads: THREADS as u32,
            shared_bytes: 0,
            args,
        });
    }
}

/// Returns the blocks of elements per group, at most `most`, such that the launch still occupies the GPU.
fn each(most: usize, blocks_if: impl Fn(usize) -> usize) -> usize {
    [4, 2].into_iter().find(|&each| each < 2 * most && blocks_if(each) >= BUSY).unwrap_or(1)
}
