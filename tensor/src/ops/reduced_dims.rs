//! Reduced dims that may be sharded: what ops share that all-reduce their results themselves.

use super::labels::{check_dim, check_ndim, full_and_reduced, invalid_argument};
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::placement::Placement;
use crate::op::ForwardContext;
use shardgrad_dist::{AxisSet, Error, Kind, Result};
use shardgrad_kernels::{Dims, Scalar};
use std::rc::Rc;

/// The reduced dims of an op that all-reduces its results itself over the mesh axes that shard these dims.
#[derive(Clone, Debug)]
pub(super) struct ReducedDims {
    /// Signature of the forward: x to y and one value that is saved for backward.
    forward: String,
    /// Signature of the backward: x, the saved values and the cotangent of y to the cotangent of x.
    backward: String,
    dims: Dims,
    /// The remaining dims, then the reduced dims.
    order: Dims,
}

/// A layout that is `=` on some axes, and otherwise as given.
pub(super) fn invariant_on(axes: AxisSet, layout: &Layout) -> Layout {
    axes.iter().fold(layout.clone(), |layout, axis| layout.with_placement(axis, Placement::Invariant))
}

/// Makes the results of an inference `=` on the mesh axes that shard the given dims of x, over which the op exchanges itself.
pub(super) fn with_invariant_outputs(inferred: Rc<Inference>, x: &Layout, dims: &[usize]) -> Rc<Inference> {
    let mut inference = inferred.into_adjustable();
    let x = inference.targets[0].as_ref().unwrap_or(x);
    let axes: AxisSet = dims.iter().flat_map(|&dim| x.dims()[dim].axes.iter()).collect();
    inference.outputs.iter_mut().for_each(|output| *output = invariant_on(axes, output));
    Rc::new(inference)
}

/// Drops from the inference of a backward op the steps that make its other arguments `~` on `axes`, which shard the reduced dims:
/// there x and its cotangent are sharded, and the other arguments stay `=`.
pub(super) fn keep_invariant_inputs(inferred: Rc<Inference>, axes: AxisSet) -> Rc<Inference> {
    let mut inference = inferred.into_adjustable();
    inference.steps.retain(|step| !(axes.contains(step.axis) && step.to == Placement::Replicate));
    if inference.steps.is_empty() {
        inference.targets.iter_mut().for_each(|target| *target = None);
    }
    Rc::new(inference)
}

impl ReducedDims {
    /// Some dims of a tensor of `ndim` dims, for a vjp that reads `num_saved` values besides x.
    pub(super) fn over(name: &str, ndim: usize, dims: &[usize], num_saved: usize) -> Result<ReducedDims> {
        let mut sorted: Dims = dims.into();
        sorted.sort_unstable();
        check_ndim(name, ndim)?;
        for &d in dims {
            check_dim(name, ndim, d)?;
        }
        if sorted.windows(2).any(|w| w[0] == w[1]) {
            return invalid_argument(format!("{name}: the dims {dims:?} name a dim twice"));
        }
        let [full, reduced] = full_and_reduced(ndim, &sorted);
        let remaining = (0..ndim).filter(|d| !sorted.contains(d));
        Ok(ReducedDims {
            forward: format!("{full} -> {reduced}, {reduced}"),
            backward: format!("{full}{} -> {full}", format!(", {reduced}").repeat(num_saved + 1)),
            order: remaining.chain(sorted.iter().copied()).collect(),
            dims: sorted,
        })
    }

    pub(super) fn forward(&self) -> &str {
        &self.forward
    }

    pub(super) fn backward(&self) -> &str {
        &self.backward
    }

    /// The last reduced dim, over whose leaves a canonical sum runs; `None` without reduced dims.
    ///
    /// # Errors
    /// `Kind::Unsupported` if another reduced dim is sharded.
    pub(super) fn last_dim(&self, x: &Layout) -> Result<Option<usize>> {
        let Some((last, others)) = self.dims.split_last() else { return Ok(None) };
        match others.iter().find(|dim| x.dims()[**dim].axes.num_shards(x.mesh()) > 1) {
            None => Ok(Some(*last)),
            Some(other) => {
                let why = format!("a sum over dim {other}, which is sharded, has leaves of dim {last} alone");
                Err(Error::new(Kind::Unsupported, why)
                    .detail("help", "shard the last reduced dim, or use Deterministic::Run"))
            }
        }
    }

    /// The number of reduced dims, as a kernel scalar.
    pub(super) fn num_dims(&self) -> Scalar {
        Scalar::Int(self.dims.len() as i64)
    }

    /// The mesh axes that shard the reduced dims.
    pub(super) fn axes(&self, x: &Layout) -> AxisSet {
        self.dims.iter().flat_map(|&d| x.dims()[d].axes.iter()).collect()
    }

    /// Makes the results of an inference `=` on the mesh axes that shard the reduced dims.
    pub(super) fn with_invariant_outputs(&self, inferred: Rc<Inference>, x: &Layout) -> Rc<Inference> {
        with_invariant_outputs(inferred, x, &self.dims)
    }

    /// [`keep_invariant_inputs`] for the mesh axes that shard the reduced dims.
    pub(super) fn keep_invariant_inputs(&self, inferred: Rc<Inference>, x: &Layout) -> Rc<Inference> {
        keep_invariant_inputs(inferred, self.axes(x))
    }

    /// A view of x with the reduced dims last.
    pub(super) fn reduced_last(&self, x: &LocalTensor) -> LocalTensor {
        x.with_view(x.view.permute(&self.order))
    }

    /// x as contiguous rows of reduced elements, and the length of a row.
    pub(super) fn rows(&self, local: &ForwardContext<'_>, x: &LocalTensor) -> Result<(LocalTensor, Scalar)> {
        let count: usize = self.dims.iter().map(|&d| x.view.shape[d]).product();
        Ok((self.reduced_last(x).contiguous(local.rank)?, Scalar::Int(count as i64)))
    }

    /// A view of rows with the dims in the order of x.
    pub(super) fn restore_order(&self, rows: &LocalTensor) -> LocalTensor {
        let mut back = Dims::from_elem(0, self.order.len());
        for (to, &from) in self.order.iter().enumerate() {
            back[from] = to;
        }
        rows.with_view(rows.view.permute(&back))
    }
}
