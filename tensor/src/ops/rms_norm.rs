//! y = x rstd w over the last dim, with rstd = 1 / sqrt(mean(x^2) + eps).

use super::{Case, Input};
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::rms_norm::{BACKWARD, FORWARD};
use shardgrad_kernels::{DType, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// `..m d!, d! -> ..m d!` on x and w, with rstd (`..m`, in the accumulator) kept for the backward. One float dtype. The
/// last dim must be whole.
///
/// With h = x rstd and u = g w: dx = rstd (u - h mean(u h)), dw = sum of g h over the rows: pending over what splits
/// them. A pending w is completed, since the one backward kernel serves both cotangents.
#[derive(Debug)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f64,
}

/// Both cotangents, linear in g.
#[derive(Debug)]
struct RmsNormBackward;

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn signature(&self) -> &str {
        "..m d!, d! -> ..m d!, ..m"
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1], outputs: &[1] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        Ok(SmallVec::from_slice(&[dtype, dtype.accumulator()]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let x = local.contiguous(x)?;
        local.launch(&FORWARD, &[&x[0], &x[1]], &[Scalar::Real(self.eps)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let args = [cx.input(0), cx.input(1), cx.output(1), &cx.grad(0)];
        let grads = Tensor::results(Rc::new(RmsNormBackward), &args);
        cx.each(|i| grads[i].clone())
    }
}

impl Op for RmsNormBackward {
    fn name(&self) -> &'static str {
        "rms_norm_backward"
    }

    fn signature(&self) -> &str {
        "..m d!, d!, ..m, ..m d! -> ..m d!, d!"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[3]]
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(inputs[0], num_outputs))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let x = local.contiguous(x)?;
        local.launch(&BACKWARD, &[&x[0], &x[1], &x[2], &x[3]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let op = Rc::new(RmsNorm { eps: 0.5 });
    vec![
        Case::new(op.clone(), vec![real(&[5, 8]), real(&[8])]),
        Case::new(op, vec![real(&[2, 3, 4]), real(&[4])]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn a_row_by_hand() {
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
