//! Attention on the CPU: one task per head and tile of queries; keys in tiles, with online softmax (a running maximum and sum).

use super::documents::{DocumentRow, Documents, visible_tiles};
use super::strips::{Queries, in_strips, transpose_strips};
use super::tile::{KEYS, Operand, Pairs, QUERIES, with_operand};
use super::{FORWARD, Head, OutputRow, Problem, operands, output_rows};
use crate::cpu::math::Maths;
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::{Arg, Launch};
use crate::match_float;
use crate::op::rows::{LANES, write};

/// The outputs of one query.
type Output<'a, T> = (OutputRow<'a, T>, &'a mut <T as Float>::Acc);

pub(super) fn forward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([q, k, v], documents, [o, lse], problem) = operands(launch);
    if problem.c == 0 {
        return super::forward(pool, launch);
    }
    match_float!(q.dtype, T => {
        let outputs = output_rows::<T>(o, problem.c).zip(write::<<T as Float>::Acc>(lse));
        let mut tasks = by_tile(&problem, outputs);
        with_operand!(T, P => pool.chunks_on_threads(&mut tasks, 1, |thread, task, outputs| {
            let mut own = pool.scratch_array_for(thread);
            let own = own.each_mut().map(|scratch| &mut **scratch);
            forward_tile::<T, P>(&problem, documents, own, [q, k, v], task, &mut outputs[0]);
        }));
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: q.dtype }))
}

/// Distributes the outputs in the order (b, t, g, r) to tasks in the order (b, g, r, tile of queries).
fn by_tile<O>(problem: &Problem, outputs: impl Iterator<Item = O>) -> Vec<Vec<O>> {
    let (heads, tiles) = (problem.g * problem.r, problem.t.div_ceil(QUERIES));
    let mut tasks: Vec<Vec<O>> =
        (0..problem.b * heads * tiles).map(|_| Vec::with_capacity(QUERIES.min(problem.t))).collect();
    for (row, output) in outputs.enumerate() {
        let (query, head) = (row / heads, row % heads);
        let (b, i) = (query / problem.t, query % problem.t);
        tasks[(b * heads + head) * tiles + i / QUERIES].push(output);
    }
    tasks
}

