//! Tiles of attention: rows of queries times rows of keys, in scratch memory of the accumulator type, or of bf16 where bf16 dot products
//! are worth it.

use super::{Head, Problem};
use crate::cpu::gemm::{MatrixMut, MatrixRef, gemm};
use crate::cpu::math::Maths;
use crate::cpu::simd::scratch::Scratch;
use crate::dtype::{Float, Real};
use crate::op::rows::LANES;
use half::{bf16, f16};

/// Queries per tile.
pub(super) const QUERIES: usize = 128;
/// Keys per tile. Changing this changes results.
pub(super) const KEYS: usize = 64;

/// The type of queries, cotangents and probabilities in products: the accumulator, or bf16 if the CPU has bf16 dot products.
pub(super) trait Operand: Float<Acc: Maths> {
    /// Whether scores must be rounded before they are weights, and scales are not folded into queries.
    const SHORT: bool;
    /// Returns scores as weights: themselves, or rounded by [`Operand::round`].
    fn weights<'s>(scores: &'s [Self::Acc], rounded: &'s [Self]) -> &'s [Self];
    /// Rounds scores, if necessary.
    fn round(scores: &[Self::Acc], rounded: &mut [Self]);

    /// The factors for queries as they are loaded, and for scores as they are used.
    fn factors(scale: f64) -> [Self::Acc; 2] {
        let (scale, one) = (Self::Acc::lit(scale), Self::Acc::ONE);
        if Self::SHORT { [one, scale] } else { [scale, one] }
    }

    /// The number of scores to round.
    fn rounded_len(scores: usize) -> usize {
        if Self::SHORT { scores } else { 0 }
    }
}

macro_rules! accumulator_operand {
    ($($t:ty)*) => {$(
        impl Operand for $t {
            const SHORT: bool = false;
            #[inline(always)]
            fn weights<'s>(scores: &'s [$t], _: &'s [$t]) -> &'s [$t] {
                scores
            }
            #[inline(always)]
            fn round(_: &[$t], _: &mut [$t]) {}
        }
    )*};
}
accumulator_operand!(f32 f64);

impl Operand for bf16 {
    const SHORT: bool = true;
    #[inline(always)]
    fn weights<'s>(_: &'s [f32], rounded: &'s [bf16]) -> &'s [bf16] {
        rounded
    }
    #[inline(always)]
    fn round(scores: &[f32], rounded: &mut [bf16]) {
        rounded.iter_mut().zip(scores).for_each(|(to, &score)| *to = bf16::narrow(score));
    }
}

/// An element type of heads.
pub(super) trait Elements: Float<Acc: Maths> {
    /// The [`Operand`] if the CPU has bf16 dot products.
    type Short: Operand<Acc = Self::Acc>;
}

macro_rules! elements {
    ($($t:ty: $short:ty)*) => {$(
        impl Elements for $t {
            type Short = $short;
        }
    )*};
}
elements!(f64: f64 f32: f32 f16: f32 bf16: bf16);

/// Binds `$p` to the [`Operand`] for heads of type `$t` on this CPU.
macro_rules! with_operand {
    ($t:ty, $p:ident => $body:expr) => {
        if $crate::cpu::gemm::has_bf16_dot() {
            type $p = <$t as $crate::op::attention::tile::Elements>::Short;
            $body
        } else {
            type $p = <$t as $crate::dtype::Float>::Acc;
            $body
        }
    };
}
pub(super) use with_operand;

impl<'a, T: Float> Head<'a, T> {
    /// Returns the vectors from `row` on as rows of a matrix.
    pub(super) fn matrix(&self, row: usize) -> MatrixRef<'a, T> {
        MatrixRef {
            data: &self.data[self.start + row * self.step..],
            row_stride: self.step,
            col_stride: self.inner,
        }
    }

    /// Loads the vectors from `row` on, times a factor, as many as fit.
    #[inline(always)]
    pub(super) fn gather<P: Float<Acc = T::Acc>>(&self, row: usize, c: usize, factor: T::Acc, to: &mut [P]) {
        for (i, to) in to.chunks_exact_mut(c).enumerate() {
            let from = &self.data[self.start + (row + i) * self.step..];
            match self.inner {
                1 => to.iter_mut().zip(from).for_each(|(to, from)| *to = P::narrow(from.widen() * factor)),
                // One number for all channels, such as the cotangent of a sum.
                0 => to.fill(P::narrow(from[0].widen() * factor)),
                step => to
                    .iter_mut()
                    .zip(from.iter().step_by(step))
                    .for_each(|(to, from)| *to = P::narrow(from.widen() * factor)),
            }
        }
    }
}

