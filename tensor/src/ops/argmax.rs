//! Index of the maximum or minimum along a dim, counted from 0.

use super::labels::{check_dim, dim_label, dim_labels_with, invalid_argument};
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::op::{DTypes, ForwardContext, LocalTensors, Op, common_float};
use shardgrad_dist::Result;
use shardgrad_kernels::op::arg_extreme::ARG_EXTREME;
use shardgrad_kernels::{DType, Dims, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// Index of the maximum (or minimum) along a dim, as i64: `a b! c -> a c`.
///
/// Any float dtype; the dim must not be sharded. The first of tied elements; the first NaN if there is one. Not
/// differentiable.
#[doc(alias = "argmin")]
#[derive(Debug)]
pub struct Argmax {
    signature: String,
    dim: usize,
    is_max: bool,
}

impl Argmax {
    /// The index of the maximum (`is_max`) or minimum along dim `dim` of a tensor of shape `shape`.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range or has extent 0.
    pub fn along(shape: &[usize], dim: usize, is_max: bool) -> Result<Rc<dyn Op>> {
        let name = if is_max { "argmax" } else { "argmin" };
        check_dim(name, shape.len(), dim)?;
        if shape[dim] == 0 {
            return invalid_argument(format!("{name}: dim {dim} of shape {shape:?} has no elements"));
        }
        let full = dim_labels_with(shape.len(), dim, &format!("{}!", dim_label(dim)));
        let signature = format!("{full} -> {}", dim_labels_with(shape.len(), dim, ""));
        Ok(Rc::new(Argmax { signature, dim, is_max }))
    }
}

impl Op for Argmax {
    fn name(&self) -> &'static str {
        if self.is_max { "argmax" } else { "argmin" }
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

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        if local.inputs[0].extent(self.dim) == 0 {
            return invalid_argument(format!("{}: dim {} has no elements", self.name(), self.dim));
        }
        let mut order: Dims = (0..x[0].view.ndim()).filter(|d| *d != self.dim).collect();
        order.push(self.dim);
        let rows = x[0].with_view(x[0].view.permute(&order)).contiguous(local.rank)?;
        let mut y = local.output(0)?;
        launch(local.rank, &ARG_EXTREME, &[&rows], &mut [&mut y], &[Scalar::Int(i64::from(self.is_max))])?;
        Ok([y].into_iter().collect())
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], dim, is_max| {
        let op = Argmax::along(shape, dim, is_max).expect("a dim of the case");
        Case::new(op, vec![Input::real(shape)]).exact()
    };
    vec![case(&[5, 7], 1, true), case(&[5, 3], 0, false), case(&[2, 5, 3], 1, true)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::reduction::Reduction;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
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
