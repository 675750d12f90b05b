//! The backward of attention on the CPU: one task per batch element and key head. Probabilities are recomputed from the scores and the
//! saved log-sum-exp.

use super::documents::{DocumentRow, Documents, visible_tiles};
use super::strips::{Queries, in_strips, transpose_strips};
use super::tile::{KEYS, Operand, Pairs, QUERIES, rows, with_operand};
use super::{Head, OutputRow, Problem, output_rows};
use crate::cpu::math::Maths;
use crate::cpu::simd::scratch::Scratch;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{LANES, sum_pairs};

/// The outputs of one key head: a row of channels per query (in the order (t, r)), key and value.
struct Outputs<'a, T: Float> {
    dq: Vec<OutputRow<'a, T>>,
    dk: Vec<OutputRow<'a, T>>,
    dv: Vec<OutputRow<'a, T>>,
}

/// Writes three outputs, or one joined output.
pub(super) fn backward(kernel: &Kernel, pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let (inputs, rest) = launch.inputs.split_first_chunk().expect("a launch has the inputs of its contract");
    let problem = Problem::new(launch.inputs, inputs.len(), launch.scalars);
    let documents = Documents::new(rest, launch.scalars);
    if problem.c == 0 {
        return Ok(());
    }
    match_float!(inputs[0].dtype, T => {
        let mut tasks = match &mut *launch.outputs {
            [d_qkv] => joined::<T>(&problem, d_qkv),
            outputs => apart::<T>(&problem, outputs.try_into().expect("a launch has the outputs of its contract")),
        };
        with_operand!(T, P => pool.chunks_on_threads(&mut tasks, 1, |thread, task, outputs| {
            let mut own = pool.scratch_array_for(thread);
            let own = own.each_mut().map(|scratch| &mut **scratch);
            backward_head::<T, P>(&problem, documents, own, inputs, task, &mut outputs[0]);
        }));
        Ok(())
    }, else Err(KernelError::DType { kernel: kernel.name, dtype: inputs[0].dtype }))
}

fn apart<'s, T: Float>(problem: &Problem, [dq, dk, dv]: &'s mut [ArgMut<'_>; 3]) -> Vec<Outputs<'s, T>> {
    let c = problem.c;
    let dq = by_key_head(problem, problem.t * problem.r, problem.r, output_rows(dq, c));
    let dk = by_key_head(problem, problem.s, 1, output_rows(dk, c));
    let dv = by_key_head(problem, problem.s, 1, output_rows(dv, c));
    dq.into_iter().zip(dk).zip(dv).map(|((dq, dk), dv)| Outputs { dq, dk, dv }).collect()
}

fn joined<'s, T: Float>(problem: &Problem, d_qkv: &'s mut ArgMut<'_>) -> Vec<Outputs<'s, T>> {
    let &Problem { b, t, g, c, .. } = problem;
    let room = || Vec::with_capacity(t);
    let mut tasks: Vec<_> = (0..b * g).map(|_| Outputs { dq: room(), dk: room(), dv: room() }).collect();
    // Rows come in the order (b, t, part, g).
    for (at, row) in output_rows(d_qkv, c).enumerate() {
        let (part, task) = (at / g % 3, &mut tasks[at / (3 * t * g) * g + at % g]);
        [&mut task.dq, &mut task.dk, &mut task.dv][part].push(row);
    }
    tasks
}

/// Distributes outputs in the order (b, rows, g, `each`) to tasks in the order (b, g): `count` rows each.
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
    documents: Option<Documents<'_>>,
    [operands, rooms, packs]: [&mut Scratch; 3],
    [q, k, v, o, lse, d_out]: &[Arg<'_>; 6],
    task: usize,
    outputs: &mut Outputs<'_, T>,
) {
    let (b, g) = (task / problem.g, task % problem.g);
    let (k, v) = (Head::<T>::new(k, b, &[g]), Head::<T>::new(v, b, &[g]));
    let documents = documents.map(|documents| documents.row(b));
    let documents = documents.as_ref();
    let mut state = State::<P>::new(rooms, operands, problem);
    let by_strips = in_strips::<P>(problem.t) > 0;
    if by_strips {
        vectorized(
            #[inline(always)]
            || {
                k.gather(0, problem.c, T::Acc::ONE, state.keys[0]);
                v.gather(0, problem.c, T::Acc::ONE, state.keys[1]);
            },
        );
    }
    for r in 0..problem.r {
        let [q, o, d_out] = [q, o, d_out].map(|arg| Head::<T>::new(arg, b, &[g, r]));
        let lse = Head::<T::Acc>::new(lse, b, &[g, r]);
        for first in (0..problem.t).step_by(QUERIES) {
            let queries = QUERIES.min(problem.t - first);
            vectorized(
                #[inline(always)]
                || state.load(problem, [&q, &o, &d_out], &lse, [first, queries]),
            );
            if by_strips {
                state.walk_strips(problem, documents, packs, [first, queries]);
            } else {
                state.walk(problem, documents, packs, [&k, &v], [first, queries]);
            }
            let rows = outputs.dq[first * problem.r..].iter_mut().skip(r).step_by(problem.r).take(queries);
            store(state.dq, problem.c, T::Acc::lit(problem.scale), rows);
        }
    }
    // Scale dk by the factor that queries were not multiplied by.
    let missing = P::factors(problem.scale)[1];
    for (out, sums, factor) in
        [(&mut outputs.dk, &state.dk, missing), (&mut outputs.dv, &state.dv, T::Acc::ONE)]
    {
        store(sums, problem.c, factor, out.iter_mut());
    }
}

/// Stores rows of c sums, times a factor, to their destinations.
fn store<'o, 'a: 'o, T: Float>(
    sums: &[T::Acc],
    c: usize,
    factor: T::Acc,
    rows: impl Iterator<Item = &'o mut OutputRow<'a, T>>,
) {
    vectorized(
        #[inline(always)]
        || {
            rows.zip(sums.chunks_exact(c)).for_each(|(out, sums)| out.store(sums, factor));
        },
    );
}

