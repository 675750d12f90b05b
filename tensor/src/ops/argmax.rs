//! y = the place of the largest, or of the smallest, element along a dim, counted from 0.

use super::labels::{check_dim, letter, letters_with, misuse};
use super::{Case, Input};
use crate::op::{DTypes, Local, Op, Pieces, common_float};
use crate::piece::{Piece, launch};
use shardgrad_dist::Result;
use shardgrad_kernels::op::arg_extreme::ARG_EXTREME;
use shardgrad_kernels::{DType, Dims, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// `a b! c -> a c`: the dim must be whole. Any float to i64: the first of those that tie, the first that is not a number if
/// there is one. Not differentiable.
#[derive(Debug)]
pub struct Argmax {
    signature: String,
    dim: usize,
    largest: bool,
}

impl Argmax {
    /// The place of the largest along a dim of a tensor of some shape, or of the smallest.
    ///
    /// # Errors
    /// `Kind::Shape` if there is no such dim, or nothing in it.
    pub fn along(shape: &[usize], dim: usize, largest: bool) -> Result<Rc<dyn Op>> {
        let name = if largest { "argmax" } else { "argmin" };
        check_dim(name, shape.len(), dim)?;
        if shape[dim] == 0 {
            return misuse(format!("{name}: there is nothing along dim {dim} of {shape:?}"));
        }
        let full = letters_with(shape.len(), dim, &format!("{}!", letter(dim)));
        let signature = format!("{full} -> {}", letters_with(shape.len(), dim, ""));
        Ok(Rc::new(Argmax { signature, dim, largest }))
    }
}

impl Op for Argmax {
    fn name(&self) -> &'static str {
        if self.largest { "argmax" } else { "argmin" }
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        common_float(inputs)?;
        Ok(SmallVec::from_slice(&[DType::I64]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        if local.inputs[0].extent(self.dim) == 0 {
            return misuse(format!("{}: there is nothing along dim {}", self.name(), self.dim));
        }
        let mut order: Dims = (0..x[0].view.ndim()).filter(|d| *d != self.dim).collect();
        order.push(self.dim);
        let rows = x[0].viewed(x[0].view.permute(&order)).contiguous(local.rank)?;
        let mut y = local.output(0)?;
        launch(local.rank, &ARG_EXTREME, &[&rows], &mut [&mut y], &[Scalar::Int(i64::from(self.largest))])?;
        Ok([y].into_iter().collect())
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], dim, largest| {
        let op = Argmax::along(shape, dim, largest).expect("a dim of the case");
        Case::new(op, vec![Input::real(shape)]).exact()
    };
    vec![case(&[5, 7], 1, true), case(&[5, 3], 0, false), case(&[2, 5, 3], 1, true)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduction::Reduction;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1.0f32, 3.0, 3.0, 4.0, f32::NAN, 6.0])?;
            assert_eq!(x.argmax(1).to_host::<i64>()?, [1, 1]);
            assert_eq!(x.argmin(1).to_host::<i64>()?, [0, 1]);
            assert_eq!(x.argmax(0).to_host::<i64>()?, [1, 1, 1]);
            Ok(())
        })
        .unwrap();
        assert!(Argmax::along(&[2, 0], 1, true).is_err() && Argmax::along(&[2], 1, true).is_err());
    }
}
