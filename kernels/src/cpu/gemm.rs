//! GEMM on the CPU: one matrix product on one thread ([`gemm`]), or a batch of them on a pool ([`batched_gemm`]).
//!
//! The order of each sum is part of the contract: an element of c is summed in blocks of [`KC`] terms, each block from 0 upwards by
//! fused multiply-adds in the order of k, and the blocks are added to c in order. Shapes, strides, tile sizes, threads and
//! instruction set do not change the bits, so that the bits of a row do not depend on the rows around it.
//!
//! Exception: two bf16 operands use the CPU's bf16 dot products where these are faster (AMX; AVX512-BF16 except on Intel's CPUs).
//! There blocks have [`BF16_KC`] terms, and within a block an f32 sum accumulates, in the order of k, a pair of products at a time
//! (AVX512-BF16), or 32 terms at a time: the fused sum of the even terms plus that of the odd terms (AMX). Subnormal operands and
//! sums count as 0. Shapes, strides and threads do not change those bits either. Two f32 operands, rounded to bf16, use the same
//! instructions if a [`MatmulPrecision`] allows it.

mod prepacked;
mod epilogue;
mod split;
pub(crate) mod leaves;

use crate::cpu::Pool;
use crate::cpu::simd::bf16::{self, Bf16Isa};
use crate::cpu::simd::blocked_gemm::{BlockedGemm, MatrixPtrMut, OnFinished};
use crate::cpu::simd::gemv::gemv_row_major;
use crate::cpu::simd::gemv_transposed;
use crate::cpu::simd::microkernel::MicroKernels;
use crate::cpu::simd::pack::{self, MatrixPtr};
use crate::cpu::simd::pack_bf16::DotOperand;
use crate::cpu::simd::prepacked::PackedB;
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::simd::{Level, level, vectorized};
use crate::dtype::{DType, Element, Float, Real};
use crate::host_vec::filled_or_unwind;
use crate::precision::MatmulPrecision;
use epilogue::BoundEpilogue;
use split::{COLS_MIN, FLOPS_MIN, ReadCost, Split};

pub use epilogue::{Epilogue, batched_gemm_with_epilogue};

/// A strided matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRef<'a, T> {
    /// The elements, from (0, 0) on.
    pub data: &'a [T],
    /// Distance between rows.
    pub row_stride: usize,
    /// Distance between columns.
    pub col_stride: usize,
}

/// A strided matrix to write. No two of its elements share memory.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    /// The elements, from (0, 0) on.
    pub data: &'a mut [T],
    /// Distance between rows.
    pub row_stride: usize,
    /// Distance between columns.
    pub col_stride: usize,
}

/// Terms of a sum that are summed before they are added to c (BLIS: KC). Changing this changes results.
pub const KC: usize = pack::KC;
/// [`KC`] for bf16 dot products.
pub const BF16_KC: usize = bf16::KC;

/// c = a b, or c += a b if `accumulate`; `dims` is (m, n, k), a is (m, k), b is (k, n), c is (m, n) in the accumulator type.
/// Two bf16 operands use bf16 dot products where these are faster; other 16-bit operands are widened while packing.
///
/// # Panics
/// If a matrix reaches outside of its memory.
pub fn gemm<A, B, R>(
    scratch: &mut Scratch,
    dims: [usize; 3],
    a: MatrixRef<'_, A>,
    b: MatrixRef<'_, B>,
    accumulate: bool,
    c: MatrixMut<'_, R>,
) where
    A: Float<Acc = R>,
    B: Float<Acc = R>,
    R: Real,
{
    let isa = Bf16Isa::best().filter(|_| A::DTYPE == DType::BF16 && B::DTYPE == DType::BF16);
    gemm_with_kind(
        isa.map_or(KernelKind::Fma(level()), KernelKind::Bf16Dot),
        scratch,
        dims,
        a,
        b,
        accumulate,
        c,
    );
}

/// Returns whether products of two bf16 operands use bf16 dot products on this CPU.
#[must_use]
pub fn has_bf16_dot() -> bool {
    Bf16Isa::best().is_some()
}

/// Returns the bf16 dot product instructions for operands of a dtype on this CPU, if products use them.
fn isa(dtype: DType, precision: MatmulPrecision) -> Option<Bf16Isa> {
    match (dtype, precision) {
        (DType::BF16, _) | (DType::F32, MatmulPrecision::Medium) => Bf16Isa::best(),
        _ => None,
    }
}

