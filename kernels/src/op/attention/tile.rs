//! Tiles of attention: rows of queries against rows of keys, in scratch memory of the accumulator type.

use super::{Head, Problem};
use crate::cpu::gemm::{Matrix, MatrixMut, product};
use crate::dtype::{Float, Real};
use crate::op::rows::LANES;

/// Queries of a tile.
pub(super) const QUERIES: usize = 64;
/// Keys of a tile. Changing this changes results.
pub(super) const KEYS: usize = 64;

impl<'a, T: Float> Head<'a, T> {
    /// The vectors from `row` on as a matrix with one row each.
    pub(super) fn matrix(&self, row: usize) -> Matrix<'a, T> {
        Matrix { data: &self.data[self.start + row * self.step..], row_stride: self.step, col_stride: self.inner }
    }

    /// Widens the vectors from `row` on, times a factor, as many as fit.
    #[inline(always)]
    pub(super) fn gather(&self, row: usize, c: usize, factor: T::Acc, to: &mut [T::Acc]) {
        for (i, to) in to.chunks_exact_mut(c).enumerate() {
            let from = &self.data[self.start + (row + i) * self.step..];
            if self.inner == 1 {
                to.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen() * factor);
            } else {
                to.iter_mut().zip(from.iter().step_by(self.inner)).for_each(|(to, from)| *to = from.widen() * factor);
            }
        }
    }
}

/// A matrix in scratch, row-major.
pub(super) fn rows<R>(data: &[R], width: usize) -> Matrix<'_, R> {
    Matrix { data, row_stride: width, col_stride: 1 }
}

/// The same turned.
pub(super) fn columns<R>(data: &[R], width: usize) -> Matrix<'_, R> {
    Matrix { data, row_stride: 1, col_stride: width }
}

/// A matrix in scratch to be written, row-major.
pub(super) fn rows_mut<R>(data: &mut [R], width: usize) -> MatrixMut<'_, R> {
    MatrixMut { data, row_stride: width, col_stride: 1 }
}

/// The length of a row of scores: so many queries, up to a full vector.
pub(super) fn row_len(queries: usize) -> usize {
    queries.next_multiple_of(LANES)
}

/// The scores of a tile: one row per key from `first_key` on, one column per query in `q`.
pub(super) fn score<T: Float>(
    [queries, keys, c]: [usize; 3],
    q: &[T::Acc],
    k: &Head<'_, T>,
    first_key: usize,
    scores: &mut [T::Acc],
) {
    product([keys, queries, c], k.matrix(first_key), columns(q, c), false, rows_mut(scores, row_len(queries)));
}

/// Overwrites what queries from `first` on have in the row of a key that they do not see: the first few columns.
#[inline(always)]
pub(super) fn mask<R: Real>(problem: &Problem, first: usize, key: usize, row: &mut [R], with: R) {
    if problem.causal {
        let hidden = (key as i64 - problem.t_start - first as i64).clamp(0, row.len() as i64);
        row[..hidden as usize].fill(with);
    }
}

/// One vector of each row of scores.
#[inline(always)]
pub(super) fn vectors<R>(scores: &mut [R], row_len: usize, at: usize) -> impl Iterator<Item = &mut [R; LANES]> {
    scores.chunks_exact_mut(row_len).map(move |row| row[at..].first_chunk_mut().expect("rows are whole vectors"))
}
