//! Elementwise SiLU (swish): y = x / (1 + exp(-x)) = x sigmoid(x).

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::{SILU, SILU_GRAD};
use std::rc::Rc;

/// Sigmoid linear unit (swish), elementwise: y = x sigmoid(x) = x / (1 + exp(-x)).
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g y'(x).
#[doc(alias = "swish")]
#[derive(Debug)]
pub struct Silu;

impl Op for Silu {
    fn name(&self) -> &'static str {
        "silu"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&SILU, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&SILU_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Silu), vec![Input::real(&[5, 3])])]
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
            assert_eq!(x.silu().to_host::<f64>()?[0], 0.0);
            assert!((x.silu().to_host::<f64>()?[1] - 0.731_058_578_630_004_9).abs() < 1e-15);
            Ok(())
        })
        .unwrap();
    }
}
