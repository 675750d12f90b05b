//! y = 1 / x.

use super::mul::mul;
use super::neg::neg;
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::RECIPROCAL;
use std::rc::Rc;

/// `..m -> ..m`, any float. dx = -g y^2.
#[derive(Debug)]
pub struct Reciprocal;

impl Op for Reciprocal {
    fn name(&self) -> &'static str {
        "reciprocal"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&RECIPROCAL, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| neg(&mul(&mul(&cx.grad(0), cx.output(0)), cx.output(0))))
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
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[4.0f64, -0.5])?;
            assert_eq!(x.reciprocal().to_host::<f64>()?, [0.25, -2.0]);
            Ok(())
        })
        .unwrap();
    }
}
