//! y = x where x > 0, else c (exp(x) - 1).

use super::pointwise::PointwiseBackward;
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::elementary::{ELU, ELU_GRAD};
use std::rc::Rc;

/// `..m -> ..m`, any float. dx = g where x > 0, else g c exp(x), at 0 too.
#[derive(Debug)]
pub struct Elu {
    /// What -y goes to far below 0, rounded to the accumulator of the dtype.
    pub scale: f64,
}

impl Op for Elu {
    fn name(&self) -> &'static str {
        "elu"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&ELU, &[x[0]], &[Scalar::Real(self.scale)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| PointwiseBackward::with(&ELU_GRAD, cx.input(0), &cx.grad(0), &[self.scale]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Elu { scale: 0.75 }), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[2.0f64, -1.0, f64::NEG_INFINITY])?;
            let y = x.elu(0.5).to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-15;
            assert!(y.iter().zip([2.0, -0.316_060_279_414_278_83, -0.5]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
