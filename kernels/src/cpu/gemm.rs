//! Matrix products: one on one thread, or a stack of them on a pool.
//!
//! The order of a sum is part of the contract: every element of c is formed from blocks of [`DEPTH`] terms, each
//! block from 0 upwards by fused multiply-adds in the order of k, and the blocks are added to c in order. Nothing
//! else (shapes, strides, tiles, instruction set) has a say in the bits, so that a row's bits do not depend on
//! the rows around it.
//!
//! Two bf16 operands meet in dot products of the CPU where these are faster (AMX; AVX512-BF16, but not Intel's), and then the CPU has a say:
//! blocks are of [`BF16_DEPTH`] terms; within a block sums in f32 take up, in the order of k, a pair of products at a time
//! (AVX512-BF16), or 32 terms at a time: the fused sum of those at even places plus that of those at odd places (AMX).
//! Operands and sums that are subnormal count as 0. Shapes, strides and threads have no say there either. Two operands of f32 meet
//! there too, rounded to bf16, if a [`MatmulPrecision`] gives leave.

mod prepacked;
mod epilogue;
mod split;

use crate::cpu::Pool;
use crate::cpu::simd::bf16::{self, Bf16Isa};
use crate::cpu::simd::blocked_gemm::{BlockedGemm, Target, Whole};
use crate::cpu::simd::gemv::gemv_row_major;
use crate::cpu::simd::gemv_transposed;
use crate::cpu::simd::microkernel::Tiles;
use crate::cpu::simd::pack::{DEPTH_MAX, Source};
use crate::cpu::simd::pack_bf16::Lines;
use crate::cpu::simd::prepacked::Packed;
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::simd::{Level, level, vectorized};
use crate::dtype::{DType, Element, Float, Real};
use crate::precision::MatmulPrecision;
use epilogue::EpilogueOutput;
use split::{COLS_MIN, OPERATIONS_MIN, ReadCost, Split};

pub use epilogue::{Epilogue, batched_gemm_with_epilogue};

/// A matrix that is read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    /// The memory, from element (0, 0) on.
    pub data: &'a [T],
    /// Distance between rows.
    pub row_stride: usize,
    /// Distance between columns.
    pub col_stride: usize,
}

/// A matrix that is written. No two of its elements share memory.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    /// The memory, from element (0, 0) on.
    pub data: &'a mut [T],
    /// Distance between rows.
    pub row_stride: usize,
    /// Distance between columns.
    pub col_stride: usize,
}

/// Terms of a sum that are added up before they meet the rest. Changing this changes results.
pub const DEPTH: usize = DEPTH_MAX;
/// The same where two bf16 operands meet in dot products of the CPU.
pub const BF16_DEPTH: usize = bf16::DEPTH;

/// c = a b, or c += a b if `accumulate`; `dims` is (m, n, k), a is (m, k), b is (k, n), c is (m, n).
/// Two bf16 operands meet in dot products of the CPU where these are faster; other 16-bit operands are widened on the kind in.
/// c is in the accumulator type.
///
/// # Panics
/// If a matrix reaches outside of its memory.
pub fn product<A, B, R>(
    scratch: &mut Scratch,
    dims: [usize; 3],
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    accumulate: bool,
    c: MatrixMut<'_, R>,
) where
    A: Float<Acc = R>,
    B: Float<Acc = R>,
    R: Real,
{
    let kind = Bf16Isa::best().filter(|_| A::DTYPE == DType::BF16 && B::DTYPE == DType::BF16);
    product_by(
        kind.map_or(KernelKind::Fma(level()), KernelKind::Bf16Dot),
        scratch,
        dims,
        a,
        b,
        accumulate,
        c,
    );
}

/// Whether two bf16 operands meet in dot products of this CPU.
#[must_use]
pub fn has_bf16_dot() -> bool {
    Bf16Isa::best().is_some()
}

/// The dot products of bf16 in which two operands of a dtype meet on this CPU, if they do.
fn isa(dtype: DType, precision: MatmulPrecision) -> Option<Bf16Isa> {
    match (dtype, precision) {
        (DType::BF16, _) | (DType::F32, MatmulPrecision::Medium) => Bf16Isa::best(),
        _ => None,
    }
}

/// Whether products of f32 are formed of operands that are rounded to bf16 on this CPU, under a precision.
#[must_use]
pub fn rounds_to_bf16(precision: MatmulPrecision) -> bool {
    isa(DType::F32, precision).is_some()
}

