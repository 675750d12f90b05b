//! y = c x for a number c.

use super::{Case, Input};
use crate::op::{Cotangents, Fixed, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::unary::SCALE;
use std::rc::Rc;

/// `..m -> ..m`, any float. Linear: a pending sum stays pending. dx = c g.
#[derive(Debug)]
pub struct Scale {
    /// The factor, rounded to the accumulator of the dtype.
    pub factor: f64,
}

/// c x of a plain tensor.
pub(super) fn scale(x: &Tensor, factor: f64) -> Tensor {
    Tensor::result(Rc::new(Scale { factor }), &[x])
}

const SIGNATURE: &str = "..m -> ..m";

impl Op for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn signature(&self) -> &str {
        SIGNATURE
    }

    fn fixed(&self) -> Option<Fixed> {
        Some(Fixed::of::<Scale>(SIGNATURE))
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&SCALE, &[x[0]], &[Scalar::Real(self.factor)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| scale(&cx.grad(0), self.factor))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Scale { factor: -1.5 }), vec![Input::real(&[5, 3])]).exact()]
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
            assert_eq!(x.scale(-0.5).to_host::<f64>()?, [-0.5, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
