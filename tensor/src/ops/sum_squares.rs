//! y = the sum of the squares of all elements, in f64.

use super::{Case, Input};
use crate::op::{DTypes, Local, Op, Pieces, common_float};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use shardgrad_kernels::op::reduce::SUM_SQUARES;
use smallvec::SmallVec;

/// `..m -> `: any float; the result is an f64 scalar, pending over the axes that split x. Not linear: a pending x is
/// completed. Not differentiable: it serves norms; for a loss use `x.square().sum()`.
#[derive(Debug)]
pub struct SumSquares;

impl Op for SumSquares {
    fn name(&self) -> &'static str {
        "sum_squares"
    }

    fn signature(&self) -> &str {
        "..m -> "
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        common_float(inputs)?;
        Ok(SmallVec::from_slice(&[DType::F64]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&SUM_SQUARES, &[x[0]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let op = std::rc::Rc::new(SumSquares);
    vec![
        Case::new(op.clone(), vec![Input::real(&[5, 3])]).exact(),
        Case::new(op, vec![Input::real(&[])]).exact(),
    ]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f32, -2.0, 3.0, 0.5])?;
            assert_eq!(x.sum_squares().to_host::<f64>()?, [14.25]);
            Ok(())
        })
        .unwrap();
    }
}
