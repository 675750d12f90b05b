//! Elementwise sign: y = -1, 0 or 1.

use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{ForwardContext, LocalTensors, Op};
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::SIGN;
use std::rc::Rc;

/// Elementwise sign: y = -1, 0 or 1.
///
/// `..m -> ..m`, any float dtype. Not differentiable. A zero keeps its sign bit and NaN stays NaN.
#[doc(alias = "signum")]
#[derive(Debug)]
pub struct Sign;

impl Op for Sign {
    fn name(&self) -> &'static str {
        "sign"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&SIGN, &[x[0]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Sign), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[-2.5f64, 0.0, 3.0, f64::NAN])?;
            let y = x.sign().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(y.iter().zip([-1.0, 0.0, 1.0, f64::NAN]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
