//! Row-wise kernels: contiguous operands as slices, fixed tasks, and sums in a fixed order.

use crate::cpu::simd::leaf_schedule::SumLeaves;
use crate::cpu::simd::{prefetch_after, prefetch_ahead};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element, Float, Real};
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::{Arg, ArgMut, Launch, Scalar};
use crate::strides::Strides;
use crate::sum_tree::{SumTree, TreeSums};
use std::convert::Infallible;
use std::ops::Range;

/// Partial sums of a row: element i is added to partial sum i mod 16, whatever the vector width is.
pub(crate) const LANES: usize = 16;

/// Terms of a partial sum in a block; blocks are summed separately: in one run, the rounding error of a row of tens of thousands would
/// exceed the bounds of kernels.
const CHUNKS_PER_SUM: usize = 64;

/// The approximate number of elements per task: enough to amortise the hand-over, and few enough for the cache of one core.
const TASK: usize = 1 << 14;

/// Rows per block of sums over rows; blocks are combined in order.
pub(crate) const ROWS_PER_SUM: usize = 32;

/// Columns of such sums per task.
const COLUMNS_PER_TASK: usize = 256;

/// Returns the rows of `width` elements per task. Depends on nothing else.
pub(crate) fn rows_per_task(width: usize) -> usize {
    (TASK / width.max(1)).max(1)
}

/// Returns the operands of a launch, as many as the kernel's contract states.
pub(crate) fn operands<'s, 'a, const I: usize, const O: usize>(
    launch: &'s mut Launch<'a>,
) -> (&'a [Arg<'a>; I], [&'s mut ArgMut<'a>; O], &'a [Scalar]) {
    let inputs: &[Arg<'_>; I] = launch.inputs.try_into().expect("a launch has the inputs of its contract");
    let outputs: &mut [ArgMut<'_>; O] =
        (&mut *launch.outputs).try_into().expect("a launch has the outputs of its contract");
    (inputs, outputs.each_mut(), launch.scalars)
}

/// Returns the operands of a launch whose contract has one more input, which is optional.
pub(crate) fn operands_and_last<'s, 'a, const I: usize, const O: usize>(
    launch: &'s mut Launch<'a>,
) -> (&'a [Arg<'a>; I], Option<&'a Arg<'a>>, [&'s mut ArgMut<'a>; O]) {
    let split = launch.inputs.split_first_chunk();
    let (inputs, last) = split.expect("a launch has the inputs of its contract");
    let outputs: &mut [ArgMut<'_>; O] =
        (&mut *launch.outputs).try_into().expect("a launch has the outputs of its contract");
    (inputs, last.first(), outputs.each_mut())
}

/// Returns whether elements of a dtype are read as this type; booleans are bytes.
pub(crate) fn holds<T: Element>(dtype: DType) -> bool {
    dtype == T::DTYPE || (dtype == DType::Bool && T::DTYPE == DType::U8)
}

/// Returns the elements of a contiguous input.
pub(crate) fn read<'a, T: Element>(arg: &Arg<'a>) -> &'a [T] {
    debug_assert!(arg.view.is_contiguous(), "the contract asks for a contiguous input");
    debug_assert!(holds::<T>(arg.dtype), "the contract asks for this dtype");
    match arg.view.numel() {
        0 => &[],
        numel => &arg.buffer.as_slice()[arg.view.offset..][..numel],
    }
}

/// Returns the elements of a contiguous output.
pub(crate) fn write<'s, T: Element>(arg: &'s mut ArgMut<'_>) -> &'s mut [T] {
    debug_assert!(arg.view.is_contiguous(), "the contract asks for a contiguous output");
    debug_assert!(holds::<T>(arg.dtype), "the contract asks for this dtype");
    match arg.view.numel() {
        0 => &mut [],
        numel => {
            let memory = arg.buffer.as_mut().expect("an output buffer has one handle");
            &mut memory[arg.view.offset..][..numel]
        }
    }
}

/// Returns the extent of the last dim.
pub(crate) fn width(arg: &Arg<'_>) -> usize {
    row_len(arg.view)
}

/// Returns the extent of the last dim of a view.
pub(crate) fn row_len(view: &Strides) -> usize {
    *view.shape.last().expect("the contract asks for at least one dim")
}