/// How a product is formed.
#[derive(Clone, Copy, Debug)]
enum KernelKind {
    /// By the tiles of a level that this CPU has, of operands that are widened.
    Fma(Level),
    /// Of two operands of bf16, or of f32, by isa that this CPU has.
    Bf16Dot(Bf16Isa),
}

fn product_by<A, B, R>(
    kind: KernelKind,
    scratch: &mut Scratch,
    dims: [usize; 3],
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    accumulate: bool,
    c: MatrixMut<'_, R>,
) where
    A: Float<Acc = R>,
    B: Float<Acc = R>,
    R: Real,
{
    let [m, n, k] = dims;
    assert!(reach([m, k], a.row_stride, a.col_stride) <= a.data.len(), "a lies inside of its memory");
    assert!(reach([k, n], b.row_stride, b.col_stride) <= b.data.len(), "b lies inside of its memory");
    assert!(reach([m, n], c.row_stride, c.col_stride) <= c.data.len(), "c lies inside of its memory");
    let to = Target { start: c.data.as_mut_ptr(), row: c.row_stride, col: c.col_stride };
    match kind {
        KernelKind::Fma(at) => {
            assert!(at as u8 <= level() as u8, "this CPU has the level");
            let a = Source::new(a.data, a.row_stride, a.col_stride);
            let b = Source::new(b.data, b.row_stride, b.col_stride);
            // SAFETY: the reaches and the level were checked above; strides of c that let two elements share memory
            // make the result arbitrary, on this one thread no worse.
            unsafe { BlockedGemm::new(&Tiles::at(at), dims, a, b, accumulate, to).run(scratch) }
        }
        KernelKind::Bf16Dot(isa) => {
            assert!(Bf16Isa::all().contains(&isa), "this CPU has the isa");
            let lines = [
                Lines::new(a.data, a.row_stride, a.col_stride),
                Lines::new(b.data, b.col_stride, b.row_stride),
            ];
            let to = Target { start: to.start.cast::<f32>(), row: to.row, col: to.col };
            // SAFETY: as above; `Lines` saw to it that both are of bf16 or f32, so that sums are f32.
            unsafe { bf16::product(isa, scratch, dims, lines, accumulate, to) }
        }
    }
}

/// Matrices of one shape that are read: element (i, j) of matrix p is at `p * strides[0] + i * strides[1] + j *
/// strides[2]`.
#[derive(Clone, Copy, Debug)]
pub struct BatchedMatrix<'a, T> {
    /// The memory, from element (0, 0, 0) on.
    pub data: &'a [T],
    /// Distance between matrices, rows and columns.
    pub strides: [usize; 3],
}

/// Matrices of one shape that are written.
#[derive(Debug)]
pub struct BatchedMatrixMut<'a, T> {
    /// The memory, from element (0, 0, 0) on.
    pub data: &'a mut [T],
    /// Distance between matrices, rows and columns.
    pub strides: [usize; 3],
}

/// c = a b for every matrix of a stack; `dims` is (g, m, n, k), a is (g, m, k), b is (g, k, n), c is (g, m, n).
/// 16-bit operands are summed in f32 and rounded once; f32 is treated as the pool's precision says.
///
/// # Panics
/// If a stack reaches outside of its memory, or elements of c may share memory.
pub fn products<T: Float>(
    pool: &Pool,
    dims: [usize; 4],
    a: BatchedMatrix<'_, T>,
    b: BatchedMatrix<'_, T>,
    c: BatchedMatrixMut<'_, T>,
) {
    batched_gemm_with_isa(isa(T::DTYPE, pool.precision()), pool, dims, a, b, c, None);
}

