//! The backward of attention on the CPU: one task per batch element and key head. Probabilities come again from the
//! scores and the saved logarithms.

use super::tile::{KEYS, Operand, Pairs, QUERIES, with_operand};
use super::{BACKWARD, Head, Problem};
use crate::cpu::math::Maths;
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::{Arg, Launch};
use crate::match_float;
use crate::op::rows::{LANES, operands, sum_pairs, write};

/// Where the results of one key head go: a row of channels per query (in the order (t, r)), key and value.
struct Outputs<'a, T> {
    dq: Vec<&'a mut [T]>,
    dk: Vec<&'a mut [T]>,
    dv: Vec<&'a mut [T]>,
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let (inputs, [dq, dk, dv], scalars) = operands::<6, 3>(launch);
    let problem = Problem::new(&inputs[0], &inputs[1], scalars);
    let c = problem.c;
    if c == 0 {
        return Ok(());
    }
    match_float!(inputs[0].dtype, T => {
        let dq = by_key_head(&problem, problem.t * problem.r, problem.r, write::<T>(dq).chunks_exact_mut(c));
        let dk = by_key_head(&problem, problem.s, 1, write::<T>(dk).chunks_exact_mut(c));
        let dv = by_key_head(&problem, problem.s, 1, write::<T>(dv).chunks_exact_mut(c));
        let mut tasks: Vec<_> =
            dq.into_iter().zip(dk).zip(dv).map(|((dq, dk), dv)| Outputs { dq, dk, dv }).collect();
        with_operand!(T, P => pool.chunks(&mut tasks, 1, |task, outputs| {
            let mut rooms = [pool.scratch(), pool.scratch(), pool.scratch()];
            backward_head::<T, P>(&problem, rooms.each_mut().map(|room| &mut **room), inputs, task, &mut outputs[0]);
        }));
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: inputs[0].dtype }))
}

/// Hands outputs, which come in the order (b, rows, g, `each`), out to tasks in the order (b, g): `count` each.
fn by_key_head<O>(
    problem: &Problem,
    count: usize,
    each: usize,
    outputs: impl Iterator<Item = O>,
) -> Vec<Vec<O>> {
    let mut tasks: Vec<Vec<O>> = (0..problem.b * problem.g).map(|_| Vec::with_capacity(count)).collect();
    for (at, output) in outputs.enumerate() {
        tasks[at / (count * problem.g) * problem.g + at / each % problem.g].push(output);
    }
    tasks
}

