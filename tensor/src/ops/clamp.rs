//! Elementwise limits: y = a where x < a, b where x > b, else x.

use super::labels::invalid_argument;
use super::unary_row::UnaryBackward;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::unary::{CLAMP, CLAMP_GRAD};
use std::rc::Rc;

/// Limits each element to a range: y = a where x < a, b where x > b, else x.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g where a <= x <= b, else 0. NaN stays NaN, with dx = 0.
#[doc(alias = "clip")]
#[derive(Debug)]
pub struct Clamp {
    /// a (`min` in PyTorch), rounded to the accumulator of the dtype; -infinity for no lower limit.
    pub low: f64,
    /// b (`max` in PyTorch), not below a; infinity for no upper limit.
    pub high: f64,
}

impl Clamp {
    /// The op that limits elements to `low..=high`.
    ///
    /// # Errors
    /// `Kind::Shape` if `low > high` or one of them is NaN.
    pub fn between(low: f64, high: f64) -> Result<Rc<dyn Op>> {
        if low <= high {
            return Ok(Rc::new(Clamp { low, high }));
        }
        invalid_argument(format!("clamp: the limits {low} to {high} are not a range; give low <= high"))
    }
}

impl Op for Clamp {
    fn name(&self) -> &'static str {
        "clamp"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&CLAMP, &[x[0]], &[Scalar::Real(self.low), Scalar::Real(self.high)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&CLAMP_GRAD, cx.input(0), &cx.grad(0), &[self.low, self.high]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(Rc::new(Clamp { low: -0.5, high: 0.75 }), vec![Input::real(&[5, 3])]).exact(),
        Case::new(Rc::new(Clamp { low: f64::NEG_INFINITY, high: 0.0 }), vec![Input::real(&[5, 3])]).exact(),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[6], &[-2.0f64, -0.5, 0.0, 0.75, f64::INFINITY, f64::NAN])?;
            let y = x.clamp(-0.5, 0.75).to_host::<f64>()?;
            assert!(y[..5] == [-0.5, -0.5, 0.0, 0.75, 0.75] && y[5].is_nan(), "{y:?}");
            Ok(())
        })
        .unwrap();
        assert!(super::Clamp::between(1.0, 0.0).is_err() && super::Clamp::between(f64::NAN, 0.0).is_err());
    }
}
