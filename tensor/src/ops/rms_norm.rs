//! Root-mean-square normalization over the last dim: y = x rstd w with rstd = 1 / sqrt(mean(x^2) + eps).

use super::layer_norm::{NormBackward, has_heads, norm_dtypes};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, PlanKey, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::rms_norm::{BACKWARD, FORWARD};
use shardgrad_kernels::{DType, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

const SIGNATURE: &str = "..m d!, d! -> ..m d!, ..m";

/// Root-mean-square normalization over the last dim: y = x rstd w with rstd = 1 / sqrt(mean(x^2) + eps).
///
/// `..m d!, d! -> ..m d!` on x and w of one float dtype; rstd (`..m`, in the accumulator dtype) is saved for backward.
/// The last dim must not be sharded.
///
/// Gradient, with h = x rstd and u = g w: dx = rstd (u - h mean(u h)), dw = the sum of g h over the rows, a partial sum
/// over the axes that shard the rows, and then in the accumulator dtype. One backward kernel computes both and adds dx to the
/// gradient of x from its other uses, such as a residual connection. For that a partial w is reduced first.
///
/// Source: Zhang and Sennrich, arXiv 1910.07467.
#[derive(Debug)]
pub struct RmsNorm {
    /// Epsilon, added to the mean square.
    pub eps: f64,
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn signature(&self) -> &str {
        SIGNATURE
    }

    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<RmsNorm>(SIGNATURE))
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: &[1] }
    }

    fn accumulates_in_place(&self) -> bool {
        true
    }

    fn rounds_sums_once(&self) -> bool {
        true
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        norm_dtypes(inputs, num_outputs)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let x = local.contiguous(x)?;
        local.launch(&FORWARD, &x.iter().collect::<SmallVec<[_; 2]>>(), &[Scalar::Real(self.eps)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = NormBackward::of_rms_norm(cx.widens_partial_sums(1), cx.input(0).layout().ndim());
        let args = [cx.input(0), cx.input(1), cx.output(1), &cx.grad(0)];
        let grads = cx.apply(&op, &args, &[cx.accumulator(0)]);
        cx.cotangents(|i| grads[i].clone())
    }
}

impl NormBackward {
    /// dx and dw, linear in g, for an x of `ndim` dims.
    pub(crate) fn of_rms_norm(is_wide: bool, ndim: usize) -> NormBackward {
        NormBackward {
            name: "rms_norm_backward",
            signature: "..m d!, d!, ..m, ..m d! -> ..m d!, d!",
            linear_in: &[&[3]],
            kernel: &BACKWARD,
            is_wide,
            has_heads: has_heads(ndim),
        }
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let op = || Rc::new(RmsNorm { eps: 0.5 });
    vec![
        Case::new(op(), vec![real(&[5, 8]), real(&[8])]),
        Case::new(op(), vec![real(&[2, 3, 4]), real(&[4])]),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_a_row_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            // Mean square 3; with eps = 1 rstd is 1/2.
            let x = Tensor::from_host(rank, &[1, 4], &[1.0f64, -1.0, 3.0, 1.0])?;
            let w = Tensor::from_host(rank, &[4], &[1.0f64, 2.0, 3.0, 4.0])?;
            assert_eq!(x.rms_norm(&w, 1.0).to_host::<f64>()?, [0.5, -1.0, 4.5, 2.0]);
            Ok(())
        })
        .unwrap();
    }
}
