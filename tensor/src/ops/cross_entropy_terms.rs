//! The two terms of a cross-entropy loss over the last dim, which may be sharded: lse = ln(sum_j exp(z_j)) and picked =
//! z_target. The loss of a row is lse - picked.

use super::embedding::check_index;
use super::reduced_dims::{invariant_on, keep_invariant_inputs};
use super::{Case, Input};
use crate::execution::context::Context;
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, common_float,
    sum_ranges, unwind,
};
use crate::tensor::Tensor;
use crate::tensor::redistribute::all_reduce;
use shardgrad_dist::{AxisSet, ReduceOp, Result};
use shardgrad_kernels::op::cross_entropy::{BACKWARD, FORWARD};
use shardgrad_kernels::op::log_sum_exp::{FINISH, SUM_EXP};
use shardgrad_kernels::op::reduce::MAX;
use shardgrad_kernels::{DType, Scalar, SumTree};
use smallvec::{SmallVec, smallvec};
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

/// The two terms of a cross-entropy loss over the last dim: lse = ln(sum_j exp(z_j)) and picked = z_target.
///
/// `..m [v], ..m -> ..m, ..m` on logits z (any float dtype) and targets (i64, each in 0..v); both results are in the
/// accumulator dtype of z. z is read once. The loss of a row is lse - picked.
///
/// The vocabulary dim v may be sharded (vocabulary-parallel cross entropy, as in Megatron). picked is then a partial
/// sum over the axes that shard v. A logarithm has no partial form, so for lse the op has its own inference rule: two
/// all-reduces of one number per row over all of these axes, of the maximum of the local lse and of the sum of
/// exp(lse - maximum); lse is invariant (`=`) there. A partial z is reduced first.
///
/// Differentiable in z: dz_j = exp(z_j - lse) dlse + (dpicked where j is the target). The backward overwrites the
/// logits if nothing else holds their memory (buffer donation).
#[doc(alias = "cross_entropy")]
#[doc(alias = "nll_loss")]
#[doc(alias = "vocab_parallel_cross_entropy")]
#[derive(Debug)]
pub struct CrossEntropyTerms;

/// Backward of [`CrossEntropyTerms`]: the cotangent of z, linear in the cotangents of both results jointly. Runs once, since it
/// overwrites z.
struct CrossEntropyBackward {
    z: Cell<Option<LocalTensor>>,
}

impl fmt::Debug for CrossEntropyBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CrossEntropyBackward")
    }
}

/// The first vocabulary index of this rank and the size of the whole vocabulary.
fn columns(local: &ForwardContext<'_>) -> [Scalar; 2] {
    let (count, range) = local.label("v");
    [Scalar::Int(range.start as i64), Scalar::Int(count as i64)]
}

/// The mesh axes that shard v.
fn axes(inference: &Inference) -> AxisSet {
    inference.label_dim("v").expect("the signature has the label v").axes.iter().collect()
}

/// The sums of exp(z - max) of this rank, over leaves of the vocabulary.
fn canonical_sum(
    tree: SumTree,
    local: &ForwardContext<'_>,
    z: &LocalTensor,
    max: &LocalTensor,
) -> Result<LocalTensor> {
    let v = local.inference.label_dim("v").expect("the signature has the label v");
    let last = z.view.ndim() - 1;
    sum_ranges(local, z, (tree, &v), max, |range| {
        let part = z.with_view(z.view.narrow(last, range.start, range.end)).contiguous(local.rank)?;
        let mut sum = local.output(0)?;
        let length = Scalar::Int(range.len() as i64);
        launch(local.rank, &SUM_EXP, &[&part, max], &mut [&mut sum], &[length])?;
        Ok(sum)
    })
}

impl Op for CrossEntropyTerms {
    fn name(&self) -> &'static str {
        "cross_entropy_terms"
    }

    fn signature(&self) -> &str {
        "..m [v], ..m -> ..m, ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: &[0] }
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        check_index(inputs[1])?;
        Ok(SmallVec::from_elem(common_float(&inputs[..1])?.accumulator(), num_outputs))
    }

    fn adjust_inference(&self, inferred: Rc<Inference>, _: &[&Layout]) -> Rc<Inference> {
        let mut inference = inferred.into_adjustable();
        let sharding_axes = axes(&inference);
        inference.outputs[0] = invariant_on(sharding_axes, &inference.outputs[0]);
        Rc::new(inference)
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Own
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let x = local.contiguous(x)?;
        let mut terms = local.launch(&FORWARD, &[&x[0], &x[1]], &columns(local))?;
        let (axes, tree) = (axes(local.inference), Context::of(local.rank).sum_tree());
        if axes.is_empty() && tree.is_none() {
            return Ok(terms);
        }
        let (mut sum, mut lse) = (local.output(0)?, local.output(0)?);
        let of = [&x[0], &x[1]];
        if tree.is_some() {
            launch(local.rank, &MAX, &[&x[0]], &mut [&mut terms[0]], &[Scalar::Int(1)])?;
        }
        let largest = all_reduce(
            local.rank,
            local.with_lineage(&of, terms[0].clone()),
            axes,
            ReduceOp::Max,
            local.site,
        )?;
        match tree {
            // The kernel sums rows; these have one element each.
            None => launch(local.rank, &SUM_EXP, &[&terms[0], &largest], &mut [&mut sum], &[Scalar::Int(1)])?,
            Some(tree) => sum = canonical_sum(tree, local, &x[0], &largest)?,
        }
        let sum = all_reduce(local.rank, local.with_lineage(&of, sum), axes, ReduceOp::Sum, local.site)?;
        launch(local.rank, &FINISH, &[&largest, &sum], &mut [&mut lse], &[])?;
        terms[0] = lse;
        Ok(terms)
    }

    fn donated_input(&self) -> Option<usize> {
        Some(0)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| {
            let z = cx.take_donated(0);
            // Anomaly detection inspects the values of the arguments; otherwise their layout is enough.
            let is_inspected = Context::of(cx.rank).detects_anomalies();
            let shown = if is_inspected { z.clone() } else { Tensor::meta(cx.rank, z.layout()) };
            let op = CrossEntropyBackward { z: Cell::new(Some(unwind(z.into_unique_local()))) };
            let args = [&shown, cx.input(1), cx.output(0), &cx.grad(0), &cx.grad(1)];
            Tensor::apply(op, &args).remove(0)
        })
    }
}

