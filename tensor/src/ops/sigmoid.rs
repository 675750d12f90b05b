//! y = 1 / (1 + exp(-x)).

use super::pointwise::PointwiseBackward;
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::{SIGMOID, SIGMOID_GRAD};
use std::rc::Rc;

/// `..m -> ..m`, any float. dx = g y (1 - y). 0 and 1 at the infinities.
#[derive(Debug)]
pub struct Sigmoid;

impl Op for Sigmoid {
    fn name(&self) -> &'static str {
        "sigmoid"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&SIGMOID, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| PointwiseBackward::of(&SIGMOID_GRAD, cx.output(0), &cx.grad(0)))
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
    fn by_hand() {
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
