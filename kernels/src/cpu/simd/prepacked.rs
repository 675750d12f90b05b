//! A whole right operand as tiles read it, for products that meet it again.
//!
//! Blocks of [`DEPTH_MAX`] steps stand one behind another, in each of them the strips of all columns. What lies where depends on
//! nothing but the extents: any task of any product finds its strips in it.

use crate::cpu::simd::level;
use crate::cpu::simd::microkernel::Tiles;
use crate::cpu::simd::pack::{DEPTH_MAX, Source};
use crate::dtype::{Float, Real};

/// Columns that are packed at a time: rows of their strips are written in turn, and more of them, which lie pages apart, would drive
/// each other out of the first-level cache.
const COLS: usize = 256;

/// A packed matrix, from some column on.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a, R> {
    data: &'a [R],
    /// Places of a step, over all strips.
    width: usize,
    first_col: usize,
}

impl<'a, R: Real> Packed<'a, R> {
    /// Places of a step of n columns on this CPU.
    pub(crate) fn width(n: usize) -> usize {
        n.next_multiple_of(Tiles::<R>::at(level()).lanes)
    }

    /// The packed form of a matrix of n columns.
    pub(crate) fn new(data: &'a [R], n: usize) -> Packed<'a, R> {
        Packed { data, width: Packed::<R>::width(n), first_col: 0 }
    }

    /// The same from a later column on, where a strip begins.
    pub(crate) fn from(self, col: usize) -> Self {
        debug_assert!(
            col.is_multiple_of(2 * Tiles::<R>::at(level()).lanes),
            "a strip begins at column {col}"
        );
        Packed { first_col: self.first_col + col, ..self }
    }

    /// Strips of so many steps from a step on, with which a block begins, and from a column on, with which a strip begins.
    pub(crate) fn strips(self, [first_depth, depth]: [usize; 2], col: usize) -> &'a [R] {
        &self.data[first_depth * self.width + (self.first_col + col) * depth..][..]
    }
}

/// Packs a block of steps of b, of k rows and n columns. `strides` are the distances of both.
///
/// # Panics
/// If b reaches outside of its memory, there is no such block, or `to` is not of its size.
pub(crate) fn pack_block<T: Float>(
    (b, strides): (&[T], [usize; 2]),
    [n, k]: [usize; 2],
    block: usize,
    to: &mut [T::Acc],
) {
    let first = block * DEPTH_MAX;
    assert!(n > 0 && first < k, "a block of something");
    assert!((k - 1) * strides[0] + (n - 1) * strides[1] < b.len(), "b lies inside of its memory");
    let (tiles, depth) = (Tiles::<T::Acc>::at(level()), DEPTH_MAX.min(k - first));
    assert!(to.len() == Packed::<T::Acc>::width(n) * depth, "room for the block");
    let b = Source::new(b, strides[0], strides[1]);
    for col in (0..n).step_by(COLS) {
        let (from, to) = (b.from(first, col), to[col * depth..].as_mut_ptr());
        // SAFETY: the assertions cover both memories, and the level is that of this CPU.
        unsafe { from.pack_columns(&tiles, [depth, COLS.min(n - col)], to) };
    }
}
