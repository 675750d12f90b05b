//! y = a where x < a, b where x > b, else x.

use super::labels::misuse;
use super::pointwise::PointwiseBackward;
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::elementary::{CLAMP, CLAMP_GRAD};
use std::rc::Rc;

/// `..m -> ..m`, any float. dx = g where a <= x <= b, the edges included, else 0. Not-a-number stays, with
/// dx = 0.
#[derive(Debug)]
pub struct Clamp {
    /// a, rounded to the accumulator of the dtype; negative infinity for no limit.
    pub low: f64,
    /// b, not below a; infinity for no limit.
    pub high: f64,
}

impl Clamp {
    /// The limits.
    ///
    /// # Errors
    /// `Kind::Shape` if they are no range.
    pub fn between(low: f64, high: f64) -> Result<Rc<dyn Op>> {
        if low <= high {
            return Ok(Rc::new(Clamp { low, high }));
        }
        misuse(format!("clamp: {low} to {high} is no range"))
    }
}

impl Op for Clamp {
    fn name(&self) -> &'static str {
        "clamp"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&CLAMP, &[x[0]], &[Scalar::Real(self.low), Scalar::Real(self.high)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| PointwiseBackward::with(&CLAMP_GRAD, cx.input(0), &cx.grad(0), &[self.low, self.high]))
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
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[6], &[-2.0f64, -0.5, 0.0, 0.75, f64::INFINITY, f64::NAN])?;
            let y = x.clamp(-0.5, 0.75).to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(y.iter().zip([-0.5, -0.5, 0.0, 0.75, 0.75, f64::NAN]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
        assert!(super::Clamp::between(1.0, 0.0).is_err() && super::Clamp::between(f64::NAN, 0.0).is_err());
    }
}
