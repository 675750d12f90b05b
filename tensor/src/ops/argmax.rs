//! Index of the maximum or minimum along a dim, which may be sharded, counted from 0.

use super::labels::{check_dim, dim_label, dim_labels_with, invalid_argument};
use super::reduced_dims::with_invariant_outputs;
use super::shard_candidates::Candidates;
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::op::{CanonicalForm, DTypes, ForwardContext, LocalTensors, Op, common_float};
use shardgrad_dist::Result;
use shardgrad_kernels::op::arg_extreme::ARG_EXTREME;
use shardgrad_kernels::{DType, Dims, Scalar, Strides};
use smallvec::SmallVec;
use std::rc::Rc;

/// Index of the maximum (or minimum) along a dim, as i64: `a b c -> a c`.
///
/// Any float dtype. The first of tied elements, in the whole dim, on every layout; the first NaN if there is one. Not
/// differentiable.
///
/// The op has its own inference rule: over mesh axes that shard the dim it gathers one element and one index for each row and rank,
/// two all-gathers, and the result is invariant (`=`) on these axes. A partial x is reduced first.
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
        let full = dim_labels_with(shape.len(), dim, dim_label(dim));
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

    // A choice among elements has one result in any order.
    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Own
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        common_float(inputs)?;
        Ok(SmallVec::from_slice(&[DType::I64]))
    }

    fn adjust_inference(&self, inferred: Rc<Inference>, args: &[&Layout]) -> Rc<Inference> {
        with_invariant_outputs(inferred, args[0], &[self.dim])
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let (rank, layout) = (local.rank, &local.inputs[0]);
        if layout.extent(self.dim) == 0 {
            return invalid_argument(format!("{}: dim {} has no elements", self.name(), self.dim));
        }
        let mut order: Dims = (0..x[0].view.ndim()).filter(|d| *d != self.dim).collect();
        order.push(self.dim);
        let rows = x[0].with_view(x[0].view.permute(&order)).contiguous(rank)?;
        let which = [Scalar::Int(i64::from(self.is_max))];
        let mut y = local.output(0)?;
        if layout.dims()[self.dim].axes.is_empty() {
            launch(rank, &ARG_EXTREME, &[&rows], &mut [&mut y], &which)?;
            return Ok([y].into_iter().collect());
        }
        let (num_rows, width) = (y.numel(), x[0].view.shape[self.dim]);
        let rows = rows.with_view(Strides::contiguous(&[num_rows, width]).at(rows.view.offset));
        // A rank without elements has no candidate.
        let own = if width == 0 {
            let values = LocalTensor::alloc(rank, rows.dtype, &[num_rows, 0])?;
            Candidates { values, positions: LocalTensor::alloc(rank, DType::I64, &[num_rows, 0])? }
        } else {
            let mut best = LocalTensor::alloc(rank, DType::I64, &[num_rows])?;
            launch(rank, &ARG_EXTREME, &[&rows], &mut [&mut best], &which)?;
            Candidates::in_shard(local, self.dim, Candidates::pick(local, &rows, &best)?, &best)?
        };
        let all = own.gathered(local, x, self.dim, 1)?;
        let mut best = LocalTensor::alloc(rank, DType::I64, &[num_rows])?;
        launch(rank, &ARG_EXTREME, &[&all.values], &mut [&mut best], &which)?;
        let index = Candidates::pick(local, &all.positions, &best)?;
        Ok([index.with_view(Strides::contiguous(&y.view.shape))].into_iter().collect())
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

    #[test]
    fn ties_and_nan_give_the_lowest_index_on_every_layout() {
        let (nan, low) = (f32::NAN, f32::NEG_INFINITY);
        let rows = [
            [1.0f32, 3.0, 0.0, 3.0, 3.0],
            [low, low, low, low, low],
            [2.0, nan, 7.0, nan, -1.0],
            [0.0, -0.0, -5.0, -5.0, 0.0],
        ];
        let layouts = [
            ("a=2", "f32[4, 5@a]"),
            ("a=3", "f32[4, 5@a]"),
            ("a=7", "f32[4, 5@a]"),
            ("a=2,b=2", "f32[4, 5@b@a]"),
            ("a=2,b=3", "f32[4@a, 5@b]"),
        ];
        for (mesh, text) in layouts {
            World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let x = Tensor::from_global(rank, &Layout::parse(text, rank.mesh())?, &rows.concat())?;
                assert_eq!(x.argmax(1).to_host::<i64>()?, [1, 0, 1, 0], "{mesh}, {text}");
                assert_eq!(x.argmin(1).to_host::<i64>()?, [2, 0, 1, 2], "{mesh}, {text}");
                Ok(())
            })
            .unwrap();
        }
    }
}
