//! Elementwise cosine: y = cos(x), x in radians.

use super::unary_backward::UnaryBackward;
use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::{COS, COS_GRAD};
use std::rc::Rc;

/// Elementwise cosine: y = cos(x), x in radians.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = -g sin(x). NaN at +-infinity.
#[derive(Debug)]
pub struct Cos;

impl Op for Cos {
    fn name(&self) -> &'static str {
        "cos"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&COS, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| UnaryBackward::of(&COS_GRAD, cx.input(0), &cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Cos), vec![Input::real(&[5, 3])])]
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
            let y = x.cos().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(
                y.iter().zip([1.0, 0.540_302_305_868_139_8, f64::NAN]).all(|(&y, e)| near(y, e)),
                "{y:?}"
            );
            Ok(())
        })
        .unwrap();
    }
}