impl Op for CrossEntropyBackward {
    fn name(&self) -> &'static str {
        "cross_entropy_backward"
    }

    fn signature(&self) -> &str {
        "..m [v], ..m, ..m, ..m, ..m -> ..m [v]"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[3, 4]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false, false, true, true]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&inputs[..1]))
    }

    fn adjust_inference(&self, inferred: Rc<Inference>, _: &[&Layout]) -> Rc<Inference> {
        let sharding_axes = axes(&inferred);
        keep_invariant_inputs(inferred, sharding_axes)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let x = local.contiguous(&x[1..])?;
        let mut z = self.z.take().expect("bug: the backward of cross-entropy runs once");
        let inputs = [&x[0], &x[1], &x[2], &x[3]];
        launch(local.rank, &BACKWARD, &inputs, &mut [&mut z], &columns(local))?;
        Ok(smallvec![z])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let op = Rc::new(CrossEntropyTerms);
    let case = |rows: &[usize], v: usize, centre: f64| {
        let logits: Vec<usize> = rows.iter().copied().chain([v]).collect();
        Case::new(op.clone(), vec![Input::offset(&logits, centre), Input::index(rows, v)])
    };
    vec![case(&[5], 7, 0.0), case(&[2, 3], 4, 0.0), case(&[5], 7, 1000.0), case(&[5], 7, -1000.0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use approx::assert_abs_diff_eq;
    use shardgrad_dist::{Mesh, World};
    use std::cell::RefCell;

    #[test]
    fn matches_a_row_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let z = Tensor::from_host(rank, &[1, 3], &[2f64.ln(), 0.0, 4f64.ln()])?;
            let target = Tensor::from_host(rank, &[1], &[2i64])?;
            let (lse, picked) = z.cross_entropy_terms(&target);
            assert_abs_diff_eq!(lse.item()?, 7f64.ln(), epsilon = 1e-15);
            assert_eq!(picked.item()?, 4f64.ln());
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn backward_reuses_the_memory_of_logits_unless_they_are_shared() {
        World::run(Mesh::single(), |rank| {
            let z = || Tensor::from_host(rank, &[2, 3], &[0.0, 1.0, 2.0, -1.0, 3.0, 0.5]);
            let target = Tensor::from_host(rank, &[2], &[2i64, 0])?;
            let ones = Tensor::from_host(rank, &[2], &[1.0, -2.0])?;
            let (logits, lse) = (z()?.layout().clone(), z()?.cross_entropy_terms(&target).0);
            let dual = ones.layout().clone();
            let back = |saved: Option<Tensor>, donated: Option<Tensor>| {
                let cotangents = CrossEntropyTerms.vjp(&Vjp {
                    rank,
                    inputs: &[saved, Some(target.clone())],
                    outputs: &[Some(lse.clone()), None],
                    input_layouts: &[logits.clone(), target.layout().clone()],
                    output_layouts: &[dual.clone(), dual.clone()],
                    grads: &[Some(ones.clone()), Some(ones.clone())],
                    needs_input_grad: &[true, false],
                    donated: RefCell::new(donated),
                    accumulators: &[],
                });
                cotangents.into_iter().next().flatten().expect("the cotangent was requested")
            };
            let owned = z()?;
            let address = owned.local().buffer.address();
            let overwritten = back(None, Some(owned));
            assert_eq!(
                overwritten.local().buffer.address(),
                address,
                "nothing else holds the logits, so that their memory is reused"
            );
            let held = z()?;
            let view = Tensor::assemble(rank, logits.clone(), held.local().clone());
            for other in
                [back(None, Some(held.clone())), back(Some(held.clone()), None), back(None, Some(view))]
            {
                assert_ne!(other.local().buffer.address(), held.local().buffer.address());
                assert_eq!(other.to_host::<f64>()?, overwritten.to_host::<f64>()?);
            }
            assert_eq!(held.to_host::<f64>()?, z()?.to_host::<f64>()?, "shared logits are not overwritten");
            Ok(())
        })
        .unwrap();
    }
}