fn backward_head<T: Float<Acc: Maths>, P: Operand<Acc = T::Acc>>(
    problem: &Problem,
    [packs, rooms, operands]: [&mut Scratch; 3],
    [q, k, v, o, lse, d_out]: &[Arg<'_>; 6],
    task: usize,
    outputs: &mut Outputs<'_, T>,
) {
    let (b, g) = (task / problem.g, task % problem.g);
    let (k, v) = (Head::<T>::new(k, b, &[g]), Head::<T>::new(v, b, &[g]));
    let mut state = State::<P>::new(rooms, operands, problem);
    for r in 0..problem.r {
        let [q, o, d_out] = [q, o, d_out].map(|arg| Head::<T>::new(arg, b, &[g, r]));
        let lse = Head::<T::Acc>::new(lse, b, &[g, r]);
        for first in (0..problem.t).step_by(QUERIES) {
            let queries = QUERIES.min(problem.t - first);
            vectorized(
                #[inline(always)]
                || state.load(problem, [&q, &o, &d_out], &lse, [first, queries]),
            );
            state.walk(problem, packs, [&k, &v], [first, queries]);
            for (i, dq) in state.dq.chunks_exact(problem.c).take(queries).enumerate() {
                store(dq, T::Acc::lit(problem.scale), outputs.dq[(first + i) * problem.r + r]);
            }
        }
    }
    // What queries were not multiplied by is missing in dk.
    let missing = P::factors(problem.scale)[1];
    for (out, sums, factor) in
        [(&mut outputs.dk, &state.dk, missing), (&mut outputs.dv, &state.dv, T::Acc::ONE)]
    {
        out.iter_mut().zip(sums.chunks_exact(problem.c)).for_each(|(out, sums)| store(sums, factor, out));
    }
}

fn store<T: Float>(sums: &[T::Acc], factor: T::Acc, out: &mut [T]) {
    vectorized(
        #[inline(always)]
        || {
            for (out, &sum) in out.iter_mut().zip(sums) {
                *out = T::narrow(sum * factor);
            }
        },
    );
}

/// The sums of one key head, and one tile of queries on its way over the keys.
struct State<'s, P: Operand> {
    dk: &'s mut [P::Acc],
    dv: &'s mut [P::Acc],
    /// The queries, times the first of [`Operand::factors`].
    q: &'s mut [P],
    d_out: &'s mut [P],
    dq: &'s mut [P::Acc],
    /// Per query, filled up to a full vector: the logarithm of the sum of exponentials, and the product of o and its
    /// cotangent.
    lse: &'s mut [P::Acc],
    delta: &'s mut [P::Acc],
    /// A row per key: the scores, then the probabilities.
    prob: &'s mut [P::Acc],
    /// A row per key: the cotangents of the probabilities, then those of the scores.
    d_score: &'s mut [P::Acc],
    /// Both, if they must be rounded.
    weights: [&'s mut [P]; 2],
}

impl<'s, R: Maths, P: Operand<Acc = R>> State<'s, P> {
    fn new(rooms: &'s mut Scratch, operands: &'s mut Scratch, problem: &Problem) -> State<'s, P> {
        let queries = QUERIES.min(problem.t);
        let row_len = queries.next_multiple_of(LANES);
        let (of_keys, of_queries, tile) = (problem.s * problem.c, queries * problem.c, row_len * KEYS);
        let lens = [of_keys, of_keys, of_queries, row_len, row_len, tile, tile];
        let [dk, dv, dq, lse, delta, prob, d_score] = rooms.slices(lens);
        let rounded = P::rounded_len(tile);
        let [q, d_out, probs, d_scores] = operands.slices([of_queries, of_queries, rounded, rounded]);
        for sums in [&mut *dk, &mut *dv, &mut *lse, &mut *delta] {
            sums.fill(R::ZERO);
        }
        State { dk, dv, q, d_out, dq, lse, delta, prob, d_score, weights: [probs, d_scores] }
    }

    /// Takes up a tile of queries.
    #[inline(always)]
    fn load<T: Float<Acc = R>>(
        &mut self,
        problem: &Problem,
        [q, o, d_out]: [&Head<'_, T>; 3],
        lse: &Head<'_, R>,
        [first, queries]: [usize; 2],
    ) {
        let (c, len) = (problem.c, queries * problem.c);
        q.gather(first, c, P::factors(problem.scale)[0], &mut self.q[..len]);
        d_out.gather(first, c, R::ONE, &mut self.d_out[..len]);
        // The place of dq serves for o first.
        o.gather(first, c, R::ONE, &mut self.dq[..len]);
        for i in 0..queries {
            self.delta[i] =
                sum_pairs(&self.d_out[i * c..][..c], &self.dq[i * c..][..c], |d, o| d.widen() * o);
            self.lse[i] = lse.at(first + i, 0);
        }
        self.dq.fill(R::ZERO);
    }

    /// Takes the tile over the keys that it sees.
    fn walk<T: Float<Acc = R>>(
        &mut self,
        problem: &Problem,
        scratch: &mut Scratch,
        [k, v]: [&Head<'_, T>; 2],
        [first, queries]: [usize; 2],
    ) {
        for pairs in Pairs::of(*problem, first, queries) {
            pairs.score(scratch, self.q, k, self.prob);
            pairs.score(scratch, self.d_out, v, self.d_score);
            vectorized(
                #[inline(always)]
                || self.differentiate(problem, pairs),
            );
            let prob = P::weights(self.prob, self.weights[0]);
            let d_score = P::weights(self.d_score, self.weights[1]);
            pairs.gather_queries(scratch, prob, self.d_out, self.dv);
            pairs.gather_queries(scratch, d_score, self.q, self.dk);
            pairs.gather_keys(scratch, d_score, k, self.dq);
        }
    }

    /// From scores and cotangents of probabilities to probabilities and cotangents of scores.
    #[inline(always)]
    fn differentiate(&mut self, problem: &Problem, pairs: Pairs) {
        let (row_len, factor) = (pairs.row_len(), P::factors(problem.scale)[1]);
        let rows = self.prob.chunks_exact_mut(row_len).zip(self.d_score.chunks_exact_mut(row_len));
        for (j, (prob, d_score)) in rows.take(pairs.keys).enumerate() {
            let hidden = pairs.hidden(problem, j);
            let whole = hidden / LANES * LANES;
            let row = prob[whole..].iter_mut().zip(&mut d_score[whole..]);
            for (((prob, d_score), &lse), &delta) in row.zip(&self.lse[whole..]).zip(&self.delta[whole..]) {
                let score = if P::SHORT { *prob * factor } else { *prob };
                *prob = (score - lse).exp();
                *d_score = *prob * (*d_score - delta);
            }
            let behind = pairs.left_behind(problem, j).max(pairs.skip);
            for row in [prob, d_score] {
                row[pairs.skip..hidden].fill(R::ZERO);
                row[behind..].fill(R::ZERO);
            }
        }
        let [probs, d_scores] = &mut self.weights;
        P::round(&self.prob[..pairs.keys * row_len], probs);
        P::round(&self.d_score[..pairs.keys * row_len], d_scores);
    }
}
