//! Matrices of 32-bit elements transposed in registers, square after square.

use super::prefetch;
use super::stream::{LINE, Stream};
#[cfg(target_arch = "x86_64")]
use super::{Level, level};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Rows and columns of `to` that are transposed together: lines of rows of `from`, and of `to`, that stay in the first-level cache.
const TILE: [usize; 2] = [64, 32];
/// Columns of `to` that are transposed for all rows before the next ones: as many pages of `from` as have their translations at hand.
const COLS: usize = 512;
/// The same past the caches, where it is the order of the stores that counts.
const COLS_PAST: usize = 64;

/// Squares that registers turn.
trait Square {
    /// Rows, and columns, of one.
    const SIDE: usize;

    /// to[i][j] = from[j][i] for a square; pointers and the distances of rows. Past the caches if so asked.
    ///
    /// # Safety
    /// The rows lie inside of their memories, nobody else touches `to`, and the CPU has the instructions. Past the caches rows of
    /// `to` start at whole vectors.
    unsafe fn transpose<const PAST: bool>(from: (*const f32, usize), to: (*mut f32, usize));
}

/// Of 16 rows, by AVX-512.
#[cfg(target_arch = "x86_64")]
struct Sixteen;
/// Of 8 rows, by AVX2.
#[cfg(target_arch = "x86_64")]
struct Eight;
/// Element by element.
struct Plain;

/// A matrix inside of memory: where it starts, and the distance of its rows.
#[derive(Debug)]
pub(crate) struct Rows<M> {
    pub(crate) memory: M,
    pub(crate) step: usize,
}

