//! A prepacked right operand of GEMM: all of b in the panels that micro-kernels read, for products that read the same b again.
//!
//! Blocks of steps follow one another, of [`KC`](crate::cpu::simd::pack::KC) steps unless a product has leaves; each holds the panels of all
//! columns. The layout depends on the extents and the leaves only, so that any task of any product finds its panels.

use crate::cpu::simd::level;
use crate::cpu::simd::microkernel::MicroKernels;
use crate::cpu::simd::pack::MatrixPtr;
use crate::dtype::{Float, Real};

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

/// A block of steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedSteps {
    pub(crate) depth: usize,
    /// The row of b of the first step.
    pub(crate) from: usize,
}

/// Packs some columns, from column `col` on, of one block of steps of b, which has k rows and n columns, into their part of the block.
/// `strides` are the row and column stride of b.
///
/// # Panics
/// If b reaches outside of its memory, there are no such steps, or `to` is not of the size of whole panels.
pub(crate) fn pack_steps<T: Float>(
    (b, strides): (&[T], [usize; 2]),
    [n, k]: [usize; 2],
    PackedSteps { depth, from, .. }: PackedSteps,
    col: usize,
    to: &mut [T::Acc],
) {
    assert!(n > col && depth > 0 && from + depth <= k, "a block of something");
    assert!((k - 1) * strides[0] + (n - 1) * strides[1] < b.len(), "b must be within its memory");
    let (kernels, cols) = (MicroKernels::<T::Acc>::for_level(level()), (to.len() / depth).min(n - col));
    assert!(to.len() == PackedB::<T::Acc>::width(cols) * depth, "room for the columns");
    let b = MatrixPtr::new(b, strides[0], strides[1]).submatrix(from, col);
    // SAFETY: the assertions cover both memories, and the level is that of this CPU.
    unsafe { b.pack_columns(&kernels, [depth, cols], to.as_mut_ptr()) };
}