/// Returns whether f32 operands of matrix products are rounded to bf16 on this CPU at a precision.
#[must_use]
pub fn rounds_to_bf16(precision: MatmulPrecision) -> bool {
    isa(DType::F32, precision).is_some()
}

/// The kind of kernel that computes a product.
#[derive(Clone, Copy, Debug)]
enum KernelKind {
    /// FMA micro-kernels of an instruction set of this CPU, on widened operands.
    Fma(Level),
    /// Dot products of bf16 operands, or of f32 operands rounded to bf16.
    Bf16Dot(Bf16Isa),
}

fn gemm_with_kind<A, B, R>(
    kind: KernelKind,
    scratch: &mut Scratch,
    dims: [usize; 3],
    a: MatrixRef<'_, A>,
    b: MatrixRef<'_, B>,
    accumulate: bool,
    c: MatrixMut<'_, R>,
) where
    A: Float<Acc = R>,
    B: Float<Acc = R>,
    R: Real,
{
    let [m, n, k] = dims;
    assert!(required_len([m, k], a.row_stride, a.col_stride) <= a.data.len(), "a must be within its memory");
    assert!(required_len([k, n], b.row_stride, b.col_stride) <= b.data.len(), "b must be within its memory");
    assert!(required_len([m, n], c.row_stride, c.col_stride) <= c.data.len(), "c must be within its memory");
    let to = MatrixPtrMut { start: c.data.as_mut_ptr(), row_stride: c.row_stride, col_stride: c.col_stride };
    match kind {
        KernelKind::Fma(at) => {
            assert!(at as u8 <= level() as u8, "this CPU has the level");
            let a = MatrixPtr::new(a.data, a.row_stride, a.col_stride);
            let b = MatrixPtr::new(b.data, b.row_stride, b.col_stride);
            // SAFETY: the reaches and the level were checked above; strides of c that let two elements share memory
            // make the result arbitrary, on this one thread no worse.
            unsafe { BlockedGemm::new(&MicroKernels::for_level(at), dims, a, b, accumulate, to).run(scratch) }
        }
        KernelKind::Bf16Dot(isa) => {
            assert!(Bf16Isa::available().contains(&isa), "this CPU has the isa");
            let lines = [
                DotOperand::new(a.data, a.row_stride, a.col_stride),
                DotOperand::new(b.data, b.col_stride, b.row_stride),
            ];
            let to = MatrixPtrMut {
                start: to.start.cast::<f32>(),
                row_stride: to.row_stride,
                col_stride: to.col_stride,
            };
            // SAFETY: as above; `DotOperand` saw to it that both are of bf16 or f32, so that sums are f32.
            unsafe { bf16::gemm(isa, scratch, dims, lines, accumulate, to) }
        }
    }
}

/// A batch of strided matrices to read: element (i, j) of matrix p is `data[p * strides[0] + i * strides[1] + j * strides[2]]`.
#[derive(Clone, Copy, Debug)]
pub struct BatchedMatrixRef<'a, T> {
    /// The elements, from (0, 0, 0) on.
    pub data: &'a [T],
    /// Distance between matrices, rows and columns.
    pub strides: [usize; 3],
}

/// A batch of strided matrices to write. No two elements share memory.
#[derive(Debug)]
pub struct BatchedMatrixMut<'a, T> {
    /// The elements, from (0, 0, 0) on.
    pub data: &'a mut [T],
    /// Distance between matrices, rows and columns.
    pub strides: [usize; 3],
}

/// c = a b for every matrix of a batch; `dims` is (g, m, n, k), a is (g, m, k), b is (g, k, n), c is (g, m, n).
/// 16-bit operands are summed in f32 and rounded once; the pool's precision applies to f32.
///
/// # Panics
/// If a batch reaches beyond its memory, or elements of c may share memory.
pub fn batched_gemm<T: Float>(
    pool: &Pool,
    dims: [usize; 4],
    a: BatchedMatrixRef<'_, T>,
    b: BatchedMatrixRef<'_, T>,
    c: BatchedMatrixMut<'_, T>,
) {
    batched_gemm_with_isa(isa(T::DTYPE, pool.precision()), pool, dims, a, b, c, None);
}

