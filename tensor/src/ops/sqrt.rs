//! Elementwise square root: y = sqrt(x).

use super::div::div;
use super::scale::scale;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::SQRT;
use std::rc::Rc;

/// Elementwise square root: y = sqrt(x).
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g / (2 y). NaN where x < 0.
#[derive(Debug)]
pub struct Sqrt;

impl Op for Sqrt {
    fn name(&self) -> &'static str {
        "sqrt"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&SQRT, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| scale(&div(&cx.grad(0), cx.output(0)), 0.5))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Sqrt), vec![Input::positive(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[4.0f64, 2.25])?;
            assert_eq!(x.sqrt().to_host::<f64>()?, [2.0, 1.5]);
            Ok(())
        })
        .unwrap();
    }
}
