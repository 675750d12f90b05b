//! y = x where x > 0, else c x.

use super::pointwise::PointwiseBackward;
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::elementary::{LEAKY_RELU, LEAKY_RELU_GRAD};
use std::rc::Rc;

/// `..m -> ..m`, any float. dx = g where x > 0, else c g, at 0 too.
#[derive(Debug)]
pub struct LeakyRelu {
    /// The slope below 0, rounded to the accumulator of the dtype.
    pub slope: f64,
}

impl Op for LeakyRelu {
    fn name(&self) -> &'static str {
        "leaky_relu"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&LEAKY_RELU, &[x[0]], &[Scalar::Real(self.slope)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| PointwiseBackward::with(&LEAKY_RELU_GRAD, cx.input(0), &cx.grad(0), &[self.slope]))
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
    fn by_hand() {
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
