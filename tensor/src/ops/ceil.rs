//! Elementwise rounding up: y = the smallest integer >= x.

use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{ForwardContext, LocalTensors, Op};
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::CEIL;
use std::rc::Rc;

/// Elementwise ceiling: y = the smallest integer >= x.
///
/// `..m -> ..m`, any float dtype. Not differentiable: the slope is 0 wherever it exists.
#[derive(Debug)]
pub struct Ceil;

impl Op for Ceil {
    fn name(&self) -> &'static str {
        "ceil"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&CEIL, &[x[0]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Ceil), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[-1.5f64, 1.5, 2.0, f64::INFINITY])?;
            let y = x.ceil().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(y.iter().zip([-1.0, 2.0, 2.0, f64::INFINITY]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
