//! Matrix products whose sums are canonical: k is cut into leaves, whose sums are joined in a tree ([`SumTree`](crate::SumTree)).
//!
//! The bits are those of one product for each leaf, rounded to the dtype of the operands, and of additions of these products in the order
//! of the tree, each rounded. Here partial sums of a tile are joined while they are in the cache.

use super::epilogue::BoundEpilogue;
use super::prepacked::{PackedBlocks, prepack_steps};
use super::split::{ReadCost, Split};
use super::{
    BatchedMatrixMut, BatchedMatrixRef, Epilogue, ROWS_PER_ROUNDING, batched_required_len,
    for_each_bf16_part, is_non_overlapping, isa, store_rounded,
};
use crate::cpu::Pool;
use crate::cpu::simd::bf16::{self, Bf16Isa};
use crate::cpu::simd::blocked_gemm::{BlockedGemm, MatrixPtrMut, OnFinished};
use crate::cpu::simd::leaf_gemm::LeafGemm;
use crate::cpu::simd::leaf_schedule::{BlockRule, LeafSchedule, StepBlock, SumLeaves};
use crate::cpu::simd::level;
use crate::cpu::simd::microkernel::MicroKernels;
use crate::cpu::simd::pack::{KC, MatrixPtr};
use crate::cpu::simd::prepacked::{PackedB, PackedSteps};
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::simd::tile_sums::TileSums;
use crate::dtype::{DType, Float};
use crate::host_vec::filled_or_unwind;
use std::ops::Range;
use std::sync::Arc;

/// Rows of c at a time where partial sums outlive a block of steps: they stay near.
const ROWS_HELD: usize = 512;

/// A batch of strided matrices to read whose summed dim is two dims, k0 and k1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeafMatrixRef<'a, T> {
    /// The elements, from the first on.
    pub(crate) data: &'a [T],
    /// Distance between matrices, between rows of a or columns of b, and between steps of k0 and of k1.
    pub(crate) strides: [usize; 4],
}

impl<'a, T> LeafMatrixRef<'a, T> {
    /// Returns the operand a with one summed dim, k1.
    fn left(self) -> BatchedMatrixRef<'a, T> {
        let [matrix, row, _, step] = self.strides;
        BatchedMatrixRef { data: self.data, strides: [matrix, row, step] }
    }

    /// Returns the operand b with one summed dim, k1.
    fn right(self) -> BatchedMatrixRef<'a, T> {
        let [matrix, column, _, step] = self.strides;
        BatchedMatrixRef { data: self.data, strides: [matrix, step, column] }
    }
}

