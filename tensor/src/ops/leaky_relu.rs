//! Elementwise leaky ReLU: y = x where x > 0, else c x.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::elementary::{LEAKY_RELU, LEAKY_RELU_GRAD};
use std::rc::Rc;

/// Leaky rectified linear unit, elementwise: y = x where x > 0, else c x.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g where x > 0, else c g, also at x = 0.
#[derive(Debug)]
pub struct LeakyRelu {
    /// c (`negative_slope` in PyTorch): the slope below 0, rounded to the accumulator of the dtype.
    pub slope: f64,
}

impl Op for LeakyRelu {
    fn name(&self) -> &'static str {
        "leaky_relu"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&LEAKY_RELU, &[x[0]], &[Scalar::Real(self.slope)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::with(&LEAKY_RELU_GRAD, cx.input(0), &cx.grad(0), &[self.slope]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(LeakyRelu { slope: 0.25 }), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[2.0f64, -2.0, 0.0])?;
            let y = x.leaky_relu(0.25).to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(y.iter().zip([2.0, -0.5, 0.0]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
