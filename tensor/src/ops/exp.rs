//! Elementwise exponential: y = exp(x).

use super::mul::mul;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::EXP;
use std::rc::Rc;

/// Elementwise exponential: y = exp(x).
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g y.
#[derive(Debug)]
pub struct Exp;

impl Op for Exp {
    fn name(&self) -> &'static str {
        "exp"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&EXP, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| mul(&cx.grad(0), cx.output(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Exp), vec![Input::real(&[5, 3])])]
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
            assert_eq!(x.exp().to_host::<f64>()?, [1.0, std::f64::consts::E]);
            Ok(())
        })
        .unwrap();
    }
}