/// c = a b for every matrix of a batch, summed over leaves; `dims` is (g, m, n). Zeros if no leaf has a term. Applies the epilogue, for
/// which c is contiguous, to every row of c once, as [`batched_gemm_with_epilogue`](super::batched_gemm_with_epilogue) does.
///
/// # Panics
/// If a batch reaches beyond its memory, or elements of c may share memory; if the leaves do not begin at 0 or are not those of one node.
pub(crate) fn batched_gemm_of_leaves<T: Float>(
    pool: &Pool,
    [g, m, n]: [usize; 3],
    leaves: &SumLeaves,
    [a, b]: [LeafMatrixRef<'_, T>; 2],
    mut c: BatchedMatrixMut<'_, T>,
    epilogue: Option<&Epilogue<'_, T>>,
) {
    assert!(leaves.borders.first() == Some(&0), "the first leaf begins at 0");
    let inner = leaves.borders[leaves.borders.len() - 1];
    for (x, vectors) in [(&a, m), (&b, n)] {
        let [matrix, vector, outer, step] = x.strides;
        let of_outer = batched_required_len([leaves.outer, vectors, inner], [outer, vector, step]);
        let required = if of_outer == 0 {
            0
        } else {
            g.saturating_sub(1).saturating_mul(matrix).saturating_add(of_outer)
        };
        assert!(g == 0 || required <= x.data.len(), "a and b must be within their memory");
    }
    assert!(batched_required_len([g, m, n], c.strides) <= c.data.len(), "c must be within its memory");
    assert!(is_non_overlapping([g, m, n], c.strides), "elements of c share no memory");
    if g * m * n == 0 {
        return;
    }
    assert!(epilogue.is_none() || c.strides == [m * n, n, 1], "c is contiguous");
    let epilogue = epilogue.map(|epilogue| BoundEpilogue::new([g, m, n], epilogue));
    let dims = [g, m, n, leaves.num_terms()];
    if let Some(isa) = isa(T::DTYPE, pool.precision()) {
        let gathered = (leaves.outer > 1).then(|| Gathered::of(pool, dims, leaves, [a, b]));
        let (a, b) = gathered.as_ref().map_or((a.left(), b.right()), Gathered::matrices);
        let of_gathered = gathered.as_ref().map_or(leaves, |gathered| &gathered.leaves);
        match T::DTYPE {
            DType::F32 => bf16_gemm_of_leaves::<T, f32>(isa, pool, (dims, of_gathered), [a, b], &mut c),
            _ => bf16_gemm_of_leaves::<T, half::bf16>(isa, pool, (dims, of_gathered), [a, b], &mut c),
        }
    } else {
        return fma_gemm_of_leaves(pool, (dims, leaves), [a, b], &mut c, epilogue.as_ref());
    }
    if let Some(epilogue) = epilogue {
        epilogue.apply_to_all(pool, &mut c);
    }
}

/// Returns the schedule of a product by FMA micro-kernels.
fn fma_schedule<T: Float>(leaves: &SumLeaves) -> LeafSchedule {
    let rounds = TileSums::<T::Acc>::of::<T>().rounds;
    LeafSchedule::new(leaves, BlockRule { part: KC, depth_max: KC, alignment: 1, rounds })
}

/// Returns the first step of each block of a schedule.
fn cut_of_blocks(schedule: &LeafSchedule) -> Arc<[usize]> {
    schedule.blocks.iter().map(|block| block.first).collect()
}

/// Returns the first step of each block in which b is packed, at the highest precision.
pub(crate) fn packed_cut_of_leaves<T: Float>(leaves: &SumLeaves) -> Arc<[usize]> {
    cut_of_blocks(&fma_schedule::<T>(leaves))
}

/// [`batched_gemm_of_leaves`] by FMA micro-kernels, after its bounds checks.
fn fma_gemm_of_leaves<T: Float>(
    pool: &Pool,
    (dims, leaves): ([usize; 4], &SumLeaves),
    [a, b]: [LeafMatrixRef<'_, T>; 2],
    c: &mut BatchedMatrixMut<'_, T>,
    epilogue: Option<&BoundEpilogue<'_, T>>,
) {
    let [g, m, n, k] = dims;
    let (kernels, sums) = (MicroKernels::for_level(level()), TileSums::<T::Acc>::of::<T>());
    let schedule = fma_schedule::<T>(leaves);
    let outer_strides = (leaves.outer > 1).then_some([a.strides[2], b.strides[2]]);
    let (left, right) = (a.left(), b.right());
    let source = |x: BatchedMatrixRef<'_, T>| MatrixPtr::new(x.data, x.strides[1], x.strides[2]);
    let (sa, sb) = (source(left), source(right));
    let sc = MatrixPtrMut { start: c.data.as_mut_ptr(), row_stride: c.strides[1], col_stride: c.strides[2] };
    let packed_b = (g == 1 && outer_strides.is_none()).then(|| {
        // SAFETY: only `packs_b` is called and nothing is run; for k = 0 nothing is packed, so that it is not called.
        let packs = || unsafe { BlockedGemm::new(&kernels, [m, n, k], sa, sb, false, sc.cast()) }.packs_b();
        let cut = cut_of_blocks(&schedule);
        let blocks = || schedule.blocks.iter().map(packed_steps).collect();
        prepack_steps(pool, [m, n, k], right, PackedBlocks { cut: Some(cut), blocks: &blocks }, packs)
    });
    let packed_b = packed_b.flatten();
    let packed = packed_b.as_ref().map(|packed_b| PackedB::new(packed_b.as_slice(), n));
    let read_cost = match outer_strides {
        Some(_) => ReadCost::PACKED,
        None => ReadCost::of(kernels.lanes, &left, c.strides, packed.is_some()),
    };
    Split::for_each_part(pool, dims, read_cost, |(thread, scratch), [matrix, row, col], [rows, cols]| {
        let c = sc.offset_by(matrix * c.strides[0] + row * c.strides[1] + col * c.strides[2]);
        let on_finished = BoundEpilogue::for_part(epilogue, [matrix, row, col], c);
        let a = sa.offset_by(matrix * left.strides[0] + row * left.strides[1]);
        let b = sb.offset_by(matrix * right.strides[0] + col * right.strides[2]);
        let packed = packed.map(|packed| packed.skip_cols(col));
        // Sums that are rounded, or held, are those of some rows at a time.
        let rows_max = match (sums.rounds, schedule.num_held) {
            (true, _) => ROWS_PER_ROUNDING,
            (false, 0 | 1) => rows,
            (false, _) => ROWS_HELD,
        };
        for first in (0..rows).step_by(rows_max) {
            let some = rows_max.min(rows - first);
            let product: Part<'_, T> = Part {
                kernels: &kernels,
                schedule: &schedule,
                outer_strides,
                sums,
                packed,
                dims: [some, cols, k],
            };
            let on_finished = |rows: Range<usize>, cols: Range<usize>| {
                on_finished(first + rows.start..first + rows.end, cols)
            };
            // SAFETY: the reaches were checked above; the parts of c that two tasks write share no memory; `kernels` fit this CPU.
            unsafe {
                product.run(
                    (pool, thread, &mut *scratch),
                    [a.submatrix(first, 0), b],
                    c.submatrix(first, 0),
                    &on_finished,
                );
            }
        }
    });
}

/// A block of steps of a prepacked b.
fn packed_steps(block: &StepBlock) -> PackedSteps {
    PackedSteps { depth: block.depth, from: block.segments[0].from[1] }
}

/// Some rows and columns of a product.
struct Part<'t, T: Float> {
    kernels: &'t MicroKernels<T::Acc>,
    schedule: &'t LeafSchedule,
    outer_strides: Option<[usize; 2]>,
    sums: TileSums<T::Acc>,
    packed: Option<PackedB<'t, T::Acc>>,
    dims: [usize; 3],
}