fn forward_tile<T: Float<Acc: Maths>, P: Operand<Acc = T::Acc>>(
    problem: &Problem,
    documents: Option<Documents<'_>>,
    [operands, rooms, packs]: [&mut Scratch; 3],
    [q, k, v]: [&Arg<'_>; 3],
    task: usize,
    outputs: &mut [Output<'_, T>],
) {
    let tiles = problem.t.div_ceil(QUERIES);
    let (head, first, c) = (task / tiles, task % tiles * QUERIES, problem.c);
    let (r, g, b) = (head % problem.r, head / problem.r % problem.g, head / problem.r / problem.g);
    let (q, k, v) = (Head::<T>::new(q, b, &[g, r]), Head::<T>::new(k, b, &[g]), Head::<T>::new(v, b, &[g]));
    let documents = documents.map(|documents| documents.row(b));
    let documents = documents.as_ref();
    let queries = outputs.len();
    let mut state = State::<P>::new(rooms, operands, queries, c);
    vectorized(
        #[inline(always)]
        || q.gather(first, c, P::factors(problem.scale)[0], state.q),
    );
    // 16-bit keys would be widened for each strip.
    if in_strips::<P>(queries) > 0 && T::DTYPE == <T::Acc as Element>::DTYPE {
        state.walk_strips(problem, documents, packs, [&k, &v], [first, queries]);
    } else {
        for pairs in visible_tiles(*problem, documents, [first, queries]) {
            pairs.score(packs, state.q, &k, state.scores);
            state.soften(problem, documents, pairs);
            pairs.gather_keys(packs, P::weights(state.scores, state.weights), &v, state.out);
        }
    }
    vectorized(
        #[inline(always)]
        || state.finish::<T>(problem, documents.is_some(), first, outputs),
    );
}

/// The state of a tile of queries during the loop over keys.
struct State<'s, P: Operand> {
    /// The queries, times the first of [`Operand::factors`].
    q: &'s mut [P],
    /// The queries in strips, transposed, and the values of one tile of keys, for tiles taken by strips.
    transposed: &'s mut [P::Acc],
    values: &'s mut [P::Acc],
    /// Scores, then exponentials, of one tile of keys: a row per key.
    scores: &'s mut [P::Acc],
    /// The exponentials, if they must be rounded.
    weights: &'s mut [P],
    /// The sums of exponentials times values.
    out: &'s mut [P::Acc],
    /// Per query, padded to a full vector: the largest score so far and the sum of exponentials relative to it.
    max: &'s mut [P::Acc],
    sum: &'s mut [P::Acc],
    /// Per query, for one tile: the origin of the scores, the factor for the earlier state, and the new sum.
    origin: &'s mut [P::Acc],
    shrink: &'s mut [P::Acc],
    total: &'s mut [P::Acc],
}

/// Returns the origin of the scores. Without a finite maximum that is 0; the sum then distinguishes 0 from NaN.
#[inline(always)]
fn origin<R: Real>(max: R) -> R {
    if max == R::NEG_INFINITY { R::ZERO } else { max }
}

impl<'s, R: Maths, P: Operand<Acc = R>> State<'s, P> {
    fn new(rooms: &'s mut Scratch, operands: &'s mut Scratch, queries: usize, c: usize) -> State<'s, P> {
        let row_len = queries.next_multiple_of(LANES);
        let (matrix, tile) = (queries * c, row_len * KEYS);
        let transposed = in_strips::<P>(queries) * c;
        let values = if transposed > 0 { KEYS * c } else { 0 };
        let lens = [tile, matrix, row_len, row_len, row_len, row_len, row_len, transposed, values];
        let [scores, out, max, sum, origin, shrink, total, transposed, values] = rooms.slices(lens);
        let [q, weights] = operands.slices([matrix, P::rounded_len(tile)]);
        out.fill(R::ZERO);
        max.fill(R::NEG_INFINITY);
        for row in [&mut *sum, &mut *origin, &mut *shrink, &mut *total] {
            row.fill(R::ZERO);
        }
        State { q, transposed, values, scores, weights, out, max, sum, origin, shrink, total }
    }

    /// Multiplies the tile in strips with the keys that it sees.
    fn walk_strips<T: Float<Acc = R>>(
        &mut self,
        problem: &Problem,
        documents: Option<&DocumentRow<'_>>,
        scratch: &mut Scratch,
        [k, v]: [&Head<'_, T>; 2],
        [first, queries]: [usize; 2],
    ) {
        let c = problem.c;
        transpose_strips(self.q, c, self.transposed);
        for pairs in visible_tiles(*problem, documents, [first, queries]) {
            let q = Queries { transposed: &*self.transposed, rows: &*self.q };
            pairs.score_strips(problem, scratch, q, k.matrix(pairs.first_key), self.scores);
            self.soften(problem, documents, pairs);
            vectorized(
                #[inline(always)]
                || v.gather(pairs.first_key, c, R::ONE, &mut self.values[..pairs.keys * c]),
            );
            pairs.gather_keys_in_parts(problem, scratch, self.scores, self.values, self.out);
        }
    }

    /// Converts the scores of a tile to exponentials relative to the new maxima, and rescales the earlier state.
    fn soften(&mut self, problem: &Problem, documents: Option<&DocumentRow<'_>>, pairs: Pairs) {
        // Here, and not where it is called: compiled once for all types of queries.
        vectorized(
            #[inline(always)]
            || self.soften_here(problem, documents, pairs),
        );
    }

    /// [`State::soften`], compiled for the instruction set of the caller.
    #[inline(always)]
    fn soften_here(&mut self, problem: &Problem, documents: Option<&DocumentRow<'_>>, pairs: Pairs) {
        let (row_len, skip, c) = (pairs.row_len(), pairs.skip, pairs.c);
        if P::SHORT {
            let factor = P::factors(problem.scale)[1];
            self.scores[..pairs.keys * row_len].iter_mut().for_each(|score| *score *= factor);
        }
        self.shrink.copy_from_slice(self.max);
        for (j, row) in self.scores.chunks_exact_mut(row_len).take(pairs.keys).enumerate() {
            let hidden = pairs.hidden(problem, j);
            row[skip..hidden].fill(R::NEG_INFINITY);
            row[pairs.left_behind(problem, j).max(skip)..].fill(R::NEG_INFINITY);
            if let Some(documents) = documents {
                documents.replace_hidden(&pairs, j, row, |_| R::NEG_INFINITY);
            }
            let whole = hidden / LANES * LANES;
            for (max, &score) in self.max[whole..].iter_mut().zip(&row[whole..]) {
                *max = if score > *max { score } else { *max };
            }
        }
        let states = self.origin[skip..].iter_mut().zip(&mut self.shrink[skip..]).zip(&self.max[skip..]);
        for ((start, shrink), &max) in states {
            *start = origin(max);
            // No rescaling yet; and results that underflow take many times as long.
            let before = if *shrink == R::NEG_INFINITY { *start } else { *shrink };
            *shrink = (before - *start).decay();
        }
        self.total.fill(R::ZERO);
        for (j, row) in self.scores.chunks_exact_mut(row_len).take(pairs.keys).enumerate() {
            let (hidden, behind) = (pairs.hidden(problem, j), pairs.left_behind(problem, j).max(skip));
            let whole = hidden / LANES * LANES;
            // Hidden pairs give 1, then 0, because exponentials that underflow take many times as long.
            row[whole..hidden].copy_from_slice(&self.origin[whole..hidden]);
            row[behind..].copy_from_slice(&self.origin[behind..]);
            if let Some(documents) = documents {
                documents.replace_hidden(&pairs, j, row, |i| self.origin[i]);
            }
            // Whole vectors, which the compiler does not find in lengths unknown to it.
            let seeing = row[whole..].as_chunks_mut::<LANES>().0.iter_mut();
            for (score, origin) in seeing.zip(self.origin[whole..].as_chunks::<LANES>().0) {
                for i in 0..LANES {
                    score[i] = (score[i] - origin[i]).decay();
                }
            }
            row[skip..hidden].fill(R::ZERO);
            row[behind..].fill(R::ZERO);
            if let Some(documents) = documents {
                documents.replace_hidden(&pairs, j, row, |_| R::ZERO);
            }
            self.total[whole..].iter_mut().zip(&row[whole..]).for_each(|(total, &score)| *total += score);
        }
        P::round(&self.scores[..pairs.keys * row_len], self.weights);
        for ((sum, &shrink), &total) in
            self.sum[skip..].iter_mut().zip(&self.shrink[skip..]).zip(&self.total[skip..])
        {
            *sum = sum.fma(shrink, total);
        }
        if pairs.first_key > 0 {
            for (out, &shrink) in self.out[skip * c..].chunks_exact_mut(c).zip(&self.shrink[skip..]) {
                for out in out {
                    *out *= shrink;
                }
            }
        }
    }

    /// Divides by the sums and stores the results.
    #[inline(always)]
    fn finish<T: Float<Acc = R>>(
        &mut self,
        problem: &Problem,
        has_documents: bool,
        first: usize,
        outputs: &mut [Output<'_, T>],
    ) {
        for ((sum, max), factor) in self.sum.iter_mut().zip(&mut *self.max).zip(&mut *self.shrink) {
            *factor = R::ONE / *sum;
            *max = origin(*max) + sum.ln();
        }
        for (i, (o, lse)) in outputs.iter_mut().enumerate() {
            let sees_none = match has_documents {
                true => self.sum[i] == R::ZERO,
                false => problem.visible(first + i).is_empty(),
            };
            match sees_none {
                true => o.clear(),
                false => o.store(&self.out[i * problem.c..][..problem.c], self.shrink[i]),
            }
            **lse = self.max[i];
        }
    }
}
