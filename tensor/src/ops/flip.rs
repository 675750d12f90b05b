//! y_i = x_(n - 1 - i) along a dim of n elements.

use super::gather::around;
use super::labels::{check_dim, letters_with};
use super::{Case, Input};
use crate::op::{Cotangents, DTypes, Local, Op, Pieces, Vjp};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::index::GATHER;
use shardgrad_kernels::{DType, Scalar};
use std::rc::Rc;

/// `a x! c -> a x! c`: any dtype. Linear. dx = g flipped.
#[derive(Debug)]
pub struct Flip {
    signature: String,
    dim: usize,
}

impl Flip {
    /// Along dim `dim` of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// Of kind `Kind::Shape` if there is no such dim.
    pub fn along(ndim: usize, dim: usize) -> Result<Rc<dyn Op>> {
        check_dim("flip", ndim, dim)?;
        Ok(Flip::of(ndim, dim))
    }

    fn of(ndim: usize, dim: usize) -> Rc<dyn Op> {
        let tensor = letters_with(ndim, dim, "x!");
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

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let x = x[0].contiguous(local.rank)?;
        let n = x.view.shape[self.dim] as i64;
        let index = Piece::upload(local.rank, &[n as usize], &(0..n).rev().collect::<Vec<i64>>())?;
        let x = x.viewed(around(&x.view, self.dim));
        let mut out = local.output(0)?;
        let seen = around(&out.view, self.dim);
        let whole = std::mem::replace(&mut out.view, seen.into());
        launch(local.rank, &GATHER, &[&x, &index], &mut [&mut out], &[Scalar::Int(0), Scalar::Int(n)])?;
        out.view = whole;
        Ok([out].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = Flip::of(cx.output_layouts[0].ndim(), self.dim);
        cx.each(|_| Tensor::result(op.clone(), &[&cx.grad(0)]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |dim, shape: &[usize]| Case::new(Flip::of(shape.len(), dim), vec![Input::real(shape)]).exact();
    vec![case(1, &[5, 7]), case(0, &[3, 5]), case(1, &[2, 4, 3]), case(0, &[0, 3])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shaping::Shaping;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert_eq!(x.flip(1).to_host::<i64>()?, [3, 2, 1, 6, 5, 4]);
            assert_eq!(x.flip(0).to_host::<i64>()?, [4, 5, 6, 1, 2, 3]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_dim_that_is_none_is_refused() {
        assert!(Flip::along(2, 2).is_err());
    }
}