impl<T: Float> Part<'_, T> {
    /// Computes the part on a thread.
    ///
    /// # Safety
    /// As for [`BlockedGemm::new`].
    unsafe fn run(
        &self,
        (pool, thread, scratch): (&Pool, usize, &mut Scratch),
        [a, b]: [MatrixPtr<T::Acc>; 2],
        c: MatrixPtrMut<T>,
        on_finished: OnFinished<'_>,
    ) {
        let Part { kernels, schedule, outer_strides, sums, packed, dims } = *self;
        let [rows, cols, _] = dims;
        if !sums.rounds {
            // SAFETY: as promised by the caller; T is its own accumulator.
            let gemm = unsafe { BlockedGemm::new(kernels, dims, a, b, false, c.cast()) };
            let gemm = gemm.with_packed_b(packed).on_finished(on_finished);
            // SAFETY: as above.
            unsafe { LeafGemm::new(gemm, schedule, outer_strides, sums).run(scratch) };
            if schedule.blocks.is_empty() {
                on_finished(0..rows, 0..cols);
            }
            return;
        }
        let mut wide_sums = pool.scratch_for(thread);
        let [wide] = wide_sums.slices([rows * cols]);
        let to = MatrixPtrMut { start: wide.as_mut_ptr(), row_stride: cols, col_stride: 1 };
        // SAFETY: as promised by the caller; `wide` is as large as the part.
        let gemm = unsafe { BlockedGemm::new(kernels, dims, a, b, false, to) };
        // SAFETY: as above.
        unsafe { LeafGemm::new(gemm.with_packed_b(packed), schedule, outer_strides, sums).run(scratch) };
        // SAFETY: the part is within c, and no other thread uses it meanwhile.
        unsafe { store_rounded(wide, cols, c) };
        on_finished(0..rows, 0..cols);
    }
}

