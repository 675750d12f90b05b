//! Scaled dot-product attention with grouped queries: o_i = sum_j p_ij v_j with p_ij = exp(scale q_i k_j - lse_i) over
//! the keys j that query i sees, where lse_i is the logarithm of the sum of exp(scale q_i k_j).
//! Grouped-query attention: query head (g, r) reads key and value head g. If causal, key j is visible to query i (both local indices) if
//! j <= t_start + i, where t_start is the global index of the first query less that of the first key; it may be negative. A window of w
//! also hides the keys below t_start + i + 1 - w (sliding window). A query that sees no key gives zeros and lse = -inf. If all scores of
//! a query are -inf, or one is NaN or +inf, its row is NaN. Hidden keys and values must be finite: they may be multiplied by 0.
//!
//! With documents, four more operands, i64, follow the others: segment ids and positions of queries `(b, t)`, then of keys `(b, s)`, rows
//! contiguous. Query i then sees key j if both have one segment id and, if causal, the position of j is at most that of i and, with a
//! window, less than w before; t_start has no effect. A query all of whose scores are -inf counts as one that sees no key.

mod tile;
mod documents;
mod strips;
mod forward;
mod backward;
mod merge;
mod gpu;

pub use merge::MERGE;

use crate::cpu::Pool;
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Bound, GpuCode, Kernel, Launch, Scalar};
use crate::match_float;
use crate::op::rows::write;
use documents::Documents;
use std::ops::Range;

/// The extra error if probabilities are rounded to 16 bits, in units of the output at its largest magnitude.
const ALLOWANCE: f64 = 4.0;

/// Scaled dot-product attention, forward.
///
/// - in: q `(b, t, g, r, c)`, k `(b, s, g, c)`, v `(b, s, g, c)`, one float dtype, any strides; documents, if any
/// - out: o `(b, t, g, r, c)` in the dtype of q or its accumulator, contiguous; lse `(b, t, g, r)` in the accumulator of q, contiguous
/// - scalars: Real scale, Int causal (0 or 1), Int t_start, Int window (0 for none; only if causal)
///
/// No t by s matrix is formed. Keys are processed in tiles that start at multiples of 64 (of 32 by plain arithmetic on a GPU), so the
/// bits of a row depend only on its query, its keys and its position. On a GPU, 16-bit heads of up to 128 channels use tensor cores with
/// probabilities rounded to 16 bits, as do bf16 dot products on a CPU that has them; the error may be four ulps of the output dtype at
/// its largest magnitude. Counted: 4 c operations per visible pair of query and key; with documents, per pair.
#[doc(alias = "scaled_dot_product_attention")]
#[doc(alias = "flash_attention")]
pub static FORWARD: Kernel = Kernel {
    name: "attention",
    reference: forward,
    cpu: Some(forward::forward),
    gpu: Some(GpuCode { source: gpu::FORWARD_SOURCE, plan: gpu::forward }),
    flops: |launch| 4 * multiply_adds(launch),
    bytes: Some(bytes),
    bound: Bound { ulps: 64.0 },
};

/// The cotangents of attention: with dp_ij = do_i v_j and D_i = sum_c do_i o_i, dv_j = sum_i p_ij do_i,
/// dq_i = scale sum_j p_ij (dp_ij - D_i) k_j and dk_j = scale sum_i p_ij (dp_ij - D_i) q_i.
///
/// - in: q, k, v as for [`FORWARD`]; o and lse from it; do `(b, t, g, r, c)`; any strides; documents, if any
/// - out: dq `(b, t, g, r, c)`, dk `(b, s, g, c)`, dv `(b, s, g, c)`, in the dtype of q or all in its accumulator, contiguous
/// - scalars: as for [`FORWARD`]
///
/// dk and dv are summed over r, then over queries in tiles of 128, in order; on a GPU over queries, and over r for each of
/// them, in tiles that the dtype and c determine.
/// The keys may be a part of those that o and lse were computed from: dq is then the part's term of the sum.
/// Counted: 10 c operations per visible pair of query and key; with documents, per pair.
pub static BACKWARD: Kernel = Kernel {
    name: "attention_backward",
    reference: backward,
    cpu: Some(|pool, launch| backward::backward(&BACKWARD, pool, launch)),
    gpu: Some(GpuCode {
        source: gpu::BACKWARD_SOURCE,
        plan: |launch, plan| gpu::backward(&BACKWARD, launch, plan),
    }),
    flops: |launch| 10 * multiply_adds(launch),
    bytes: Some(bytes),
    bound: Bound { ulps: 256.0 },
};

