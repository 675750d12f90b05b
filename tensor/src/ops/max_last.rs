//! y = the largest element along the last dim, which may be split.

use super::{Case, Input};
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{DTypes, Local, Op, Pieces, common_float, infer_by_signature};
use crate::piece::{Piece, launch};
use crate::redistribute::combine;
use crate::refusal::Refusal;
use crate::state::State;
use shardgrad_dist::{AxisSet, ReduceOp, Result};
use shardgrad_kernels::op::reduce::MAX;
use shardgrad_kernels::{DType, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// `..m v -> ..m`: any float; the result is in its accumulator. Negative infinity where v is 0. Not differentiable: it
/// serves as the constant that keeps exponentials finite.
///
/// Max has no pending form. So the op states its own rule: axes that split v end as `=`, by one all-reduce over all of
/// them inside the op, since nothing else can be meant. A pending x is completed before.
#[derive(Debug)]
pub struct MaxLast;

/// The axes that split v.
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

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&[common_float(inputs)?.accumulator()]))
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        let mut inference = Rc::unwrap_or_clone(infer_by_signature(self, context, args, dtypes, want)?);
        let split = axes(&inference);
        let output = &mut inference.outputs[0];
        *output = split.iter().fold(output.clone(), |layout, axis| layout.with_state(axis, State::Invariant));
        Ok(Rc::new(inference))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let mut out = local.output(0)?;
        launch(local.rank, &MAX, &[x[0]], &mut [&mut out], &[Scalar::Int(1)])?;
        let out =
            combine(local.rank, local.made_of(x, out), axes(local.inference), ReduceOp::Max, local.site)?;
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
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn rows_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1.0f32, 3.0, 2.0, -4.0, -6.0, -5.0])?;
            assert_eq!(x.max_last().to_host::<f32>()?, [3.0, -4.0]);
            assert_eq!(x.cast(DType::BF16).max_last().to_host::<f32>()?, [3.0, -4.0]);
            let none = Tensor::from_host::<f32>(rank, &[1, 0], &[])?;
            assert_eq!(none.max_last().to_host::<f32>()?, [f32::NEG_INFINITY]);
            Ok(())
        })
        .unwrap();
    }
}
