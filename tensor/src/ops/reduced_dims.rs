//! Reduced dims that may be sharded: what ops share that all-reduce their results themselves.

use super::labels::{check_dim, check_ndim, full_and_reduced, invalid_argument};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::placement::Placement;
use crate::op::{DTypes, ForwardContext, LocalTensors, Op};
use shardgrad_dist::{AxisSet, Error, Kind, Result};
use shardgrad_kernels::{DType, Dims, Kernel, Scalar};
use smallvec::SmallVec;
use std::iter;
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

/// Backward of an op over reduced dims, by one kernel: the cotangent of x from x, the saved values and the cotangent of y, which comes
/// last.
#[derive(Debug)]
pub(super) struct ReducedDimsBackward {
    pub(super) name: &'static str,
    pub(super) over: ReducedDims,
    /// The cotangent of y, in which the op is linear.
    pub(super) linear_in: &'static [&'static [usize]],
    pub(super) kernel: &'static Kernel,
}

impl Op for ReducedDimsBackward {
    fn name(&self) -> &'static str {
        self.name
    }

    fn signature(&self) -> &str {
        &self.over.backward
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        self.linear_in
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&inputs[..1]))
    }

    fn adjust_inference(&self, inferred: Rc<Inference>, args: &[&Layout]) -> Rc<Inference> {
        keep_invariant_inputs(inferred, self.over.axes(args[0]))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let (rows, length) = self.over.rows(local, x[0])?;
        let values = local.contiguous(&x[1..])?;
        let mut dx = LocalTensor::alloc(local.rank, rows.dtype, &rows.view.shape)?;
        let inputs: SmallVec<[&LocalTensor; 4]> = iter::once(&rows).chain(&values).collect();
        launch(local.rank, self.kernel, &inputs, &mut [&mut dx], &[length])?;
        Ok([self.over.restore_order(&dx)].into_iter().collect())
    }
}
