//! MicroKernels whose queries fill strips, where operands meet in the accumulator type: what is packed is packed once for all
//! tiles that read it, and pairs that nobody sees are left out in steps of a strip. What is left out are terms of 0 at an end
//! of a sum, so bits are those of the products of whole tiles.

use super::Problem;
use super::tile::{Operand, Pairs, columns, rows, rows_mut};
use crate::cpu::gemm::{MatrixRef, gemm};
use crate::cpu::simd::pack::pack_row_panels;
use crate::cpu::simd::scratch::Scratch;
use crate::dtype::{Float, Real};

/// Queries of a strip: what products read without packing it.
const STRIP: usize = 32;
/// Rows of a part: what the tiles of AVX-512 form in two strips, reading the other operand where it lies. It is the same on every
/// CPU, since pairs of a part that nobody sees meet a factor of 0, which an infinity turns into no number.
const PART: usize = 28;

/// How many queries of a tile, the first ones, lie in strips; with none, tiles are not taken this way.
pub(super) fn in_strips<P: Operand>(queries: usize) -> usize {
    if P::SHORT { 0 } else { queries / STRIP * STRIP }
}

/// Turns the queries, rows of c channels, that lie in strips: `transposed` has room for these.
pub(super) fn turn<P: Operand>(rows: &[P], c: usize, transposed: &mut [P::Acc]) {
    pack_row_panels(rows, c, STRIP, transposed);
}

/// Queries as the columns that keys meet: those in strips transposed, and all of them as rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queries<'s, P: Operand> {
    pub(super) transposed: &'s [P::Acc],
    pub(super) rows: &'s [P],
}

impl Pairs {
    /// How many keys of the tile, the first ones, queries before this one see.
    fn seen(&self, problem: &Problem, before: usize) -> usize {
        match problem.causal {
            true => {
                let end = (self.first + before) as i64 + problem.t_start - self.first_key as i64;
                end.clamp(0, self.keys as i64) as usize
            }
            false => self.keys,
        }
    }

    /// [`Pairs::score`], but for pairs that are hidden by order and lie in other strips than those that are not.
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
