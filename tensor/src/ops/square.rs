//! y = x^2.

use super::mul::mul;
use super::scale::scale;
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::SQUARE;
use std::rc::Rc;

/// `..m -> ..m`, any float. dx = 2 g x.
#[derive(Debug)]
pub struct Square;

impl Op for Square {
    fn name(&self) -> &'static str {
        "square"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&SQUARE, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| scale(&mul(&cx.grad(0), cx.input(0)), 2.0))
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
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[3.0f64, -0.5])?;
            assert_eq!(x.square().to_host::<f64>()?, [9.0, 0.25]);
            Ok(())
        })
        .unwrap();
    }
}
