//! Elementwise rounding to the nearest integer, halves to the even one.

use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{ForwardContext, LocalTensors, Op};
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::ROUND;
use std::rc::Rc;

/// Elementwise rounding to the nearest integer, halves to the even one (as `torch.round`, not as `f64::round`).
///
/// `..m -> ..m`, any float dtype. Not differentiable: the slope is 0 wherever it exists.
#[doc(alias = "round_ties_even")]
#[derive(Debug)]
pub struct Round;

impl Op for Round {
    fn name(&self) -> &'static str {
        "round"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&ROUND, &[x[0]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Round), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[5], &[-1.5f64, 0.5, 2.5, 2.6, f64::NAN])?;
            let y = x.round().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(y.iter().zip([-2.0, 0.0, 2.0, 3.0, f64::NAN]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