/// Indices checked at a time, before the offending one is searched.
const INDICES_AT_ONCE: usize = 1024;

/// Returns an error for the first index outside of `0..rows`.
pub(crate) fn check_indices(kernel: &'static str, indices: &[i64], rows: i64) -> Result<(), KernelError> {
    // Negative indices are large as unsigned; without a branch per index, this vectorizes.
    let outside = |&i: &i64| i as u64 >= rows as u64;
    let some = |chunk: &[i64]| chunk.iter().fold(false, |some, i| some | outside(i));
    let chunks = || indices.chunks(INDICES_AT_ONCE);
    let Some(chunk) = vectorized(
        #[inline(always)]
        || chunks().position(some),
    ) else {
        return Ok(());
    };
    let rest = &indices[chunk * INDICES_AT_ONCE..];
    let position = chunk * INDICES_AT_ONCE + rest.iter().position(outside).unwrap_or_default();
    Err(KernelError::Index { kernel, index: indices[position], position, rows: rows as usize })
}

/// Returns the error of a kernel whose operand is not a float.
pub(crate) fn no_float(kernel: &'static str, dtype: DType) -> Result<(), KernelError> {
    Err(KernelError::DType { kernel, dtype })
}

/// Folds the partial results of a row, neighbours at half distance first.
#[inline(always)]
fn fold<R: Real>(mut lanes: [R; LANES], join: impl Fn(R, R) -> R) -> R {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = join(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Chunks of a row whose maxima are independent of those of earlier chunks, so that the CPU overlaps the comparisons.
const CHUNKS_PER_MAX: usize = 8;

/// Returns the largest `value` of the elements, ignoring NaN; negative infinity for an empty row.
#[inline(always)]
pub(crate) fn largest<T: Copy, R: Real>(x: &[T], value: impl Fn(T) -> R) -> R {
    // A comparison and a selection in this order compile to one instruction.
    let larger = |a: R, b: R| if b > a { b } else { a };
    let mut lanes = [R::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    let (groups, single) = chunks.as_chunks::<CHUNKS_PER_MAX>();
    for group in groups {
        prefetch_ahead(group.as_flattened());
        let mut most = [R::NEG_INFINITY; LANES];
        for chunk in group {
            for i in 0..LANES {
                most[i] = larger(most[i], value(chunk[i]));
            }
        }
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], most[i]);
        }
    }
    for chunk in single {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], value(chunk[i]));
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, value(x));
    }
    fold(lanes, larger)
}

/// Returns the sum of `term` over a row.
#[inline(always)]
pub(crate) fn sum<T: Copy, R: Real>(x: &[T], term: impl Fn(T) -> R) -> R {
    sum_triples(x, x, x, |x, _, _| term(x))
}

/// Returns the sum of `term` over a row, prefetching the cache lines `bytes` bytes ahead; for terms with enough arithmetic.
#[inline(always)]
pub(crate) fn sum_before<T: Copy, R: Real>(x: &[T], bytes: usize, term: impl Fn(T) -> R) -> R {
    sum_prefetching(x, x, x, |chunk, _| prefetch_after(chunk, bytes), |x, _, _| term(x))
}

/// Returns the sum of `term` over two rows.
#[inline(always)]
pub(crate) fn sum_pairs<T: Copy, U: Copy, R: Real>(x: &[T], y: &[U], term: impl Fn(T, U) -> R) -> R {
    sum_triples(x, y, y, |x, y, _| term(x, y))
}

/// Returns the sum of `term` over three rows.
#[inline(always)]
pub(crate) fn sum_triples<T: Copy, U: Copy, V: Copy, R: Real>(
    x: &[T],
    y: &[U],
    z: &[V],
    term: impl Fn(T, U, V) -> R,
) -> R {
    sum_prefetching(x, y, z, |_, _| (), term)
}

