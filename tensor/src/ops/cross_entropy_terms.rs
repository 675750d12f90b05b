//! sum_exp = sum_j exp(z_j - max) and picked = z_target over the last dim, which may be split: what a cross-entropy is
//! made of. The loss per row is max + ln(sum_exp) - picked.

use super::embedding::check_index;
use super::{Case, Input};
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::op::cross_entropy::{BACKWARD, TERMS};
use shardgrad_kernels::{DType, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// `..m [v], ..m, ..m -> ..m, ..m` on logits z (any float), the maximum of each row (in the accumulator of z, see
/// [`MaxLast`](super::max_last::MaxLast)) and targets (i64, each in 0..v); both results are in the accumulator.
///
/// Differentiable in z only: dz_j = exp(z_j - max) dsum_exp + (dpicked where j is the target); max is a constant, on
/// which the loss does not depend. Both results are pending over the axes that split v.
#[derive(Debug)]
pub struct CrossEntropyTerms;

/// The cotangent of z, linear in those of the two sums jointly.
#[derive(Debug)]
struct CrossEntropyBackward;

/// Where this rank's columns begin, and how many there are in all.
fn columns(local: &Local<'_>) -> [Scalar; 2] {
    let (count, range) = local.label("v");
    [Scalar::Int(range.start as i64), Scalar::Int(count as i64)]
}

impl Op for CrossEntropyTerms {
    fn name(&self) -> &'static str {
        "cross_entropy_terms"
    }

    fn signature(&self) -> &str {
        "..m [v], ..m, ..m -> ..m, ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false, false]
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1, 2], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        check_index(inputs[2])?;
        let accumulator = common_float(&inputs[..1])?.accumulator();
        if inputs[1] != accumulator {
            let text = format!("row maxima of {} for logits of {}", inputs[1], inputs[0]);
            return Err(Error::new(Kind::DType, text).detail("help", "use z.max_last()"));
        }
        Ok(SmallVec::from_elem(accumulator, num_outputs))
    }

    fn forward(&self, local: &Local<'_>, x: &[Piece]) -> Result<Pieces> {
        let x = local.contiguous(x)?;
        local.launch(&TERMS, &[&x[0], &x[1], &x[2]], &columns(local))
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| {
            let args = [cx.input(0), cx.input(1), cx.input(2), &cx.grad(0), &cx.grad(1)];
            Tensor::results(Rc::new(CrossEntropyBackward), &args).remove(0)
        })
    }
}

impl Op for CrossEntropyBackward {
    fn name(&self) -> &'static str {
        "cross_entropy_backward"
    }

    fn signature(&self) -> &str {
        "..m [v], ..m, ..m, ..m, ..m -> ..m [v]"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[3, 4]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false, false, true, true]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&inputs[..1]))
    }

    fn forward(&self, local: &Local<'_>, x: &[Piece]) -> Result<Pieces> {
        let x = local.contiguous(x)?;
        local.launch(&BACKWARD, &[&x[0], &x[1], &x[2], &x[3], &x[4]], &columns(local))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let op = Rc::new(CrossEntropyTerms);
    let case = |rows: &[usize], v: usize| {
        let logits: Vec<usize> = rows.iter().copied().chain([v]).collect();
        Case::new(op.clone(), vec![Input::real(&logits), Input::positive(rows), Input::index(rows, v)])
    };
    vec![case(&[5], 7), case(&[2, 3], 4)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn a_row_by_hand() {
        World::run(Mesh::single(), |rank| {
            let z = Tensor::from_host(rank, &[1, 3], &[2f64.ln(), 0.0, 4f64.ln()])?;
            let target = Tensor::from_host(rank, &[1], &[2i64])?;
            let (sum_exp, picked) = z.cross_entropy_terms(&z.max_last(), &target);
            assert!((sum_exp.item()? - 1.75).abs() < 1e-15);
            assert_eq!(picked.item()?, 4f64.ln());
            Ok(())
        })
        .unwrap();
    }
}
