//! Elementwise absolute value: y = |x|.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::{ABS, ABS_GRAD};
use std::rc::Rc;

/// Elementwise absolute value: y = |x|.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g sign(x), 0 where x = 0.
#[derive(Debug)]
pub struct Abs;

impl Op for Abs {
    fn name(&self) -> &'static str {
        "abs"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&ABS, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&ABS_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Abs), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[-2.5f64, 0.0, 3.0])?;
            let y = x.abs().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(y.iter().zip([2.5, 0.0, 3.0]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
