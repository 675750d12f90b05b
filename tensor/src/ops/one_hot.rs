//! One-hot encoding: y_(.., j) = 1 where j is the index, else 0.

use super::embedding::check_index;
use super::labels::unsplit;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::op::{DTypes, ForwardContext, LocalTensors, Op, OutputLayouts};
use shardgrad_dist::Result;
use shardgrad_kernels::op::one_hot::ONE_HOT;
use shardgrad_kernels::{DType, Scalar};
use smallvec::smallvec;
use std::rc::Rc;

/// One-hot encoding of indices: y_(.., j) = 1 where j is the index, else 0; `..m -> ..m v`.
///
/// Indices are i64, each in 0..v; the result has any dtype. Not differentiable. The new dim is unsharded, unless a
/// layout is requested ([`Vjp::cotangent`](crate::op::Vjp::cotangent)): then each rank makes its range of
/// the dim. An index outside of 0..v is an error of kind `Kind::Data`.
#[derive(Debug)]
pub struct OneHot {
    /// v (`num_classes` in PyTorch): the extent of the new dim.
    pub count: usize,
    /// The dtype of the result.
    pub dtype: DType,
}

impl Op for OneHot {
    fn name(&self) -> &'static str {
        "one_hot"
    }

    fn signature(&self) -> &str {
        "..m -> ..m v"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_index(inputs[0])?;
        Ok([self.dtype][..].into())
    }

    fn default_outputs(&self, args: &[&Layout], dtypes: &[DType]) -> OutputLayouts {
        let mut shape = args[0].shape();
        shape.push(self.count);
        smallvec![unsplit(args[0], dtypes[0], &shape)]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let (count, range) = local.label("v");
        let scalars = [Scalar::Int(range.start as i64), Scalar::Int(count as i64)];
        local.launch(&ONE_HOT, &[&x[0].contiguous(local.rank)?], &scalars)
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |count, dtype, input| Case::fixed_shape(Rc::new(OneHot { count, dtype }), vec![input]).exact();
    vec![
        case(7, DType::F32, Input::index(&[5], 7)),
        case(3, DType::Bool, Input::index(&[2, 5], 3)),
        case(2, DType::F32, Input::index(&[], 2)),
        case(1, DType::F32, Input::index(&[1, 1], 1)),
        case(0, DType::F32, Input::index(&[0], 1)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::indexing::Indexing;
    use crate::op::{OutputOptions, apply_first};
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};
    use std::panic::Location;

    #[test]
    fn matches_rows_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let index = Tensor::from_host(rank, &[2], &[2i64, 0])?;
            assert_eq!(index.one_hot(3, DType::F32).to_host::<f32>()?, [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn requested_sharding_of_the_new_dim_is_used() {
        let mesh = Mesh::parse("a=2").unwrap();
        World::run(mesh.clone(), |rank| {
            let index = Tensor::from_host(rank, &[2], &[2i64, 0])?;
            let want = Layout::parse("bool[2, 3@a]", &mesh)?;
            let op = OneHot { count: 3, dtype: DType::Bool };
            let options = OutputOptions { layouts: &[Some(want.clone())], ..OutputOptions::default() };
            let y = apply_first(&op, &[&index], options, Location::caller());
            assert_eq!(*y.layout(), want);
            assert_eq!(y.to_host::<u8>()?, [0, 0, 1, 1, 0, 0]);
            Ok(())
        })
        .unwrap();
    }
}
