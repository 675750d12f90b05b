//! Ring attention: scaled dot-product attention where queries, keys and values are sharded by tokens alike.

use super::attention_mask::{AttentionLaunch, Mask, check_documents, forward_dtypes};
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::op::{
    Cotangents, DTypes, ForwardContext, LocalTensors, Op, PlanKey, SavedForBackward, Vjp,
    refuse_order_of_ranks,
};
use crate::tensor::Tensor;
use crate::tensor::ring::Ring;
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::op::attention::{BACKWARD, FORWARD, MERGE};
use shardgrad_kernels::op::binary::ACCUMULATE;
use shardgrad_kernels::{DType, Strides};
use smallvec::SmallVec;
use std::ops::Range;
use std::rc::Rc;

/// [`Attention`](super::attention::Attention) of tokens to tokens of the same sequence, which may be sharded: `b t h c!, b t h c!, b t h
/// c! -> b t h c!`, or with grouped queries `b t g r c!, b t g c!, b t g c! -> b t g r c!`; with packed documents two more arguments `b
/// u!, b u!` (i64), the segment ids and positions of all tokens.
///
/// The op has its own inference rule: over mesh axes that shard tokens, keys and values travel around the ring of the shards. Each
/// rank sends its chunk on, attends to it meanwhile, and merges the partial output with those of the earlier chunks by their
/// log-sum-exp, in the accumulator dtype; with n shards that is n - 1 messages of a chunk of k and v. The backward sends k and v around
/// once more, and with them the cotangents of each chunk in the accumulator dtype, which end at the rank of the chunk. A rank holds
/// at most two chunks of keys and values of other ranks, one of which is on its way, and as many of their cotangents. Chunks that no
/// query sees by index travel but are not computed.
///
/// Terms are merged in the order of the shards before the rank's own, so that the bits do not depend on timing.
///
/// Source: Liu et al., arXiv 2310.01889; Brandon et al., arXiv 2311.09431.
#[doc(alias = "ring attention")]
#[doc(alias = "context parallel")]
#[doc(alias = "striped attention")]
#[derive(Clone, Copy, Debug)]
pub struct RingAttention {
    pub(super) mask: Mask,
    pub(super) is_grouped: bool,
    pub(super) has_documents: bool,
}

/// Backward of [`RingAttention`]: the cotangents of q, k and v, linear in g.
#[derive(Debug)]
struct RingAttentionBackward(RingAttention);

/// The tensors of one rank under the five dims of the kernels, and the ring of its tokens.
struct RingCall<'a> {
    op: RingAttention,
    rank: &'a Rank,
    ring: Ring<'a>,
    /// q, k, v and further tensors of queries: their dims of tokens come second.
    tensors: SmallVec<[LocalTensor; 6]>,
    documents: Option<[LocalTensor; 2]>,
}

