//! Elementwise GELU in its tanh form: y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as GPT-2 uses it.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::{GELU, GELU_GRAD};
use std::rc::Rc;

/// Gaussian error linear unit in its tanh approximation, elementwise, as GPT-2 uses it:
/// `torch.nn.functional.gelu(x, approximate="tanh")`, `jax.nn.gelu`. y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715
/// x^3))) / 2.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g y'(x). [`GeluExact`](super::gelu_exact::GeluExact) is the form with
/// erf.
#[doc(alias = "gelu_tanh")]
#[doc(alias = "gelu_new")]
#[derive(Debug)]
pub struct Gelu;

impl Op for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&GELU, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&GELU_GRAD, cx.input(0), &cx.grad(0)))
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
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[0.0f64, 1.0])?;
            assert_eq!(x.gelu().to_host::<f64>()?[0], 0.0);
            assert!((x.gelu().to_host::<f64>()?[1] - 0.841_191_990_608_307_5).abs() < 1e-12);
            Ok(())
        })
        .unwrap();
    }
}
