//! A row times a matrix: what decoding one token is made of. Every element of the matrix is used once, so it is read where
//! it lies, in long runs, and never packed. ([`crate::cpu::simd::gemv_transposed`] is for columns that are.)
//!
//! Sums are those of [`crate::cpu::gemm`], bit for bit.

use crate::cpu::simd::pack::DEPTH_MAX;
use crate::cpu::simd::vectorized;
use crate::dtype::{Float, Real};

/// Columns whose sums are held at a time, where rows lie side by side: they stay in the first-level cache.
const COLS: usize = 1024;
/// Rows that are taken at a time: each sum is read and written once for all of them.
const ROWS: usize = 8;

/// y = x b for a `b` of x.len() rows of y.len() elements; row p begins at `p * stride`.
pub(crate) fn gemv_row_major<T: Float>(x: &[T::Acc], b: &[T], stride: usize, y: &mut [T::Acc]) {
    vectorized(
        #[inline(always)]
        || {
            y.fill(T::Acc::ZERO);
            for (block, x) in x.chunks(DEPTH_MAX).enumerate() {
                for (part, y) in y.chunks_mut(COLS).enumerate() {
                    let rows = |p: usize| &b[(block * DEPTH_MAX + p) * stride + part * COLS..][..y.len()];
                    let mut sums = [T::Acc::ZERO; COLS];
                    let sums = &mut sums[..y.len()];
                    let (many, rest) = x.as_chunks::<ROWS>();
                    for (i, x) in many.iter().enumerate() {
                        let rows: [&[T]; ROWS] = std::array::from_fn(|r| rows(i * ROWS + r));
                        for (j, sum) in sums.iter_mut().enumerate() {
                            for r in 0..ROWS {
                                *sum = x[r].fma(rows[r][j].widen(), *sum);
                            }
                        }
                    }
                    for (r, x) in rest.iter().enumerate() {
                        for (sum, b) in sums.iter_mut().zip(rows(many.len() * ROWS + r)) {
                            *sum = x.fma(b.widen(), *sum);
                        }
                    }
                    add(block, sums, y);
                }
            }
        },
    );
}

/// Brings the sums of a block to those before it.
#[inline(always)]
fn add<R: Real>(block: usize, sums: &[R], y: &mut [R]) {
    for (y, sum) in y.iter_mut().zip(sums) {
        *y = if block == 0 { *sum } else { *y + *sum };
    }
}
