//! Elementwise reciprocal square root: y = 1 / sqrt(x).

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::{RSQRT, RSQRT_GRAD};
use std::rc::Rc;

/// Elementwise reciprocal square root: y = 1 / sqrt(x).
///
/// `..m -> ..m`, any float dtype. Gradient: dx = -g y^3 / 2. Infinity at 0, NaN below.
#[derive(Debug)]
pub struct Rsqrt;

impl Op for Rsqrt {
    fn name(&self) -> &'static str {
        "rsqrt"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&RSQRT, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&RSQRT_GRAD, cx.output(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Rsqrt), vec![Input::positive(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[4.0f64, 0.0, -1.0, f64::INFINITY])?;
            let y = x.rsqrt().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(y.iter().zip([0.5, f64::INFINITY, f64::NAN, 0.0]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
