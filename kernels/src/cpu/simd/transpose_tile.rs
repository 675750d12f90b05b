//! Transposition of a few rows of any length, in registers.

use crate::dtype::Real;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// to[j][i] = from[i][j] for j below the length and i below the number of rows transposed at a time; pointers and row strides.
///
/// # Safety
/// The rows and columns are within their memory, hold at least a square, no other thread touches `to`, and the CPU has the
/// instructions.
pub(crate) type TransposeTile<R> = unsafe fn(usize, (*const R, usize), (*mut R, usize));

/// Returns the starts of blocks that cover `len` elements; the last may overlap the one before.
pub(crate) fn starts(len: usize, block: usize) -> impl Iterator<Item = usize> {
    (0..len).step_by(block).map(move |at| at.min(len - block))
}

/// See [`TransposeTile`]; N rows at a time.
pub(crate) unsafe fn plain<R: Real, const N: usize>(
    len: usize,
    (from, from_step): (*const R, usize),
    (to, to_step): (*mut R, usize),
) {
    for i in 0..N {
        for j in 0..len {
            // SAFETY: the caller guarantees N rows of `len` elements on both sides.
            unsafe { *to.add(j * to_step + i) = *from.add(i * from_step + j) };
        }
    }
}

/// See [`TransposeTile`]; 8 rows at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn eight_f32(
    len: usize,
    (from, from_step): (*const f32, usize),
    (to, to_step): (*mut f32, usize),
) {
    for first in starts(len, 8) {
        for half in [0, 4] {
            // Rows i and i + 4 in the halves of one vector, so that no later shuffle crosses the halves.
            let row = |i: usize| {
                let from = from.wrapping_add(i * from_step + first + half);
                // SAFETY: the caller guarantees 8 rows of at least 8 elements.
                unsafe { _mm256_loadu2_m128(from.wrapping_add(4 * from_step), from) }
            };
            let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
            let (low, high) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (low2, high2) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            let to = to.wrapping_add((first + half) * to_step);
            // SAFETY: the caller guarantees 8 columns of at least 8 elements.
            unsafe {
                _mm256_storeu_ps(to, _mm256_shuffle_ps::<0x44>(low, low2));
                _mm256_storeu_ps(to.add(to_step), _mm256_shuffle_ps::<0xee>(low, low2));
                _mm256_storeu_ps(to.add(2 * to_step), _mm256_shuffle_ps::<0x44>(high, high2));
                _mm256_storeu_ps(to.add(3 * to_step), _mm256_shuffle_ps::<0xee>(high, high2));
            }
        }
    }
}

/// See [`TransposeTile`]; 4 rows at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn four_f64(
    len: usize,
    (from, from_step): (*const f64, usize),
    (to, to_step): (*mut f64, usize),
) {
    for first in starts(len, 4) {
        for half in [0, 2] {
            // Rows i and i + 2 in the halves of one vector.
            let row = |i: usize| {
                let from = from.wrapping_add(i * from_step + first + half);
                // SAFETY: the caller guarantees 4 rows of at least 4 elements.
                unsafe { _mm256_loadu2_m128d(from.wrapping_add(2 * from_step), from) }
            };
            let (r0, r1) = (row(0), row(1));
            let to = to.wrapping_add((first + half) * to_step);
            // SAFETY: the caller guarantees 4 columns of at least 4 elements.
            unsafe {
                _mm256_storeu_pd(to, _mm256_unpacklo_pd(r0, r1));
                _mm256_storeu_pd(to.add(to_step), _mm256_unpackhi_pd(r0, r1));
            }
        }
    }
}
