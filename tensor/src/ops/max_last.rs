//! Maximum along the last dim, which may be sharded, in the accumulator dtype.

use super::reduced_dims::invariant_on;
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::op::{CanonicalForm, DTypes, ForwardContext, LocalTensors, Op, common_float};
use crate::tensor::redistribute::all_reduce;
use shardgrad_dist::{AxisSet, ReduceOp, Result};
use shardgrad_kernels::op::reduce::MAX;
use shardgrad_kernels::{DType, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// Maximum along the last dim, which may be sharded, in the accumulator dtype: `..m v -> ..m`.
///
/// Any float dtype. -infinity where v has extent 0. Not differentiable: it serves as the constant that is subtracted to
/// keep exponentials finite. [`Amax`](super::amax::Amax) is the differentiable maximum over any dims.
///
/// A maximum has no partial form, so the op has its own inference rule: over mesh axes that shard v it runs one
/// all-reduce, and the result is invariant (`=`) on these axes. A partial x is reduced first.
#[doc(alias = "amax")]
#[derive(Debug)]
pub struct MaxLast;

/// The mesh axes that shard v.
fn axes(inference: &Inference) -> AxisSet {
    inference.label_dim("v").expect("the signature has the label v").axes.iter().collect()
}

impl Op for MaxLast {
    fn name(&self) -> &'static str {
        "max_last"
    }

    fn signature(&self) -> &str {
        "..m v -> ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    // A choice among elements has one result in any order.
    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Own
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&[common_float(inputs)?.accumulator()]))
    }

    fn adjust_inference(&self, inferred: Rc<Inference>, _: &[&Layout]) -> Rc<Inference> {
        let mut inference = inferred.into_adjustable();
        let sharding_axes = axes(&inference);
        inference.outputs[0] = invariant_on(sharding_axes, &inference.outputs[0]);
        Rc::new(inference)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let mut out = local.output(0)?;
        launch(local.rank, &MAX, &[x[0]], &mut [&mut out], &[Scalar::Int(1)])?;
        let out = all_reduce(
            local.rank,
            local.with_lineage(x, out),
            axes(local.inference),
            ReduceOp::Max,
            local.site,
        )?;
        Ok([out].into_iter().collect())
    }
}

pub(super) fn cases() -> Vec<Case> {
    let op = Rc::new(MaxLast);
    vec![
        Case::new(op.clone(), vec![Input::real(&[5, 7])]).exact(),
        Case::new(op, vec![Input::real(&[2, 3, 4])]).exact(),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn matches_rows_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1.0f32, 3.0, 2.0, -4.0, -6.0, -5.0])?;
            assert_eq!(x.max_last().to_host::<f32>()?, [3.0, -4.0]);
            assert_eq!(x.cast(DType::BF16).max_last().to_host::<f32>()?, [3.0, -4.0]);
            let empty = Tensor::from_host::<f32>(rank, &[1, 0], &[])?;
            assert_eq!(empty.max_last().to_host::<f32>()?, [f32::NEG_INFINITY]);
            Ok(())
        })
        .unwrap();
    }
}
