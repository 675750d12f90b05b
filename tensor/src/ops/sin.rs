//! Elementwise sine: y = sin(x), x in radians.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::{SIN, SIN_GRAD};
use std::rc::Rc;

/// Elementwise sine: y = sin(x), x in radians.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g cos(x). NaN at +-infinity.
#[derive(Debug)]
pub struct Sin;

impl Op for Sin {
    fn name(&self) -> &'static str {
        "sin"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&SIN, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&SIN_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Sin), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[0.0f64, 1.0, f64::INFINITY])?;
            let y = x.sin().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(
                y.iter().zip([0.0, 0.841_470_984_807_896_5, f64::NAN]).all(|(&y, e)| near(y, e)),
                "{y:?}"
            );
            Ok(())
        })
        .unwrap();
    }
}
