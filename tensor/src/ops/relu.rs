//! Elementwise rectified linear unit: y = max(x, 0).

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::{RELU, RELU_GRAD};
use std::rc::Rc;

/// Rectified linear unit, elementwise: y = max(x, 0).
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g where x > 0, else 0.
#[derive(Debug)]
pub struct Relu;

impl Op for Relu {
    fn name(&self) -> &'static str {
        "relu"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&RELU, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&RELU_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Relu), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[0.0f64, 1.0])?;
            assert_eq!(x.neg().relu().to_host::<f64>()?, [0.0, 0.0]);
            assert_eq!(x.relu().to_host::<f64>()?, [0.0, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
