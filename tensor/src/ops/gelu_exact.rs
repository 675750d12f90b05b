//! Elementwise GELU with erf: y = x Phi(x) = x (1 + erf(x / sqrt 2)) / 2, as BERT and the default of PyTorch use it.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::{GELU_EXACT, GELU_EXACT_GRAD};
use std::rc::Rc;

/// Gaussian error linear unit with the error function, elementwise, as BERT and the default of PyTorch use it:
/// y = x Phi(x) = x (1 + erf(x / sqrt 2)) / 2.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g (Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)). NaN at -infinity.
/// [`Gelu`](super::gelu::Gelu) is the tanh approximation.
#[doc(alias = "gelu")]
#[derive(Debug)]
pub struct GeluExact;

impl Op for GeluExact {
    fn name(&self) -> &'static str {
        "gelu_exact"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&GELU_EXACT, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&GELU_EXACT_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(GeluExact), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[0.0f64, 1.0, -2.0, 50.0])?;
            let y = x.gelu_exact().to_host::<f64>()?;
            let near = y
                .iter()
                .zip([0.0, 0.841_344_746_068_542_9, -0.045_500_263_896_358_42, 50.0])
                .all(|(y, e): (&f64, f64)| *y == e || (y - e).abs() < 1e-14);
            assert!(near, "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
