//! Elementwise hyperbolic tangent: y = tanh(x).

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::{TANH, TANH_GRAD};
use std::rc::Rc;

/// Hyperbolic tangent, elementwise: y = tanh(x).
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g (1 - y^2).
#[derive(Debug)]
pub struct Tanh;

impl Op for Tanh {
    fn name(&self) -> &'static str {
        "tanh"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&TANH, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&TANH_GRAD, cx.output(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Tanh), vec![Input::real(&[5, 3])])]
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
            assert_eq!(x.tanh().to_host::<f64>()?[0], 0.0);
            assert!((x.tanh().to_host::<f64>()?[1] - 0.761_594_155_955_764_9).abs() < 1e-15);
            Ok(())
        })
        .unwrap();
    }
}
