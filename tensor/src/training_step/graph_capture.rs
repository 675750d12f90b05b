//! Graph capture: records the launches of a rank once (CUDA graph) and replays them without host work.

use crate::execution::context::Context;
use crate::execution::local_tensor::View;
use crate::layout::Layout;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Rank, Result};
use shardgrad_kernels::{Graph, KernelError};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A captured graph with the memory that it uses.
#[doc(alias = "CUDAGraph")]
#[doc(alias = "cuda_graph")]
#[derive(Debug)]
pub struct CapturedGraph {
    rank: Rank,
    graph: Graph,
    reads: Vec<TensorAddress>,
}

/// Address, layout and strides of a tensor.
#[derive(Debug, PartialEq)]
struct TensorAddress {
    layout: Layout,
    view: View,
    address: u64,
}

impl TensorAddress {
    /// `None` for host memory.
    fn of(tensor: &Tensor) -> Option<TensorAddress> {
        let local = tensor.local();
        let address = local.buffer.device_address()?;
        Some(TensorAddress { layout: tensor.layout().clone(), view: local.view.clone(), address })
    }
}

/// The captured graph and the result of the work, or the reason why the work cannot be captured.
pub type CaptureResult<T> = std::result::Result<(CapturedGraph, T), Error>;

/// Captures `work` as a graph: its launches are recorded and not run. The results have values after
/// [`CapturedGraph::replay`], at the same addresses in each replay. `reads` are the inputs: tensors that the work reads
/// or writes and that may be replaced between replays ([`CapturedGraph::matches_inputs`]); their handles are dropped
/// before the work begins.
///
/// The work must involve this rank alone: it must not read values on the host or communicate. Scalars that are passed by
/// value (factors, random keys) keep their captured values. If the work cannot be captured, none of it was run, and it
/// can be run uncaptured, which shows its own errors.
///
/// # Errors
/// `Kind::Unsupported` if the work fails while a handle outside of it holds a tensor that it made, which has no
/// contents.
///
/// # Panics
/// With the panic of `work`, unless that is an [`Error`].
#[doc(alias = "cuda.graph")]
#[doc(alias = "make_graphed_callables")]
#[doc(alias = "CUDAGraph")]
#[doc(alias = "stream_capture")]
pub fn capture<T>(
    rank: &Rank,
    reads: Vec<Tensor>,
    work: impl FnOnce() -> Result<T>,
) -> Result<CaptureResult<T>> {
    let reads: Option<Vec<TensorAddress>> =
        reads.into_iter().map(|tensor| TensorAddress::of(&tensor)).collect();
    let context = Context::of(rank);
    let path = context.path();
    let (mut work, made, mut failed) = (Some(work), Cell::new(None), None);
    let mut record = || {
        let work = work.take().expect("bug: work is captured once");
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(value)) => made.set(Some(value)),
            Ok(Err(error)) => failed = Some(Ok(error)),
            Err(cause) => failed = Some(cause.downcast::<Error>().map(|error| *error)),
        }
        if failed.is_some() { Err(KernelError::NotCapturable { what: "fails" }) } else { Ok(()) }
    };
    let captured = rank.backend().capture(&mut record, &mut || made.set(None));
    if failed.is_some() || captured.is_err() {
        // Work that ended early left the path in an intermediate state.
        context.set_path(&path);
    }
    let failed = match failed {
        Some(Err(panic)) => resume_unwind(panic),
        Some(Ok(cause)) => Some(cause),
        None => None,
    };
    let why = match (captured, made.into_inner(), reads) {
        (Ok(graph), Some(made), Some(reads)) => {
            return Ok(Ok((CapturedGraph { rank: rank.clone(), graph, reads }, made)));
        }
        (Err(error @ KernelError::CaptureOutputHeld { .. }), ..) => {
            let error = Error::from(error);
            return Err(failed
                .into_iter()
                .fold(error, |error, cause| error.detail("cause", cause.message())));
        }
        (Err(error), ..) => Error::from(error),
        (Ok(_), ..) => Error::from(KernelError::Unsupported { kernel: "capture", device: "the host" }),
    };
    Ok(Err(failed.unwrap_or(why)))
}