/// A tile of query-key pairs. Scores have one row per key and one column per query, so that per-query operations vectorize.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pairs {
    /// The first query, how many there are, and how many of them, in whole vectors, see no key of the tile.
    pub(super) first: usize,
    pub(super) queries: usize,
    pub(super) skip: usize,
    /// The first key, and how many there are.
    pub(super) first_key: usize,
    pub(super) keys: usize,
    pub(super) c: usize,
}

impl Pairs {
    /// Iterates over the tiles of keys that queries from `first` on see.
    pub(super) fn of(problem: Problem, first: usize, queries: usize) -> impl Iterator<Item = Pairs> {
        let (start, limit) = (problem.visible(first).start, problem.visible(first + queries - 1).end);
        // Tiles start at the same keys for every window and every query.
        (start / KEYS * KEYS..limit).step_by(KEYS).map(move |first_key| {
            let keys = KEYS.min(limit - first_key);
            let pairs = Pairs { first, queries, skip: 0, first_key, keys, c: problem.c };
            Pairs { skip: pairs.hidden(&problem, 0) / LANES * LANES, ..pairs }
        })
    }

    /// Returns the length of a row of scores: the number of queries, padded to a full vector.
    pub(super) fn row_len(&self) -> usize {
        self.queries.next_multiple_of(LANES)
    }

    /// Returns how many queries, the first ones, do not see key j of the tile.
    #[inline(always)]
    pub(super) fn hidden(&self, problem: &Problem, j: usize) -> usize {
        match problem.causal {
            true => {
                let first_seeing = (self.first_key + j) as i64 - problem.t_start - self.first as i64;
                first_seeing.clamp(0, self.queries as i64) as usize
            }
            false => 0,
        }
    }

    /// Returns the first query for which key j of the tile is before the window.
    #[inline(always)]
    pub(super) fn left_behind(&self, problem: &Problem, j: usize) -> usize {
        match problem.causal {
            true => {
                let seen = (self.first_key + j + problem.window) as i64 - problem.t_start - self.first as i64;
                seen.clamp(0, self.queries as i64) as usize
            }
            false => self.queries,
        }
    }

    /// Computes the scores of all pairs but those skipped: each row of `k` times each row of `q` (in scratch).
    pub(super) fn score<T: Float, P: Float<Acc = T::Acc>>(
        &self,
        scratch: &mut Scratch,
        q: &[P],
        k: &Head<'_, T>,
        scores: &mut [T::Acc],
    ) {
        let dims = [self.keys, self.queries - self.skip, self.c];
        let (q, scores) =
            (columns(&q[self.skip * self.c..], self.c), rows_mut(&mut scores[self.skip..], self.row_len()));
        gemm(scratch, dims, k.matrix(self.first_key), q, false, scores);
    }

    /// Adds to each row of `to` (one per query) the rows of `k`, weighted by the scores.
    pub(super) fn gather_keys<T: Float, P: Float<Acc = T::Acc>>(
        &self,
        scratch: &mut Scratch,
        scores: &[P],
        k: &Head<'_, T>,
        to: &mut [T::Acc],
    ) {
        let dims = [self.queries - self.skip, self.c, self.keys];
        let (scores, to) =
            (columns(&scores[self.skip..], self.row_len()), rows_mut(&mut to[self.skip * self.c..], self.c));
        gemm(scratch, dims, scores, k.matrix(self.first_key), true, to);
    }

    /// Adds to each row of `to` (one per key) the rows of `q` (in scratch), weighted by the scores.
    pub(super) fn gather_queries<P: Float>(
        &self,
        scratch: &mut Scratch,
        scores: &[P],
        q: &[P],
        to: &mut [P::Acc],
    ) {
        let dims = [self.keys, self.c, self.queries - self.skip];
        let (scores, q) =
            (rows(&scores[self.skip..], self.row_len()), rows(&q[self.skip * self.c..], self.c));
        gemm(scratch, dims, scores, q, true, rows_mut(&mut to[self.first_key * self.c..], self.c));
    }
}

/// Views scratch as a row-major matrix.
pub(super) fn rows<R>(data: &[R], width: usize) -> MatrixRef<'_, R> {
    MatrixRef { data, row_stride: width, col_stride: 1 }
}

/// Views scratch as a transposed matrix.
pub(super) fn columns<R>(data: &[R], width: usize) -> MatrixRef<'_, R> {
    MatrixRef { data, row_stride: 1, col_stride: width }
}

/// Views scratch as a row-major matrix to write.
pub(super) fn rows_mut<R>(data: &mut [R], width: usize) -> MatrixMut<'_, R> {
    MatrixMut { data, row_stride: width, col_stride: 1 }
}
