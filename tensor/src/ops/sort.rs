//! The elements of a dim in order, with the places where they stood.

use super::gather::ScatterAdd;
use super::labels::{check_dim, letters_with};
use super::{Case, Input};
use crate::dim::Dim;
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::sort::SORT;
use shardgrad_kernels::{DType, Dims, Scalar};
use std::rc::Rc;

/// `a x! c -> a x! c, a x! c`: values like x (any dtype) and places (i64). dx = g of the values, each at its place.
///
/// The order is stable in both directions: of equal elements (0 and -0 are equal) the one with the lower place stands
/// first. Not-a-number is larger than all numbers and equal to itself: last ascending, first descending.
#[derive(Debug)]
pub struct Sort {
    signature: String,
    dim: usize,
    descending: bool,
}

impl Sort {
    /// Along dim `dim` of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// Of kind `Kind::Shape` if there is no such dim.
    pub fn along(ndim: usize, dim: usize, descending: bool) -> Result<Rc<dyn Op>> {
        check_dim("sort", ndim, dim)?;
        let tensor = letters_with(ndim, dim, "x!");
        Ok(Rc::new(Sort { signature: format!("{tensor} -> {tensor}, {tensor}"), dim, descending }))
    }
}

/// The first `count` elements along a dim in order, and their places.
pub(super) fn ordered(
    local: &Local<'_>,
    x: &Piece,
    dim: usize,
    count: usize,
    descending: bool,
) -> Result<Pieces> {
    let ndim = x.view.ndim();
    let last: Dims = (0..ndim).filter(|&d| d != dim).chain([dim]).collect();
    let x = x.viewed(x.view.permute(&last)).contiguous(local.rank)?;
    let mut shape = x.view.shape.clone();
    shape[ndim - 1] = count;
    let mut values = Piece::alloc(local.rank, x.dtype, &shape)?;
    let mut places = Piece::alloc(local.rank, DType::I64, &shape)?;
    let scalars = [Scalar::Int(descending.into())];
    launch(local.rank, &SORT, &[&x], &mut [&mut values, &mut places], &scalars)?;
    let back: Dims = (0..dim).chain([ndim - 1]).chain(dim..ndim - 1).collect();
    Ok([values, places].into_iter().map(|p| p.viewed(p.view.permute(&back))).collect())
}

/// The cotangent of what was ordered: g of the values, each at its place.
pub(super) fn unordered(cx: &Vjp<'_>, dim: usize) -> Cotangents {
    let target = Dim::whole(cx.input_layouts[0].extent(dim));
    let op = ScatterAdd::of(cx.input_layouts[0].ndim(), dim, target, false);
    cx.each(|i| Tensor::apply_with(op.clone(), &[&cx.grad(0), cx.output(1)], cx.goal(i)))
}

impl Op for Sort {
    fn name(&self) -> &'static str {
        "sort"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[], outputs: &[1] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok([inputs[0], DType::I64][..].into())
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        ordered(local, x[0], self.dim, x[0].view.shape[self.dim], self.descending)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        unordered(cx, self.dim)
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
    use super::*;
    use crate::indexing::Indexing;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn orders_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[3i64, 1, 3, -5, 0, -7])?;
            let (values, places) = x.sort(1, false);
            assert_eq!(values.to_host::<i64>()?, [1, 3, 3, -7, -5, 0]);
            assert_eq!(places.to_host::<i64>()?, [1, 0, 2, 2, 0, 1]);
            assert_eq!(x.argsort(1, true).to_host::<i64>()?, [0, 2, 1, 1, 0, 2]);
            assert_eq!(x.sort(0, false).0.to_host::<i64>()?, [-5, 0, -7, 3, 1, 3]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn not_a_number_is_larger_than_all_numbers() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[f32::NAN, f32::INFINITY, 0.0, -0.0])?;
            assert_eq!(x.argsort(0, false).to_host::<i64>()?, [2, 3, 1, 0]);
            assert_eq!(x.argsort(0, true).to_host::<i64>()?, [0, 1, 2, 3]);
            Ok(())
        })
        .unwrap();
    }
}
