//! Gated linear recurrence along a dim, which may be sharded: h_t = a_t h_(t-1) + x_t.

use super::labels::{check_dim, dim_labels};
use super::shard_candidates::gather_shards;
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, View, launch};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::placement::Placement;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, refuse_order_of_ranks};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::fill::FILL;
use shardgrad_kernels::op::gated_scan::{BACKWARD, CARRY, SCAN, SUMMARY};
use shardgrad_kernels::{DType, Scalar, Strides};
use smallvec::SmallVec;
use std::rc::Rc;

/// Gated linear recurrence along a dim: h_t = a_t h_(t-1) + x_t from h_(-1) = 0; `a b c, a b c -> a b c` on a and x.
///
/// One float dtype; the state is f64. Linear in x. The op has its own inference rule: over mesh axes that shard the dim it runs one
/// all-gather of two f64 numbers for each lane and rank: the product of the rank's a, and the h that the rank ends with from zero.
/// Each rank computes the h before its shard from these and then its shard. The backward likewise runs one all-gather, of three
/// numbers: the cotangent is a reversed recurrence, and da needs the h before the shard.
///
/// FLOPs: 2 for each element, backward 3; 3 more each where the dim is sharded. Bytes: a, x and h once, backward a, h, g, da and dx
/// once; a and x (or g) once more where the dim is sharded.
///
/// Gradient: dx_t = g_t + a_(t+1) dx_(t+1), da_t = dx_t h_(t-1).
///
/// Source: Blelloch, "Prefix sums and their applications", 1990; Martin and Cundy, arXiv 1709.04057.
#[doc(alias = "associative_scan")]
#[doc(alias = "linear recurrence")]
#[doc(alias = "selective_scan")]
#[doc(alias = "prefix scan")]
#[derive(Debug)]
pub struct GatedScan {
    steps: StepDim,
    /// Whether the recurrence is the adjoint in x: h_t = x_t + a_(t+1) h_(t+1).
    is_reversed: bool,
}

/// Backward of [`GatedScan`]: the cotangents of a and x from a, h and the cotangent of h; linear in h, and in its cotangent.
#[derive(Debug)]
struct GatedScanBackward {
    steps: StepDim,
    signature: String,
}

/// The dim of the recurrence in tensors of some dims.
#[derive(Clone, Debug)]
struct StepDim {
    signature: String,
    dim: usize,
}

impl GatedScan {
    /// The recurrence along dim `dim` of tensors of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range.
    pub fn along(ndim: usize, dim: usize) -> Result<Rc<dyn Op>> {
        check_dim("gated_scan", ndim, dim)?;
        let labels = dim_labels(0..ndim);
        let steps = StepDim { signature: format!("{labels}, {labels} -> {labels}"), dim };
        Ok(Rc::new(GatedScan { steps, is_reversed: false }))
    }
}

impl StepDim {
    /// A local shape as the kernels take it: lanes, steps, lanes.
    fn shape(&self, local_shape: &[usize]) -> [usize; 3] {
        let (outer, inner) = (&local_shape[..self.dim], &local_shape[self.dim + 1..]);
        [outer.iter().product(), local_shape[self.dim], inner.iter().product()]
    }

    /// The number of lanes and a contiguous local tensor as the kernels take it.
    fn operand(&self, x: &LocalTensor) -> (usize, LocalTensor) {
        let shape = self.shape(&x.view.shape);
        (shape[0] * shape[2], x.with_view(Strides::contiguous(&shape).at(x.view.offset)))
    }

    /// This rank's position among the shards of the dim, and the number of shards.
    fn shard(&self, local: &ForwardContext<'_>) -> (usize, usize) {
        self.shard_at(local, local.rank.coordinates())
    }

    fn shard_at(&self, local: &ForwardContext<'_>, coordinates: &[usize]) -> (usize, usize) {
        local.inputs[0].dims()[self.dim].shard_index(local.rank.mesh(), coordinates)
    }

    /// Gathers a local tensor of all shards of the dim: (shard, row, lane) from (row, lane).
    fn gather(
        &self,
        local: &ForwardContext<'_>,
        x: &[&LocalTensor],
        own: LocalTensor,
    ) -> Result<LocalTensor> {
        refuse_order_of_ranks("gated_scan over a sharded dim", local.rank)?;
        let own_shape = own.view.shape.clone();
        let gathered = gather_shards(local, x, self.dim, own)?;
        let num_shards = gathered.view.shape[0];
        Ok(gathered.with_view(Strides::contiguous(&[num_shards, own_shape[0], own_shape[1]])))
    }

