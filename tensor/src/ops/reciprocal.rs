//! Elementwise reciprocal: y = 1 / x.

use super::mul::mul;
use super::neg::neg;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::RECIPROCAL;
use std::rc::Rc;

/// Elementwise reciprocal: y = 1 / x.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = -g y^2.
#[doc(alias = "recip")]
#[derive(Debug)]
pub struct Reciprocal;

impl Op for Reciprocal {
    fn name(&self) -> &'static str {
        "reciprocal"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&RECIPROCAL, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| neg(&mul(&mul(&cx.grad(0), cx.output(0)), cx.output(0))))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Reciprocal), vec![Input::positive(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[4.0f64, -0.5])?;
            assert_eq!(x.reciprocal().to_host::<f64>()?, [0.25, -2.0]);
            Ok(())
        })
        .unwrap();
    }
}
