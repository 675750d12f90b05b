//! The context of a forward on one rank: label ranges, output memory, kernel launches.

use super::{GradAccumulator, LocalTensors};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::lineage::Lineage;
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::{Device, Kernel, Scalar};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// The context of [`Op::forward`](super::Op::forward) on this rank: ranges of labels, layouts, memory for outputs.
#[derive(Debug)]
pub struct ForwardContext<'a> {
    /// The rank that runs the forward.
    pub rank: &'a Rank,
    /// Layouts of the arguments, after the implicit redistribution steps.
    pub inputs: &'a [Layout],
    /// The inferred labels, steps and output layouts.
    pub inference: &'a Inference,
    /// The line of the caller, for errors.
    pub site: &'static Location<'static>,
    /// For each output a sum that it may be added to; none beyond the end.
    pub(super) accumulators: &'a [Option<&'a GradAccumulator>],
    /// The label of which the arguments are one leaf, and the global range of the leaf, if the op is called for each leaf of a sum.
    pub(super) leaf: Option<(u8, Range<usize>)>,
}

impl ForwardContext<'_> {
    /// The global extent of a label and the range of it that the arguments have: this rank's, or a leaf of that.
    #[must_use]
    pub fn label(&self, name: &str) -> (usize, Range<usize>) {
        let (extent, range) = self.inference.label(name, self.rank.mesh(), self.rank.coordinates());
        match &self.leaf {
            Some((label, leaf)) if self.inference.labels().number(name) == Some(*label) => {
                (extent, leaf.clone())
            }
            _ => (extent, range),
        }
    }

    /// Allocates memory for output `i`: contiguous, uninitialized contents.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn output(&self, i: usize) -> Result<LocalTensor> {
        let view = self.inference.view(i, self.rank.coordinates());
        let dtype = self.inference.outputs[i].dtype();
        if let Some((label, leaf)) = &self.leaf
            && let Some(dim) = self.inference.labels().outputs()[i].iter().position(|known| known == label)
        {
            let mut shape = view.shape.clone();
            shape[dim] = leaf.len();
            return LocalTensor::alloc(self.rank, dtype, &shape);
        }
        LocalTensor::alloc_with_view(self.rank, dtype, view.clone())
    }

    /// Takes the sum that output `i` is to be added to, contiguous and of the shape and dtype of the output.
    ///
    /// The op must then return the sum plus the output. The caller adds a sum that no op takes.
    pub(crate) fn take_accumulator(&self, i: usize) -> Option<LocalTensor> {
        let view = self.inference.view(i, self.rank.coordinates());
        self.accumulators.get(i).copied().flatten()?.accumulate_for(self.inference.outputs[i].dtype(), view)
    }

    /// [`ForwardContext::take_accumulator`] for a matrix product, which must round its result before the addition. `None` on GPUs,
    /// whose libraries round product and sum once.
    pub(crate) fn take_product_accumulator(&self, i: usize) -> Option<LocalTensor> {
        match self.rank.backend().device() {
            Device::Cuda(_) => None,
            _ => self.take_accumulator(i),
        }
    }

    /// An intermediate local tensor with the lineage of these arguments, before a collective inside of the op.
    pub(crate) fn with_lineage(&self, x: &[&LocalTensor], tensor: LocalTensor) -> LocalTensor {
        LocalTensor { lineage: self.lineage(x), ..tensor }
    }

    /// The lineage of outputs that are computed from these arguments.
    #[inline]
    pub(super) fn lineage(&self, x: &[&LocalTensor]) -> Lineage {
        x.iter().fold(self.inference.lineage(), |all, tensor| all.join(tensor.lineage))
    }

    /// The result of `make`, cached with the inference while the views of the local tensors `x` stay the same.
    ///
    /// `T` must be private to one op and depend on nothing of the op but its signature.
    pub(crate) fn memoize<T: 'static>(&self, x: &[&LocalTensor], make: impl FnOnce() -> T) -> Rc<T> {
        self.inference.memoize(x.iter().map(|p| &p.view), make)
    }

    /// Allocates all outputs of the op and runs a kernel that writes them.
    ///
    /// # Errors
    /// The errors of the kernel.
    pub fn launch(
        &self,
        kernel: &Kernel,
        inputs: &[&LocalTensor],
        scalars: &[Scalar],
    ) -> Result<LocalTensors> {
        if let [_] = self.inference.outputs[..] {
            let mut output = self.output(0)?;
            launch(self.rank, kernel, inputs, &mut [&mut output], scalars)?;
            return Ok(smallvec![output]);
        }
        let mut outputs: LocalTensors =
            (0..self.inference.outputs.len()).map(|i| self.output(i)).collect::<Result<_>>()?;
        launch(self.rank, kernel, inputs, &mut outputs.iter_mut().collect::<Vec<_>>(), scalars)?;
        Ok(outputs)
    }

    /// The local tensors, copied where they are not contiguous.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn contiguous(&self, tensors: &[&LocalTensor]) -> Result<SmallVec<[LocalTensor; 6]>> {
        tensors.iter().map(|x| x.contiguous(self.rank)).collect()
    }
}
