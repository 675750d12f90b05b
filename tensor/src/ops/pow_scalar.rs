//! Elementwise power with a number as exponent: y = x^c.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::elementary::{POW_SCALAR, POW_SCALAR_GRAD};
use std::rc::Rc;

/// Elementwise power with a number as exponent: y = x^c.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g c x^(c - 1), 0 for c = 0; infinite at x = 0 for 0 < c < 1. As IEEE
/// 754 `pow`: 1 for c = 0, NaN where x < 0 and c is not an integer.
#[doc(alias = "powf")]
#[doc(alias = "pow")]
#[derive(Debug)]
pub struct PowScalar {
    /// c (the exponent), rounded to the accumulator of the dtype.
    pub exponent: f64,
}

impl Op for PowScalar {
    fn name(&self) -> &'static str {
        "pow_scalar"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&POW_SCALAR, &[x[0]], &[Scalar::Real(self.exponent)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::with(&POW_SCALAR_GRAD, cx.input(0), &cx.grad(0), &[self.exponent]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(Rc::new(PowScalar { exponent: 1.5 }), vec![Input::positive(&[5, 3])]),
        Case::new(Rc::new(PowScalar { exponent: -2.0 }), vec![Input::positive(&[5, 3])]),
        Case::new(Rc::new(PowScalar { exponent: 0.0 }), vec![Input::positive(&[5, 3])]),
    ]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[4.0f64, 0.0, 2.25, -1.0])?;
            let y = x.powf(1.5).to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(y.iter().zip([8.0, 0.0, 3.375, f64::NAN]).all(|(&y, e)| near(y, e)), "{y:?}");
            let y = Tensor::from_host(rank, &[3], &[-2.0f32, 0.0, 3.0])?;
            assert_eq!(y.powf(2.0).to_host::<f32>()?, [4.0, 0.0, 9.0]);
            assert_eq!(y.powf(0.0).to_host::<f32>()?, [1.0, 1.0, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
