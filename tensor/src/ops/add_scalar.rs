//! Elementwise addition of a number: y = x + c.

use super::{Case, Input};
use crate::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, PlanKey, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::unary::ADD_SCALAR;
use std::rc::Rc;

/// Elementwise addition of a number: y = x + c.
///
/// `..m -> ..m`, any float dtype. Gradient: dx = g. Declared not linear: each rank of a partial sum would add c, so a
/// partial x is reduced first.
#[doc(alias = "add")]
#[derive(Debug)]
pub struct AddScalar {
    /// c, rounded to the accumulator of the dtype.
    pub term: f64,
}

const SIGNATURE: &str = "..m -> ..m";

impl Op for AddScalar {
    fn name(&self) -> &'static str {
        "add_scalar"
    }

    fn signature(&self) -> &str {
        SIGNATURE
    }

    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<AddScalar>(SIGNATURE))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&ADD_SCALAR, &[x[0]], &[Scalar::Real(self.term)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| cx.grad(0))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(AddScalar { term: 0.75 }), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[1.0f64, -2.0])?;
            assert_eq!(x.add_scalar(0.5).to_host::<f64>()?, [1.5, -1.5]);
            Ok(())
        })
        .unwrap();
    }
}
