//! Elementwise exponential linear unit: y = x where x > 0, else c (exp(x) - 1).

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::elementary::{ELU, ELU_GRAD};
use std::rc::Rc;

/// Exponential linear unit, elementwise: y = x where x > 0, else c (exp(x) - 1).
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g where x > 0, else g c exp(x), also at x = 0.
#[derive(Debug)]
pub struct Elu {
    /// c (`alpha` in PyTorch): y approaches -c for x far below 0. Rounded to the accumulator of the dtype.
    pub scale: f64,
}

impl Op for Elu {
    fn name(&self) -> &'static str {
        "elu"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&ELU, &[x[0]], &[Scalar::Real(self.scale)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::with(&ELU_GRAD, cx.input(0), &cx.grad(0), &[self.scale]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Elu { scale: 0.75 }), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[2.0f64, -1.0, f64::NEG_INFINITY])?;
            let y = x.elu(0.5).to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-15;
            assert!(y.iter().zip([2.0, -0.316_060_279_414_278_83, -0.5]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