/// [`batched_gemm`] by given bf16 dot products, or by FMA if `isa` is `None`. Applies the epilogue to every row of c once.
fn batched_gemm_with_isa<T: Float>(
    isa: Option<Bf16Isa>,
    pool: &Pool,
    dims: [usize; 4],
    a: BatchedMatrixRef<'_, T>,
    b: BatchedMatrixRef<'_, T>,
    mut c: BatchedMatrixMut<'_, T>,
    epilogue: Option<&BoundEpilogue<'_, T>>,
) {
    let [g, m, n, k] = dims;
    assert!(batched_required_len([g, m, k], a.strides) <= a.data.len(), "a must be within its memory");
    assert!(batched_required_len([g, k, n], b.strides) <= b.data.len(), "b must be within its memory");
    assert!(batched_required_len([g, m, n], c.strides) <= c.data.len(), "c must be within its memory");
    assert!(is_non_overlapping([g, m, n], c.strides), "elements of c share no memory");
    if g * m * n == 0 {
        return;
    }
    if let Some(isa) = isa {
        match T::DTYPE {
            DType::F32 => batched_bf16_gemm::<T, f32>(isa, pool, dims, [a, b], &mut c),
            _ => batched_bf16_gemm::<T, half::bf16>(isa, pool, dims, [a, b], &mut c),
        }
    } else if g == 1 && m == 1 && n > 1 && c.strides[2] == 1 && gemv(pool, [n, k], a, b, &mut c.data[..n]) {
        // Done.
    } else if k > 0
        && let Some(epilogue) = epilogue
    {
        return batched_fma_gemm(pool, dims, [a, b], &mut c, Some(epilogue));
    } else {
        batched_fma_gemm(pool, dims, [a, b], &mut c, None);
    }
    if let Some(epilogue) = epilogue {
        epilogue.apply_to_all(pool, &mut c);
    }
}