/// to[i][j] = from[j][i] for so many rows i and columns j; past the caches where there is a stream.
///
/// # Panics
/// If a matrix reaches beyond its memory.
pub(crate) fn transpose(
    from: Rows<&[f32]>,
    to: Rows<&mut [f32]>,
    [rows, cols]: [usize; 2],
    stream: Option<&Stream>,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    assert!((cols - 1) * from.step + rows <= from.memory.len(), "the matrix is read inside of its memory");
    assert!((rows - 1) * to.step + cols <= to.memory.len(), "the matrix is written inside of its memory");
    let in_lines =
        to.memory.as_ptr().addr().is_multiple_of(LINE) && (to.step * size_of::<f32>()).is_multiple_of(LINE);
    let is_past = stream.is_some() && in_lines;
    #[cfg(target_arch = "x86_64")]
    match level() {
        // SAFETY: `level` has just detected the instructions.
        Level::Avx512 => return unsafe { avx512(from, to, [rows, cols], is_past) },
        // SAFETY: `level` has just detected the instructions.
        Level::Avx2 => return unsafe { avx2(from, to, [rows, cols], is_past) },
        Level::Baseline => {}
    }
    by_squares::<Plain>(from, to, [rows, cols], is_past);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,bmi2,f16c")]
fn avx512(from: Rows<&[f32]>, to: Rows<&mut [f32]>, extents: [usize; 2], is_past: bool) {
    by_squares::<Sixteen>(from, to, extents, is_past);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2(from: Rows<&[f32]>, to: Rows<&mut [f32]>, extents: [usize; 2], is_past: bool) {
    by_squares::<Eight>(from, to, extents, is_past);
}

/// See [`transpose`], which has found room for both matrices, whole lines for rows of `to` if they pass the caches, and the
/// instructions.
#[inline(always)]
fn by_squares<S: Square>(from: Rows<&[f32]>, to: Rows<&mut [f32]>, extents: [usize; 2], is_past: bool) {
    match is_past {
        true => past_caches::<S>(from, to, extents),
        false => by_tiles::<S>(from, to, extents),
    }
}

/// Squares along rows of `from`: lines are read whole, and stored whole.
#[inline(always)]
fn past_caches<S: Square>(from: Rows<&[f32]>, to: Rows<&mut [f32]>, [rows, cols]: [usize; 2]) {
    let side = S::SIDE;
    for first in (0..cols).step_by(COLS_PAST) {
        for row in (0..rows).step_by(side) {
            for col in (first..cols.min(first + COLS_PAST)).step_by(side) {
                let (height, width) = (side.min(rows - row), side.min(cols - col));
                let (from_at, to_at) = (col * from.step + row, row * to.step + col);
                if height == side && width == side {
                    let from = (from.memory[from_at..].as_ptr(), from.step);
                    let to = (to.memory[to_at..].as_mut_ptr(), to.step);
                    // SAFETY: `transpose` has checked that both matrices lie in memory, and that rows of `to` start at lines,
                    // of which sides are whole vectors; `level` has detected the instructions.
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

/// From the start of a cache line on: no part of a row lies on two.
#[repr(align(64))]
struct Tile([[f32; TILE[0]]; TILE[1]]);

/// Tiles that are brought to the first-level cache in long runs; meanwhile it is asked for the memory that they go to.
#[inline(always)]
fn by_tiles<S: Square>(from: Rows<&[f32]>, to: Rows<&mut [f32]>, [rows, cols]: [usize; 2]) {
    let Tile(tile) = &mut Tile([[0.0; TILE[0]]; TILE[1]]);
    for first in (0..cols).step_by(COLS) {
        for row in (0..rows).step_by(TILE[0]) {
            for col in (first..cols.min(first + COLS)).step_by(TILE[1]) {
                let (height, width) = (TILE[0].min(rows - row), TILE[1].min(cols - col));
                let to_at = row * to.step + col;
                (0..height).for_each(|i| prefetch(&to.memory[to_at + i * to.step..][..width]));
                for (j, tile) in tile[..width].iter_mut().enumerate() {
                    let from = &from.memory[(col + j) * from.step + row..][..height];
                    // A length that is known is no call.
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

/// Turns a tile into rows of `to`.
#[inline(always)]
fn store_tile<S: Square>(
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
            // SAFETY: the square lies inside of the tile, and of `to`, in which `transpose` has found room for the matrix; `level`
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

impl Square for Plain {
    const SIDE: usize = 8;

    unsafe fn transpose<const PAST: bool>(
        (from, from_step): (*const f32, usize),
        (to, to_step): (*mut f32, usize),
    ) {
        for (i, j) in (0..Plain::SIDE).flat_map(|i| (0..Plain::SIDE).map(move |j| (i, j))) {
            // SAFETY: the caller vouches for 8 rows of 8 elements, transposed or not.
            unsafe { *to.add(i * to_step + j) = *from.add(j * from_step + i) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Square for Sixteen {
    const SIDE: usize = 16;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn transpose<const PAST: bool>(
        (from, from_step): (*const f32, usize),
        (to, to_step): (*mut f32, usize),
    ) {
        for quarter in (0..16).step_by(4) {
            // Rows i, i + 4, i + 8 and i + 12 in the quarters of one vector: then nothing has to cross them later.
            let part = |i: usize| {
                // SAFETY: the caller vouches for 16 rows of 16 elements.
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
                // SAFETY: the caller vouches for 16 rows of 16 elements, at whole vectors if they pass the caches.
                unsafe { if PAST { _mm512_stream_ps(to, row) } else { _mm512_storeu_ps(to, row) } }
            };
            store(0, _mm512_shuffle_ps::<0x44>(low, low2));
            store(1, _mm512_shuffle_ps::<0xee>(low, low2));
            store(2, _mm512_shuffle_ps::<0x44>(high, high2));
            store(3, _mm512_shuffle_ps::<0xee>(high, high2));
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Square for Eight {
    const SIDE: usize = 8;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn transpose<const PAST: bool>(
        (from, from_step): (*const f32, usize),
        (to, to_step): (*mut f32, usize),
    ) {
        for half in [0, 4] {
            // Rows i and i + 4 in the halves of one vector, as above.
            let row = |i: usize| {
                let from = from.wrapping_add(i * from_step + half);
                // SAFETY: the caller vouches for 8 rows of 8 elements.
                unsafe { _mm256_loadu2_m128(from.wrapping_add(4 * from_step), from) }
            };
            let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
            let (low, high) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (low2, high2) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            let store = |i: usize, row: __m256| {
                let to = to.wrapping_add((half + i) * to_step);
                // SAFETY: the caller vouches for 8 rows of 8 elements, at whole vectors if they pass the caches.
                unsafe { if PAST { _mm256_stream_ps(to, row) } else { _mm256_storeu_ps(to, row) } }
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

    type Way = fn(Rows<&[f32]>, Rows<&mut [f32]>, [usize; 2], bool);

    /// By all squares that this CPU has, both ways, on matrices of all kinds of edges with room between their rows.
    #[test]
    fn turned_by_every_instruction_set() {
        let mut ways: Vec<Way> = vec![by_squares::<Plain>];
        #[cfg(target_arch = "x86_64")]
        {
            if level() != Level::Baseline {
                // SAFETY: `level` has just detected the instructions.
                ways.push(|from, to, extents, is_past| unsafe { avx2(from, to, extents, is_past) });
            }
            if level() == Level::Avx512 {
                // SAFETY: `level` has just detected the instructions.
                ways.push(|from, to, extents, is_past| unsafe { avx512(from, to, extents, is_past) });
            }
        }
        for [rows, cols] in [[1usize, 1usize], [16, 16], [8, 24], [64, 32], [65, 33], [130, 97], [31, 600]] {
            let (from_step, to_step) = (rows + 3, (cols + 5).next_multiple_of(16));
            let from: Vec<f32> = (0..cols * from_step).map(|i| i as f32 + 1.0).collect();
            for (way, is_past) in ways.iter().flat_map(|way| [(way, false), (way, true)]) {
                let mut memory = vec![0.0; rows * to_step + 16];
                let start = memory.as_ptr().align_offset(LINE);
                let to = Rows { memory: &mut memory[start..], step: to_step };
                way(Rows { memory: &from, step: from_step }, to, [rows, cols], is_past);
                for (at, &got) in memory.iter().enumerate() {
                    let (i, j) = (at.wrapping_sub(start) / to_step, at.wrapping_sub(start) % to_step);
                    let inside = at >= start && i < rows && j < cols;
                    let want = if inside { from[j * from_step + i] } else { 0.0 };
                    assert_eq!(got, want, "{rows} x {cols}, past the caches: {is_past}, at {i}, {j}");
                }
            }
        }
    }
}
