//! y = ln(1 + exp(x)), finite for every finite x.

use super::pointwise::PointwiseBackward;
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::{SOFTPLUS, SOFTPLUS_GRAD};
use std::rc::Rc;

/// `..m -> ..m`, any float. dx = g / (1 + exp(-x)). 0 and infinity at the infinities.
#[derive(Debug)]
pub struct Softplus;

impl Op for Softplus {
    fn name(&self) -> &'static str {
        "softplus"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&SOFTPLUS, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| PointwiseBackward::of(&SOFTPLUS_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Softplus), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[0.0f64, 1000.0, -1000.0, f64::NEG_INFINITY])?;
            let y = x.softplus().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-15;
            assert!(
                y.iter().zip([std::f64::consts::LN_2, 1000.0, 0.0, 0.0]).all(|(&y, e)| near(y, e)),
                "{y:?}"
            );
            Ok(())
        })
        .unwrap();
    }
}
