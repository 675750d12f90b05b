//! Elementwise negation: y = -x.

use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::unary::NEG;
use std::rc::Rc;

/// Elementwise negation: y = -x.
///
/// `..m -> ..m`, any float dtype. Linear: a partial sum stays partial. Gradient: dx = -g.
#[doc(alias = "negative")]
#[derive(Debug)]
pub struct Neg;

/// -x, for the vjps of other ops.
pub(super) fn neg(x: &Tensor) -> Tensor {
    Tensor::apply_one(Neg, &[x])
}

impl Op for Neg {
    fn name(&self) -> &'static str {
        "neg"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&NEG, &[x[0]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| neg(&cx.grad(0)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Neg), vec![Input::real(&[5, 3])]).exact()]
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
            assert_eq!(x.neg().to_host::<f64>()?, [-1.0, 2.0]);
            Ok(())
        })
        .unwrap();
    }
}
