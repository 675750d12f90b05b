//! Work of a rank that is noted once and done again as a whole, where its device can: launches without the host's part.

use crate::context::Context;
use crate::layout::Layout;
use crate::piece::View;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Phase, Rank, Result};
use shardgrad_kernels::{Graph, KernelError};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Work that was noted, with the memory that it uses.
#[derive(Debug)]
pub struct Captured {
    rank: Rank,
    graph: Graph,
    reads: Vec<Place>,
}

/// Where the numbers of a tensor lie, and how.
#[derive(Debug, PartialEq)]
struct Place {
    layout: Layout,
    view: View,
    address: u64,
}

impl Place {
    /// `None` for memory that is not a device's.
    fn of(tensor: &Tensor) -> Option<Place> {
        let piece = tensor.piece();
        let address = piece.buffer.device_address()?;
        Some(Place { layout: tensor.layout().clone(), view: piece.view.clone(), address })
    }
}

/// Work that was noted and what came out of it, or why it cannot be noted.
pub type Outcome<T> = std::result::Result<(Captured, T), Error>;

/// Runs `work` so that what it launches is noted and not done. What comes out has numbers once [`Captured::replay`] was
/// called, and other ones at the same places each time. `reads` are tensors that the work reads or writes and that may be replaced
/// between its replays ([`Captured::finds`]); they are let go of before it begins.
///
/// The work is done with this rank alone: nothing of it may reach the host, or another rank. Numbers that are passed by value
/// (factors, keys of random numbers) stay as they are. Where it cannot be noted, nothing of it was done, and the same work may
/// be done without: a fault of its own shows there.
///
/// # Errors
/// `Kind::Unsupported` if the work fails, and somebody holds on to what it has made until then, which has no contents.
///
/// # Panics
/// With the panic of `work`, unless that is an [`Error`].
pub fn capture<T>(rank: &Rank, reads: Vec<Tensor>, work: impl FnOnce() -> Result<T>) -> Result<Outcome<T>> {
    let reads: Option<Vec<Place>> = reads.into_iter().map(|tensor| Place::of(&tensor)).collect();
    let context = Context::of(rank);
    let (path, is_backward) = (context.path(), context.phase() == Phase::Backward);
    let is_closed = context.is_closed();
    let (mut work, mut made, mut failed) = (Some(work), None, None);
    let noted = rank.backend().capture(&mut || {
        let work = work.take().expect("bug: work is captured once");
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(value)) => made = Some(value),
            Ok(Err(error)) => failed = Some(Ok(error)),
            Err(cause) => failed = Some(cause.downcast::<Error>().map(|error| *error)),
        }
        if failed.is_some() { Err(KernelError::NotCapturable { what: "fails" }) } else { Ok(()) }
    });
    if failed.is_some() || noted.is_err() {
        // Where the work was left in the middle, so was what says where it stood.
        context.set_path(&path);
        context.set_backward(is_backward);
        context.set_closed(is_closed);
    }
    let failed = match failed {
        Some(Err(panic)) => resume_unwind(panic),
        Some(Ok(cause)) => Some(cause),
        None => None,
    };
    let why = match (noted, made, reads) {
        (Ok(graph), Some(made), Some(reads)) => {
            return Ok(Ok((Captured { rank: rank.clone(), graph, reads }, made)));
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

impl Captured {
    /// Whether these tensors lie where those did that the work was said to read, in the same order.
    #[must_use]
    pub fn finds<'a>(&self, tensors: impl IntoIterator<Item = &'a Tensor>) -> bool {
        let mut tensors = tensors.into_iter();
        let same = |place: &Place| tensors.next().and_then(Place::of).is_some_and(|now| now == *place);
        self.reads.iter().all(same) && tensors.next().is_none()
    }

    /// Does the work again, with the numbers that are now in the memory that it uses.
    ///
    /// # Errors
    /// What the device reports. An index that points outside is reported by the next copy to the host.
    pub fn replay(&self) -> Result<()> {
        Ok(self.rank.backend().replay(&self.graph)?)
    }
}

impl Tensor {
    /// A copy of the numbers in memory of its own, for [`Tensor::refilled`]; `None` for a view, whose numbers do not lie
    /// row-major from the first byte of their memory, so that work on it would not be that on the copy.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn copied(&self) -> Result<Option<Tensor>> {
        let piece = self.piece();
        if !(piece.view.is_contiguous() && piece.view.offset == 0) {
            return Ok(None);
        }
        let copy = piece.converted(self.rank(), piece.dtype)?;
        Ok(Some(Tensor::assemble(self.rank(), self.layout().clone(), copy)))
    }

    /// This tensor with the numbers of another in its memory; `None` if that lies otherwise, or if somebody else holds this one.
    ///
    /// # Errors
    /// What the device reports.
    pub fn refilled(self, from: &Tensor) -> Result<Option<Tensor>> {
        if self.layout() != from.layout() || self.piece().view != from.piece().view {
            return Ok(None);
        }
        let rank = self.rank().clone();
        let Some((layout, mut piece)) = self.into_parts() else { return Ok(None) };
        if !piece.buffer.is_unique() {
            return Ok(None);
        }
        let view = piece.view.clone();
        piece.write(&rank, view, from.piece())?;
        Ok(Some(Tensor::assemble(&rank, layout, piece)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Kind, Mesh, World};

    #[test]
    fn the_processor_captures_nothing_and_runs_nothing() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[1.0f32, 2.0])?;
            let outcome = capture(rank, vec![x], || -> Result<()> { panic!("it is run") })?;
            assert_eq!(outcome.unwrap_err().kind(), Kind::Unsupported);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn memory_is_refilled_by_what_lies_alike_unless_somebody_holds_it() {
        World::run(Mesh::single(), |rank| {
            let tensor = |data: &[f32]| Tensor::from_host(rank, &[data.len()], data);
            let (first, second) = (tensor(&[1.0, 2.0])?, tensor(&[3.0, 4.0])?);
            let own = first.copied()?.expect("it is flat");
            assert!(first.slice(0, 1..2).copied()?.is_none());
            let place = own.piece().buffer.address();
            let own = own.refilled(&second)?.expect("nobody else has it");
            assert_eq!(own.to_host::<f32>()?, [3.0, 4.0]);
            assert_eq!(own.piece().buffer.address(), place);
            assert_eq!(first.to_host::<f32>()?, [1.0, 2.0]);
            let buffer = own.piece().buffer.clone();
            assert!(own.refilled(&first)?.is_none());
            drop(buffer);
            let own = first.copied()?.expect("it is flat");
            let held = own.clone();
            assert!(own.refilled(&second)?.is_none());
            assert!(held.refilled(&tensor(&[1.0, 2.0, 3.0])?)?.is_none());
            Ok(())
        })
        .unwrap();
    }
}
