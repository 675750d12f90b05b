//! y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2: the form that GPT-2 uses.

use super::pointwise::PointwiseBackward;
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::{GELU, GELU_GRAD};
use std::rc::Rc;

/// `..m -> ..m`, any float. dx = g y'(x).
#[derive(Debug)]
pub struct Gelu;

impl Op for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&GELU, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| PointwiseBackward::of(&GELU_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Gelu), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[0.0f64, 1.0])?;
            assert_eq!(x.gelu().to_host::<f64>()?[0], 0.0);
            assert!((x.gelu().to_host::<f64>()?[1] - 0.841_191_990_608_307_5).abs() < 1e-12);
            Ok(())
        })
        .unwrap();
    }
}
