//! Attention on the CPU: one task per head and tile of queries; keys in tiles, with a running maximum and sum.

use super::tile::{KEYS, QUERIES, columns, mask, row_len, rows_mut, score, vectors};
use super::{FORWARD, Head, Problem};
use crate::cpu::gemm::product;
use crate::cpu::math::Maths;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::{Arg, Launch};
use crate::match_float;
use crate::op::rows::{LANES, operands, write};

/// Where the results of one query go.
type Output<'a, T> = (&'a mut [T], &'a mut <T as Float>::Acc);

pub(super) fn forward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([q, k, v], [o, lse], scalars) = operands(launch);
    let problem = Problem::new(q, k, scalars);
    if problem.c == 0 {
        return super::forward(pool, launch);
    }
    match_float!(q.dtype, T => {
        let outputs = write::<T>(o).chunks_exact_mut(problem.c).zip(write::<<T as Float>::Acc>(lse));
        let mut tasks = by_tile(&problem, outputs);
        pool.chunks(&mut tasks, 1, |task, outputs| forward_tile::<T>(&problem, [q, k, v], task, &mut outputs[0]));
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: q.dtype }))
}

/// Hands the outputs, which come in the order (b, t, g, r), out to tasks in the order (b, g, r, tile of queries).
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

fn forward_tile<T: Float<Acc: Maths>>(
    problem: &Problem,
    [q, k, v]: [&Arg<'_>; 3],
    task: usize,
    outputs: &mut [Output<'_, T>],
) {
    let tiles = problem.t.div_ceil(QUERIES);
    let (head, first, c) = (task / tiles, task % tiles * QUERIES, problem.c);
    let (r, g, b) = (head % problem.r, head / problem.r % problem.g, head / problem.r / problem.g);
    let (q, k, v) = (Head::<T>::new(q, b, &[g, r]), Head::<T>::new(k, b, &[g]), Head::<T>::new(v, b, &[g]));
    let queries = outputs.len();
    let mut state = State::new(queries, c);
    vectorized(#[inline(always)] || q.gather(first, c, T::Acc::lit(problem.scale), &mut state.q));
    let limit = problem.visible(first + queries - 1);
    for first_key in (0..limit).step_by(KEYS) {
        let keys = KEYS.min(limit - first_key);
        score([queries, keys, c], &state.q, &k, first_key, &mut state.scores);
        vectorized(#[inline(always)] || state.soften(problem, first, first_key, keys));
        let scores = columns(&state.scores, row_len(queries));
        product([queries, c, keys], scores, v.matrix(first_key), true, rows_mut(&mut state.out, c));
    }
    vectorized(#[inline(always)] || state.finish::<T>(problem, first, outputs));
}

/// A tile of queries on its way over the keys.
struct State<R> {
    /// The queries, times the scale.
    q: Vec<R>,
    /// Scores, then exponentials, of one tile of keys: a row per key.
    scores: Vec<R>,
    /// The sums of exponentials times values.
    out: Vec<R>,
    /// Per query, filled up to a full vector: the largest score so far, the sum of exponentials below it, and what
    /// the last tile shrank them by.
    max: Vec<R>,
    sum: Vec<R>,
    shrink: Vec<R>,
}

/// What scores are measured from. Without a finite maximum that is 0; the sum then tells 0 from not-a-number.
#[inline(always)]
fn origin<R: Real>(max: R) -> R {
    if max == R::NEG_INFINITY { R::ZERO } else { max }
}

impl<R: Maths> State<R> {
    fn new(queries: usize, c: usize) -> State<R> {
        let row = row_len(queries);
        State {
            q: vec![R::ZERO; queries * c],
            scores: vec![R::ZERO; row * KEYS],
            out: vec![R::ZERO; queries * c],
            max: vec![R::NEG_INFINITY; row],
            sum: vec![R::ZERO; row],
            shrink: vec![R::ZERO; row],
        }
    }

    /// Turns the scores of a tile into exponentials below the new maxima, and scales what came before down to them.
    #[inline(always)]
    fn soften(&mut self, problem: &Problem, first: usize, first_key: usize, keys: usize) {
        let row_len = self.max.len();
        let scores = &mut self.scores[..keys * row_len];
        for (j, row) in scores.chunks_exact_mut(row_len).enumerate() {
            mask(problem, first, first_key + j, row, R::NEG_INFINITY);
        }
        for at in (0..row_len).step_by(LANES) {
            let [max, sum, shrink] = [&mut self.max, &mut self.sum, &mut self.shrink]
                .map(|state| state[at..].first_chunk_mut().expect("rows are whole vectors"));
            soften_lanes(scores, row_len, at, [max, sum, shrink]);
        }
        if first_key > 0 {
            for (out, &shrink) in self.out.chunks_exact_mut(problem.c).zip(&self.shrink) {
                for out in out {
                    *out *= shrink;
                }
            }
        }
    }

    /// Divides by the sums and stores.
    #[inline(always)]
    fn finish<T: Float<Acc = R>>(&mut self, problem: &Problem, first: usize, outputs: &mut [Output<'_, T>]) {
        for ((sum, max), factor) in self.sum.iter_mut().zip(&mut self.max).zip(&mut self.shrink) {
            *factor = R::ONE / *sum;
            *max = origin(*max) + sum.ln();
        }
        for (i, (o, lse)) in outputs.iter_mut().enumerate() {
            let (factor, seen) = (self.shrink[i], problem.visible(first + i) > 0);
            for (o, &out) in o.iter_mut().zip(&self.out[i * problem.c..]) {
                *o = if seen { T::narrow(out * factor) } else { T::default() };
            }
            **lse = self.max[i];
        }
    }
}

/// One vector of queries: exponentials below the new maxima in place of scores, and their sums.
#[inline(always)]
fn soften_lanes<R: Maths>(
    scores: &mut [R],
    row_len: usize,
    at: usize,
    [max, sum, shrink]: [&mut [R; LANES]; 3],
) {
    let old = *max;
    for row in vectors(scores, row_len, at) {
        for i in 0..LANES {
            max[i] = max[i].greater(row[i]);
        }
    }
    let from = max.map(origin);
    let mut total = [R::ZERO; LANES];
    for row in vectors(scores, row_len, at) {
        for i in 0..LANES {
            row[i] = (row[i] - from[i]).exp();
            total[i] += row[i];
        }
    }
    for i in 0..LANES {
        shrink[i] = (old[i] - from[i]).exp();
        sum[i] = sum[i].fma(shrink[i], total[i]);
    }
}