impl<'a> RingCall<'a> {
    /// `own` arguments are tensors, q, k and v first; documents follow.
    fn new(
        op: RingAttention,
        local: &ForwardContext<'a>,
        x: &[&LocalTensor],
        own: usize,
    ) -> Result<RingCall<'a>> {
        let rank = local.rank;
        let view = |(i, x): (usize, &&LocalTensor)| match op.is_grouped || i == 1 || i == 2 {
            true => (*x).clone(),
            false => x.with_view(x.view.unsqueeze(3)),
        };
        let tensors = x[..own].iter().enumerate().map(view).collect();
        let documents = match op.has_documents {
            true => Some([x[own].contiguous(rank)?, x[own + 1].contiguous(rank)?]),
            false => None,
        };
        let dim = local.inputs[0].dims()[1];
        if op.has_documents {
            check_documents("ring_attention", local.inputs[own].extent(1), dim.extent, dim.extent)?;
        }
        let lineage = local.with_lineage(x, x[1].clone()).lineage;
        Ok(RingCall { op, rank, ring: Ring::new(rank, dim, lineage, local.site), tensors, documents })
    }

    fn dtype(&self) -> DType {
        self.tensors[0].dtype
    }

    /// The launch of the queries of this rank on the keys of the shard `hops` before its own.
    fn launch(&self, hops: usize) -> AttentionLaunch<'_> {
        let [queries, keys] =
            [0, hops].map(|hops| self.ring.range(hops)).map(|range| range.start as i64..range.end as i64);
        let c = self.tensors[0].view.shape[4];
        let documents = self.documents.as_ref().map(|[segments, positions]| [segments, positions]);
        AttentionLaunch { rank: self.rank, mask: self.op.mask, c, queries, keys, documents }
    }

    /// Whether some query of this rank sees some key of the shard `hops` before its own, as far as shapes tell.
    fn sees(&self, hops: usize) -> bool {
        let [queries, keys] = [0, hops].map(|hops| self.ring.range(hops));
        match self.op.has_documents {
            true => !queries.is_empty() && !keys.is_empty(),
            false => self.op.mask.sees(&queries, &keys),
        }
    }

    /// The shape of the keys of a range of tokens.
    fn key_shape(&self, tokens: &Range<usize>) -> Vec<usize> {
        let mut shape = self.tensors[1].view.shape.to_vec();
        shape[1] = tokens.len();
        shape
    }

    /// The shape of a flat message of keys and values, or of their cotangents, of the shard `hops` before that of this rank.
    fn message_shape(&self, hops: usize) -> [usize; 1] {
        [2 * self.key_shape(&self.ring.range(hops)).iter().product::<usize>()]
    }

    /// Two tensors of keys as one flat tensor.
    fn pack(&self, pair: [&LocalTensor; 2]) -> Result<LocalTensor> {
        let mut packed = LocalTensor::alloc(self.rank, pair[0].dtype, &[2 * pair[0].numel()])?;
        for (i, x) in pair.into_iter().enumerate() {
            packed.write(self.rank, Strides::contiguous(&x.view.shape).at(i * x.numel()), x)?;
        }
        Ok(packed)
    }

    /// The two tensors of keys in a message.
    fn unpack(&self, packed: &LocalTensor, hops: usize) -> [LocalTensor; 2] {
        let view = Strides::contiguous(&self.key_shape(&self.ring.range(hops)));
        let numel = view.numel();
        [0, 1].map(|i| packed.with_view(view.clone().at(i * numel)))
    }

    /// Allocates a tensor of this shape in the accumulator dtype.
    fn alloc_wide(&self, shape: &[usize]) -> Result<LocalTensor> {
        LocalTensor::alloc(self.rank, self.dtype().accumulator(), shape)
    }

    /// Adds x to sums.
    fn add(&self, sums: &mut LocalTensor, x: &LocalTensor) -> Result<()> {
        launch(self.rank, &ACCUMULATE, &[x], &mut [sums], &[])
    }

    /// o and lse of the queries of this rank on the keys of one shard, o in the accumulator dtype.
    fn attend(&self, [k, v]: [&LocalTensor; 2], hops: usize) -> Result<[LocalTensor; 2]> {
        let shape = &self.tensors[0].view.shape;
        let (mut o, mut lse) = (self.alloc_wide(shape)?, self.alloc_wide(&shape[..4])?);
        self.launch(hops).run(&FORWARD, &[&self.tensors[0], k, v], &mut [&mut o, &mut lse])?;
        Ok([o, lse])
    }

    /// o and lse of the queries of this rank on the keys of all shards.
    fn forward(&self) -> Result<[LocalTensor; 2]> {
        let num_shards = self.ring.num_shards();
        let mut lane = self.ring.lane(self.dtype());
        if num_shards > 1 {
            lane.pass_on(self.pack([&self.tensors[1], &self.tensors[2]])?)?;
        }
        let [mut o, mut lse] = self.attend([&self.tensors[1], &self.tensors[2]], 0)?;
        for hops in 1..num_shards {
            let keys = lane.receive(&self.message_shape(hops))?;
            if hops + 1 < num_shards {
                lane.pass_on(keys.clone())?;
            }
            if self.sees(hops) {
                let [k, v] = self.unpack(&keys, hops);
                let [part, part_lse] = self.attend([&k, &v], hops)?;
                launch(self.rank, &MERGE, &[&part, &part_lse], &mut [&mut o, &mut lse], &[])?;
            }
        }
        Ok([o, lse])
    }

    /// The terms of dq, dk and dv from the keys of one shard, in the accumulator dtype.
    fn differentiate(&self, [k, v]: [&LocalTensor; 2], hops: usize) -> Result<[LocalTensor; 3]> {
        let [q, _, _, o, lse, g] = &self.tensors[..] else { unreachable!("six tensors of the backward") };
        let keys = self.key_shape(&self.ring.range(hops));
        let [mut dq, mut dk, mut dv] =
            [self.alloc_wide(&q.view.shape)?, self.alloc_wide(&keys)?, self.alloc_wide(&keys)?];
        let outputs = &mut [&mut dq, &mut dk, &mut dv];
        self.launch(hops).run(&BACKWARD, &[q, k, v, o, lse, g], outputs)?;
        Ok([dq, dk, dv])
    }

    /// dq, dk and dv of the tokens of this rank, in the accumulator dtype.
    fn backward(&self) -> Result<[LocalTensor; 3]> {
        let num_shards = self.ring.num_shards();
        let mut lane = self.ring.lane(self.dtype());
        let mut sums_lane = self.ring.lane(self.dtype().accumulator());
        if num_shards > 1 {
            lane.pass_on(self.pack([&self.tensors[1], &self.tensors[2]])?)?;
        }
        let [mut dq, mut dk, mut dv] = self.differentiate([&self.tensors[1], &self.tensors[2]], 0)?;
        for hops in 1..num_shards {
            let keys = lane.receive(&self.message_shape(hops))?;
            if hops + 1 < num_shards {
                lane.pass_on(keys.clone())?;
            }
            // The sums of the ranks between that of the chunk and this one.
            let mut sums = match hops {
                1 => None,
                _ => Some(sums_lane.receive(&self.message_shape(hops))?),
            };
            sums_lane.wait_until_read()?;
            if self.sees(hops) {
                let [k, v] = self.unpack(&keys, hops);
                let [dq_term, dk_term, dv_term] = self.differentiate([&k, &v], hops)?;
                self.add(&mut dq, &dq_term)?;
                sums = Some(match sums {
                    None => self.pack([&dk_term, &dv_term])?,
                    Some(sums) => self.add_to_packed(sums, [&dk_term, &dv_term], hops)?,
                });
            }
            drop(keys);
            let zeros = || LocalTensor::full(self.rank, dq.dtype, &self.message_shape(hops), 0.0);
            sums_lane.pass_on(sums.map_or_else(zeros, Ok)?)?;
        }
        if num_shards > 1 {
            // The sums of this rank's own chunk return after a whole round.
            let sums = sums_lane.receive(&self.message_shape(0))?;
            let [dk_sum, dv_sum] = self.unpack(&sums, 0);
            self.add(&mut dk, &dk_sum)?;
            self.add(&mut dv, &dv_sum)?;
        }
        Ok([dq, dk, dv])
    }

    /// Adds two tensors of keys to a message of sums.
    fn add_to_packed(
        &self,
        mut sums: LocalTensor,
        terms: [&LocalTensor; 2],
        hops: usize,
    ) -> Result<LocalTensor> {
        let views = self.unpack(&sums, hops).map(|part| part.view);
        let whole = sums.view.clone();
        for (view, term) in views.into_iter().zip(terms) {
            sums.view = view;
            self.add(&mut sums, term)?;
        }
        sums.view = whole;
        Ok(sums)
    }
}

