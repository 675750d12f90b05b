//! Elementwise square: y = x^2.

use super::mul::mul;
use super::scale::scale;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::SQUARE;
use std::rc::Rc;

/// Elementwise square: y = x^2.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = 2 g x.
#[derive(Debug)]
pub struct Square;

impl Op for Square {
    fn name(&self) -> &'static str {
        "square"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&SQUARE, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| scale(&mul(&cx.grad(0), cx.input(0)), 2.0))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Square), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[3.0f64, -0.5])?;
            assert_eq!(x.square().to_host::<f64>()?, [9.0, 0.25]);
            Ok(())
        })
        .unwrap();
    }
}