/// The sums of one key head, and the current tile of queries.
struct State<'s, P: Operand> {
    dk: &'s mut [P::Acc],
    dv: &'s mut [P::Acc],
    /// The queries, times the first of [`Operand::factors`].
    q: &'s mut [P],
    d_out: &'s mut [P],
    /// Queries and cotangents transposed, as far as they fill strips, and all keys and values, for tiles taken by strips.
    transposed: [&'s mut [P::Acc]; 2],
    keys: [&'s mut [P::Acc]; 2],
    dq: &'s mut [P::Acc],
    /// Per query, padded to a full vector: the log-sum-exp, and the dot product of o and its cotangent.
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
        let transposed = in_strips::<P>(queries) * problem.c;
        let kept = if transposed > 0 { of_keys } else { 0 };
        let lens =
            [of_keys, of_keys, of_queries, row_len, row_len, tile, tile, transposed, transposed, kept, kept];
        let [dk, dv, dq, lse, delta, prob, d_score, q_turned, d_out_turned, k, v] = rooms.slices(lens);
        let rounded = P::rounded_len(tile);
        let [q, d_out, probs, d_scores] = operands.slices([of_queries, of_queries, rounded, rounded]);
        for sums in [&mut *dk, &mut *dv, &mut *lse, &mut *delta] {
            sums.fill(R::ZERO);
        }
        let (transposed, keys, weights) = ([q_turned, d_out_turned], [k, v], [probs, d_scores]);
        State { dk, dv, q, d_out, transposed, keys, dq, lse, delta, prob, d_score, weights }
    }

    /// Loads a tile of queries.
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
        // The memory of dq holds o first.
        o.gather(first, c, R::ONE, &mut self.dq[..len]);
        for i in 0..queries {
            self.delta[i] =
                sum_pairs(&self.d_out[i * c..][..c], &self.dq[i * c..][..c], |d, o| d.widen() * o);
            self.lse[i] = lse.at(first + i, 0);
        }
        self.dq.fill(R::ZERO);
    }

    /// Multiplies the tile with the keys that it sees.
    fn walk<T: Float<Acc = R>>(
        &mut self,
        problem: &Problem,
        documents: Option<&DocumentRow<'_>>,
        scratch: &mut Scratch,
        [k, v]: [&Head<'_, T>; 2],
        [first, queries]: [usize; 2],
    ) {
        for pairs in visible_tiles(*problem, documents, [first, queries]) {
            pairs.score(scratch, self.q, k, self.prob);
            pairs.score(scratch, self.d_out, v, self.d_score);
            self.differentiate(problem, documents, pairs);
            let prob = P::weights(self.prob, self.weights[0]);
            let d_score = P::weights(self.d_score, self.weights[1]);
            pairs.gather_queries(scratch, prob, self.d_out, self.dv);
            pairs.gather_queries(scratch, d_score, self.q, self.dk);
            pairs.gather_keys(scratch, d_score, k, self.dq);
        }
    }

    /// Multiplies the tile in strips with the keys that it sees.
    fn walk_strips(
        &mut self,
        problem: &Problem,
        documents: Option<&DocumentRow<'_>>,
        scratch: &mut Scratch,
        [first, queries]: [usize; 2],
    ) {
        let (c, whole) = (problem.c, in_strips::<P>(queries) * problem.c);
        transpose_strips(self.q, c, &mut self.transposed[0][..whole]);
        transpose_strips(self.d_out, c, &mut self.transposed[1][..whole]);
        for pairs in visible_tiles(*problem, documents, [first, queries]) {
            let [k, v] = self.keys.each_ref().map(|keys| &keys[pairs.first_key * c..]);
            let [q, d_out] = self.transposed.each_ref().map(|transposed| &transposed[..whole]);
            let (q, d_out) = (
                Queries { transposed: q, rows: &*self.q },
                Queries { transposed: d_out, rows: &*self.d_out },
            );
            pairs.score_strips(problem, scratch, q, rows(k, c), self.prob);
            pairs.score_strips(problem, scratch, d_out, rows(v, c), self.d_score);
            self.differentiate(problem, documents, pairs);
            pairs.gather_queries_in_parts(problem, scratch, self.prob, &*self.d_out, self.dv);
            pairs.gather_queries_in_parts(problem, scratch, self.d_score, &*self.q, self.dk);
            let k = &self.keys[0][pairs.first_key * c..];
            pairs.gather_keys_in_parts(problem, scratch, self.d_score, k, self.dq);
        }
    }

    /// Converts scores to probabilities, and cotangents of probabilities to cotangents of scores.
    fn differentiate(&mut self, problem: &Problem, documents: Option<&DocumentRow<'_>>, pairs: Pairs) {
        // Here, and not where it is called: compiled once for all types of queries.
        vectorized(
            #[inline(always)]
            || self.differentiate_here(problem, documents, pairs),
        );
    }

    /// [`State::differentiate`], compiled for the instruction set of the caller.
    #[inline(always)]
    fn differentiate_here(&mut self, problem: &Problem, documents: Option<&DocumentRow<'_>>, pairs: Pairs) {
        let (row_len, factor) = (pairs.row_len(), P::factors(problem.scale)[1]);
        let rows = self.prob.chunks_exact_mut(row_len).zip(self.d_score.chunks_exact_mut(row_len));
        for (j, (prob, d_score)) in rows.take(pairs.keys).enumerate() {
            let hidden = pairs.hidden(problem, j);
            let whole = hidden / LANES * LANES;
            let row = prob[whole..].as_chunks_mut::<LANES>().0.iter_mut();
            let row = row.zip(d_score[whole..].as_chunks_mut::<LANES>().0);
            let known = self.lse[whole..]
                .as_chunks::<LANES>()
                .0
                .iter()
                .zip(self.delta[whole..].as_chunks::<LANES>().0);
            for ((prob, d_score), (lse, delta)) in row.zip(known) {
                for i in 0..LANES {
                    let score = if P::SHORT { prob[i] * factor } else { prob[i] };
                    prob[i] = (score - lse[i]).decay();
                    d_score[i] = prob[i] * (d_score[i] - delta[i]);
                }
            }
            let behind = pairs.left_behind(problem, j).max(pairs.skip);
            for row in [prob, d_score] {
                row[pairs.skip..hidden].fill(R::ZERO);
                row[behind..].fill(R::ZERO);
                if let Some(documents) = documents {
                    documents.replace_hidden(&pairs, j, row, |_| R::ZERO);
                }
            }
        }
        let [probs, d_scores] = &mut self.weights;
        P::round(&self.prob[..pairs.keys * row_len], probs);
        P::round(&self.d_score[..pairs.keys * row_len], d_scores);
    }
}
