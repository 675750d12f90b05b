//! Layer normalization over the last dim: y = (x - mean) rstd w + b with rstd = 1 / sqrt(mean((x - mean)^2) + eps).

use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, common_float};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::layer_norm::{BACKWARD, FORWARD};
use shardgrad_kernels::{DType, Kernel, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// Layer normalization over the last dim: y = (x - mean) rstd w + b with rstd = 1 / sqrt(mean((x - mean)^2) + eps).
///
/// `..m d!, d!, d! -> ..m d!` on x, w and b of one float dtype; mean and rstd (`..m`, in the accumulator dtype) are
/// saved for backward. The last dim must not be sharded. With `has_residual` x itself, without a copy, is a second
/// result.
///
/// Gradient, with h = (x - mean) rstd and u = g w: dx = rstd (u - mean(u) - h mean(u h)), dw = the sum of g h and db =
/// the sum of g over the rows; dw and db are partial sums over the axes that shard the rows, and then in the
/// accumulator dtype. One backward kernel computes all three and adds the cotangent of the residual to dx. For that a
/// partial w or b is reduced first, although y is linear in both.
///
/// Source: Ba et al., arXiv 1607.06450.
#[derive(Debug)]
pub struct LayerNorm {
    /// Epsilon, added to the variance.
    pub eps: f64,
    /// Whether x is returned as a second result, for a residual connection: its gradient is then added inside the backward kernel.
    pub has_residual: bool,
}

/// Backward of [`LayerNorm`]: dx, dw and db, jointly linear in g and the cotangent of the residual if there is one.
#[derive(Debug)]
struct LayerNormBackward {
    has_residual: bool,
    /// Whether dw and db are in the accumulator dtype.
    is_wide: bool,
}

/// The index of the residual among the results of a norm with one: after y.
const RESIDUAL: usize = 1;

/// Runs the kernel of a norm and inserts x as residual if there is one.
pub(super) fn run_norm(
    local: &ForwardContext<'_>,
    kernel: &Kernel,
    x: &[&LocalTensor],
    (eps, has_residual): (f64, bool),
) -> Result<LocalTensors> {
    let inputs = local.contiguous(x)?;
    let written = (0..local.inference.outputs.len()).filter(|i| !(has_residual && *i == RESIDUAL));
    let mut outputs: LocalTensors = written.map(|i| local.output(i)).collect::<Result<_>>()?;
    let inputs: SmallVec<[&LocalTensor; 3]> = inputs.iter().collect();
    launch(
        local.rank,
        kernel,
        &inputs,
        &mut outputs.iter_mut().collect::<SmallVec<[_; 3]>>(),
        &[Scalar::Real(eps)],
    )?;
    if has_residual {
        outputs.insert(RESIDUAL, x[0].clone());
    }
    Ok(outputs)
}

/// The dtypes of dx and of the parameter gradients.
pub(super) fn backward_dtypes(dtype: DType, num_outputs: usize, is_wide: bool) -> DTypes {
    let sums = if is_wide { dtype.accumulator() } else { dtype };
    (0..num_outputs).map(|i| if i == 0 { dtype } else { sums }).collect()
}

/// The cotangent of the residual, if it exists and the cotangent of x is requested.
pub(super) fn residual_cotangent<'a>(cx: &'a Vjp<'_>) -> Option<&'a Tensor> {
    cx.grads.get(RESIDUAL)?.as_ref().filter(|_| cx.needs_input_grad[0])
}

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn signature(&self) -> &str {
        match self.has_residual {
            false => "..m d!, d!, d! -> ..m d!, ..m, ..m",
            true => "..m d!, d!, d! -> ..m d!, ..m d!, ..m, ..m",
        }
    }

    fn num_saved(&self) -> usize {
        2
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: if self.has_residual { &[2, 3] } else { &[1, 2] } }
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
        let [mean, rstd] = self.saved_for_backward().outputs else { unreachable!("mean and rstd are saved") };
        let mut args = vec![cx.input(0), cx.input(1), cx.output(*mean), cx.output(*rstd), &g];
        args.extend(residual);
        let is_wide = !cx.input_layouts[1].replicate().is_empty();
        let op = LayerNormBackward { has_residual: residual.is_some(), is_wide };
        let grads = Tensor::results(Rc::new(op), &args);
        cx.cotangents(|i| grads[i].clone())
    }
}

impl Op for LayerNormBackward {
    fn name(&self) -> &'static str {
        "layer_norm_backward"
    }

    fn signature(&self) -> &str {
        match self.has_residual {
            false => "..m d!, d!, ..m, ..m, ..m d! -> ..m d!, d!, d!",
            true => "..m d!, d!, ..m, ..m, ..m d!, ..m d! -> ..m d!, d!, d!",
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        if self.has_residual { &[&[4, 5]] } else { &[&[4]] }
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(backward_dtypes(inputs[0], num_outputs, self.is_wide))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let x = local.contiguous(x)?;
        local.launch(&BACKWARD, &x.iter().collect::<SmallVec<[_; 6]>>(), &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let op = |has_residual| Rc::new(LayerNorm { eps: 0.5, has_residual });
    vec![
        Case::new(op(false), vec![real(&[5, 8]), real(&[8]), real(&[8])]),
        Case::new(op(false), vec![real(&[2, 3, 4]), real(&[4]), real(&[4])]),
        Case::new(op(true), vec![real(&[5, 8]), real(&[8]), real(&[8])]),
        Case::new(op(true), vec![real(&[2, 3, 4]), real(&[4]), real(&[4])]),
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
            // Mean 3, variance 3.5; with eps = 0.5 rstd is 1/2.
            let x = Tensor::from_host(rank, &[1, 4], &[1.0f64, 2.0, 3.0, 6.0])?;
            let w = Tensor::from_host(rank, &[4], &[1.0f64, 2.0, 3.0, 4.0])?;
            let b = Tensor::from_host(rank, &[4], &[10.0f64, 20.0, 30.0, 40.0])?;
            assert_eq!(x.layer_norm(&w, &b, 0.5).to_host::<f64>()?, [9.0, 19.0, 30.0, 46.0]);
            let (same, y) = x.layer_norm_with_residual(&w, &b, 0.5);
            assert_eq!(same.local().buffer.address(), x.local().buffer.address(), "no copy");
            assert_eq!(y.to_host::<f64>()?, [9.0, 19.0, 30.0, 46.0]);
            Ok(())
        })
        .unwrap();
    }
}