/// Returns the sum of `term` over three rows; calls `prefetch` with each whole chunk of x and of z before its terms are computed.
#[inline(always)]
pub(crate) fn sum_prefetching<T: Copy, U: Copy, V: Copy, R: Real>(
    x: &[T],
    y: &[U],
    z: &[V],
    prefetch: impl Fn(&[T], &[V]),
    term: impl Fn(T, U, V) -> R,
) -> R {
    let mut lanes = [R::ZERO; LANES];
    let ((xs, x_rest), (ys, y_rest), (zs, z_rest)) = (x.as_chunks(), y.as_chunks(), z.as_chunks());
    let blocks = xs.chunks(CHUNKS_PER_SUM).zip(ys.chunks(CHUNKS_PER_SUM)).zip(zs.chunks(CHUNKS_PER_SUM));
    for ((xs, ys), zs) in blocks {
        let mut sums = [R::ZERO; LANES];
        for ((x, y), z) in xs.iter().zip(ys).zip(zs) {
            let (x, y, z): (&[T; LANES], &[U; LANES], &[V; LANES]) = (x, y, z);
            prefetch(x, z);
            for i in 0..LANES {
                sums[i] += term(x[i], y[i], z[i]);
            }
        }
        for i in 0..LANES {
            lanes[i] += sums[i];
        }
    }
    for (lane, ((&x, &y), &z)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest).zip(z_rest)) {
        *lane += term(x, y, z);
    }
    fold(lanes, |a, b| a + b)
}

/// Blocks per group: groups are summed separately, because a large f32 sum would lose small terms.
const BLOCKS_TOGETHER: usize = 64;

/// Sums blocks of `out.len()` partial sums: the blocks of a group in order, then the groups.
pub(crate) fn add_blocks<T: Float>(pool: &Pool, blocks: &[T::Acc], out: &mut [T]) {
    let width = out.len();
    pool.chunks(out, COLUMNS_PER_TASK, |i, out| {
        let [mut total, mut group] = [(); 2].map(|()| vec![T::Acc::ZERO; out.len()]);
        vectorized(
            #[inline(always)]
            || {
                for blocks in blocks.chunks(BLOCKS_TOGETHER * width.max(1)) {
                    group.fill(T::Acc::ZERO);
                    for block in blocks.chunks_exact(width) {
                        for (sum, part) in group.iter_mut().zip(&block[i * COLUMNS_PER_TASK..]) {
                            *sum += *part;
                        }
                    }
                    total.iter_mut().zip(&group).for_each(|(total, sum)| *total += *sum);
                }
            },
        );
        out.iter_mut().zip(total).for_each(|(out, total)| *out = T::narrow(total));
    });
}

/// Returns the leaves that scalars of a launch state: Int leaves of the tree, Int first leaf, then Int borders of the leaves in the summed
/// dim that is cut, with `outer` elements of the summed dims before it.
pub(crate) fn leaves_of(scalars: &[Scalar], outer: usize) -> SumLeaves {
    let count = |scalar: &Scalar| scalar.int() as usize;
    let [num_leaves, first, borders @ ..] = scalars else { unreachable!("the contract asks for leaves") };
    let borders = borders.iter().map(count).collect();
    SumLeaves { tree: SumTree::new(count(num_leaves)), first: count(first), borders, outer }
}

/// [`leaves_of`] of rows, of whose last dim the scalars state the leaves.
pub(crate) fn leaves_of_rows(scalars: &[Scalar], num_rows: usize) -> SumLeaves {
    let leaves = leaves_of(scalars, 1);
    let inner = leaves.borders[leaves.borders.len() - 1];
    SumLeaves { outer: num_rows / inner.max(1), ..leaves }
}

/// Joins the sums of leaves, each rounded, into `out`: `sum` writes the sum of a leaf, by its number. Zeros if all are absent.
pub(crate) fn join_leaves<T: Float>(leaves: &SumLeaves, out: &mut [T], mut sum: impl FnMut(usize, &mut [T])) {
    join_leaves_of_any(leaves, out, &mut sum);
}

/// [`join_leaves`], compiled once for each T.
fn join_leaves_of_any<T: Float>(leaves: &SumLeaves, out: &mut [T], sum: &mut dyn FnMut(usize, &mut [T])) {
    let mut sums = TreeSums::new(leaves.tree);
    for (number, pair) in leaves.borders.windows(2).enumerate() {
        let is_present = leaves.outer * (pair[1] - pair[0]) > 0;
        let of_leaf = is_present.then(|| {
            let mut of_leaf = filled_or_unwind(T::default(), out.len());
            sum(number, &mut of_leaf);
            of_leaf
        });
        let Ok(()) = sums.add(SumTree::leaf(leaves.first + number), of_leaf, |mut left, right| {
            let pairs = left.iter_mut().zip(&right);
            pairs.for_each(|(left, right)| *left = T::narrow(left.widen() + right.widen()));
            Ok::<_, Infallible>(left)
        });
    }
    match sums.into_roots().next() {
        Some((_, Some(total))) => out.copy_from_slice(&total),
        _ => out.fill(T::default()),
    }
}

