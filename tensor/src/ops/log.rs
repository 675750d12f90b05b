//! Elementwise natural logarithm: y = ln(x).

use super::div::div;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::LOG;
use std::rc::Rc;

/// Elementwise natural logarithm: y = ln(x).
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g / x. Not finite where x <= 0.
#[doc(alias = "ln")]
#[derive(Debug)]
pub struct Log;

impl Op for Log {
    fn name(&self) -> &'static str {
        "log"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&LOG, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| div(&cx.grad(0), cx.input(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Log), vec![Input::positive(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[1.0f64, std::f64::consts::E])?;
            assert_eq!(x.log().to_host::<f64>()?, [0.0, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