/// [`BACKWARD`] for q, k and v from one fused product, into one joined tensor of that product's layout.
///
/// - in: as for [`BACKWARD`], with r = 1 and s = t
/// - out: dq, dk and dv as the parts of `(b, t, 3, g, c)`, contiguous
/// - scalars: as for [`FORWARD`]
///
/// The sums are those of [`BACKWARD`], in the same order. Counted: 10 c operations per visible pair of query and key.
pub static BACKWARD_JOINED: Kernel = Kernel {
    name: "attention_backward_joined",
    reference: backward_joined,
    cpu: Some(|pool, launch| backward::backward(&BACKWARD_JOINED, pool, launch)),
    gpu: Some(GpuCode {
        source: gpu::BACKWARD_SOURCE,
        plan: |launch, plan| gpu::backward(&BACKWARD_JOINED, launch, plan),
    }),
    flops: |launch| 10 * multiply_adds(launch),
    bytes: Some(bytes),
    bound: Bound { ulps: 256.0 },
};

/// The parameters of a launch, forward or backward.
#[derive(Clone, Copy, Debug)]
struct Problem {
    /// Batch, queries, key heads, query heads per key head, channels.
    b: usize,
    t: usize,
    g: usize,
    r: usize,
    c: usize,
    /// Keys.
    s: usize,
    scale: f64,
    causal: bool,
    t_start: i64,
    /// The most keys that a query sees.
    window: usize,
}

impl Problem {
    /// The problem of a launch with `own` operands besides documents, which hide pairs that no tile is cut by.
    fn new(inputs: &[Arg<'_>], own: usize, scalars: &[Scalar]) -> Problem {
        let problem = Problem::without_documents(&inputs[0], &inputs[1], scalars);
        if inputs.len() == own { problem } else { Problem { causal: false, t_start: 0, ..problem } }
    }

    fn without_documents(q: &Arg<'_>, k: &Arg<'_>, scalars: &[Scalar]) -> Problem {
        let &[b, t, g, r, c] = &q.view.shape[..] else { panic!("the contract asks for five dims of q") };
        debug_assert_eq!(k.view.shape[..], [b, k.view.shape[1], g, c], "the contract asks for k like q");
        let (scale, causal) = (scalars[0].real(), scalars[1].int() != 0);
        // Without a window no key is too far away to be visible; half of the range leaves room for sums.
        let window = Some(scalars[3].int() as usize).filter(|w| *w > 0).unwrap_or(usize::MAX / 4);
        Problem { b, t, g, r, c, s: k.view.shape[1], scale, causal, t_start: scalars[2].int(), window }
    }

    /// Returns the keys that query i sees.
    fn visible(&self, i: usize) -> Range<usize> {
        if !self.causal {
            return 0..self.s;
        }
        let end = self.t_start + i as i64 + 1;
        let place = |key: i64| key.clamp(0, self.s as i64) as usize;
        place(end - self.window as i64)..place(end)
    }

    /// Returns the keys that some query sees: ranges of neighbouring queries overlap or follow each other.
    fn seen(&self) -> Range<usize> {
        match self.t {
            0 => 0..0,
            t => self.visible(0).start..self.visible(t - 1).end,
        }
    }
}

/// Returns how many operands of a launch are not documents: three forward, six backward.
fn own_operands(launch: &Launch<'_>) -> usize {
    if matches!(launch.inputs.len(), 3 | 7) { 3 } else { 6 }
}

/// Returns channels times visible pairs.
fn multiply_adds(launch: &Launch<'_>) -> u64 {
    let problem = Problem::new(launch.inputs, own_operands(launch), launch.scalars);
    let pairs: usize = (0..problem.t).map(|i| problem.visible(i).len()).sum();
    (problem.b * problem.g * problem.r * problem.c * pairs) as u64
}

/// Returns the bytes of operands, counting only visible keys and values.
fn bytes(launch: &Launch<'_>) -> u64 {
    let [_, k, v] = [0, 1, 2].map(|at| &launch.inputs[at]);
    let problem = Problem::new(launch.inputs, own_operands(launch), launch.scalars);
    let seen = problem.seen();
    let hidden = |x: &Arg<'_>| {
        let view = x.view.narrow(1, seen.start, seen.end);
        x.bytes() - Arg { view: &view, ..*x }.bytes()
    };
    launch.operand_bytes() - hidden(k) - hidden(v)
}