/// Rows of one leaf, summed as a block: those number `numbers` of the leaf, in order.
struct LeafBlock {
    /// The rows of the leaf in the summed dim that is cut: the first, and their number.
    first: usize,
    len: usize,
    numbers: Range<usize>,
    /// The extent of that dim.
    inner: usize,
}

impl LeafBlock {
    /// Returns the blocks of all leaves, in order, and the number of blocks of each leaf.
    fn all(leaves: &SumLeaves) -> (Vec<LeafBlock>, Vec<usize>) {
        let inner = leaves.borders[leaves.borders.len() - 1];
        let (mut blocks, mut counts) = (vec![], vec![]);
        for pair in leaves.borders.windows(2) {
            let (first, len) = (pair[0], pair[1] - pair[0]);
            let num_rows = leaves.outer * len;
            for start in (0..num_rows).step_by(ROWS_PER_SUM) {
                let numbers = start..num_rows.min(start + ROWS_PER_SUM);
                blocks.push(LeafBlock { first, len, numbers, inner });
            }
            counts.push(num_rows.div_ceil(ROWS_PER_SUM));
        }
        (blocks, counts)
    }

    /// Returns the row with a number in the leaf.
    #[inline(always)]
    fn row(&self, number: usize) -> usize {
        number / self.len * self.inner + self.first + number % self.len
    }
}

/// Partial sums in blocks of rows: N sums of `width` elements for each block.
struct BlockSums<R, const N: usize> {
    sums: [Vec<R>; N],
    width: usize,
}

impl<R: Real, const N: usize> BlockSums<R, N> {
    fn new(num_blocks: usize, width: usize) -> BlockSums<R, N> {
        BlockSums { sums: std::array::from_fn(|_| filled_or_unwind(R::ZERO, num_blocks * width)), width }
    }

    /// Returns the sums of each block.
    fn of_blocks(&mut self, num_blocks: usize) -> Vec<[&mut [R]; N]> {
        let mut rest = self.sums.each_mut().map(|sums| sums.chunks_mut(self.width));
        (0..num_blocks)
            .map(|_| rest.each_mut().map(|rest| rest.next().expect("sums for each block")))
            .collect()
    }
}

/// Joins the partial sums in blocks of leaves, of which each leaf has as many as `counts` states.
fn join_blocks_of_leaves<T: Float>(
    pool: &Pool,
    leaves: &SumLeaves,
    counts: &[usize],
    parts: &[T::Acc],
    out: &mut [T],
) {
    let (mut rest, width) = (parts, out.len());
    join_leaves(leaves, out, |leaf, of_leaf| {
        let (blocks, after) = rest.split_at(counts[leaf] * width);
        add_blocks(pool, blocks, of_leaf);
        rest = after;
    });
}

/// Sums over rows, by leaves of the last dim of rows: `add_row` adds a row to N sums. Within a leaf rows are summed in blocks of
/// [`ROWS_PER_SUM`], then those ([`add_blocks`]).
pub(crate) fn sum_rows_of_leaves<T: Float, const N: usize>(
    pool: &Pool,
    leaves: &SumLeaves,
    add_row: impl Fn(usize, [&mut [T::Acc]; N]) + Sync,
    outputs: [&mut [T]; N],
) {
    let (blocks, counts) = LeafBlock::all(leaves);
    let mut parts = BlockSums::new(blocks.len(), outputs[0].len());
    let mut sums = parts.of_blocks(blocks.len());
    pool.chunks(&mut sums, 1, |i, sums| {
        vectorized(
            #[inline(always)]
            || {
                // `for_each` is not always inlined, and compiled on its own its body would have no vectors.
                for number in blocks[i].numbers.clone() {
                    add_row(blocks[i].row(number), sums[0].each_mut().map(|sums| &mut **sums));
                }
            },
        );
    });
    for (parts, out) in parts.sums.iter().zip(outputs) {
        join_blocks_of_leaves(pool, leaves, &counts, parts, out);
    }
}

