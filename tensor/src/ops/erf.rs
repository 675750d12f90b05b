//! Elementwise error function: y = (2 / sqrt(pi)) times the integral of exp(-t^2) from 0 to x.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::{ERF, ERF_GRAD};
use std::rc::Rc;

/// Error function, elementwise: y = (2 / sqrt(pi)) times the integral of exp(-t^2) from 0 to x.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g (2 / sqrt(pi)) exp(-x^2). -1 and 1 at -infinity and infinity.
#[derive(Debug)]
pub struct Erf;

impl Op for Erf {
    fn name(&self) -> &'static str {
        "erf"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&ERF, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&ERF_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Erf), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[0.0f64, 0.5, f64::NEG_INFINITY, f64::INFINITY])?;
            let y = x.erf().to_host::<f64>()?;
            let near = y
                .iter()
                .zip([0.0, 0.520_499_877_813_046_5, -1.0, 1.0])
                .all(|(y, e): (&f64, f64)| *y == e || (y - e).abs() < 1e-15);
            assert!(near, "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
