//! Reductions on the CPU in the documented order, along rows or across them.

use crate::cpu::simd::prefetch_ahead;
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Element, Float, Real};
use crate::host_vec::filled_or_unwind;
use crate::kernel::Arg;
use crate::op::pointwise::TASK;
use crate::op::strided_iter::StridedIter;
use crate::strides::Strides;
use std::marker::PhantomData;
use std::ops::Range;

/// Reduced elements in one block.
pub(super) const BLOCK: usize = 256;
/// Partial results within a block.
pub(super) const LANES: usize = 16;
/// Reduced elements per task of a long row: a power of two of blocks, and so a branch of the tree.
const BRANCH: usize = 64 * BLOCK;
/// Adjacent results computed together in column reductions.
const COLUMNS: usize = 128;

/// The operation: how elements, widened first, become partial results, and how two partial results are combined.
pub(super) trait Fold {
    type From: Real;
    type Result: Real;
    const EMPTY: Self::Result;
    fn load(x: Self::From) -> Self::Result;
    fn join(a: Self::Result, b: Self::Result) -> Self::Result;
}

/// x_0 + x_1 + ...
pub(super) struct Sum<R>(PhantomData<R>);
/// The largest; NaN propagates.
pub(super) struct Max<R>(PhantomData<R>);
/// The smallest; NaN propagates.
pub(super) struct Min<R>(PhantomData<R>);
/// x_0^2 + x_1^2 + ... in f64.
pub(super) struct Squares<R>(PhantomData<R>);

impl<R: Real> Fold for Sum<R> {
    type From = R;
    type Result = R;
    const EMPTY: R = R::ZERO;
    #[inline(always)]
    fn load(x: R) -> R {
        x
    }
    #[inline(always)]
    fn join(a: R, b: R) -> R {
        a + b
    }
}

impl<R: Real> Fold for Max<R> {
    type From = R;
    type Result = R;
    const EMPTY: R = R::NEG_INFINITY;
    #[inline(always)]
    fn load(x: R) -> R {
        x
    }
    #[inline(always)]
    #[expect(clippy::eq_op, reason = "only not-a-number differs from itself")]
    fn join(a: R, b: R) -> R {
        if a > b || a != a { a } else { b }
    }
}

impl<R: Real> Fold for Min<R> {
    type From = R;
    type Result = R;
    const EMPTY: R = R::INFINITY;
    #[inline(always)]
    fn load(x: R) -> R {
        x
    }
    #[inline(always)]
    #[expect(clippy::eq_op, reason = "only not-a-number differs from itself")]
    fn join(a: R, b: R) -> R {
        if a < b || a != a { a } else { b }
    }
}

impl<R: Real> Fold for Squares<R> {
    type From = R;
    type Result = f64;
    const EMPTY: f64 = 0.0;
    #[inline(always)]
    fn load(x: R) -> f64 {
        x.to_f64() * x.to_f64()
    }
    #[inline(always)]
    fn join(a: f64, b: f64) -> f64 {
        a + b
    }
}

/// The function applied to each finished result.
type Finish<'f, F, U> = dyn Fn(<F as Fold>::Result) -> U + Sync + 'f;

/// y = finish(fold of x over its last `num_reduced` dims).
pub(super) fn reduce<F: Fold, T: Float<Acc = F::From>, U: Element>(
    pool: &Pool,
    x: &Arg<'_>,
    num_reduced: usize,
    y: &mut [U],
    finish: &Finish<'_, F, U>,
) {
    let memory = x.buffer.as_slice::<T>();
    let num_kept = x.view.ndim() - num_reduced;
    let kept = StridedIter::over([x.view], 0..num_kept, [x.view.offset]);
    let reduced = StridedIter::over([x.view], num_kept..x.view.ndim(), [0]);
    debug_assert_eq!(y.len(), kept.numel(), "the contract asks for one result for each kept element");
    if y.is_empty() {
        return;
    }
    let x = Operand { memory, kept, reduced };
    if x.reduced.numel() == 1 {
        return alone::<F, T, U>(pool, &x, y, finish);
    }
    let neighbours = x.kept.dims()[x.kept.dims().len() - 1];
    if neighbours.1 == [1] && neighbours.0 >= LANES && x.reduced.steps() != [1] {
        across::<F, T, U>(pool, &x, neighbours.0, y, finish);
    } else {
        along::<F, T, U>(pool, &x, y, finish);
    }
}

struct Operand<'a, T> {
    memory: &'a [T],
    kept: StridedIter<1>,
    reduced: StridedIter<1>,
}

/// Reductions of one element each: the blocks and the tree only add the identity.
fn alone<F: Fold, T: Float<Acc = F::From>, U: Element>(
    pool: &Pool,
    x: &Operand<'_, T>,
    y: &mut [U],
    finish: &Finish<'_, F, U>,
) {
    let [step] = x.kept.steps();
    pool.chunks(y, TASK, |task, y| {
        let mut left = y.iter_mut();
        x.kept.for_each_run(task * TASK..task * TASK + left.len(), |[at], length| {
            for (i, y) in left.by_ref().take(length).enumerate() {
                *y = finish(F::join(F::EMPTY, F::load(x.memory[at + i * step].widen())));
            }
        });
    });
}

