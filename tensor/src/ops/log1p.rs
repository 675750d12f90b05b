//! Elementwise y = ln(1 + x), accurate near 0.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::{LOG1P, LOG1P_GRAD};
use std::rc::Rc;

/// Elementwise natural logarithm of 1 + x, accurate near 0: y = ln(1 + x).
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g / (1 + x). -infinity at x = -1, NaN below.
#[doc(alias = "ln_1p")]
#[derive(Debug)]
pub struct Log1p;

impl Op for Log1p {
    fn name(&self) -> &'static str {
        "log1p"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&LOG1P, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&LOG1P_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Log1p), vec![Input::positive(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[5], &[0.0f64, 1e-9, -1.0, -2.0, f64::INFINITY])?;
            let y = x.log1p().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-24;
            assert!(
                y.iter()
                    .zip([0.0, 9.999_999_995e-10, f64::NEG_INFINITY, f64::NAN, f64::INFINITY])
                    .all(|(&y, e)| near(y, e)),
                "{y:?}"
            );
            Ok(())
        })
        .unwrap();
    }
}
