//! Elementwise logistic sigmoid: y = 1 / (1 + exp(-x)).

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::{SIGMOID, SIGMOID_GRAD};
use std::rc::Rc;

/// Logistic sigmoid, elementwise: y = 1 / (1 + exp(-x)).
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g y (1 - y). 0 and 1 at -infinity and infinity.
#[doc(alias = "logistic")]
#[doc(alias = "expit")]
#[derive(Debug)]
pub struct Sigmoid;

impl Op for Sigmoid {
    fn name(&self) -> &'static str {
        "sigmoid"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&SIGMOID, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&SIGMOID_GRAD, cx.output(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Sigmoid), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[0.0f64, 1.0, f64::NEG_INFINITY, f64::INFINITY])?;
            let y = x.sigmoid().to_host::<f64>()?;
            let near = y
                .iter()
                .zip([0.5, 0.731_058_578_630_004_9, 0.0, 1.0])
                .all(|(y, e): (&f64, f64)| *y == e || (y - e).abs() < 1e-15);
            assert!(near, "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
