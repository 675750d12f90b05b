//! Transposition of matrices of 32-bit elements, in squares that fit the registers.

use super::prefetch;
use super::stream::{LINE, StreamingStores};
#[cfg(target_arch = "x86_64")]
use super::{Level, level};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Rows and columns of `to` transposed together: cache lines of rows of `from`, and of `to`, that stay in the L1 cache.
const TILE: [usize; 2] = [64, 32];
/// Columns of `to` transposed for all rows before the next columns: as many pages of `from` as the TLB holds.
const COLS_PER_PASS: usize = 512;
/// Columns at a time with streaming stores, which depend on the order of the stores.
const COLS_STREAMED: usize = 64;

/// A transposition of a square in registers.
trait SquareKernel {
    /// Rows, and columns, of a square.
    const SIDE: usize;

    /// to[i][j] = from[j][i] for a square; pointers and row strides. Uses streaming stores if `STREAMING`.
    ///
    /// # Safety
    /// The rows are within their memory, no other thread touches `to`, and the CPU has the instructions. If `STREAMING`, rows of `to` are
    /// aligned to vectors.
    unsafe fn transpose<const STREAMING: bool>(from: (*const f32, usize), to: (*mut f32, usize));
}

/// Squares of 16 rows, by AVX-512.
#[cfg(target_arch = "x86_64")]
struct Sixteen;
/// Squares of 8 rows, by AVX2.
#[cfg(target_arch = "x86_64")]
struct Eight;
/// Squares of 8 rows, element by element.
struct Plain;

/// A matrix in memory: the memory from element (0, 0) on, and the row stride.
#[derive(Debug)]
pub(crate) struct StridedRows<M> {
    pub(crate) memory: M,
    pub(crate) step: usize,
}