/// Writes the rows of `out`, of `width` elements each, and sums over rows: `write_row` writes a row, `add_row` adds a row to N sums.
///
/// Without scalars rows are summed in blocks of [`ROWS_PER_SUM`], then those ([`add_blocks`]), into sums in the type of rows or in its
/// accumulator. Scalars state leaves of the last dim of rows; the sums are then those of [`sum_rows_of_leaves`], in the type of rows.
pub(crate) fn write_and_sum_rows<T: Float, const N: usize>(
    pool: &Pool,
    (out, width): (&mut [T], usize),
    leaf_scalars: &[Scalar],
    write_row: impl Fn(usize, &mut [T]) + Sync,
    add_row: impl Fn(usize, [&mut [T::Acc]; N]) + Sync,
    sums: [&mut ArgMut<'_>; N],
) {
    let num_rows = out.len() / width;
    if !leaf_scalars.is_empty() {
        let rows = rows_per_task(width);
        pool.chunks(out, rows * width, |i, out| {
            vectorized(
                #[inline(always)]
                || {
                    for (row, out) in out.chunks_exact_mut(width).enumerate() {
                        write_row(i * rows + row, out);
                    }
                },
            );
        });
        let leaves = leaves_of_rows(leaf_scalars, num_rows);
        return sum_rows_of_leaves(pool, &leaves, add_row, sums.map(|sum| write::<T>(sum)));
    }
    let num_blocks = num_rows.div_ceil(ROWS_PER_SUM);
    let mut parts = BlockSums::new(num_blocks, width);
    let sums_of_blocks = parts.of_blocks(num_blocks);
    let mut tasks: Vec<_> = out.chunks_mut(ROWS_PER_SUM * width).zip(sums_of_blocks).collect();
    pool.chunks(&mut tasks, 1, |i, task| {
        let (out, sums) = &mut task[0];
        vectorized(
            #[inline(always)]
            || {
                for (row, out) in out.chunks_exact_mut(width).enumerate() {
                    let row = i * ROWS_PER_SUM + row;
                    add_row(row, sums.each_mut().map(|sums| &mut **sums));
                    write_row(row, out);
                }
            },
        );
    });
    drop(tasks);
    for (parts, sum) in parts.sums.iter().zip(sums) {
        add_blocks_into::<T>(pool, parts, sum);
    }
}

/// [`add_blocks`] into sums in the type of rows or in its accumulator.
fn add_blocks_into<T: Float>(pool: &Pool, blocks: &[T::Acc], sum: &mut ArgMut<'_>) {
    if sum.dtype == T::DTYPE {
        add_blocks(pool, blocks, write::<T>(sum));
    } else {
        add_blocks(pool, blocks, write::<T::Acc>(sum));
    }
}

/// Writes the input gradient of a row, `slope` at the elements of x, w and dy, plus the residual gradient r, rounded once.
#[inline(always)]
pub(crate) fn write_input_grad<T: Float>(
    (x, w, dy): (&[T], &[T], &[T]),
    (dx, r): (&mut [T], Option<&[T]>),
    slope: impl Fn(T, T, T) -> T::Acc,
) {
    let places = dx.iter_mut().zip(x).zip(w).zip(dy);
    match r {
        None => {
            for (((dx, &x), &w), &dy) in places {
                *dx = T::narrow(slope(x, w, dy));
            }
        }
        Some(r) => {
            for ((((dx, &x), &w), &dy), r) in places.zip(r) {
                *dx = T::narrow(slope(x, w, dy) + r.widen());
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::kernel::Kernel;
    use crate::op::kernel_check::{Case, Kind, round, values};

    /// Checks that the sums over rows of a backward kernel, by leaves, have the bits of a launch for each leaf and of rounded additions in
    /// the tree, and that the rows have those of such launches. The kernel takes x, w, as many statistics of rows as it sums, and dy.
    pub(crate) fn check_sums_over_leaves(backward: &Kernel, num_sums: usize) {
        let (outer, inner, d, borders) = (3, 50, 20, [0i64, 3, 3, 20, 50]);
        let (x, dy, w) = (values(1, outer * inner * d), values(2, outer * inner * d), values(3, d));
        let statistics = (0..num_sums).map(|number| values(4 + number as u64, outer * inner));
        let statistics: Vec<_> = statistics.collect();
        let launched = |rows: &[usize], scalars: &[Scalar], dtype: DType| {
            let pick = |from: &[f64], width: usize| -> Vec<f64> {
                rows.iter().flat_map(|row| from[row * width..(row + 1) * width].to_vec()).collect()
            };
            let mut case = Case::new(backward).input(&[rows.len(), d], &pick(&x, d)).input(&[d], &w);
            for statistic in &statistics {
                case = case.input_as(Kind::Accumulator, &[rows.len()], &pick(statistic, 1));
            }
            case = case.input(&[rows.len(), d], &pick(&dy, d)).output(&[rows.len(), d]);
            (0..num_sums).fold(case, |case, _| case.output(&[d])).scalars(scalars).fast(dtype)
        };
        let all: Vec<usize> = (0..outer * inner).collect();
        let scalars: Vec<Scalar> = [4, 0].into_iter().chain(borders).map(Scalar::Int).collect();
        for dtype in DType::FLOATS {
            let got = launched(&all, &scalars, dtype);
            let leaf = |range: Range<usize>| {
                let rows: Vec<usize> =
                    (0..outer).flat_map(|row| range.clone().map(move |t| row * inner + t)).collect();
                let outputs = launched(&rows, &[], dtype);
                for (i, row) in rows.iter().enumerate() {
                    assert_eq!(
                        got[0][row * d..(row + 1) * d],
                        outputs[0][i * d..(i + 1) * d],
                        "dx in {dtype}"
                    );
                }
                outputs
            };
            let leaves = [leaf(0..3), leaf(3..20), leaf(20..50)];
            let add = |x: f64, y: f64| round(dtype, x + y);
            assert_eq!(got.len(), 1 + num_sums, "dx and the sums");
            for output in 1..got.len() {
                for i in 0..d {
                    let [first, second, third] = [0, 1, 2].map(|leaf| leaves[leaf][output][i]);
                    assert_eq!(got[output][i], add(first, add(second, third)), "{dtype}, output {output}");
                }
            }
        }
    }

    #[test]
    fn sums_and_maxima_match_known_values() {
        let x: Vec<f32> = (0..37).map(|i| i as f32).collect();
        assert_eq!(sum(&x, |v| v), 666.0);
        assert_eq!(sum_pairs(&x, &x, |a, b| a * b), 16206.0);
        assert_eq!(largest(&x, |v| -v), 0.0);
        assert_eq!(largest(&[f32::NAN, -3.0, f32::NAN], |v| v), -3.0);
        // The maximum at each position of groups of chunks, single chunks and the rest; of equal numbers, the first.
        for n in [8 * LANES, 8 * LANES + 1, 19 * LANES + 5] {
            for at in 0..n {
                let mut x = vec![f32::NAN; n];
                x[at] = -1.0;
                assert_eq!(largest(&x, |v| v), -1.0, "{at} of {n}");
                let zeros: Vec<f32> = (0..n).map(|i| if i < at { -0.0 } else { 0.0 }).collect();
                assert_eq!(largest(&zeros, |v| v).to_bits(), first_largest(&zeros).to_bits(), "{at} of {n}");
            }
        }
        assert_eq!(largest(&[] as &[f32], |v| v), f32::NEG_INFINITY);
        assert_eq!(sum(&[] as &[f64], |v| v), 0.0);
    }

    /// A plain reference: lane by lane.
    fn first_largest(x: &[f32]) -> f32 {
        let larger = |a: f32, b: f32| if b > a { b } else { a };
        let lane = |i: usize| x.iter().skip(i).step_by(LANES).copied().fold(f32::NEG_INFINITY, larger);
        fold(std::array::from_fn(lane), larger)
    }

    #[test]
    fn add_blocks_matches_known_values() {
        let mut out = [0.0f32; 300];
        let blocks: Vec<f32> = (0..900).map(|i| i as f32).collect();
        add_blocks(&Pool::new(2), &blocks, &mut out);
        assert!((0..300).all(|i| out[i] == (900 + 3 * i) as f32));
    }

    #[test]
    fn tasks_hold_whole_rows() {
        assert_eq!([0, 1, 64, 1 << 14, 50257].map(rows_per_task), [1 << 14, 1 << 14, 256, 1, 1]);
    }
}