/// The vectors of one head: channel c of row i is at `start + i * step + c * inner`.
#[derive(Clone, Copy, Debug)]
struct Head<'a, T> {
    data: &'a [T],
    start: usize,
    step: usize,
    inner: usize,
}

impl<'a, T: Element> Head<'a, T> {
    /// Views an operand `(b, rows, heads.., c)`, for one batch element and head.
    fn new(arg: &Arg<'a>, b: usize, head: &[usize]) -> Head<'a, T> {
        let strides = &arg.view.strides;
        let at: usize = head.iter().zip(&strides[2..]).map(|(i, step)| i * step).sum();
        Head {
            data: arg.buffer.as_slice(),
            start: arg.view.offset + b * strides[0] + at,
            step: strides[1],
            inner: *strides.last().expect("heads have channels"),
        }
    }

    fn at(&self, row: usize, channel: usize) -> T {
        self.data[self.start + row * self.step + channel * self.inner]
    }

    fn dot<U: Element>(&self, row: usize, other: &Head<'_, U>, other_row: usize, c: usize) -> f64 {
        (0..c).map(|i| self.at(row, i).to_f64() * other.at(other_row, i).to_f64()).sum()
    }
}

/// Iterates over the heads of a problem: batch element, key head, query head within it.
fn heads(problem: Problem) -> impl Iterator<Item = [usize; 3]> {
    let of_batch = move |b| (0..problem.g).flat_map(move |g| (0..problem.r).map(move |r| [b, g, r]));
    (0..problem.b).flat_map(of_batch)
}

/// The operands of a launch with `I` operands and documents, if any, and its outputs.
type Operands<'s, 'a, const I: usize, const O: usize> =
    (&'a [Arg<'a>; I], Option<Documents<'a>>, [&'s mut ArgMut<'a>; O], Problem);

fn operands<'s, 'a, const I: usize, const O: usize>(launch: &'s mut Launch<'a>) -> Operands<'s, 'a, I, O> {
    let (inputs, scalars) = (launch.inputs, launch.scalars);
    let (own, rest) = inputs.split_first_chunk().expect("a launch has the inputs of its contract");
    let outputs: &mut [ArgMut<'_>; O] =
        (&mut *launch.outputs).try_into().expect("a launch has the outputs of its contract");
    (own, Documents::new(rest, scalars), outputs.each_mut(), Problem::new(inputs, I, scalars))
}

/// A row of channels of an output: in the dtype of the operands, or in its accumulator.
enum OutputRow<'a, T: Float> {
    Own(&'a mut [T]),
    Wide(&'a mut [T::Acc]),
}

impl<T: Float> OutputRow<'_, T> {
    /// Stores sums times a factor.
    #[inline(always)]
    fn store(&mut self, sums: &[T::Acc], factor: T::Acc) {
        match self {
            OutputRow::Own(row) => {
                row.iter_mut().zip(sums).for_each(|(out, &sum)| *out = T::narrow(sum * factor));
            }
            OutputRow::Wide(row) => row.iter_mut().zip(sums).for_each(|(out, &sum)| *out = sum * factor),
        }
    }

    fn clear(&mut self) {
        match self {
            OutputRow::Own(row) => row.fill(T::default()),
            OutputRow::Wide(row) => row.fill(T::Acc::default()),
        }
    }
}

/// Returns the rows of c channels of an output.
fn output_rows<'s, T: Float>(
    out: &'s mut ArgMut<'_>,
    c: usize,
) -> Box<dyn Iterator<Item = OutputRow<'s, T>> + 's> {
    match out.dtype == T::DTYPE {
        true => Box::new(write::<T>(out).chunks_exact_mut(c).map(OutputRow::Own)),
        false => Box::new(write::<T::Acc>(out).chunks_exact_mut(c).map(OutputRow::Wide)),
    }
}

fn forward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([q, k, v], documents, [o, lse], p) = operands(launch);
    match_float!(q.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (mut averages, lse) = (vec![0.0; p.b * p.t * p.g * p.r * p.c], write::<Acc>(lse));
        for [b, g, r] in heads(p) {
            let (q, k, v) = (Head::<T>::new(q, b, &[g, r]), Head::<T>::new(k, b, &[g]), Head::<T>::new(v, b, &[g]));
            let documents = documents.map(|documents| documents.row(b));
            for i in 0..p.t {
                let row = ((b * p.t + i) * p.g + g) * p.r + r;
                let is_visible = |j: &usize| documents.is_none_or(|documents| documents.sees(i, *j));
                let seen: Vec<usize> = p.visible(i).filter(is_visible).collect();
                let scores: Vec<f64> = seen.iter().map(|&j| p.scale * q.dot(i, &k, j, p.c)).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let max = if max == f64::NEG_INFINITY { 0.0 } else { max };
                let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
                let sees_none = scores.is_empty() || documents.is_some() && sum == 0.0;
                for channel in 0..p.c {
                    let terms = seen.iter().zip(&scores).map(|(&j, x)| (x - max).exp() * v.at(j, channel).to_f64());
                    averages[row * p.c + channel] = if sees_none { 0.0 } else { terms.sum::<f64>() / sum };
                }
                lse[row] = Acc::from_f64(max + sum.ln());
            }
        }
        store_sums::<T>(o, &averages);
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: q.dtype }))
}