/// Computes each result separately; long rows are cut into branches of the tree.
fn along<F: Fold, T: Float<Acc = F::From>, U: Element>(
    pool: &Pool,
    x: &Operand<'_, T>,
    y: &mut [U],
    finish: &Finish<'_, F, U>,
) {
    let count = x.reduced.numel();
    let branches = count.div_ceil(BRANCH).max(1);
    if branches == 1 {
        let per_task = (TASK / count.max(1)).max(1);
        pool.chunks(y, per_task, |task, y| {
            for (i, y) in y.iter_mut().enumerate() {
                *y = finish(branch::<F, T>(x, task * per_task + i, 0..count));
            }
        });
        return;
    }
    let mut parts = filled_or_unwind(F::EMPTY, y.len() * branches);
    pool.chunks(&mut parts, 1, |i, part| {
        let first = i % branches * BRANCH;
        part[0] = branch::<F, T>(x, i / branches, first..count.min(first + BRANCH));
    });
    for (y, parts) in y.iter_mut().zip(parts.chunks_mut(branches)) {
        join_pairs::<F>(parts, 1);
        *y = finish(parts[0]);
    }
}

/// Reduces the elements `range` of result number `number`, from the start of a block on.
fn branch<F: Fold, T: Float<Acc = F::From>>(
    x: &Operand<'_, T>,
    number: usize,
    range: Range<usize>,
) -> F::Result {
    let [base] = x.kept.at(number);
    let mut sums = Tree::<F>::new();
    if range.is_empty() {
        return sums.finish();
    }
    let row = (x.reduced.dims().len() == 1 && x.reduced.steps() == [1])
        .then(|| &x.memory[base + range.start..base + range.end]);
    if let Some(row) = row.and_then(T::as_wide) {
        sums.take(row);
        return sums.finish();
    }
    let mut gathered = [F::From::ZERO; BLOCK];
    if let Some(row) = row {
        row.chunks(BLOCK).for_each(|part| {
            widen(part, &mut gathered);
            sums.take(&gathered[..part.len()]);
        });
        return sums.finish();
    }
    let [step] = x.reduced.steps();
    let mut filled = 0;
    x.reduced.for_each_run(range, |[at], length| {
        for i in 0..length {
            gathered[filled] = x.memory[base + at + i * step].widen();
            filled += 1;
            if filled == BLOCK {
                sums.take(&gathered);
                filled = 0;
            }
        }
    });
    sums.take(&gathered[..filled]);
    sums.finish()
}

/// Widens a row into the start of another.
fn widen<T: Float>(from: &[T], to: &mut [T::Acc]) {
    vectorized(
        #[inline(always)]
        || to.iter_mut().zip(from).for_each(|(to, x)| *to = x.widen()),
    );
}

/// Reduces one block, or the incomplete last one.
#[inline(always)]
fn block<F: Fold>(x: &[F::From]) -> F::Result {
    let mut lanes = [F::EMPTY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = F::join(lanes[i], F::load(chunk[i]));
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = F::join(*lane, F::load(x));
    }
    folded::<F>(lanes)
}

/// Combines the partial results of a block: the upper half with the lower one, until one is left.
#[inline(always)]
fn folded<F: Fold>(mut lanes: [F::Result; LANES]) -> F::Result {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = F::join(lanes[i], lanes[i + half]);
        }
    }
    lanes[0]
}

/// The balanced tree over blocks that arrive in order: one complete branch for each bit of their number.
struct Tree<F: Fold> {
    branches: [F::Result; usize::BITS as usize],
    count: usize,
}

impl<F: Fold> Tree<F> {
    #[inline(always)]
    fn new() -> Tree<F> {
        Tree { branches: [F::EMPTY; usize::BITS as usize], count: 0 }
    }

    /// Adds the next elements of a row: whole blocks, and the incomplete last one.
    fn take(&mut self, row: &[F::From]) {
        vectorized(
            #[inline(always)]
            || {
                for part in row.chunks(BLOCK) {
                    prefetch_ahead(part);
                    self.push(block::<F>(part));
                }
            },
        );
    }

    #[inline(always)]
    fn push(&mut self, block: F::Result) {
        let (mut branch, mut level) = (block, 0);
        while self.count >> level & 1 == 1 {
            branch = F::join(self.branches[level], branch);
            level += 1;
        }
        self.branches[level] = branch;
        self.count += 1;
    }

    #[inline(always)]
    fn finish(self) -> F::Result {
        let mut levels = (0..usize::BITS as usize).filter(|level| self.count >> level & 1 == 1);
        match levels.next() {
            None => F::EMPTY,
            Some(lowest) => {
                levels.fold(self.branches[lowest], |right, level| F::join(self.branches[level], right))
            }
        }
    }
}

