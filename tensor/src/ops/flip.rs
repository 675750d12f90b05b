//! Reversal along a dim: y_i = x_(n - 1 - i) for n elements.

use super::gather::outer_dim_inner;
use super::labels::{check_dim, dim_labels_with};
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::index::GATHER;
use shardgrad_kernels::{DType, Scalar};
use std::rc::Rc;

/// Reverses a tensor along a dim: y_i = x_(n - 1 - i) for n elements; `a x! c -> a x! c`.
///
/// Any dtype. The dim must not be sharded. Linear. Gradient: dx = g reversed.
#[doc(alias = "reverse")]
#[derive(Debug)]
pub struct Flip {
    signature: String,
    dim: usize,
}

impl Flip {
    /// The reversal along dim `dim` of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range.
    pub fn along(ndim: usize, dim: usize) -> Result<Rc<dyn Op>> {
        check_dim("flip", ndim, dim)?;
        Ok(Flip::of(ndim, dim))
    }

    fn of(ndim: usize, dim: usize) -> Rc<dyn Op> {
        let tensor = dim_labels_with(ndim, dim, "x!");
        Rc::new(Flip { signature: format!("{tensor} -> {tensor}"), dim })
    }
}

impl Op for Flip {
    fn name(&self) -> &'static str {
        "flip"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs.into())
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let x = x[0].contiguous(local.rank)?;
        let n = x.view.shape[self.dim] as i64;
        let index = LocalTensor::upload(local.rank, &[n as usize], &(0..n).rev().collect::<Vec<i64>>())?;
        let x = x.with_view(outer_dim_inner(&x.view, self.dim));
        let mut out = local.output(0)?;
        let three_dims = outer_dim_inner(&out.view, self.dim);
        let view = std::mem::replace(&mut out.view, three_dims.into());
        launch(local.rank, &GATHER, &[&x, &index], &mut [&mut out], &[Scalar::Int(0), Scalar::Int(n)])?;
        out.view = view;
        Ok([out].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = Flip::of(cx.output_layouts[0].ndim(), self.dim);
        cx.cotangents(|_| Tensor::apply_one(op.clone(), &[&cx.grad(0)]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |dim, shape: &[usize]| Case::new(Flip::of(shape.len(), dim), vec![Input::real(shape)]).exact();
    vec![case(1, &[5, 7]), case(0, &[3, 5]), case(1, &[2, 4, 3]), case(0, &[0, 3])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::shaping::Shaping;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert_eq!(x.flip(1).to_host::<i64>()?, [3, 2, 1, 6, 5, 4]);
            assert_eq!(x.flip(0).to_host::<i64>()?, [4, 5, 6, 1, 2, 3]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn dim_out_of_range_is_refused() {
        assert!(Flip::along(2, 2).is_err());
    }
}
