//! y = x rstd w over the last dim, with rstd = 1 / sqrt(mean(x^2) + eps).

use super::layer_norm::{backward_dtypes, beside, normalized};
use super::{Case, Input};
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use shardgrad_kernels::op::rms_norm::{BACKWARD, FORWARD};
use smallvec::SmallVec;
use std::rc::Rc;

/// `..m d!, d! -> ..m d!` on x and w, with rstd (`..m`, in the accumulator) kept for the backward. One float dtype. The
/// last dim must be whole. With a residual x itself, the same memory, is the second result.
///
/// With h = x rstd and u = g w: dx = rstd (u - h mean(u h)), dw = sum of g h over the rows: pending over what splits
/// them, and then in the accumulator. A pending w is completed, since the one backward kernel serves both cotangents. It adds the
/// cotangent of the residual to dx.
#[derive(Debug)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f64,
    /// Whether x is a result too, to which what is made of y is added later.
    pub has_residual: bool,
}

/// Both cotangents, linear in g and, together with it, in the cotangent of the residual if there is one.
#[derive(Debug)]
struct RmsNormBackward {
    has_residual: bool,
    /// Whether dw is in the accumulator.
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

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1], outputs: if self.has_residual { &[2] } else { &[1] } }
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
        let [rstd] = self.keeps().outputs else { unreachable!("one output is kept") };
        let mut args = vec![cx.input(0), cx.input(1), cx.output(*rstd), &g];
        args.extend(residual);
        let is_wide = !cx.input_layouts[1].replicate().is_empty();
        let op = RmsNormBackward { has_residual: residual.is_some(), is_wide };
        let grads = Tensor::results(Rc::new(op), &args);
        cx.each(|i| grads[i].clone())
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

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
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
    use crate::residual::Residual;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn a_row_by_hand() {
        World::run(Mesh::single(), |rank| {
            // Mean square 3; with eps = 1 rstd is 1/2.
            let x = Tensor::from_host(rank, &[1, 4], &[1.0f64, -1.0, 3.0, 1.0])?;
            let w = Tensor::from_host(rank, &[4], &[1.0f64, 2.0, 3.0, 4.0])?;
            assert_eq!(x.rms_norm(&w, 1.0).to_host::<f64>()?, [0.5, -1.0, 4.5, 2.0]);
            let (same, y) = x.rms_norm_beside(&w, 1.0);
            assert_eq!(same.piece().buffer.address(), x.piece().buffer.address(), "no copy");
            assert_eq!(y.to_host::<f64>()?, [0.5, -1.0, 4.5, 2.0]);
            Ok(())
        })
        .unwrap();
    }
}