/// See [`products`]; in dot products by isa that this CPU has, or widened. An epilogue sees every row of c once.
fn batched_gemm_with_isa<T: Float>(
    isa: Option<Bf16Isa>,
    pool: &Pool,
    dims: [usize; 4],
    a: BatchedMatrix<'_, T>,
    b: BatchedMatrix<'_, T>,
    mut c: BatchedMatrixMut<'_, T>,
    epilogue: Option<&EpilogueOutput<'_, T>>,
) {
    let [g, m, n, k] = dims;
    assert!(reach3([g, m, k], a.strides) <= a.data.len(), "a lies inside of its memory");
    assert!(reach3([g, k, n], b.strides) <= b.data.len(), "b lies inside of its memory");
    assert!(reach3([g, m, n], c.strides) <= c.data.len(), "c lies inside of its memory");
    assert!(apart([g, m, n], c.strides), "elements of c share no memory");
    if g * m * n == 0 {
        return;
    }
    if let Some(isa) = isa {
        match T::DTYPE {
            DType::F32 => batched_bf16_gemm::<T, f32>(isa, pool, dims, a, b, &mut c),
            _ => batched_bf16_gemm::<T, half::bf16>(isa, pool, dims, a, b, &mut c),
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
        epilogue.all(pool, &mut c);
    }
}

/// [`products`] whose reaches were checked, by tiles of widened operands; an epilogue sees parts of c as they get whole, and k > 0.
fn batched_fma_gemm<T: Float>(
    pool: &Pool,
    dims: [usize; 4],
    [a, b]: [BatchedMatrix<'_, T>; 2],
    c: &mut BatchedMatrixMut<'_, T>,
    epilogue: Option<&EpilogueOutput<'_, T>>,
) {
    let tiles = Tiles::at(level());
    let source = |x: BatchedMatrix<'_, T>| Source::new(x.data, x.strides[1], x.strides[2]);
    let (sa, sb) = (source(a), source(b));
    let sc = Target { start: c.data.as_mut_ptr(), row: c.strides[1], col: c.strides[2] };
    let [g, m, n, k] = dims;
    // SAFETY: it is asked and not run, so that nothing is touched, as k is not 0.
    let packs = || unsafe { BlockedGemm::new(&tiles, [m, n, k], sa, sb, false, sc.cast()) }.packs_b();
    let kept = if g == 1 { prepacked::prepack(pool, [m, n, k], b, packs) } else { None };
    let packed = kept.as_ref().map(|kept| Packed::new(kept.as_slice(), n));
    let read_cost = ReadCost::of(tiles.lanes, &a, c.strides, packed.is_some());
    Split::each(pool, dims, read_cost, |(thread, scratch), [matrix, row, col], [rows, cols]| {
        let c = sc.moved(matrix * c.strides[0] + row * c.strides[1] + col * c.strides[2]);
        let whole = EpilogueOutput::of_part(epilogue, [matrix, row, col], c);
        // SAFETY: the reaches were checked above; the parts of c that two tasks write share no memory; `tiles`
        // fit this CPU; an empty a or b (k = 0) is not touched.
        unsafe {
            let a = sa.moved(matrix * a.strides[0] + row * a.strides[1]);
            let b = sb.moved(matrix * b.strides[0] + col * b.strides[2]);
            let b = (b, packed.map(|packed| packed.from(col)));
            rounded(&tiles, (pool, thread, scratch), [rows, cols, k], a, b, c, &whole);
        }
    });
}

/// [`products`] whose reaches were checked, in dot products; R is T by a name that says that its sums are f32.
fn batched_bf16_gemm<T: Float, R: Float<Acc = f32>>(
    isa: Bf16Isa,
    pool: &Pool,
    dims: [usize; 4],
    a: BatchedMatrix<'_, T>,
    b: BatchedMatrix<'_, T>,
    c: &mut BatchedMatrixMut<'_, T>,
) {
    assert!(Bf16Isa::all().contains(&isa), "this CPU has the isa");
    assert!(T::DTYPE == R::DTYPE, "both are one type");
    let la = Lines::new(a.data, a.strides[1], a.strides[2]);
    let lb = Lines::new(b.data, b.strides[2], b.strides[1]);
    let to: Target<R> = Target { start: c.data.as_mut_ptr().cast(), row: c.strides[1], col: c.strides[2] };
    Split::each(pool, dims, ReadCost::PACKED, |(_, scratch), [matrix, row, col], [rows, cols]| {
        let a = la.moved(matrix * a.strides[0] + row * a.strides[1]);
        let b = lb.moved(matrix * b.strides[0] + col * b.strides[2]);
        let to = to.moved(matrix * c.strides[0] + row * c.strides[1] + col * c.strides[2]);
        // SAFETY: the caller checked the reaches; the parts of c that two tasks write share no memory; an empty a or b
        // (k = 0) is not touched.
        unsafe { bf16::product(isa, scratch, [rows, cols, dims[3]], [a, b], false, to) }
    });
}

/// A single row is cut into about so many tasks a thread: they share nothing, so more of them cost little.
const ROW_TASKS: usize = 2;

/// A product of one row. Most of what it reads is b, so it is cut along the columns. False, and nothing is done, if
/// neither rows nor columns of b lie side by side, or this CPU has nothing for them.
fn gemv<T: Float>(
    pool: &Pool,
    [n, k]: [usize; 2],
    a: BatchedMatrix<'_, T>,
    b: BatchedMatrix<'_, T>,
    c: &mut [T],
) -> bool {
    let [_, row, col] = b.strides;
    let transposed = col != 1 && row == 1;
    if k == 0 || col != 1 && !(transposed && gemv_transposed::is_supported(level(), T::DTYPE)) {
        return false;
    }
    let parts = (2 * n * k / OPERATIONS_MIN).clamp(1, ROW_TASKS * pool.num_threads());
    let cols = n.div_ceil(parts).next_multiple_of(COLS_MIN);
    let x: Vec<T::Acc> = (0..k).map(|i| a.data[i * a.strides[2]].widen()).collect();
    pool.chunks(c, cols, |part, c| {
        let mut y = vec![T::Acc::ZERO; c.len()];
        let b = &b.data[part * cols * col..];
        if transposed {
            gemv_transposed::gemv_column_major(level(), &x, b, col, &mut y)
        } else {
            gemv_row_major(&x, b, row, &mut y)
        }
        c.iter_mut().zip(y).for_each(|(c, y)| *c = T::narrow(y));
    });
    true
}

/// Rows of a product that are rounded at a time: their sums stay in the cache.
const ROWS_ROUNDED_TOGETHER: usize = 256;

/// One product, rounded to the type of its operands; `whole` is told of its parts (see [`BlockedGemm::telling`]).
///
/// # Safety
/// As for [`BlockedGemm::new`].
unsafe fn rounded<T: Float>(
    tiles: &Tiles<T::Acc>,
    (pool, thread, scratch): (&Pool, usize, &mut Scratch),
    [m, n, k]: [usize; 3],
    a: Source<T::Acc>,
    (b, packed): (Source<T::Acc>, Option<Packed<'_, T::Acc>>),
    c: Target<T>,
    whole: Whole<'_>,
) {
    if T::DTYPE == T::Acc::DTYPE {
        // SAFETY: as promised by the caller; T is its own accumulator.
        let product = unsafe { BlockedGemm::new(tiles, [m, n, k], a, b, false, c.cast()) };
        // SAFETY: as above.
        unsafe { product.of_packed(packed).telling(whole).run(scratch) };
        return;
    }
    let mut sums = pool.scratch_of(thread);
    for first in (0..m).step_by(ROWS_ROUNDED_TOGETHER) {
        let rows = ROWS_ROUNDED_TOGETHER.min(m - first);
        let [wide] = sums.slices([rows * n]);
        let to = Target { start: wide.as_mut_ptr(), row: n, col: 1 };
        // SAFETY: as promised by the caller; `wide` is as large as these rows.
        let product = unsafe { BlockedGemm::new(tiles, [rows, n, k], a.from(first, 0), b, false, to) };
        // SAFETY: as above.
        unsafe { product.of_packed(packed).run(scratch) };
        // SAFETY: these rows lie inside of c, and nobody else uses them meanwhile.
        unsafe { round(wide, n, c.from(first, 0)) };
        if k > 0 {
            whole(first..first + rows, 0..n);
        }
    }
}

/// Rounds rows of n sums each into c.
///
/// # Safety
/// c holds as many elements, which nobody else uses meanwhile.
unsafe fn round<T: Float>(wide: &[T::Acc], n: usize, c: Target<T>) {
    vectorized(
        #[inline(always)]
        || {
            for (i, row) in wide.chunks_exact(n).enumerate() {
                if c.col == 1 {
                    // SAFETY: row i lies inside of c, side by side.
                    let to = unsafe { std::slice::from_raw_parts_mut(c.at(i, 0), n) };
                    to.iter_mut().zip(row).for_each(|(to, &sum)| *to = T::narrow(sum));
                } else {
                    for (j, &sum) in row.iter().enumerate() {
                        // SAFETY: (i, j) lies inside of c.
                        unsafe { *c.at(i, j) = T::narrow(sum) };
                    }
                }
            }
        },
    );
}

/// One past the furthest element of a stack.
fn reach3([g, m, n]: [usize; 3], strides: [usize; 3]) -> usize {
    match (g, reach([m, n], strides[1], strides[2])) {
        (0, _) | (_, 0) => 0,
        (_, reach) => (g - 1).saturating_mul(strides[0]).saturating_add(reach),
    }
}

/// Whether no two elements share memory, as far as the strides tell: each steps over all that the smaller ones reach.
fn apart(extents: [usize; 3], strides: [usize; 3]) -> bool {
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

/// One past the furthest element of a matrix.
fn reach([rows, cols]: [usize; 2], row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        return 0;
    }
    // What wraps would pass for little.
    let [down, right] =
        [(rows - 1, row_stride), (cols - 1, col_stride)].map(|(n, step)| n.saturating_mul(step));
    down.saturating_add(right).saturating_add(1)
}

#[cfg(test)]
mod bf16_tests;
#[cfg(test)]
mod tests;
