//! y = x + c for a number c.

use super::{Case, Input};
use crate::op::{Cotangents, Fixed, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::unary::ADD_SCALAR;
use std::rc::Rc;

/// `..m -> ..m`, any float. dx = g. Not linear, since each rank of a pending sum would add c: the sum is completed.
#[derive(Debug)]
pub struct AddScalar {
    /// What is added, rounded to the accumulator of the dtype.
    pub term: f64,
}

const SIGNATURE: &str = "..m -> ..m";

impl Op for AddScalar {
    fn name(&self) -> &'static str {
        "add_scalar"
    }

    fn signature(&self) -> &str {
        SIGNATURE
    }

    fn fixed(&self) -> Option<Fixed> {
        Some(Fixed::of::<AddScalar>(SIGNATURE))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&ADD_SCALAR, &[x[0]], &[Scalar::Real(self.term)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| cx.grad(0))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(AddScalar { term: 0.75 }), vec![Input::real(&[5, 3])]).exact()]
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
            assert_eq!(x.add_scalar(0.5).to_host::<f64>()?, [1.5, -1.5]);
            Ok(())
        })
        .unwrap();
    }
}
