//! Softmax over the last dim: y_i = exp(x_i - max x) / sum_j exp(x_j - max x).

use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::softmax::{BACKWARD, FORWARD};
use std::rc::Rc;

/// Softmax over the last dim: y_i = exp(x_i - max x) / sum_j exp(x_j - max x); `..m d! -> ..m d!`.
///
/// Any float dtype. The last dim must not be sharded. Gradient: dx = y (g - sum_j y_j g_j).
#[derive(Debug)]
pub struct Softmax;

/// Backward of [`Softmax`]: the cotangent of x from y and the cotangent of y; linear in the last.
#[derive(Debug)]
struct SoftmaxBackward;

impl Op for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn signature(&self) -> &str {
        "..m d! -> ..m d!"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[0] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&FORWARD, &[&x[0].contiguous(local.rank)?], &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| Tensor::apply_one(SoftmaxBackward, &[cx.output(0), &cx.grad(0)]))
    }
}

impl Op for SoftmaxBackward {
    fn name(&self) -> &'static str {
        "softmax_backward"
    }

    fn signature(&self) -> &str {
        "..m d!, ..m d! -> ..m d!"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let x = local.contiguous(x)?;
        local.launch(&BACKWARD, &[&x[0], &x[1]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let op = Rc::new(Softmax);
    let case = |input| Case::new(op.clone(), vec![input]);
    vec![
        case(Input::real(&[5, 8])),
        case(Input::real(&[2, 3, 4])),
        case(Input::offset(&[5, 8], 1000.0)),
        case(Input::offset(&[5, 8], -1000.0)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use approx::assert_abs_diff_eq;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_rows_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[0.0f64, 3f64.ln(), 800.0, 800.0])?;
            let y = x.softmax().to_host::<f64>()?;
            assert_abs_diff_eq!(y[..], [0.25, 0.75, 0.5, 0.5][..], epsilon = 1e-15);
            Ok(())
        })
        .unwrap();
    }
}
