//! Blocks of matrices as tiles read them: in strips, widened, with the elements of one step side by side.

use crate::cpu::simd::tile::Tiles;
use crate::dtype::{Element, Float, Real};

/// A matrix that is read; the caller vouches for what it reaches.
pub(crate) struct Source<T> {
    pub(crate) start: *const T,
    pub(crate) row: usize,
    pub(crate) col: usize,
}

impl<T> Clone for Source<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Source<T> {}

// SAFETY: tasks on several threads only read through it.
unsafe impl<T: Sync> Sync for Source<T> {}

impl<T> Source<T> {
    pub(crate) fn turned(self) -> Self {
        Source { row: self.col, col: self.row, ..self }
    }

    pub(crate) fn moved(self, distance: usize) -> Self {
        Source { start: self.start.wrapping_add(distance), ..self }
    }

    /// # Safety
    /// The element lies inside of the memory.
    #[inline(always)]
    pub(crate) unsafe fn at(self, i: usize, j: usize) -> *const T {
        // SAFETY: as promised by the caller.
        unsafe { self.start.add(i * self.row + j * self.col) }
    }

    /// # Safety
    /// The element lies inside of the memory.
    pub(crate) unsafe fn from(self, i: usize, j: usize) -> Self {
        // SAFETY: as promised by the caller.
        Source { start: unsafe { self.at(i, j) }, ..self }
    }
}

/// Packs strips of the tallest tile's rows (fewer in the last), each column after column.
///
/// # Safety
/// The block lies inside of its memory, and `to` has room for it.
#[inline(always)]
pub(crate) unsafe fn pack_rows<T: Float>(
    tiles: &Tiles<T::Acc>,
    from: Source<T>,
    [rows, depth]: [usize; 2],
    to: *mut T::Acc,
) {
    let tallest = tiles.heights[0];
    for first in (0..rows).step_by(tallest) {
        let height = tallest.min(rows - first);
        // SAFETY: as promised by the caller.
        unsafe { pack(tiles, from.from(first, 0).turned(), [depth, height], height, to.add(first * depth)) };
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
#[inline(always)]
pub(crate) unsafe fn cols_of<T: Float>(
    tiles: &Tiles<T::Acc>,
    from: Source<T>,
    [depth, cols]: [usize; 2],
    few_rows: bool,
    to: *mut T::Acc,
) -> Strips<T::Acc> {
    let wide = 2 * tiles.lanes;
    let direct = few_rows && from.col == 1 && T::DTYPE == <T::Acc as Element>::DTYPE;
    let packed_from = if direct { cols / wide * wide } else { 0 };
    for first in (packed_from..cols).step_by(wide) {
        let used = wide.min(cols - first);
        let width = used.next_multiple_of(tiles.lanes);
        // SAFETY: as promised by the caller.
        unsafe {
            pack(tiles, from.from(0, first), [depth, used], width, to.add((first - packed_from) * depth))
        };
    }
    Strips { packed: to, packed_from, direct: from.start.cast(), direct_row: from.row }
}

/// to[p * width + j] = from(p, j), and 0 for j from `used` to `width`.
///
/// # Safety
/// The block lies inside of its memory, and `to` has room for it.
#[inline(always)]
unsafe fn pack<T: Float>(
    tiles: &Tiles<T::Acc>,
    from: Source<T>,
    [depth, used]: [usize; 2],
    width: usize,
    to: *mut T::Acc,
) {
    let block = tiles.block;
    // SAFETY: p is below `depth` and j below `used` or, where only `to` is touched, below `width`.
    unsafe {
        if from.row == 1 && from.col != 1 && depth >= block && used >= block {
            for j in starts(used, block) {
                for p in starts(depth, block) {
                    turn(tiles, (from.at(p, j), from.col), (to.add(p * width + j), width));
                }
            }
        } else {
            for p in 0..depth {
                for j in 0..used {
                    *to.add(p * width + j) = (*from.at(p, j)).widen();
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
#[inline(always)]
fn starts(len: usize, block: usize) -> impl Iterator<Item = usize> {
    (0..len).step_by(block).map(move |at| at.min(len - block))
}

/// Turns one block, widening it first if it is of 16-bit elements.
///
/// # Safety
/// Both blocks lie inside of their memories.
#[inline(always)]
unsafe fn turn<T: Float>(
    tiles: &Tiles<T::Acc>,
    (from, from_step): (*const T, usize),
    (to, to_step): (*mut T::Acc, usize),
) {
    if T::DTYPE == <T::Acc as Element>::DTYPE {
        // SAFETY: as promised by the caller; T is its own accumulator.
        unsafe { (tiles.turn)((from.cast(), from_step), (to, to_step)) };
        return;
    }
    let mut wide = [T::Acc::ZERO; 64];
    for i in 0..tiles.block {
        for j in 0..tiles.block {
            // SAFETY: as promised by the caller.
            wide[i * 8 + j] = unsafe { *from.add(i * from_step + j) }.widen();
        }
    }
    // SAFETY: as promised by the caller.
    unsafe { (tiles.turn)((wide.as_ptr(), 8), (to, to_step)) };
}
