//! Blocks of matrices as tiles read them: in strips, widened, with the elements of one step side by side.

use crate::cpu::simd::tile::Tiles;
use crate::cpu::simd::vectorized;
use crate::dtype::{Element, Float, Real};
use std::mem::MaybeUninit;

/// The deepest block that is packed at a time.
pub(crate) const DEPTH_MAX: usize = 256;

/// A matrix that is read, of any float type that widens to R; the caller vouches for what it reaches.
pub(crate) struct Source<R> {
    start: *const u8,
    row: usize,
    col: usize,
    /// Bytes of an element.
    size: usize,
    /// Whether elements are of type R itself, so that tiles can read them where they lie.
    direct: bool,
    /// Copies a block of it.
    pack: Pack<R>,
}

/// to[p * width + j] = from(p, j) for j below `used`, else 0: from, \[depth, used\], width, to.
type Pack<R> = unsafe fn(&Tiles<R>, Source<R>, [usize; 2], usize, *mut R);

impl<R> Clone for Source<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Source<R> {}

// SAFETY: it points to floats, and tasks on several threads only read through it.
unsafe impl<R> Sync for Source<R> {}

impl<R: Real> Source<R> {
    pub(crate) fn new<T: Float<Acc = R>>(data: &[T], row: usize, col: usize) -> Source<R> {
        let direct = T::DTYPE == R::DTYPE;
        Source { start: data.as_ptr().cast(), row, col, size: size_of::<T>(), direct, pack: pack::<T> }
    }

    pub(crate) fn turned(self) -> Self {
        Source { row: self.col, col: self.row, ..self }
    }

    /// The same from another element on.
    pub(crate) fn moved(self, distance: usize) -> Self {
        Source { start: self.start.wrapping_add(distance * self.size), ..self }
    }

    /// The same from element (i, j) on.
    pub(crate) fn from(self, i: usize, j: usize) -> Self {
        self.moved(i * self.row + j * self.col)
    }
}

/// Packs strips of the tallest tile's rows (fewer in the last), each column after column.
///
/// # Safety
/// The block lies inside of its memory, and `to` has room for it.
pub(crate) unsafe fn pack_rows<R: Real>(
    tiles: &Tiles<R>,
    from: Source<R>,
    [rows, depth]: [usize; 2],
    to: *mut R,
) {
    let tallest = tiles.heights[0];
    for first in (0..rows).step_by(tallest) {
        let height = tallest.min(rows - first);
        // SAFETY: as promised by the caller.
        unsafe {
            (from.pack)(tiles, from.from(first, 0).turned(), [depth, height], height, to.add(first * depth))
        };
    }
}

/// Strips of b, two vectors wide (one, if the last holds no more): those from column `packed_from` on are packed,
/// each row after row, filled up with 0; those before lie in b itself.
#[derive(Clone, Copy)]
pub(crate) struct Strips<R> {
    pub(crate) packed: *const R,
    pub(crate) packed_from: usize,
    pub(crate) direct: *const R,
    pub(crate) direct_row: usize,
}

/// Packs the strips of a block of b, or only the last if the rest can stay where it is.
///
/// # Safety
/// The block lies inside of its memory, and `to` has room for it.
pub(crate) unsafe fn cols_of<R: Real>(
    tiles: &Tiles<R>,
    from: Source<R>,
    [depth, cols]: [usize; 2],
    few_rows: bool,
    to: *mut R,
) -> Strips<R> {
    let wide = 2 * tiles.lanes;
    let packed_from = if few_rows && from.col == 1 && from.direct { cols / wide * wide } else { 0 };
    for first in (packed_from..cols).step_by(wide) {
        let used = wide.min(cols - first);
        let width = used.next_multiple_of(tiles.lanes);
        // SAFETY: as promised by the caller.
        unsafe {
            let to = to.add((first - packed_from) * depth);
            (from.pack)(tiles, from.from(0, first), [depth, used], width, to);
        }
    }
    Strips { packed: to, packed_from, direct: from.start.cast(), direct_row: from.row }
}

/// See [`Pack`].
///
/// # Safety
/// `from` is of type T; the block lies inside of its memory, and `to` has room for it.
unsafe fn pack<T: Float>(
    tiles: &Tiles<T::Acc>,
    from: Source<T::Acc>,
    [depth, used]: [usize; 2],
    width: usize,
    to: *mut T::Acc,
) {
    let block = tiles.block;
    let start = from.start.cast::<T>();
    // SAFETY: p is below `depth` and j below `used` or, where only `to` is touched, below `width`.
    unsafe {
        if from.row == 1 && from.col != 1 && depth >= block && used >= block {
            for j in starts(used, block) {
                turn(tiles, (start.add(j * from.col), from.col), depth, (to.add(j), width));
            }
        } else if from.col == 1 {
            vectorized(
                #[inline(always)]
                || {
                    for p in 0..depth {
                        for j in 0..used {
                            *to.add(p * width + j) = (*start.add(p * from.row + j)).widen();
                        }
                    }
                },
            );
        } else {
            for p in 0..depth {
                for j in 0..used {
                    *to.add(p * width + j) = (*start.add(p * from.row + j * from.col)).widen();
                }
            }
        }
        for p in 0..depth {
            for j in used..width {
                *to.add(p * width + j) = T::Acc::ZERO;
            }
        }
    }
}

/// Where blocks start that cover `len` elements; the last may overlap the one before.
fn starts(len: usize, block: usize) -> impl Iterator<Item = usize> {
    (0..len).step_by(block).map(move |at| at.min(len - block))
}

/// Turns a block's worth of rows of `depth` elements, widening them first if they are of 16 bits.
///
/// # Safety
/// The rows, and as many columns of `to`, lie inside of their memories.
unsafe fn turn<T: Float>(
    tiles: &Tiles<T::Acc>,
    (from, from_step): (*const T, usize),
    depth: usize,
    (to, to_step): (*mut T::Acc, usize),
) {
    let mut wide = [MaybeUninit::<T::Acc>::uninit(); 8 * DEPTH_MAX];
    let (rows, step) = if T::DTYPE == <T::Acc as Element>::DTYPE {
        (from.cast::<T::Acc>(), from_step)
    } else {
        assert!(depth <= DEPTH_MAX && tiles.block <= 8, "a block of rows fits the scratch");
        vectorized(
            #[inline(always)]
            || {
                for (i, row) in wide.chunks_exact_mut(DEPTH_MAX).take(tiles.block).enumerate() {
                    for (p, to) in row[..depth].iter_mut().enumerate() {
                        // SAFETY: as promised by the caller.
                        to.write(unsafe { *from.add(i * from_step + p) }.widen());
                    }
                }
            },
        );
        (wide.as_ptr().cast::<T::Acc>(), DEPTH_MAX)
    };
    for p in starts(depth, tiles.block) {
        // SAFETY: as promised by the caller; of `wide`, what was just written is read.
        unsafe { (tiles.turn)((rows.add(p), step), (to.add(p * to_step), to_step)) };
    }
}
