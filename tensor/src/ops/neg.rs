//! y = -x.

use super::{Case, Input};
use crate::op::{Cotangents, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::NEG;
use std::rc::Rc;

/// `..m -> ..m`, any float. Linear: a pending sum stays pending. dx = -g.
#[derive(Debug)]
pub struct Neg;

/// -x of a plain tensor.
pub(super) fn neg(x: &Tensor) -> Tensor {
    Tensor::result(Rc::new(Neg), &[x])
}

impl Op for Neg {
    fn name(&self) -> &'static str {
        "neg"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&NEG, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| neg(&cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Neg), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[1.0f64, -2.0])?;
            assert_eq!(x.neg().to_host::<f64>()?, [-1.0, 2.0]);
            Ok(())
        })
        .unwrap();
    }
}