fn backward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let (inputs, documents, outputs, p) = operands::<6, 3>(launch);
    match_float!(inputs[0].dtype, T => {
        let sums = cotangents::<T>(p, documents, inputs);
        outputs.into_iter().zip(&sums).for_each(|(out, sums)| store_sums::<T>(out, sums));
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: inputs[0].dtype }))
}

fn backward_joined(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let (inputs, documents, [out], p) = operands::<6, 1>(launch);
    match_float!(inputs[0].dtype, T => {
        let (parts, row) = (cotangents::<T>(p, documents, inputs), (p.g * p.c).max(1));
        let rows = (0..out.view.numel() / row).flat_map(|at| &parts[at % 3][at / 3 * row..][..row]);
        store_sums::<T>(out, &rows.copied().collect::<Vec<f64>>());
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD_JOINED.name, dtype: inputs[0].dtype }))
}

/// The destinations of dq, dk and dv.
fn cotangents<T: Float>(
    p: Problem,
    documents: Option<Documents<'_>>,
    [q, k, v, o, lse, d_out]: &[Arg<'_>; 6],
) -> [Vec<f64>; 3] {
    let of_keys = || vec![0.0; p.b * p.s * p.g * p.c];
    let (mut dq, mut dk, mut dv) = (vec![0.0; p.b * p.t * p.g * p.r * p.c], of_keys(), of_keys());
    for [b, g, r] in heads(p) {
        let (k, v) = (Head::<T>::new(k, b, &[g]), Head::<T>::new(v, b, &[g]));
        let [q, o, d_out] = [q, o, d_out].map(|arg| Head::<T>::new(arg, b, &[g, r]));
        let lse = Head::<T::Acc>::new(lse, b, &[g, r]);
        let documents = documents.map(|documents| documents.row(b));
        for i in 0..p.t {
            let row = ((b * p.t + i) * p.g + g) * p.r + r;
            let delta = d_out.dot(i, &o, i, p.c);
            let is_visible = |j: &usize| documents.is_none_or(|documents| documents.sees(i, *j));
            for j in p.visible(i).filter(is_visible) {
                let prob = (p.scale * q.dot(i, &k, j, p.c) - lse.at(i, 0).to_f64()).exp();
                let ds = p.scale * prob * (d_out.dot(i, &v, j, p.c) - delta);
                let at = ((b * p.s + j) * p.g + g) * p.c;
                for channel in 0..p.c {
                    dq[row * p.c + channel] += ds * k.at(j, channel).to_f64();
                    dk[at + channel] += ds * q.at(i, channel).to_f64();
                    dv[at + channel] += prob * d_out.at(i, channel).to_f64();
                }
            }
        }
    }
    [dq, dk, dv]
}

/// Stores sums to an output in `T` or its accumulator.
fn store_sums<T: Float>(out: &mut ArgMut<'_>, sums: &[f64]) {
    fn store<E: Element>(out: &mut ArgMut<'_>, sums: &[f64]) {
        write::<E>(out).iter_mut().zip(sums).for_each(|(out, &sum)| *out = E::from_f64(sum));
    }
    if out.dtype == T::DTYPE { store::<T>(out, sums) } else { store::<T::Acc>(out, sums) }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod document_tests;
