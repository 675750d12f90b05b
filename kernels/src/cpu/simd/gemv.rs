//! gemv, a row vector times a row-major matrix: the product of decoding one token. Every element of the matrix is used once, so the
//! matrix is read in place, in long runs, and never packed. ([`crate::cpu::simd::gemv_transposed`] is for contiguous columns.)
//!
//! The bits of the sums are those of [`crate::cpu::gemm`].

use crate::cpu::simd::pack::KC;
use crate::cpu::simd::vectorized;
use crate::dtype::{Float, Real};

/// Columns whose sums are held at a time: they stay in the L1 cache.
const COLS: usize = 1024;
/// Rows taken at a time: each sum is loaded and stored once for all of them.
const ROWS: usize = 8;

/// y = x b for a row-major `b` of x.len() rows of y.len() elements; row p begins at `p * stride`.
pub(crate) fn gemv_row_major<T: Float>(x: &[T::Acc], b: &[T], stride: usize, y: &mut [T::Acc]) {
    vectorized(
        #[inline(always)]
        || {
            y.fill(T::Acc::ZERO);
            for (block, x) in x.chunks(KC).enumerate() {
                for (part, y) in y.chunks_mut(COLS).enumerate() {
                    let rows = |p: usize| &b[(block * KC + p) * stride + part * COLS..][..y.len()];
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

/// Adds the sums of a block of k to y; the first block stores them.
#[inline(always)]
fn add<R: Real>(block: usize, sums: &[R], y: &mut [R]) {
    for (y, sum) in y.iter_mut().zip(sums) {
        *y = if block == 0 { *sum } else { *y + *sum };
    }
}
