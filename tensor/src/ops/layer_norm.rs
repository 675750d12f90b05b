//! y = (x - mean) rstd w + b over the last dim, with rstd = 1 / sqrt(mean((x - mean)^2) + eps).

use super::{Case, Input};
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::layer_norm::{BACKWARD, FORWARD};
use shardgrad_kernels::{DType, Kernel, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// `..m d!, d!, d! -> ..m d!` on x, w and b, with mean and rstd (`..m`, in the accumulator) kept for the backward.
/// One float dtype. The last dim must be whole. With a residual x itself, the same memory, is the second result.
///
/// With h = (x - mean) rstd and u = g w: dx = rstd (u - mean(u) - h mean(u h)), dw = sum of g h, db = sum of g over the
/// rows: both pending over what splits the rows, and then in the accumulator. The backward is one kernel for all three, so a
/// pending w or b is completed, although y is linear in the two. It adds the cotangent of the residual to dx.
#[derive(Debug)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f64,
    /// Whether x is a result too, to which what is made of y is added later.
    pub has_residual: bool,
}

/// All three cotangents, linear in g and, together with it, in the cotangent of the residual if there is one.
#[derive(Debug)]
struct LayerNormBackward {
    has_residual: bool,
    /// Whether dw and db are in the accumulator.
    is_wide: bool,
}

/// Where the residual is among the results of a norm that has one: behind y.
const RESIDUAL: usize = 1;

/// The results of a norm: what its kernel writes and, if there is a residual, x as it is.
pub(super) fn normalized(
    local: &Local<'_>,
    kernel: &Kernel,
    x: &[&Piece],
    (eps, has_residual): (f64, bool),
) -> Result<Pieces> {
    let inputs = local.contiguous(x)?;
    let written = (0..local.inference.outputs.len()).filter(|i| !(has_residual && *i == RESIDUAL));
    let mut outputs: Pieces = written.map(|i| local.output(i)).collect::<Result<_>>()?;
    let inputs: SmallVec<[&Piece; 3]> = inputs.iter().collect();
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

/// The dtypes of dx and of sums over rows.
pub(super) fn backward_dtypes(dtype: DType, num_outputs: usize, is_wide: bool) -> DTypes {
    let sums = if is_wide { dtype.accumulator() } else { dtype };
    (0..num_outputs).map(|i| if i == 0 { dtype } else { sums }).collect()
}

/// The cotangent of the residual, if there is one that somebody asks for.
pub(super) fn beside<'a>(cx: &'a Vjp<'_>) -> Option<&'a Tensor> {
    cx.grads.get(RESIDUAL)?.as_ref().filter(|_| cx.wanted[0])
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

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1], outputs: if self.has_residual { &[2, 3] } else { &[1, 2] } }
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        let saved = |i: usize| i + self.num_saved() >= num_outputs;
        Ok((0..num_outputs).map(|i| if saved(i) { dtype.accumulator() } else { dtype }).collect())
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        normalized(local, &FORWARD, x, (self.eps, self.has_residual))
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let (g, residual) = (cx.grad(0), beside(cx));
        let [mean, rstd] = self.keeps().outputs else { unreachable!("two outputs are kept") };
        let mut args = vec![cx.input(0), cx.input(1), cx.output(*mean), cx.output(*rstd), &g];
        args.extend(residual);
        let is_wide = !cx.input_layouts[1].replicate().is_empty();
        let op = LayerNormBackward { has_residual: residual.is_some(), is_wide };
        let grads = Tensor::results(Rc::new(op), &args);
        cx.each(|i| grads[i].clone())
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

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
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
    use crate::residual::Residual;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn a_row_by_hand() {
        World::run(Mesh::single(), |rank| {
            // Mean 3, variance 3.5; with eps = 0.5 rstd is 1/2.
            let x = Tensor::from_host(rank, &[1, 4], &[1.0f64, 2.0, 3.0, 6.0])?;
            let w = Tensor::from_host(rank, &[4], &[1.0f64, 2.0, 3.0, 4.0])?;
            let b = Tensor::from_host(rank, &[4], &[10.0f64, 20.0, 30.0, 40.0])?;
            assert_eq!(x.layer_norm(&w, &b, 0.5).to_host::<f64>()?, [9.0, 19.0, 30.0, 46.0]);
            let (same, y) = x.layer_norm_beside(&w, &b, 0.5);
            assert_eq!(same.piece().buffer.address(), x.piece().buffer.address(), "no copy");
            assert_eq!(y.to_host::<f64>()?, [9.0, 19.0, 30.0, 46.0]);
            Ok(())
        })
        .unwrap();
    }
}
