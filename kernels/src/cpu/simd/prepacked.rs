//! A prepacked right operand of GEMM: all of b in the panels that micro-kernels read, for products that read the same b again.
//!
//! Blocks of [`KC`] steps follow one another; each holds the panels of all columns. The layout depends on the extents only, so that
//! any task of any product finds its panels.

use crate::cpu::simd::level;
use crate::cpu::simd::microkernel::MicroKernels;
use crate::cpu::simd::pack::{KC, MatrixPtr};
use crate::dtype::{Float, Real};

/// Columns packed at a time: rows of their panels are written in turn, and rows of more panels, which are pages apart, would evict each
/// other from the L1 cache.
const COLS: usize = 256;

/// A prepacked matrix, from some column on.
#[derive(Clone, Copy)]
pub(crate) struct PackedB<'a, R> {
    data: &'a [R],
    /// Elements of a step, over all panels.
    width: usize,
    first_col: usize,
}

impl<'a, R: Real> PackedB<'a, R> {
    /// Returns the elements of a step of n columns on this CPU.
    pub(crate) fn width(n: usize) -> usize {
        n.next_multiple_of(MicroKernels::<R>::for_level(level()).lanes)
    }

    /// Wraps the packed form of a matrix of n columns.
    pub(crate) fn new(data: &'a [R], n: usize) -> PackedB<'a, R> {
        PackedB { data, width: PackedB::<R>::width(n), first_col: 0 }
    }

    /// Returns the matrix from a later column on, at which a panel begins.
    pub(crate) fn skip_cols(self, col: usize) -> Self {
        debug_assert!(
            col.is_multiple_of(2 * MicroKernels::<R>::for_level(level()).lanes),
            "a panel begins at column {col}"
        );
        PackedB { first_col: self.first_col + col, ..self }
    }

    /// Returns the panels of `depth` steps from the first step of a block on, and from the first column of a panel on.
    pub(crate) fn panels(self, [first_depth, depth]: [usize; 2], col: usize) -> &'a [R] {
        &self.data[first_depth * self.width + (self.first_col + col) * depth..][..]
    }
}

/// Packs one block of steps of b, which has k rows and n columns. `strides` are its row and column stride.
///
/// # Panics
/// If b reaches outside of its memory, there is no such block, or `to` is not of its size.
pub(crate) fn pack_block<T: Float>(
    (b, strides): (&[T], [usize; 2]),
    [n, k]: [usize; 2],
    block: usize,
    to: &mut [T::Acc],
) {
    let first = block * KC;
    assert!(n > 0 && first < k, "a block of something");
    assert!((k - 1) * strides[0] + (n - 1) * strides[1] < b.len(), "b must be within its memory");
    let (kernels, depth) = (MicroKernels::<T::Acc>::for_level(level()), KC.min(k - first));
    assert!(to.len() == PackedB::<T::Acc>::width(n) * depth, "room for the block");
    let b = MatrixPtr::new(b, strides[0], strides[1]);
    for col in (0..n).step_by(COLS) {
        let (from, to) = (b.submatrix(first, col), to[col * depth..].as_mut_ptr());
        // SAFETY: the assertions cover both memories, and the level is that of this CPU.
        unsafe { from.pack_columns(&kernels, [depth, COLS.min(n - col)], to) };
    }
}