    /// The summary of this rank's shard, as the first rows of a tensor of `rows` rows: (row, lane).
    fn summary(
        &self,
        local: &ForwardContext<'_>,
        [a, x]: [&LocalTensor; 2],
        is_reversed: bool,
        rows: usize,
    ) -> Result<LocalTensor> {
        let shape = &a.view.shape;
        let lanes = shape[0] * shape[2];
        let mut all = LocalTensor::alloc(local.rank, DType::F64, &[rows, lanes])?;
        let summary = Strides::contiguous(&[2, shape[0], shape[2]]);
        let scalars = [Scalar::Int(i64::from(is_reversed))];
        with_output_view(&mut all, summary, |all| {
            launch(local.rank, &SUMMARY, &[a, x], &mut [all], &scalars)
        })?;
        Ok(all)
    }

    /// Writes the carry into this rank's shard, from the summaries of all shards.
    fn write_carry(
        &self,
        local: &ForwardContext<'_>,
        summaries: &LocalTensor,
        is_reversed: bool,
        to: &mut LocalTensor,
    ) -> Result<()> {
        let scalars = [Scalar::Int(self.shard(local).0 as i64), Scalar::Int(i64::from(is_reversed))];
        launch(local.rank, &CARRY, &[summaries], &mut [to], &scalars)
    }

    /// The last shard before this rank's that is not empty.
    fn shard_before(&self, local: &ForwardContext<'_>) -> Option<usize> {
        let dim = local.inputs[0].dims()[self.dim];
        let (own, num_shards) = self.shard(local);
        (0..own).rev().find(|&i| dim.shard_start(i, num_shards) < dim.shard_start(i + 1, num_shards))
    }
}

/// Calls `go` with an output under another view of its memory.
fn with_output_view<R>(
    output: &mut LocalTensor,
    view: impl Into<View>,
    go: impl FnOnce(&mut LocalTensor) -> Result<R>,
) -> Result<R> {
    let whole = std::mem::replace(&mut output.view, view.into());
    let result = go(output);
    output.view = whole;
    result
}

/// Fills an output with zeros.
fn zero(local: &ForwardContext<'_>, output: &mut LocalTensor) -> Result<()> {
    launch(local.rank, &FILL, &[], &mut [output], &[Scalar::Real(0.0)])
}

impl Op for GatedScan {
    fn name(&self) -> &'static str {
        if self.is_reversed { "gated_scan_reversed" } else { "gated_scan" }
    }

    fn signature(&self) -> &str {
        &self.steps.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[0] }
    }

    fn saved_for_backward_of(&self, needs_input_grad: &[bool]) -> SavedForBackward {
        match needs_input_grad {
            [false, _] => SavedForBackward { inputs: &[0], outputs: &[] },
            _ => self.saved_for_backward(),
        }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let flat = local.contiguous(x)?;
        let ((lanes, a), (_, v)) = (self.steps.operand(&flat[0]), self.steps.operand(&flat[1]));
        let mut carry;
        let mut inputs: SmallVec<[&LocalTensor; 3]> = SmallVec::from_slice(&[&a, &v]);
        if self.steps.shard(local).1 > 1 {
            let summary = self.steps.summary(local, [&a, &v], self.is_reversed, 2)?;
            let summaries = self.steps.gather(local, x, summary)?;
            carry = LocalTensor::alloc(local.rank, DType::F64, &[lanes])?;
            self.steps.write_carry(local, &summaries, self.is_reversed, &mut carry)?;
            inputs.push(&carry);
        }
        let mut h = local.output(0)?;
        let scalars = [Scalar::Int(i64::from(self.is_reversed))];
        with_output_view(&mut h, Strides::contiguous(&a.view.shape), |h| {
            launch(local.rank, &SCAN, &inputs, &mut [h], &scalars)
        })?;
        Ok([h].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let (steps, grad) = (self.steps.clone(), cx.grad(0));
        if !cx.needs_input_grad[0] {
            let op = Rc::new(GatedScan { steps, is_reversed: true });
            return cx.cotangents(|_| Tensor::apply_one(op.clone(), &[cx.input(0), &grad]));
        }
        let labels = dim_labels(0..grad.layout().ndim());
        let signature = format!("{labels}, {labels}, {labels} -> {labels}, {labels}");
        let op = Rc::new(GatedScanBackward { steps, signature });
        let both = Tensor::apply(op, &[cx.input(0), cx.output(0), &grad]);
        cx.cotangents(|i| both[i].clone())
    }
}

