//! Sum of the squares of all elements, in f64: the squared L2 norm.

use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{DTypes, ForwardContext, LocalTensors, Op, common_float};
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use shardgrad_kernels::op::reduce::SUM_SQUARES;
use smallvec::SmallVec;

/// Sum of the squares of all elements as an f64 scalar, the squared L2 norm: `..m -> `.
///
/// Any float dtype. The result is a partial sum over the mesh axes that shard x. Not linear: a partial x is reduced
/// first. Not differentiable, since it serves gradient norms; for a loss use `x.square().sum()`.
#[doc(alias = "norm")]
#[doc(alias = "grad_norm")]
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

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
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
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f32, -2.0, 3.0, 0.5])?;
            assert_eq!(x.sum_squares().to_host::<f64>()?, [14.25]);
            Ok(())
        })
        .unwrap();
    }
}