/// to[i][j] = from[j][i] for all rows i and columns j; with streaming stores if `stream` is given and `to` is aligned.
///
/// # Panics
/// If a matrix reaches outside of its memory.
pub(crate) fn transpose(
    from: StridedRows<&[f32]>,
    to: StridedRows<&mut [f32]>,
    [rows, cols]: [usize; 2],
    stream: Option<&StreamingStores>,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    assert!((cols - 1) * from.step + rows <= from.memory.len(), "the matrix is read inside of its memory");
    assert!((rows - 1) * to.step + cols <= to.memory.len(), "the matrix is written inside of its memory");
    let in_lines =
        to.memory.as_ptr().addr().is_multiple_of(LINE) && (to.step * size_of::<f32>()).is_multiple_of(LINE);
    let is_streaming = stream.is_some() && in_lines;
    #[cfg(target_arch = "x86_64")]
    match level() {
        // SAFETY: `level` has just detected the instructions.
        Level::Avx512 => return unsafe { avx512(from, to, [rows, cols], is_streaming) },
        // SAFETY: `level` has just detected the instructions.
        Level::Avx2 => return unsafe { avx2(from, to, [rows, cols], is_streaming) },
        Level::Baseline => {}
    }
    transpose_with::<Plain>(from, to, [rows, cols], is_streaming);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,bmi2,f16c")]
fn avx512(from: StridedRows<&[f32]>, to: StridedRows<&mut [f32]>, extents: [usize; 2], is_streaming: bool) {
    transpose_with::<Sixteen>(from, to, extents, is_streaming);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2(from: StridedRows<&[f32]>, to: StridedRows<&mut [f32]>, extents: [usize; 2], is_streaming: bool) {
    transpose_with::<Eight>(from, to, extents, is_streaming);
}

/// [`transpose`] after its checks: room for both matrices, rows of `to` aligned to cache lines if streaming, and the instructions.
#[inline(always)]
fn transpose_with<S: SquareKernel>(
    from: StridedRows<&[f32]>,
    to: StridedRows<&mut [f32]>,
    extents: [usize; 2],
    is_streaming: bool,
) {
    match is_streaming {
        true => transpose_streaming::<S>(from, to, extents),
        false => transpose_tiled::<S>(from, to, extents),
    }
}

/// Transposes squares along rows of `from` with streaming stores: cache lines are read and stored whole.
#[inline(always)]
fn transpose_streaming<S: SquareKernel>(
    from: StridedRows<&[f32]>,
    to: StridedRows<&mut [f32]>,
    [rows, cols]: [usize; 2],
) {
    let side = S::SIDE;
    for first in (0..cols).step_by(COLS_STREAMED) {
        for row in (0..rows).step_by(side) {
            for col in (first..cols.min(first + COLS_STREAMED)).step_by(side) {
                let (height, width) = (side.min(rows - row), side.min(cols - col));
                let (from_at, to_at) = (col * from.step + row, row * to.step + col);
                if height == side && width == side {
                    let from = (from.memory[from_at..].as_ptr(), from.step);
                    let to = (to.memory[to_at..].as_mut_ptr(), to.step);
                    // SAFETY: `transpose` has checked that both matrices lie in memory, and that rows of `to` start at cache lines, of
                    // which sides are whole vectors; `level` has detected the instructions.
                    unsafe { S::transpose::<true>(from, to) };
                    continue;
                }
                for (i, j) in (0..height).flat_map(|i| (0..width).map(move |j| (i, j))) {
                    to.memory[to_at + i * to.step + j] = from.memory[from_at + j * from.step + i];
                }
            }
        }
    }
}

/// Aligned to a cache line, so that no row straddles two more than necessary.
#[repr(align(64))]
struct Tile([[f32; TILE[0]]; TILE[1]]);

/// Transposes tiles: copies each into the L1 cache in long runs, while the memory it is written to is prefetched.
#[inline(always)]
fn transpose_tiled<S: SquareKernel>(
    from: StridedRows<&[f32]>,
    to: StridedRows<&mut [f32]>,
    [rows, cols]: [usize; 2],
) {
    let Tile(tile) = &mut Tile([[0.0; TILE[0]]; TILE[1]]);
    for first in (0..cols).step_by(COLS_PER_PASS) {
        for row in (0..rows).step_by(TILE[0]) {
            for col in (first..cols.min(first + COLS_PER_PASS)).step_by(TILE[1]) {
                let (height, width) = (TILE[0].min(rows - row), TILE[1].min(cols - col));
                let to_at = row * to.step + col;
                (0..height).for_each(|i| prefetch(&to.memory[to_at + i * to.step..][..width]));
                for (j, tile) in tile[..width].iter_mut().enumerate() {
                    let from = &from.memory[(col + j) * from.step + row..][..height];
                    // A copy of constant length is no call.
                    match <&[f32; TILE[0]]>::try_from(from) {
                        Ok(from) => *tile = *from,
                        Err(_) => tile[..height].copy_from_slice(from),
                    }
                }
                store_tile::<S>(tile, &mut to.memory[to_at..], to.step, [height, width]);
            }
        }
    }
}

/// Transposes a tile into rows of `to`.
#[inline(always)]
fn store_tile<S: SquareKernel>(
    tile: &[[f32; TILE[0]]; TILE[1]],
    to: &mut [f32],
    step: usize,
    [height, width]: [usize; 2],
) {
    let side = S::SIDE;
    let (whole_rows, whole_cols) = (height / side * side, width / side * side);
    for i in (0..whole_rows).step_by(side) {
        for j in (0..whole_cols).step_by(side) {
            let (from, to) =
                (tile.as_flattened()[j * TILE[0] + i..].as_ptr(), to[i * step + j..].as_mut_ptr());
            // SAFETY: the square is within the tile, and of `to`, in which `transpose` has found room for the matrix; `level`
            // has detected the instructions.
            unsafe { S::transpose::<false>((from, TILE[0]), (to, step)) };
        }
    }
    for i in 0..height {
        let done = if i < whole_rows { whole_cols } else { 0 };
        for j in done..width {
            to[i * step + j] = tile[j][i];
        }
    }
}

impl SquareKernel for Plain {
    const SIDE: usize = 8;

    unsafe fn transpose<const STREAMING: bool>(
        (from, from_step): (*const f32, usize),
        (to, to_step): (*mut f32, usize),
    ) {
        for (i, j) in (0..Plain::SIDE).flat_map(|i| (0..Plain::SIDE).map(move |j| (i, j))) {
            // SAFETY: the caller guarantees 8 rows of 8 elements on both sides.
            unsafe { *to.add(i * to_step + j) = *from.add(j * from_step + i) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl SquareKernel for Sixteen {
    const SIDE: usize = 16;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn transpose<const STREAMING: bool>(
        (from, from_step): (*const f32, usize),
        (to, to_step): (*mut f32, usize),
    ) {
        for quarter in (0..16).step_by(4) {
            // Rows i, i + 4, i + 8 and i + 12 in the quarters of one vector, so that no later shuffle crosses quarters.
            let part = |i: usize| {
                // SAFETY: the caller guarantees 16 rows of 16 elements.
                unsafe { _mm_loadu_ps(from.add(i * from_step + quarter)) }
            };
            let row = |i: usize| {
                let low = _mm512_insertf32x4::<1>(_mm512_castps128_ps512(part(i)), part(i + 4));
                _mm512_insertf32x4::<3>(_mm512_insertf32x4::<2>(low, part(i + 8)), part(i + 12))
            };
            let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
            let (low, high) = (_mm512_unpacklo_ps(r0, r1), _mm512_unpackhi_ps(r0, r1));
            let (low2, high2) = (_mm512_unpacklo_ps(r2, r3), _mm512_unpackhi_ps(r2, r3));
            let store = |i: usize, row: __m512| {
                let to = to.wrapping_add((quarter + i) * to_step);
                // SAFETY: the caller guarantees 16 rows of 16 elements, aligned to vectors if streaming.
                unsafe { if STREAMING { _mm512_stream_ps(to, row) } else { _mm512_storeu_ps(to, row) } }
            };
            store(0, _mm512_shuffle_ps::<0x44>(low, low2));
            store(1, _mm512_shuffle_ps::<0xee>(low, low2));
            store(2, _mm512_shuffle_ps::<0x44>(high, high2));
            store(3, _mm512_shuffle_ps::<0xee>(high, high2));
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl SquareKernel for Eight {
    const SIDE: usize = 8;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn transpose<const STREAMING: bool>(
        (from, from_step): (*const f32, usize),
        (to, to_step): (*mut f32, usize),
    ) {
        for half in [0, 4] {
            // Rows i and i + 4 in the halves of one vector, as above.
            let row = |i: usize| {
                let from = from.wrapping_add(i * from_step + half);
                // SAFETY: the caller guarantees 8 rows of 8 elements.
                unsafe { _mm256_loadu2_m128(from.wrapping_add(4 * from_step), from) }
            };
            let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
            let (low, high) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (low2, high2) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            let store = |i: usize, row: __m256| {
                let to = to.wrapping_add((half + i) * to_step);
                // SAFETY: the caller guarantees 8 rows of 8 elements, aligned to vectors if streaming.
                unsafe { if STREAMING { _mm256_stream_ps(to, row) } else { _mm256_storeu_ps(to, row) } }
            };
            store(0, _mm256_shuffle_ps::<0x44>(low, low2));
            store(1, _mm256_shuffle_ps::<0xee>(low, low2));
            store(2, _mm256_shuffle_ps::<0x44>(high, high2));
            store(3, _mm256_shuffle_ps::<0xee>(high, high2));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Transpose = fn(StridedRows<&[f32]>, StridedRows<&mut [f32]>, [usize; 2], bool);

    /// Checks all squares that this CPU supports, with and without streaming, on matrices with all kinds of edges and gaps between rows.
    #[test]
    fn every_instruction_set_transposes() {
        let mut implementations: Vec<Transpose> = vec![transpose_with::<Plain>];
        #[cfg(target_arch = "x86_64")]
        {
            if level() != Level::Baseline {
                // SAFETY: `level` has just detected the instructions.
                implementations
                    .push(|from, to, extents, is_streaming| unsafe { avx2(from, to, extents, is_streaming) });
            }
            if level() == Level::Avx512 {
                // SAFETY: `level` has just detected the instructions.
                implementations.push(|from, to, extents, is_streaming| unsafe {
                    avx512(from, to, extents, is_streaming)
                });
            }
        }
        for [rows, cols] in [[1usize, 1usize], [16, 16], [8, 24], [64, 32], [65, 33], [130, 97], [31, 600]] {
            let (from_step, to_step) = (rows + 3, (cols + 5).next_multiple_of(16));
            let from: Vec<f32> = (0..cols * from_step).map(|i| i as f32 + 1.0).collect();
            for (implementation, is_streaming) in implementations
                .iter()
                .flat_map(|implementation| [(implementation, false), (implementation, true)])
            {
                let mut memory = vec![0.0; rows * to_step + 16];
                let start = memory.as_ptr().align_offset(LINE);
                let to = StridedRows { memory: &mut memory[start..], step: to_step };
                implementation(
                    StridedRows { memory: &from, step: from_step },
                    to,
                    [rows, cols],
                    is_streaming,
                );
                for (at, &got) in memory.iter().enumerate() {
                    let (i, j) = (at.wrapping_sub(start) / to_step, at.wrapping_sub(start) % to_step);
                    let inside = at >= start && i < rows && j < cols;
                    let want = if inside { from[j * from_step + i] } else { 0.0 };
                    assert_eq!(got, want, "{rows} x {cols}, streaming: {is_streaming}, at {i}, {j}");
                }
            }
        }
    }
}