/// The same tree over parts in memory: rows of `width` results, reduced into the first row.
fn join_pairs<F: Fold>(parts: &mut [F::Result], width: usize) {
    let count = parts.len() / width;
    let mut distance = 1;
    while distance < count {
        for left in (0..count - distance).step_by(2 * distance) {
            let (low, high) = parts.split_at_mut((left + distance) * width);
            let pairs = low[left * width..].iter_mut().zip(&high[..width]);
            pairs.take(width).for_each(|(a, b)| *a = F::join(*a, *b));
        }
        distance *= 2;
    }
}

/// Computes results that are contiguous in memory: rows are combined with each other, `COLUMNS` results and one block at a time.
fn across<F: Fold, T: Float<Acc = F::From>, U: Element>(
    pool: &Pool,
    x: &Operand<'_, T>,
    neighbours: usize,
    y: &mut [U],
    finish: &Finish<'_, F, U>,
) {
    let count = x.reduced.numel();
    let (blocks, tiles) = (count.div_ceil(BLOCK), neighbours.div_ceil(COLUMNS));
    let mut parts = filled_or_unwind(F::EMPTY, y.len() / neighbours * tiles * blocks * COLUMNS);
    let per_task = (TASK / (count.clamp(1, BLOCK) * neighbours.min(COLUMNS))).max(1);
    pool.chunks_on_threads(&mut parts, per_task * COLUMNS, |thread, task, parts| {
        let mut scratch = pool.scratch_for(thread);
        for (i, part) in parts.chunks_mut(COLUMNS).enumerate() {
            let (number, block) = ((task * per_task + i) / blocks, (task * per_task + i) % blocks);
            let (row, first) = (number / tiles, number % tiles * COLUMNS);
            let columns = first..neighbours.min(first + COLUMNS);
            let range = block * BLOCK..count.min((block + 1) * BLOCK);
            block_across::<F, T>(&mut scratch, x, row * neighbours, columns, range, part);
        }
    });
    for (row, y) in y.chunks_mut(neighbours).enumerate() {
        for (tile, y) in y.chunks_mut(COLUMNS).enumerate() {
            let size = blocks * COLUMNS;
            let parts = &mut parts[(row * tiles + tile) * size..][..size];
            join_pairs::<F>(parts, COLUMNS);
            let results = parts.iter().copied().chain(std::iter::repeat(F::EMPTY));
            y.iter_mut().zip(results).for_each(|(y, result)| *y = finish(result));
        }
    }
}

/// Reduces one block of the results `first + columns` into the start of `out`.
fn block_across<F: Fold, T: Float<Acc = F::From>>(
    scratch: &mut Scratch,
    x: &Operand<'_, T>,
    first: usize,
    columns: Range<usize>,
    range: Range<usize>,
    out: &mut [F::Result],
) {
    let [base] = x.kept.at(first + columns.start);
    let [step] = x.reduced.steps();
    let out = &mut out[..columns.len()];
    if let Some(memory) = T::as_wide(x.memory) {
        return joined::<F>(&memory[base..], &x.reduced, range, out);
    }
    // After widening, the rows of a block are contiguous.
    let width = columns.len();
    let [wide] = scratch.slices([range.len() * width]);
    let mut rows = wide.chunks_mut(width);
    x.reduced.for_each_run(range.clone(), |[at], length| {
        for (i, row) in rows.by_ref().take(length).enumerate() {
            widen(&x.memory[base + at + i * step..][..width], row);
        }
    });
    let side_by_side = Strides::new([range.len()][..].into(), [width][..].into(), 0);
    joined::<F>(wide, &StridedIter::new([&side_by_side]), 0..range.len(), out);
}

/// Combines the rows `range` of an operand, each as wide as `out`, with each other.
fn joined<F: Fold>(memory: &[F::From], rows: &StridedIter<1>, range: Range<usize>, out: &mut [F::Result]) {
    let ([step], width) = (rows.steps(), out.len());
    let mut lanes = [[F::EMPTY; COLUMNS]; LANES];
    let mut lane = 0;
    vectorized(
        #[inline(always)]
        || {
            rows.for_each_run(
                range,
                #[inline(always)]
                |[at], length| {
                    for i in 0..length {
                        let row = &memory[at + i * step..][..width];
                        let sums = lanes[lane % LANES].iter_mut().zip(row);
                        sums.for_each(|(sum, &x)| *sum = F::join(*sum, F::load(x)));
                        lane += 1;
                    }
                },
            );
            // Column by column: row by row, the compiler would unroll loops of constant length into 15 copies.
            for (column, out) in out.iter_mut().enumerate().take(COLUMNS) {
                let mut column_lanes = [F::EMPTY; LANES];
                for (to, lane) in column_lanes.iter_mut().zip(&lanes) {
                    *to = lane[column];
                }
                *out = folded::<F>(column_lanes);
            }
        },
    );
}
