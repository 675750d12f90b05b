//! y = sqrt(x).

use super::div::div;
use super::scale::scale;
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::SQRT;
use std::rc::Rc;

/// `..m -> ..m`, any float. dx = g / (2 y).
#[derive(Debug)]
pub struct Sqrt;

impl Op for Sqrt {
    fn name(&self) -> &'static str {
        "sqrt"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&SQRT, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| scale(&div(&cx.grad(0), cx.output(0)), 0.5))
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
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[4.0f64, 2.25])?;
            assert_eq!(x.sqrt().to_host::<f64>()?, [2.0, 1.5]);
            Ok(())
        })
        .unwrap();
    }
}
