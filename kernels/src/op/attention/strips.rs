//! Attention tiles whose queries fill strips, for operands in the accumulator type: operands are packed once for all tiles that read
//! them, and hidden pairs are skipped in steps of a strip. Skipped terms are zeros at an end of a sum, so the bits are those of products
//! of whole tiles.

use super::Problem;
use super::tile::{Operand, Pairs, columns, rows, rows_mut};
use crate::cpu::gemm::{MatrixRef, gemm};
use crate::cpu::simd::pack::pack_row_panels;
use crate::cpu::simd::scratch::Scratch;
use crate::dtype::{Float, Real};

/// Queries per strip: the width that products read without packing.
const STRIP: usize = 32;
/// Rows per part: the tile of AVX-512 for two strips, with the other operand read in place. The same on every CPU, because hidden pairs
/// of a part are multiplied by 0, which turns an infinity into NaN.
const PART: usize = 28;

/// Returns how many queries of a tile, the first ones, fill strips; with none, tiles are not taken this way.
pub(super) fn in_strips<P: Operand>(queries: usize) -> usize {
    if P::SHORT { 0 } else { queries / STRIP * STRIP }
}

/// Transposes the queries, rows of c channels, that fill strips: `transposed` has room for these.
pub(super) fn transpose_strips<P: Operand>(rows: &[P], c: usize, transposed: &mut [P::Acc]) {
    pack_row_panels(rows, c, STRIP, transposed);
}

/// The queries of a tile: those in strips transposed, and all of them as rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queries<'s, P: Operand> {
    pub(super) transposed: &'s [P::Acc],
    pub(super) rows: &'s [P],
}

impl Pairs {
    /// Returns how many keys of the tile, the first ones, are visible to queries before this one.
    fn seen(&self, problem: &Problem, before: usize) -> usize {
        match problem.causal {
            true => {
                let end = (self.first + before) as i64 + problem.t_start - self.first_key as i64;
                end.clamp(0, self.keys as i64) as usize
            }
            false => self.keys,
        }
    }

    /// [`Pairs::score`], without strips in which all pairs are hidden by causality.
    pub(super) fn score_strips<R: Real, T: Float<Acc = R>, P: Operand<Acc = R>>(
        &self,
        problem: &Problem,
        scratch: &mut Scratch,
        q: Queries<'_, P>,
        keys: MatrixRef<'_, T>,
        scores: &mut [R],
    ) {
        let (whole, c) = (q.transposed.len() / self.c, self.c);
        for first in (self.skip / STRIP * STRIP..whole).step_by(STRIP) {
            let dims = [self.seen(problem, first + STRIP), STRIP, c];
            let (q, scores) =
                (rows(&q.transposed[first * c..], STRIP), rows_mut(&mut scores[first..], self.row_len()));
            gemm(scratch, dims, keys, q, false, scores);
        }
        let first = whole.max(self.skip);
        if first < self.queries {
            let (q, scores) =
                (columns(&q.rows[first * c..], c), rows_mut(&mut scores[first..], self.row_len()));
            gemm(scratch, [self.keys, self.queries - first, c], keys, q, false, scores);
        }
    }

    /// [`Pairs::gather_keys`] of keys in scratch.
    pub(super) fn gather_keys_in_parts<R: Real>(
        &self,
        problem: &Problem,
        scratch: &mut Scratch,
        scores: &[R],
        keys: &[R],
        to: &mut [R],
    ) {
        let c = self.c;
        for first in (self.skip..self.queries).step_by(PART) {
            let count = PART.min(self.queries - first);
            let dims = [count, c, self.seen(problem, first + count)];
            let to = rows_mut(&mut to[first * c..], c);
            gemm(scratch, dims, columns(&scores[first..], self.row_len()), rows(keys, c), true, to);
        }
    }

    /// [`Pairs::gather_queries`].
    pub(super) fn gather_queries_in_parts<R: Real, P: Operand<Acc = R>>(
        &self,
        problem: &Problem,
        scratch: &mut Scratch,
        scores: &[R],
        q: &[P],
        to: &mut [R],
    ) {
        let c = self.c;
        for key in (0..self.keys).step_by(PART) {
            let count = PART.min(self.keys - key);
            let (start, end) = (self.hidden(problem, key), self.left_behind(problem, key + count - 1));
            if start < end {
                let scores = rows(&scores[key * self.row_len() + start..], self.row_len());
                let to = rows_mut(&mut to[(self.first_key + key) * c..], c);
                gemm(scratch, [count, c, end - start], scores, rows(&q[start * c..], c), true, to);
            }
        }
    }
}
