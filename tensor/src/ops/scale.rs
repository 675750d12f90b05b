//! Elementwise multiplication with a number: y = c x.

use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, PlanKey, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::unary::SCALE;
use std::rc::Rc;

/// Elementwise multiplication with a number: y = c x.
///
/// `..m -> ..m`, any float dtype. Linear: a partial sum stays partial. Gradient: dx = c g.
#[doc(alias = "mul_scalar")]
#[derive(Debug)]
pub struct Scale {
    /// c, rounded to the accumulator of the dtype.
    pub factor: f64,
}

/// c x, for the vjps of other ops.
pub(super) fn scale(x: &Tensor, factor: f64) -> Tensor {
    Tensor::apply_one(Scale { factor }, &[x])
}

const SIGNATURE: &str = "..m -> ..m";

impl Op for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn signature(&self) -> &str {
        SIGNATURE
    }

    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<Scale>(SIGNATURE))
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&SCALE, &[x[0]], &[Scalar::Real(self.factor)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| scale(&cx.grad(0), self.factor))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Scale { factor: -1.5 }), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[1.0f64, -2.0])?;
            assert_eq!(x.scale(-0.5).to_host::<f64>()?, [-0.5, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