/// Tensors in the accumulator dtype as outputs `0..` of an op.
fn as_outputs<const N: usize>(local: &ForwardContext<'_>, tensors: [LocalTensor; N]) -> Result<LocalTensors> {
    let output = |(i, x): (usize, LocalTensor)| {
        let layout = &local.inference.outputs[i];
        let x = if x.dtype == layout.dtype() { x } else { x.to_dtype(local.rank, layout.dtype())? };
        Ok(x.with_view(Strides::contiguous(&layout.local_shape(local.rank.coordinates()))))
    };
    tensors.into_iter().enumerate().map(output).collect()
}

impl RingAttention {
    fn static_signature(&self) -> &'static str {
        match (self.is_grouped, self.has_documents) {
            (false, false) => "b t h c!, b t h c!, b t h c! -> b t h c!, b t h",
            (true, false) => "b t g r c!, b t g c!, b t g c! -> b t g r c!, b t g r",
            (false, true) => "b t h c!, b t h c!, b t h c!, b u!, b u! -> b t h c!, b t h",
            (true, true) => "b t g r c!, b t g c!, b t g c!, b u!, b u! -> b t g r c!, b t g r",
        }
    }
}

impl Op for RingAttention {
    fn name(&self) -> &'static str {
        "ring_attention"
    }

    fn signature(&self) -> &str {
        self.static_signature()
    }

    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<RingAttention>(self.static_signature()))
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        match self.has_documents {
            true => SavedForBackward { inputs: &[0, 1, 2, 3, 4], outputs: &[0, 1] },
            false => SavedForBackward { inputs: &[0, 1, 2], outputs: &[0, 1] },
        }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        forward_dtypes(inputs)
    }

    fn estimate_work(&self, _: usize, args: &[&Layout], outputs: &[Layout]) -> usize {
        // The signature has one label for queries and keys.
        outputs.first().map_or(0, Layout::numel).saturating_mul(args[0].extent(1))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let call = RingCall::new(*self, local, x, 3)?;
        if call.ring.num_shards() > 1 {
            refuse_order_of_ranks(self.name(), local.rank)?;
        }
        as_outputs(local, call.forward()?)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let g = cx.grad(0);
        let tensors = [cx.input(0), cx.input(1), cx.input(2), cx.output(0), cx.output(1), &g];
        let documents = if self.has_documents { 3..5 } else { 3..3 };
        let args: SmallVec<[&Tensor; 8]> =
            tensors.into_iter().chain(documents.map(|i| cx.input(i))).collect();
        let grads = Tensor::apply(Rc::new(RingAttentionBackward(*self)), &args);
        cx.cotangents(|i| grads[i].clone())
    }
}

