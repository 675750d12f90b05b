//! Elements of a dim in order, with the indices of their source positions.

use super::gather::ScatterAdd;
use super::labels::{check_dim, dim_labels_with};
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::sort::SORT;
use shardgrad_kernels::{DType, Dims, Scalar};
use std::rc::Rc;

/// Sorts along a dim: values (any dtype) and the i64 indices of their source positions; `a x! c -> a x! c, a x! c`.
///
/// The sort is stable in both directions: of equal elements (0 and -0 are equal) the one with the lower index comes
/// first. NaN is larger than all numbers and equal to itself: last ascending, first descending. The dim must not be
/// sharded. Gradient: dx = g of the values, scattered to the source positions.
#[doc(alias = "argsort")]
#[derive(Debug)]
pub struct Sort {
    signature: String,
    dim: usize,
    descending: bool,
}

impl Sort {
    /// The sort along dim `dim` of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range.
    pub fn along(ndim: usize, dim: usize, descending: bool) -> Result<Rc<dyn Op>> {
        check_dim("sort", ndim, dim)?;
        let tensor = dim_labels_with(ndim, dim, "x!");
        Ok(Rc::new(Sort { signature: format!("{tensor} -> {tensor}, {tensor}"), dim, descending }))
    }
}

/// The first `count` elements along a dim in sorted order, and the indices of their source positions.
pub(super) fn sort_prefix(
    local: &ForwardContext<'_>,
    x: &LocalTensor,
    dim: usize,
    count: usize,
    descending: bool,
) -> Result<LocalTensors> {
    let sorted = sort_rows(local, &dim_last(local, x, dim)?, count, descending)?;
    Ok(sorted.into_iter().map(|sorted| dim_back(&sorted, dim)).collect())
}

/// A local tensor with a dim as the last one, contiguous.
pub(super) fn dim_last(local: &ForwardContext<'_>, x: &LocalTensor, dim: usize) -> Result<LocalTensor> {
    let last: Dims = (0..x.view.ndim()).filter(|&d| d != dim).chain([dim]).collect();
    x.with_view(x.view.permute(&last)).contiguous(local.rank)
}

/// The inverse of [`dim_last`].
pub(super) fn dim_back(x: &LocalTensor, dim: usize) -> LocalTensor {
    let ndim = x.view.ndim();
    let back: Dims = (0..dim).chain([ndim - 1]).chain(dim..ndim - 1).collect();
    x.with_view(x.view.permute(&back))
}

/// The first `count` elements of the rows of a contiguous local tensor in sorted order, and their indices in the row.
pub(super) fn sort_rows(
    local: &ForwardContext<'_>,
    x: &LocalTensor,
    count: usize,
    descending: bool,
) -> Result<[LocalTensor; 2]> {
    let mut shape = x.view.shape.clone();
    *shape.last_mut().expect("a sorted tensor has a dim") = count;
    let mut values = LocalTensor::alloc(local.rank, x.dtype, &shape)?;
    let mut indices = LocalTensor::alloc(local.rank, DType::I64, &shape)?;
    let scalars = [Scalar::Int(descending.into())];
    launch(local.rank, &SORT, &[x], &mut [&mut values, &mut indices], &scalars)?;
    Ok([values, indices])
}

/// The cotangent of the sorted tensor: g of the values, scattered to the source positions.
pub(super) fn sort_vjp(cx: &Vjp<'_>, dim: usize) -> Cotangents {
    let sorted = &cx.input_layouts[0];
    let op = ScatterAdd::into_shards(sorted.ndim(), dim, sorted.dims()[dim]);
    cx.cotangents(|i| cx.cotangent(i, op.clone(), &[&cx.grad(0), cx.output(1)]))
}

impl Op for Sort {
    fn name(&self) -> &'static str {
        "sort"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[1] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok([inputs[0], DType::I64][..].into())
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        sort_prefix(local, x[0], self.dim, x[0].view.shape[self.dim], self.descending)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        sort_vjp(cx, self.dim)
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |dim, descending, input: Input| {
        let op = Sort::along(input.shape().len(), dim, descending).expect("a dim of the case");
        Case::new(op, vec![input]).exact()
    };
    vec![
        case(1, false, Input::distinct(&[5, 7])),
        case(0, true, Input::distinct(&[5, 3])),
        case(1, true, Input::distinct(&[2, 5, 3])),
        case(1, false, Input::index(&[3, 6], 4)),
        case(0, false, Input::distinct(&[0, 3])),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::indexing::Indexing;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_orders_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[3i64, 1, 3, -5, 0, -7])?;
            let (values, indices) = x.sort(1, false);
            assert_eq!(values.to_host::<i64>()?, [1, 3, 3, -7, -5, 0]);
            assert_eq!(indices.to_host::<i64>()?, [1, 0, 2, 2, 0, 1]);
            assert_eq!(x.argsort(1, true).to_host::<i64>()?, [0, 2, 1, 1, 0, 2]);
            assert_eq!(x.sort(0, false).0.to_host::<i64>()?, [-5, 0, -7, 3, 1, 3]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn nan_is_larger_than_all_numbers() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[f32::NAN, f32::INFINITY, 0.0, -0.0])?;
            assert_eq!(x.argsort(0, false).to_host::<i64>()?, [2, 3, 1, 0]);
            assert_eq!(x.argsort(0, true).to_host::<i64>()?, [0, 1, 2, 3]);
            Ok(())
        })
        .unwrap();
    }
}
