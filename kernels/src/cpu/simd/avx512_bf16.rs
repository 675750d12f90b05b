//! Dot products of bf16 in vectors: AVX512-BF16.

use crate::cpu::simd::pack_bf16::{PANEL, STEP_WORDS};
use std::arch::x86_64::*;

/// Rows of sums computed at a time: with two vectors each, they and their operands fit the registers.
const ROWS: usize = 8;

/// c_ij = the dot product of vector i of a (vector-major) and vector j of b (pair-major) over `steps` steps, for `extents` vectors of
/// each, 16 or 32; rows of c are [`PANEL`] apart. A sum starts at 0 and accumulates a pair of products at a time, in the order of k.
///
/// # Safety
/// The panels are packed, c has room, and the CPU has AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn dot_panel(steps: usize, a: *const u32, b: *const u32, extents: [usize; 2], c: *mut f32) {
    let [rows, cols] = extents;
    for first in (0..rows).step_by(ROWS) {
        let (a, c) = (a.wrapping_add(first * STEP_WORDS), c.wrapping_add(first * PANEL));
        // SAFETY: as promised by the caller.
        unsafe {
            match cols {
                PANEL => tile::<2>(steps, (a, rows), b, c),
                _ => tile::<1>(steps, (a, rows), b, c),
            }
        }
    }
}

/// [`dot_panel`] for some rows, and W vectors of columns.
///
/// # Safety
/// As for [`dot_panel`].
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn tile<const W: usize>(steps: usize, (a, rows): (*const u32, usize), b: *const u32, c: *mut f32) {
    let mut sums = [[_mm512_setzero_ps(); W]; ROWS];
    for step in 0..steps {
        for word in 0..STEP_WORDS {
            let a = a.wrapping_add(step * rows * STEP_WORDS + word);
            let b = b.wrapping_add((step * STEP_WORDS + word) * 16 * W);
            // SAFETY: the caller guarantees `steps` steps of these vectors; every bit pattern is a vector.
            let b: [__m512bh; W] = std::array::from_fn(|w| unsafe {
                std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(b.wrapping_add(16 * w).cast()))
            });
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: as above.
                let pair: __m512bh = unsafe {
                    std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(
                        *a.wrapping_add(i * STEP_WORDS) as i32,
                    ))
                };
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum = _mm512_dpbf16_ps(*sum, pair, b);
                }
            }
        }
    }
    for (i, sums) in sums.into_iter().enumerate() {
        for (w, sum) in sums.into_iter().enumerate() {
            // SAFETY: the caller guarantees the room.
            unsafe { _mm512_storeu_ps(c.wrapping_add(i * PANEL + 16 * w), sum) };
        }
    }
}