impl Op for RingAttentionBackward {
    fn name(&self) -> &'static str {
        "ring_attention_backward"
    }

    fn signature(&self) -> &str {
        match (self.0.is_grouped, self.0.has_documents) {
            (false, false) => {
                "b t h c!, b t h c!, b t h c!, b t h c!, b t h, b t h c! -> b t h c!, b t h c!, b t h c!"
            }
            (true, false) => {
                "b t g r c!, b t g c!, b t g c!, b t g r c!, b t g r, b t g r c! -> b t g r c!, b t g c!, b t g c!"
            }
            (false, true) => {
                "b t h c!, b t h c!, b t h c!, b t h c!, b t h, b t h c!, b u!, b u! -> b t h c!, b t h c!, b t h c!"
            }
            (true, true) => {
                "b t g r c!, b t g c!, b t g c!, b t g r c!, b t g r, b t g r c!, b u!, b u! -> b t g r c!, b t g c!, b t g c!"
            }
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[5]]
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(inputs[0], num_outputs))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        as_outputs(local, RingCall::new(self.0, local, x, 6)?.backward()?)
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |mask, q: &[usize], k: &[usize], has_documents| {
        let op = RingAttention { mask, is_grouped: q.len() == 5, has_documents };
        let mut inputs = vec![Input::real(q), Input::real(k), Input::real(k)];
        if has_documents {
            inputs.extend([Input::index(&q[..2], 2), Input::index(&q[..2], q[1])]);
        }
        Case::new(Rc::new(op), inputs)
    };
    vec![
        case(Mask::Causal, &[2, 5, 3, 2], &[2, 5, 3, 2], false),
        case(Mask::None, &[2, 3, 2, 3], &[2, 3, 2, 3], false),
        case(Mask::Causal, &[2, 5, 2, 3, 2], &[2, 5, 2, 2], false),
        case(Mask::Window(2), &[2, 5, 2, 1, 2], &[2, 5, 2, 2], false),
        case(Mask::Causal, &[2, 5, 3, 2], &[2, 5, 3, 2], true),
        case(Mask::Window(3), &[2, 5, 2, 3, 2], &[2, 5, 2, 2], true),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use approx::abs_diff_eq;
    use shardgrad_dist::{Kind, Mesh, World};

    /// Attention of three tokens of one channel on a mesh `a`.
    fn attend(mesh: &str, mask: Mask, segments: Option<[i64; 3]>) -> Vec<f64> {
        let results = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let layout = Layout::parse("f64[1, 3@a, 1, 1]", rank.mesh())?;
            let tensor = |x: &[f64]| Tensor::from_global(rank, &layout, x);
            // Scores are the keys: weights 1, 3 and 4.
            let (q, k, v) =
                (tensor(&[1.0; 3])?, tensor(&[0.0, 3f64.ln(), 4f64.ln()])?, tensor(&[4.0, 8.0, 12.0])?);
            let op = RingAttention { mask, is_grouped: false, has_documents: segments.is_some() };
            let mut args = vec![q, k, v];
            if let Some(segments) = segments {
                args.push(Tensor::from_host(rank, &[1, 3], &segments)?);
                args.push(Tensor::from_host(rank, &[1, 3], &[0i64, 1, 2])?);
            }
            Tensor::apply_one(Rc::new(op), &args.iter().collect::<Vec<_>>()).to_f64()
        });
        results.unwrap().remove(0)
    }

    #[test]
    fn documents_of_another_number_of_tokens_are_refused() {
        for (mesh, num_queries, num_ids) in [("a=1", 4, 3), ("a=2", 4, 3), ("a=2", 4, 5), ("a=1", 5, 4)] {
            let error = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let zeros =
                    |n| Tensor::zeros(rank, &Layout::parse(&format!("f64[1, {n}@a, 1, 1]"), rank.mesh())?);
                let ids = Tensor::zeros(rank, &Layout::parse(&format!("i64[1, {num_ids}]"), rank.mesh())?)?;
                let keys = zeros(4)?;
                let _ = zeros(num_queries)?.document_attention(&keys, &keys, [&ids, &ids], true, None);
                Ok(())
            });
            assert_eq!(
                error.unwrap_err().kind(),
                Kind::Shape,
                "{mesh}: {num_queries} queries, {num_ids} ids"
            );
        }
    }

    #[test]
    fn matches_three_tokens_computed_by_hand() {
        for mesh in ["a=1", "a=2", "a=3", "a=4"] {
            let near = |found: Vec<f64>, expected: [f64; 3]| {
                assert!(abs_diff_eq!(found[..], expected[..], epsilon = 1e-12), "{mesh}: {found:?}");
            };
            near(attend(mesh, Mask::Causal, None), [4.0, 7.0, 9.5]);
            near(attend(mesh, Mask::None, None), [9.5; 3]);
            near(attend(mesh, Mask::Window(2), None), [4.0, 7.0, 72.0 / 7.0]);
            near(attend(mesh, Mask::Causal, Some([0, 1, 1])), [4.0, 8.0, 72.0 / 7.0]);
            near(attend(mesh, Mask::None, Some([7, 0, 7])), [10.4, 8.0, 10.4]);
        }
    }
}
