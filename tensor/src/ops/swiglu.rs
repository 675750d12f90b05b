//! SwiGLU activation: y = silu(g) u with silu(g) = g / (1 + exp(-g)), elementwise.

use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::swiglu::{BACKWARD, FORWARD};
use std::rc::Rc;

/// SwiGLU activation, elementwise: y = silu(g) u with silu(g) = g / (1 + exp(-g)).
///
/// `..m, ..m -> ..m` on gate g and u of one float dtype. Gradient, with s = 1 / (1 + exp(-g)): dg = dy u s (1 + g (1 -
/// s)), du = dy g s. One backward kernel computes both, so a partial u is reduced first, although y is linear in u.
///
/// Source: Shazeer, arXiv 2002.05202.
#[doc(alias = "silu_and_mul")]
#[doc(alias = "gated linear unit")]
#[doc(alias = "GLU")]
#[derive(Debug)]
pub struct SwiGlu;

/// Backward of [`SwiGlu`]: dg and du, linear in dy.
#[derive(Debug)]
struct SwiGluBackward;

impl Op for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn signature(&self) -> &str {
        "..m, ..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&FORWARD, &[x[0], x[1]], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let grads = Tensor::apply(SwiGluBackward, &[cx.input(0), cx.input(1), &cx.grad(0)]);
        cx.cotangents(|i| grads[i].clone())
    }
}

impl Op for SwiGluBackward {
    fn name(&self) -> &'static str {
        "swiglu_backward"
    }

    fn signature(&self) -> &str {
        "..m, ..m, ..m -> ..m, ..m"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[2]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let x = local.contiguous(x)?;
        local.launch(&BACKWARD, &[&x[0], &x[1], &x[2]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    vec![
        Case::new(Rc::new(SwiGlu), vec![real(&[5, 3]), real(&[5, 3])]),
        Case::new(Rc::new(SwiGlu), vec![real(&[2, 1, 8]), real(&[2, 1, 8])]),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use approx::abs_diff_eq;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            // e^-g = 1/3 where g = ln 3, so that s is 3/4.
            let g = Tensor::from_host(rank, &[2], &[3f64.ln(), 0.0])?;
            let u = Tensor::from_host(rank, &[2], &[2.0, 5.0])?;
            let y = g.swiglu(&u).to_host::<f64>()?;
            assert!(abs_diff_eq!(y[0], 1.5 * 3f64.ln(), epsilon = 1e-15) && y[1] == 0.0, "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