/// [`batched_gemm`] by FMA micro-kernels, after its bounds checks. Applies the epilogue to parts of c as they are finished; k > 0 then.
fn batched_fma_gemm<T: Float>(
    pool: &Pool,
    dims: [usize; 4],
    [a, b]: [BatchedMatrixRef<'_, T>; 2],
    c: &mut BatchedMatrixMut<'_, T>,
    epilogue: Option<&BoundEpilogue<'_, T>>,
) {
    let kernels = MicroKernels::for_level(level());
    let source = |x: BatchedMatrixRef<'_, T>| MatrixPtr::new(x.data, x.strides[1], x.strides[2]);
    let (sa, sb) = (source(a), source(b));
    let sc = MatrixPtrMut { start: c.data.as_mut_ptr(), row_stride: c.strides[1], col_stride: c.strides[2] };
    let [g, m, n, k] = dims;
    // SAFETY: only `packs_b` is called and nothing is run, so no memory is touched, as k is not 0.
    let packs = || unsafe { BlockedGemm::new(&kernels, [m, n, k], sa, sb, false, sc.cast()) }.packs_b();
    let packed_b = if g == 1 { prepacked::prepack(pool, [m, n, k], b, packs) } else { None };
    let packed = packed_b.as_ref().map(|packed_b| PackedB::new(packed_b.as_slice(), n));
    let read_cost = ReadCost::of(kernels.lanes, &a, c.strides, packed.is_some());
    Split::for_each_part(pool, dims, read_cost, |(thread, scratch), [matrix, row, col], [rows, cols]| {
        let c = sc.offset_by(matrix * c.strides[0] + row * c.strides[1] + col * c.strides[2]);
        let on_finished = BoundEpilogue::for_part(epilogue, [matrix, row, col], c);
        // SAFETY: the reaches were checked above; the parts of c that two tasks write share no memory; `kernels`
        // fit this CPU; an empty a or b (k = 0) is not touched.
        unsafe {
            let a = sa.offset_by(matrix * a.strides[0] + row * a.strides[1]);
            let b = sb.offset_by(matrix * b.strides[0] + col * b.strides[2]);
            let b = (b, packed.map(|packed| packed.skip_cols(col)));
            gemm_rounded(&kernels, (pool, thread, scratch), [rows, cols, k], a, b, c, &on_finished);
        }
    });
}

/// Returns the bytes of the packed form of b that a product of one matrix caches if b is a cached operand
/// ([`Backend::cache_packed`](crate::Backend::cache_packed)), from extents (m, n, k) and the strides of a, b and c, at the highest
/// precision. `None` if the product packs nothing.
pub(crate) fn prepacked_bytes<T: Float>([m, n, k]: [usize; 3], strides: [[usize; 2]; 3]) -> Option<usize> {
    if [m, n, k].contains(&0) || m == 1 && n > 1 || isa(T::DTYPE, MatmulPrecision::Highest).is_some() {
        return None;
    }
    let kernels = MicroKernels::for_level(level());
    let [a, b] = [strides[0], strides[1]].map(|[row, col]| MatrixPtr::new::<T>(&[], row, col));
    let c: MatrixPtrMut<T::Acc> =
        MatrixPtrMut { start: std::ptr::null_mut(), row_stride: strides[2][0], col_stride: strides[2][1] };
    // SAFETY: only `packs_b` is called and nothing is run, so no memory is touched, as k is not 0.
    let packs = || unsafe { BlockedGemm::new(&kernels, [m, n, k], a, b, false, c) }.packs_b();
    prepacked::prepacked_bytes::<T>([m, n, k], packs)
}

/// [`batched_gemm`] by bf16 dot products, after its bounds checks. R is the same type as T, with the static knowledge that its
/// accumulator is f32.
fn batched_bf16_gemm<T: Float, R: Float<Acc = f32>>(
    isa: Bf16Isa,
    pool: &Pool,
    dims: [usize; 4],
    factors: [BatchedMatrixRef<'_, T>; 2],
    c: &mut BatchedMatrixMut<'_, T>,
) {
    for_each_bf16_part::<T, R>(isa, pool, dims, factors, c, |scratch, [rows, cols], factors, to| {
        // SAFETY: the caller checked the reaches; the parts of c that two tasks write share no memory; an empty a or b
        // (k = 0) is not touched; this CPU has the isa.
        unsafe { bf16::gemm(isa, scratch, [rows, cols, dims[3]], factors, false, to) }
    });
}

/// Calls `part` for each part of a product by bf16 dot products, with scratch memory, the part's rows and columns, its operands and
/// its place in c. R is as for [`batched_bf16_gemm`].
fn for_each_bf16_part<T: Float, R: Float<Acc = f32>>(
    isa: Bf16Isa,
    pool: &Pool,
    dims: [usize; 4],
    [a, b]: [BatchedMatrixRef<'_, T>; 2],
    c: &mut BatchedMatrixMut<'_, T>,
    part: impl Fn(&mut Scratch, [usize; 2], [DotOperand; 2], MatrixPtrMut<R>) + Sync,
) {
    assert!(Bf16Isa::available().contains(&isa), "this CPU has the isa");
    assert!(T::DTYPE == R::DTYPE, "both are one type");
    let la = DotOperand::new(a.data, a.strides[1], a.strides[2]);
    let lb = DotOperand::new(b.data, b.strides[2], b.strides[1]);
    let to: MatrixPtrMut<R> = MatrixPtrMut {
        start: c.data.as_mut_ptr().cast(),
        row_stride: c.strides[1],
        col_stride: c.strides[2],
    };
    Split::for_each_part(pool, dims, ReadCost::PACKED, |(_, scratch), [matrix, row, col], extents| {
        let a = la.offset_by(matrix * a.strides[0] + row * a.strides[1]);
        let b = lb.offset_by(matrix * b.strides[0] + col * b.strides[2]);
        let to = to.offset_by(matrix * c.strides[0] + row * c.strides[1] + col * c.strides[2]);
        part(scratch, extents, [a, b], to);
    });
}

/// Tasks per thread for a gemv: tasks share no operand data, so more of them cost little.
const ROW_TASKS: usize = 2;

/// Batched product of one row (gemv), split into tasks along the columns, because reading b dominates. Returns false, with c unchanged,
/// if neither rows nor columns of b are contiguous, or this CPU has no kernel for them.
fn gemv<T: Float>(
    pool: &Pool,
    [n, k]: [usize; 2],
    a: BatchedMatrixRef<'_, T>,
    b: BatchedMatrixRef<'_, T>,
    c: &mut [T],
) -> bool {
    let [_, row, col] = b.strides;
    let transposed = col != 1 && row == 1;
    if k == 0 || col != 1 && !(transposed && gemv_transposed::is_supported(level(), T::DTYPE)) {
        return false;
    }
    let parts = (2 * n * k / FLOPS_MIN).clamp(1, ROW_TASKS * pool.num_threads());
    let cols = n.div_ceil(parts).next_multiple_of(COLS_MIN);
    let x: Vec<T::Acc> = (0..k).map(|i| a.data[i * a.strides[2]].widen()).collect();
    pool.chunks(c, cols, |task, c| {
        let mut y = filled_or_unwind(T::Acc::ZERO, c.len());
        let b = &b.data[task * cols * col..];
        if transposed {
            gemv_transposed::gemv_column_major(level(), &x, b, col, &mut y)
        } else {
            gemv_row_major(&x, b, row, &mut y)
        }
        c.iter_mut().zip(y).for_each(|(c, y)| *c = T::narrow(y));
    });
    true
}

/// Rows whose f32 sums are rounded to 16 bits at a time: the sums stay in the cache.
const ROWS_PER_ROUNDING: usize = 256;

/// One product, rounded to the type of its operands; `on_finished` is called for its finished parts ([`BlockedGemm::on_finished`]).
///
/// # Safety
/// As for [`BlockedGemm::new`].
unsafe fn gemm_rounded<T: Float>(
    kernels: &MicroKernels<T::Acc>,
    (pool, thread, scratch): (&Pool, usize, &mut Scratch),
    [m, n, k]: [usize; 3],
    a: MatrixPtr<T::Acc>,
    (b, packed): (MatrixPtr<T::Acc>, Option<PackedB<'_, T::Acc>>),
    c: MatrixPtrMut<T>,
    on_finished: OnFinished<'_>,
) {
    if T::DTYPE == T::Acc::DTYPE {
        // SAFETY: as promised by the caller; T is its own accumulator.
        let product = unsafe { BlockedGemm::new(kernels, [m, n, k], a, b, false, c.cast()) };
        // SAFETY: as above.
        unsafe { product.with_packed_b(packed).on_finished(on_finished).run(scratch) };
        return;
    }
    let mut sums = pool.scratch_for(thread);
    for first in (0..m).step_by(ROWS_PER_ROUNDING) {
        let rows = ROWS_PER_ROUNDING.min(m - first);
        let [wide] = sums.slices([rows * n]);
        let to = MatrixPtrMut { start: wide.as_mut_ptr(), row_stride: n, col_stride: 1 };
        // SAFETY: as promised by the caller; `wide` is as large as these rows.
        let product = unsafe { BlockedGemm::new(kernels, [rows, n, k], a.submatrix(first, 0), b, false, to) };
        // SAFETY: as above.
        unsafe { product.with_packed_b(packed).run(scratch) };
        // SAFETY: these rows are within c, and no other thread uses them meanwhile.
        unsafe { store_rounded(wide, n, c.submatrix(first, 0)) };
        if k > 0 {
            on_finished(first..first + rows, 0..n);
        }
    }
}

/// Rounds rows of n sums each into c.
///
/// # Safety
/// c has room for the rows, and no other thread uses it meanwhile.
unsafe fn store_rounded<T: Float>(wide: &[T::Acc], n: usize, c: MatrixPtrMut<T>) {
    vectorized(
        #[inline(always)]
        || {
            for (i, row) in wide.chunks_exact(n).enumerate() {
                if c.col_stride == 1 {
                    // SAFETY: row i is within c, contiguous.
                    let to = unsafe { std::slice::from_raw_parts_mut(c.at(i, 0), n) };
                    to.iter_mut().zip(row).for_each(|(to, &sum)| *to = T::narrow(sum));
                } else {
                    for (j, &sum) in row.iter().enumerate() {
                        // SAFETY: (i, j) is within c.
                        unsafe { *c.at(i, j) = T::narrow(sum) };
                    }
                }
            }
        },
    );
}

/// Returns the memory, in elements, that a batch of matrices needs: one past the furthest element.
fn batched_required_len([g, m, n]: [usize; 3], strides: [usize; 3]) -> usize {
    match (g, required_len([m, n], strides[1], strides[2])) {
        (0, _) | (_, 0) => 0,
        (_, reach) => (g - 1).saturating_mul(strides[0]).saturating_add(reach),
    }
}

/// Returns whether the strides prove that no two elements share memory: each stride steps over all that the smaller ones reach.
fn is_non_overlapping(extents: [usize; 3], strides: [usize; 3]) -> bool {
    let mut dims = [0, 1, 2].map(|d| (strides[d], extents[d]));
    dims.sort_unstable();
    let mut reach = 1usize;
    extents.contains(&0)
        || dims.into_iter().filter(|&(_, extent)| extent > 1).all(|(stride, extent)| {
            let steps_over = stride >= reach;
            reach = reach.saturating_add((extent - 1).saturating_mul(stride));
            steps_over
        })
}

/// Returns the memory, in elements, that a matrix needs: one past the furthest element.
fn required_len([rows, cols]: [usize; 2], row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        return 0;
    }
    // Saturate: a wrapped length would pass for a small one.
    let [down, expected] =
        [(rows - 1, row_stride), (cols - 1, col_stride)].map(|(n, step)| n.saturating_mul(step));
    down.saturating_add(expected).saturating_add(1)
}

#[cfg(test)]
mod bf16_tests;
#[cfg(test)]
mod tests;
