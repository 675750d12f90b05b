//! Elementwise softplus: y = ln(1 + exp(x)), finite for every finite x.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::{SOFTPLUS, SOFTPLUS_GRAD};
use std::rc::Rc;

/// Softplus, elementwise: y = ln(1 + exp(x)), finite for every finite x.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g / (1 + exp(-x)). 0 and infinity at -infinity and infinity.
#[derive(Debug)]
pub struct Softplus;

impl Op for Softplus {
    fn name(&self) -> &'static str {
        "softplus"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&SOFTPLUS, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&SOFTPLUS_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Softplus), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[0.0f64, 1000.0, -1000.0, f64::NEG_INFINITY])?;
            let y = x.softplus().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-15;
            assert!(
                y.iter().zip([std::f64::consts::LN_2, 1000.0, 0.0, 0.0]).all(|(&y, e)| near(y, e)),
                "{y:?}"
            );
            Ok(())
        })
        .unwrap();
    }
}
