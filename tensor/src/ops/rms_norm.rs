//! Root-mean-square normalization over the last dim: y = x rstd w with rstd = 1 / sqrt(mean(x^2) + eps).

use super::layer_norm::{backward_dtypes, residual_cotangent, run_norm};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, common_float};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use shardgrad_kernels::op::rms_norm::{BACKWARD, FORWARD};
use smallvec::SmallVec;
use std::rc::Rc;

/// Root-mean-square normalization over the last dim: y = x rstd w with rstd = 1 / sqrt(mean(x^2) + eps).
///
/// `..m d!, d! -> ..m d!` on x and w of one float dtype; rstd (`..m`, in the accumulator dtype) is saved for backward.
/// The last dim must not be sharded. With `has_residual` x itself, without a copy, is a second result.
///
/// Gradient, with h = x rstd and u = g w: dx = rstd (u - h mean(u h)), dw = the sum of g h over the rows, a partial sum
/// over the axes that shard the rows, and then in the accumulator dtype. One backward kernel computes both and adds the
/// cotangent of the residual to dx. For that a partial w is reduced first.
///
/// Source: Zhang and Sennrich, arXiv 1910.07467.
#[derive(Debug)]
pub struct RmsNorm {
    /// Epsilon, added to the mean square.
    pub eps: f64,
    /// Whether x is returned as a second result, for a residual connection: its gradient is then added inside the backward kernel.
    pub has_residual: bool,
}

/// Backward of [`RmsNorm`]: dx and dw, jointly linear in g and the cotangent of the residual if there is one.
#[derive(Debug)]
struct RmsNormBackward {
    has_residual: bool,
    /// Whether dw is in the accumulator dtype.
    is_wide: bool,
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn signature(&self) -> &str {
        match self.has_residual {
            false => "..m d!, d! -> ..m d!, ..m",
            true => "..m d!, d! -> ..m d!, ..m d!, ..m",
        }
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: if self.has_residual { &[2] } else { &[1] } }
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        let saved = |i: usize| i + self.num_saved() >= num_outputs;
        Ok((0..num_outputs).map(|i| if saved(i) { dtype.accumulator() } else { dtype }).collect())
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        run_norm(local, &FORWARD, x, (self.eps, self.has_residual))
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let (g, residual) = (cx.grad(0), residual_cotangent(cx));
        let [rstd] = self.saved_for_backward().outputs else { unreachable!("rstd is saved") };
        let mut args = vec![cx.input(0), cx.input(1), cx.output(*rstd), &g];
        args.extend(residual);
        let is_wide = !cx.input_layouts[1].replicate().is_empty();
        let op = RmsNormBackward { has_residual: residual.is_some(), is_wide };
        let grads = Tensor::results(Rc::new(op), &args);
        cx.cotangents(|i| grads[i].clone())
    }
}

impl Op for RmsNormBackward {
    fn name(&self) -> &'static str {
        "rms_norm_backward"
    }

    fn signature(&self) -> &str {
        match self.has_residual {
            false => "..m d!, d!, ..m, ..m d! -> ..m d!, d!",
            true => "..m d!, d!, ..m, ..m d!, ..m d! -> ..m d!, d!",
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        if self.has_residual { &[&[3, 4]] } else { &[&[3]] }
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(backward_dtypes(inputs[0], num_outputs, self.is_wide))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let x = local.contiguous(x)?;
        local.launch(&BACKWARD, &x.iter().collect::<SmallVec<[_; 5]>>(), &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let op = |has_residual| Rc::new(RmsNorm { eps: 0.5, has_residual });
    vec![
        Case::new(op(false), vec![real(&[5, 8]), real(&[8])]),
        Case::new(op(false), vec![real(&[2, 3, 4]), real(&[4])]),
        Case::new(op(true), vec![real(&[5, 8]), real(&[8])]),
        Case::new(op(true), vec![real(&[2, 3, 4]), real(&[4])]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Residual;
    use crate::methods::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_a_row_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            // Mean square 3; with eps = 1 rstd is 1/2.
            let x = Tensor::from_host(rank, &[1, 4], &[1.0f64, -1.0, 3.0, 1.0])?;
            let w = Tensor::from_host(rank, &[4], &[1.0f64, 2.0, 3.0, 4.0])?;
            assert_eq!(x.rms_norm(&w, 1.0).to_host::<f64>()?, [0.5, -1.0, 4.5, 2.0]);
            let (same, y) = x.rms_norm_with_residual(&w, 1.0);
            assert_eq!(same.local().buffer.address(), x.local().buffer.address(), "no copy");
            assert_eq!(y.to_host::<f64>()?, [0.5, -1.0, 4.5, 2.0]);
            Ok(())
        })
        .unwrap();
    }
}
