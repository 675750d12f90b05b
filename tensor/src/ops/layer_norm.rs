//! y = (x - mean) rstd w + b over the last dim, with rstd = 1 / sqrt(mean((x - mean)^2) + eps).

use super::{Case, Input};
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::layer_norm::{BACKWARD, FORWARD};
use shardgrad_kernels::{DType, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// `..m d!, d!, d! -> ..m d!` on x, w and b, with mean and rstd (`..m`, in the accumulator) kept for the backward.
/// One float dtype. The last dim must be whole.
///
/// With h = (x - mean) rstd and u = g w: dx = rstd (u - mean(u) - h mean(u h)), dw = sum of g h, db = sum of g over the
/// rows: both pending over what splits the rows. The backward is one kernel for all three, so a pending w or b is
/// completed, although y is linear in the two.
#[derive(Debug)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f64,
}

/// All three cotangents, linear in g.
#[derive(Debug)]
struct LayerNormBackward;

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn signature(&self) -> &str {
        "..m d!, d!, d! -> ..m d!, ..m, ..m"
    }

    fn num_saved(&self) -> usize {
        2
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1], outputs: &[1, 2] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        Ok(SmallVec::from_slice(&[dtype, dtype.accumulator(), dtype.accumulator()]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let x = local.contiguous(x)?;
        local.launch(&FORWARD, &[&x[0], &x[1], &x[2]], &[Scalar::Real(self.eps)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let args = [cx.input(0), cx.input(1), cx.output(1), cx.output(2), &cx.grad(0)];
        let grads = Tensor::results(Rc::new(LayerNormBackward), &args);
        cx.each(|i| grads[i].clone())
    }
}

impl Op for LayerNormBackward {
    fn name(&self) -> &'static str {
        "layer_norm_backward"
    }

    fn signature(&self) -> &str {
        "..m d!, d!, ..m, ..m, ..m d! -> ..m d!, d!, d!"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[4]]
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(inputs[0], num_outputs))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let x = local.contiguous(x)?;
        local.launch(&BACKWARD, &[&x[0], &x[1], &x[2], &x[3], &x[4]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let op = Rc::new(LayerNorm { eps: 0.5 });
    vec![
        Case::new(op.clone(), vec![real(&[5, 8]), real(&[8]), real(&[8])]),
        Case::new(op, vec![real(&[2, 3, 4]), real(&[4]), real(&[4])]),
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
            // Mean 3, variance 3.5; with eps = 0.5 rstd is 1/2.
            let x = Tensor::from_host(rank, &[1, 4], &[1.0f64, 2.0, 3.0, 6.0])?;
            let w = Tensor::from_host(rank, &[4], &[1.0f64, 2.0, 3.0, 4.0])?;
            let b = Tensor::from_host(rank, &[4], &[10.0f64, 20.0, 30.0, 40.0])?;
            assert_eq!(x.layer_norm(&w, &b, 0.5).to_host::<f64>()?, [9.0, 19.0, 30.0, 46.0]);
            Ok(())
        })
        .unwrap();
    }
}