/// [`batched_gemm_of_leaves`] by bf16 dot products, for a single step of k0, after its bounds checks. R is the same type as T, with the
/// static knowledge that its accumulator is f32.
fn bf16_gemm_of_leaves<T: Float, R: Float<Acc = f32>>(
    isa: Bf16Isa,
    pool: &Pool,
    (dims, leaves): ([usize; 4], &SumLeaves),
    factors: [BatchedMatrixRef<'_, T>; 2],
    c: &mut BatchedMatrixMut<'_, T>,
) {
    let schedule = LeafSchedule::new(leaves, bf16::leaf_rule::<R>());
    for_each_bf16_part::<T, R>(isa, pool, dims, factors, c, |scratch, [rows, cols], factors, to| {
        // SAFETY: the caller checked the reaches; the parts of c that two tasks write share no memory; this CPU has the isa.
        unsafe { bf16::gemm_of_leaves(isa, scratch, ([rows, cols, dims[3]], &schedule), factors, to) }
    });
}

/// Operands with one summed dim, leaf after leaf, copied from operands with two.
struct Gathered<T> {
    leaves: SumLeaves,
    dims: [usize; 4],
    a: Vec<T>,
    b: Vec<T>,
}

impl<T: Float> Gathered<T> {
    fn of(
        pool: &Pool,
        dims: [usize; 4],
        leaves: &SumLeaves,
        [a, b]: [LeafMatrixRef<'_, T>; 2],
    ) -> Gathered<T> {
        let [g, m, n, _] = dims;
        let borders = leaves.borders.iter().map(|border| border * leaves.outer).collect();
        let steps: Vec<[usize; 2]> = leaves
            .borders
            .windows(2)
            .flat_map(|pair| {
                (0..leaves.outer).flat_map(|outer| (pair[0]..pair[1]).map(move |inner| [outer, inner]))
            })
            .collect();
        let gather = |x: LeafMatrixRef<'_, T>, vectors: usize| {
            let mut to = filled_or_unwind(T::default(), g * steps.len() * vectors);
            pool.chunks(&mut to, vectors, |row, to| {
                let (matrix, [outer, inner]) = (row / steps.len(), steps[row % steps.len()]);
                let from = &x.data[matrix * x.strides[0] + outer * x.strides[2] + inner * x.strides[3]..];
                match x.strides[1] {
                    1 => to.copy_from_slice(&from[..vectors]),
                    stride => to.iter_mut().enumerate().for_each(|(i, to)| *to = from[i * stride]),
                }
            });
            to
        };
        Gathered {
            leaves: SumLeaves { borders, outer: 1, ..leaves.clone() },
            dims,
            a: gather(a, m),
            b: gather(b, n),
        }
    }

    fn matrices(&self) -> (BatchedMatrixRef<'_, T>, BatchedMatrixRef<'_, T>) {
        let [_, m, n, k] = self.dims;
        (
            BatchedMatrixRef { data: &self.a, strides: [k * m, 1, m] },
            BatchedMatrixRef { data: &self.b, strides: [k * n, n, 1] },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Allocator;
    use crate::cpu::gemm::batched_gemm;
    use crate::cpu::pack_cache::PackCache;
    use crate::precision::MatmulPrecision;
    use crate::sum_tree::{SumTree, TreeSums};
    use half::{bf16, f16};
    use proptest::prelude::*;
    use std::convert::Infallible;

    /// How the extents (vectors, k0, k1) of an operand are laid out in memory: strides.
    fn strides(kind: usize, [vectors, outer, inner]: [usize; 3]) -> [usize; 3] {
        match kind {
            // Steps contiguous; vectors contiguous; gaps everywhere; k1 before k0.
            0 => [outer * inner, inner, 1],
            1 => [1, inner * vectors, vectors],
            2 => [outer * (2 * inner + 1), 2 * inner + 1, 2],
            _ => [outer * inner, 1, outer],
        }
    }

    /// A product by leaves, and how it is to be computed.
    #[derive(Clone, Debug)]
    struct Case {
        dims: [usize; 3],
        leaves: SumLeaves,
        kinds: [usize; 3],
        threads: usize,
        precision: MatmulPrecision,
    }

    fn leaves(num_leaves: usize, [outer, inner]: [usize; 2]) -> SumLeaves {
        let tree = SumTree::new(num_leaves);
        let ends = (0..num_leaves).map(|leaf| tree.leaf_range(inner, leaf).end);
        SumLeaves { tree, first: 0, borders: std::iter::once(0).chain(ends).collect(), outer }
    }

    /// One product for each leaf, joined in the tree: the definition.
    fn products_of_leaves<T: Float>(case: &Case, x: [&[T]; 2], at: [[usize; 4]; 2]) -> Vec<T> {
        let [g, m, n] = case.dims;
        let mut sums = TreeSums::new(case.leaves.tree);
        for (number, pair) in case.leaves.borders.windows(2).enumerate() {
            let k = case.leaves.outer * (pair[1] - pair[0]);
            let element = |of: usize, matrix: usize, vector: usize, step: usize| {
                let (len, strides) = (pair[1] - pair[0], at[of]);
                let place = [matrix, vector, step / len, pair[0] + step % len];
                x[of][(0..4).map(|d| place[d] * strides[d]).sum::<usize>()]
            };
            let sum = (k > 0).then(|| {
                let index = |at: usize, cols: usize| (at / (k * cols), at / cols % k, at % cols);
                let a: Vec<T> =
                    (0..g * k * m).map(|at| index(at, m)).map(|(p, l, i)| element(0, p, i, l)).collect();
                let b: Vec<T> =
                    (0..g * k * n).map(|at| index(at, n)).map(|(p, l, j)| element(1, p, j, l)).collect();
                let mut c = vec![T::default(); g * m * n];
                let pool = Pool::new(1).with_precision(case.precision);
                let a = BatchedMatrixRef { data: &a[..], strides: [k * m, 1, m] };
                let b = BatchedMatrixRef { data: &b[..], strides: [k * n, n, 1] };
                batched_gemm(
                    &pool,
                    [g, m, n, k],
                    a,
                    b,
                    BatchedMatrixMut { data: &mut c, strides: [m * n, n, 1] },
                );
                c
            });
            let Ok(()) = sums.add(SumTree::leaf(case.leaves.first + number), sum, |left: Vec<T>, right| {
                let sums = left.iter().zip(&right).map(|(x, y)| T::narrow(x.widen() + y.widen()));
                Ok::<_, Infallible>(sums.collect())
            });
        }
        sums.into_roots().next().and_then(|(_, sum)| sum).unwrap_or_else(|| vec![T::default(); g * m * n])
    }

    fn check<T: Float>(case: &Case) -> Result<(), String> {
        let [g, m, n] = case.dims;
        let inner = case.leaves.borders[case.leaves.borders.len() - 1];
        let operand = |of: usize, vectors: usize| {
            let within = strides(case.kinds[of], [vectors, case.leaves.outer, inner]);
            let matrix = 3 * vectors.max(1) * case.leaves.outer * (inner + 1);
            let value = |i: usize| T::from_f64((((i + of) * 7919) % 1000) as f64 / 700.0 - 0.7);
            let memory: Vec<T> = (0..g * matrix + 1).map(value).collect();
            (memory, [matrix, within[0], within[1], within[2]])
        };
        let ((x, a_strides), (y, b_strides)) = (operand(0, m), operand(1, n));
        let expected = products_of_leaves(case, [&x, &y], [a_strides, b_strides]);
        let c_strides = [[m * n, n, 1], [m * n, 1, m], [2 * m * n, 2 * n, 2]][case.kinds[2]];
        let stale = T::from_f64(9.0);
        let pool = Pool::new(case.threads).with_precision(case.precision);
        let a = LeafMatrixRef { data: &x[..], strides: a_strides };
        let b = LeafMatrixRef { data: &y[..], strides: b_strides };
        let mut c = vec![stale; 2 * g * m * n + 1];
        let to = BatchedMatrixMut { data: &mut c[..], strides: c_strides };
        batched_gemm_of_leaves(&pool, case.dims, &case.leaves, [a, b], to, None);
        let places: Vec<usize> = (0..g * m * n)
            .map(|at| at / (m * n) * c_strides[0] + at / n % m * c_strides[1] + at % n * c_strides[2])
            .collect();
        for (at, expected) in expected.iter().enumerate() {
            let got = c[places[at]];
            if got.to_f64().to_bits() != expected.to_f64().to_bits() {
                return Err(format!("{} {case:?}, element {at}: {got:?}, not {expected:?}", T::DTYPE));
            }
        }
        let is_written = |at: &usize| places.contains(at);
        if g * m * n < 500 && (0..c.len()).any(|at| !is_written(&at) && c[at] != stale) {
            return Err(format!("{} {case:?}: more than c is written", T::DTYPE));
        }
        let mut ended = vec![stale; g * m * n];
        let negate = |_: [usize; 2], c: &mut [T], _: &mut [T]| {
            c.iter_mut().for_each(|c| *c = T::from_f64(-c.to_f64()))
        };
        let to = BatchedMatrixMut { data: &mut ended[..], strides: [m * n, n, 1] };
        batched_gemm_of_leaves(&pool, case.dims, &case.leaves, [a, b], to, Some(&negate));
        match ended.iter().zip(&expected).position(|(got, expected)| got.to_f64() != -expected.to_f64()) {
            Some(at) => Err(format!("{} {case:?}: the epilogue missed element {at}", T::DTYPE)),
            None => Ok(()),
        }
    }

    fn check_all(case: &Case) -> Result<(), String> {
        check::<f32>(case)?;
        check::<f64>(case)?;
        check::<bf16>(case)?;
        check::<f16>(case)?;
        check::<f32>(&Case { precision: MatmulPrecision::Medium, ..case.clone() })
    }

    fn case(dims: [usize; 3], leaves: SumLeaves) -> Case {
        Case { dims, leaves, kinds: [0, 1, 0], threads: 1, precision: MatmulPrecision::Highest }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 80, ..ProptestConfig::default() })]
        #[test]
        fn bits_are_those_of_one_product_for_each_leaf(
            dims in [1usize..3, 1usize..50, 1usize..50],
            (num_leaves, outer, inner) in (1usize..13, 1usize..4, 0usize..90),
            kinds in [0usize..4, 0usize..4, 0usize..3],
            threads in 1usize..3,
        ) {
            let case = Case { kinds, threads, ..case(dims, leaves(num_leaves, [outer, inner])) };
            check_all(&case).unwrap();
        }
    }

    #[test]
    fn bits_of_large_and_skinny_products_are_those_of_the_products_of_leaves() {
        for (dims, num_leaves, k, kinds, threads) in [
            // Leaves of a part and more, held sums, several blocks of columns, of rows and tasks.
            ([1, 60, 100], 8, [1, 2100], [0, 1, 0], 2),
            ([1, 600, 40], 8, [1, 1100], [0, 1, 0], 1),
            ([1, 530, 50], 3, [1, 2500], [1, 1, 0], 1),
            ([1, 30, 900], 4, [2, 300], [1, 1, 0], 2),
            ([1, 300, 70], 8, [4, 33], [1, 1, 0], 3),
            ([1, 1, 130], 8, [1, 700], [0, 0, 0], 2),
            ([1, 130, 1], 5, [1, 700], [0, 0, 0], 2),
            ([1, 40, 130], 8, [1, 300], [0, 1, 1], 2),
            ([3, 0, 5], 8, [1, 30], [0, 1, 0], 1),
            // Fewer steps than leaves.
            ([2, 20, 30], 8, [1, 3], [0, 1, 0], 1),
            ([2, 20, 30], 8, [1, 0], [0, 1, 0], 1),
        ] {
            check_all(&Case { kinds, threads, ..case(dims, leaves(num_leaves, k)) }).unwrap();
        }
    }

    #[test]
    fn leaves_of_a_node_of_a_larger_tree_are_joined_in_its_order() {
        for (first, borders) in [(8, vec![0, 5, 9, 9, 20]), (4, vec![0, 3, 4, 8, 70]), (10, vec![0, 7, 19])] {
            let leaves = SumLeaves { tree: SumTree::new(12), first, borders, outer: 1 };
            check_all(&case([1, 20, 40], leaves)).unwrap();
        }
    }

    #[test]
    fn prepacked_operands_are_cut_at_leaves() {
        let (m, n, num_leaves) = (64, 100, 8);
        // Two cuts of 100 steps into one block are the same.
        for (k, num_forms) in [(100, 1), (300, 2), (770, 2)] {
            let pack_cache = Arc::new(PackCache::new(Allocator::default()));
            let pool = Pool::new(2).with_pack_cache(pack_cache.clone());
            let value = |i: usize| ((i * 7919) % 1000) as f32 / 700.0 - 0.7;
            let mut weight = Allocator::default().alloc(4 * k * n).unwrap();
            weight.as_mut::<f32>().unwrap().iter_mut().enumerate().for_each(|(i, to)| *to = value(i));
            let _hold = pack_cache.hold(&weight);
            let x: Vec<f32> = (0..m * k).map(|i| value(i + 5)).collect();
            let a = LeafMatrixRef { data: &x[..], strides: [0, k, 0, 1] };
            let b = LeafMatrixRef { data: weight.as_slice::<f32>(), strides: [0, 1, 0, n] };
            let product = |pool: &Pool, num_leaves: usize| {
                let mut c = vec![9f32; m * n];
                let to = BatchedMatrixMut { data: &mut c[..], strides: [m * n, n, 1] };
                batched_gemm_of_leaves(pool, [1, m, n], &leaves(num_leaves, [1, k]), [a, b], to, None);
                c
            };
            let alone = Pool::new(1);
            for (num_leaves, forms) in [(num_leaves, 1), (num_leaves, 1), (3, num_forms)] {
                assert!(product(&pool, num_leaves) == product(&alone, num_leaves), "{k} {num_leaves}");
                assert_eq!(
                    pack_cache.counts(),
                    [1, forms],
                    "leaves that cut blocks otherwise have a form of their own"
                );
            }
        }
    }
}