impl Op for GatedScanBackward {
    fn name(&self) -> &'static str {
        "gated_scan_backward"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1], &[2]]
    }

    fn adjust_inference(&self, inferred: Rc<Inference>, args: &[&Layout]) -> Rc<Inference> {
        if args[1].partial().is_empty() {
            return inferred;
        }
        // The cotangent of x does not depend on h: where h is a partial sum, its cotangent and that of x are `~`.
        let mut inference = inferred.into_adjustable();
        let axes = args[1].partial();
        inference.outputs[1] = (axes.iter())
            .fold(inference.outputs[1].clone(), |dx, axis| dx.with_placement(axis, Placement::Replicate));
        Rc::new(inference)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let flat = local.contiguous(x)?;
        let ((lanes, a), (_, h), (_, g)) =
            (self.steps.operand(&flat[0]), self.steps.operand(&flat[1]), self.steps.operand(&flat[2]));
        let mut edges;
        let mut inputs: SmallVec<[&LocalTensor; 4]> = SmallVec::from_slice(&[&a, &h, &g]);
        if self.steps.shard(local).1 > 1 {
            let mut own = self.steps.summary(local, [&a, &g], true, 3)?;
            let (last, steps) = (own.view.select(0, 2), h.view.shape[1]);
            if steps > 0 {
                let h_last = h.with_view(h.view.select(1, steps - 1));
                let at = Strides::contiguous(&h_last.view.shape).at(last.offset);
                own.write(local.rank, at, &h_last)?;
            } else {
                // No rank reads the row of an empty shard.
                with_output_view(&mut own, last, |own| zero(local, own))?;
            }
            let all = self.steps.gather(local, x, own)?;
            edges = LocalTensor::alloc(local.rank, DType::F64, &[2, lanes])?;
            let [carry, first] = [0, 1].map(|row| edges.view.select(0, row));
            with_output_view(&mut edges, carry, |edges| self.steps.write_carry(local, &all, true, edges))?;
            match self.steps.shard_before(local) {
                Some(shard) => {
                    edges.write(local.rank, first, &all.with_view(all.view.select(0, shard).select(0, 2)))?;
                }
                None => with_output_view(&mut edges, first, |edges| zero(local, edges))?,
            }
            inputs.push(&edges);
        }
        let (mut da, mut dx) = (local.output(0)?, local.output(1)?);
        let flat_view = || Strides::contiguous(&a.view.shape);
        with_output_view(&mut da, flat_view(), |da| {
            with_output_view(&mut dx, flat_view(), |dx| {
                launch(local.rank, &BACKWARD, &inputs, &mut [da, dx], &[])
            })
        })?;
        Ok([da, dx].into_iter().collect())
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], dim| {
        let op = GatedScan::along(shape.len(), dim).expect("a dim of the case");
        Case::new(op, vec![Input::real(shape), Input::real(shape)]).exact()
    };
    vec![case(&[5, 4], 0), case(&[3, 5], 1), case(&[2, 5, 3], 1)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::reduction::Reduction;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        for mesh in ["a=1", "a=2", "a=3", "a=5"] {
            let mesh = Mesh::parse(mesh).unwrap();
            World::run(mesh.clone(), |rank| {
                let layout = Layout::parse("f64[2, 4@a]", &mesh)?;
                let tensor = |values: [f64; 8]| Tensor::from_global(rank, &layout, &values);
                let a = tensor([0.5, 2.0, -1.0, 3.0, 0.0, 1.0, 1.0, 1.0])?;
                let x = tensor([1.0, 2.0, 3.0, -4.0, 1.0, 1.0, 1.0, 1.0])?;
                let h = x.gated_scan(&a, 1);
                assert_eq!(h.layout(), &layout);
                assert_eq!(h.to_host::<f64>()?, [1.0, 4.0, -1.0, -7.0, 1.0, 2.0, 3.0, 4.0]);
                Ok(())
            })
            .unwrap();
        }
        assert!(GatedScan::along(2, 2).is_err());
    }

    #[test]
    fn a_sharded_dim_costs_one_small_gather() {
        let mesh = Mesh::parse("a=2,b=2").unwrap();
        let collectives = World::run(mesh.clone(), |rank| {
            rank.trace().enable();
            for text in ["f32[3, 8@a@b]", "f32[3, 8@b@a]", "f32[2@a, 8@b]", "f32[4@a, 8]"] {
                let layout = Layout::parse(text, &mesh)?;
                let (a, x) = (Tensor::full(rank, &layout, 1.0)?, Tensor::full(rank, &layout, 1.0)?);
                let h = x.gated_scan(&a, 1).to_host::<f32>()?;
                assert!(h.iter().enumerate().all(|(i, h)| *h == (i % 8 + 1) as f32), "{text}: {h:?}");
            }
            let records = rank.trace().take();
            Ok(records.iter().map(|r| format!("{} {} {}", r.op, r.dtype, r.numel())).collect::<Vec<_>>())
        });
        let f64s: Vec<String> =
            collectives.unwrap().remove(0).into_iter().filter(|c| c.contains("f64")).collect();
        // Two numbers of each lane and rank: three lanes on four ranks, twice, and one lane on two ranks.
        assert_eq!(f64s, ["all_gather f64 24", "all_gather f64 24", "all_gather f64 4"]);
    }
}
