//! Elementwise y = exp(x) - 1, accurate near 0.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::{EXPM1, EXPM1_GRAD};
use std::rc::Rc;

/// Elementwise exponential minus one, accurate near 0: y = exp(x) - 1.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g (y + 1). -1 and infinity at -infinity and infinity.
#[derive(Debug)]
pub struct Expm1;

impl Op for Expm1 {
    fn name(&self) -> &'static str {
        "expm1"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&EXPM1, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&EXPM1_GRAD, cx.output(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Expm1), vec![Input::real(&[5, 3])])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[0.0f64, 1e-9, f64::NEG_INFINITY, f64::INFINITY])?;
            let y = x.expm1().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-24;
            assert!(
                y.iter().zip([0.0, 1.000_000_000_5e-9, -1.0, f64::INFINITY]).all(|(&y, e)| near(y, e)),
                "{y:?}"
            );
            Ok(())
        })
        .unwrap();
    }
}