impl CapturedGraph {
    /// Whether these tensors have the addresses, layouts and strides of the captured inputs, in the same order.
    #[must_use]
    pub fn matches_inputs<'a>(&self, tensors: impl IntoIterator<Item = &'a Tensor>) -> bool {
        let mut tensors = tensors.into_iter();
        let same = |expected: &TensorAddress| {
            tensors.next().and_then(TensorAddress::of).is_some_and(|now| now == *expected)
        };
        self.reads.iter().all(same) && tensors.next().is_none()
    }

    /// Replays the graph on the values that are now in its memory.
    ///
    /// # Errors
    /// Errors of the device. An index out of range is reported by the next copy to the host.
    #[doc(alias = "cudaGraphLaunch")]
    pub fn replay(&self) -> Result<()> {
        Ok(self.rank.backend().replay(&self.graph)?)
    }
}

impl Tensor {
    /// Copies the tensor to its own memory, a static input for [`Tensor::copy_from`]; `None` for a view, whose
    /// elements are not row-major from the first byte of their memory, so that work on the copy would differ.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "static_input")]
    pub fn static_copy(&self) -> Result<Option<Tensor>> {
        let local = self.local();
        if !(local.view.is_contiguous() && local.view.offset == 0) {
            return Ok(None);
        }
        let copy = local.to_dtype(self.rank(), local.dtype)?;
        Ok(Some(Tensor::assemble(self.rank(), self.layout().clone(), copy)))
    }

    /// Copies the values of another tensor into the memory of this one; `None` if layout or strides differ, or the
    /// memory is shared.
    ///
    /// # Errors
    /// Errors of the device.
    #[doc(alias = "copy_")]
    pub fn copy_from(self, from: &Tensor) -> Result<Option<Tensor>> {
        if self.layout() != from.layout() || self.local().view != from.local().view {
            return Ok(None);
        }
        let rank = self.rank().clone();
        let Some((layout, mut local)) = self.into_parts() else { return Ok(None) };
        if !local.buffer.is_unique() {
            return Ok(None);
        }
        let view = local.view.clone();
        local.write(&rank, view, from.local())?;
        Ok(Some(Tensor::assemble(&rank, layout, local)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use shardgrad_dist::{Kind, Mesh, World};

    #[test]
    fn cpu_refuses_capture_without_running_the_work() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[1.0f32, 2.0])?;
            let outcome = capture(rank, vec![x], || -> Result<()> { panic!("the work ran") })?;
            assert_eq!(outcome.unwrap_err().kind(), Kind::Unsupported);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn copy_from_needs_equal_strides_and_unshared_memory() {
        World::run(Mesh::single(), |rank| {
            let tensor = |data: &[f32]| Tensor::from_host(rank, &[data.len()], data);
            let (first, second) = (tensor(&[1.0, 2.0])?, tensor(&[3.0, 4.0])?);
            let own = first.static_copy()?.expect("it is flat");
            assert!(first.slice(0, 1..2).static_copy()?.is_none());
            let place = own.local().buffer.address();
            let own = own.copy_from(&second)?.expect("the memory is unshared");
            assert_eq!(own.to_host::<f32>()?, [3.0, 4.0]);
            assert_eq!(own.local().buffer.address(), place);
            assert_eq!(first.to_host::<f32>()?, [1.0, 2.0]);
            let buffer = own.local().buffer.clone();
            assert!(own.copy_from(&first)?.is_none());
            drop(buffer);
            let own = first.static_copy()?.expect("it is flat");
            let held = own.clone();
            assert!(own.copy_from(&second)?.is_none());
            assert!(held.copy_from(&tensor(&[1.0, 2.0, 3.0])?)?.is_none());
            Ok(())
        })
        .unwrap();
    }
}
