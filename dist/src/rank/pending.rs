//! Asynchronous collectives of a rank, and their results.

use super::Rank;
use crate::call::{Call, Op, ReduceOp, Request};
use crate::error::Result;
use crate::transport::{Pending, Transport};
use shardgrad_kernels::{Backend, Buffer};
use std::sync::Arc;

/// The result of an asynchronous collective (PyTorch: `Work`). Dropped, the collective still takes place.
#[doc(alias = "Work")]
#[doc(alias = "async_op")]
#[derive(Debug)]
pub struct PendingBuffer(Pending);

impl PendingBuffer {
    /// Whether the call may still be under way, on all members alike. If not, [`PendingBuffer::wait`] returns at once: the call blocked,
    /// or the device lets later work wait for the result. Dry runs answer as a CPU.
    #[must_use]
    pub fn is_async(&self) -> bool {
        !matches!(self.0, Pending::Done(_))
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// Those of the collective; see [`Rank`].
    pub fn wait(self) -> Result<Buffer> {
        Ok(self.0.wait()?.expect("bug: a call without a result"))
    }
}

impl From<Buffer> for PendingBuffer {
    fn from(buffer: Buffer) -> PendingBuffer {
        PendingBuffer(Pending::Done(Some(buffer)))
    }
}

/// Ranks on a CPU run an asynchronous collective on a communication thread, while they compute. A rank has one issue order: calls of the
/// communication thread run one after another, and a call that blocks waits for those before, over whatever groups. On other devices
/// every collective is asynchronous by itself, and its result is there at once for the host.
impl Rank {
    /// [`Rank::all_reduce`] whose result may come later. The argument is held until then.
    ///
    /// # Errors
    /// See [`Rank`]; errors of the call itself come from [`PendingBuffer::wait`], the next collective or [`Rank::check`].
    pub fn all_reduce_async(
        &self,
        call: &Call<'_>,
        x: &Buffer,
        numel: usize,
        op: ReduceOp,
    ) -> Result<PendingBuffer> {
        self.issue_async(call, Op::AllReduce(op), x, numel, &[numel])
    }

    /// [`Rank::all_gather`] whose result may come later. The argument is held until then.
    ///
    /// # Errors
    /// As [`Rank::all_reduce_async`].
    pub fn all_gather_async(&self, call: &Call<'_>, x: &Buffer, counts: &[usize]) -> Result<PendingBuffer> {
        let group_rank = self.check_counts(call, "all_gather", counts)?;
        self.issue_async(call, Op::AllGather, x, counts[group_rank], counts)
    }

    /// [`Rank::reduce_scatter`] whose result may come later. The argument is held until then.
    ///
    /// # Errors
    /// As [`Rank::all_reduce_async`].
    pub fn reduce_scatter_async(
        &self,
        call: &Call<'_>,
        x: &Buffer,
        counts: &[usize],
    ) -> Result<PendingBuffer> {
        self.check_counts(call, "reduce_scatter", counts)?;
        self.issue_async(call, Op::ReduceScatter, x, counts.iter().sum(), counts)
    }

    fn issue_async(
        &self,
        call: &Call<'_>,
        op: Op,
        x: &Buffer,
        numel_held: usize,
        counts: &[usize],
    ) -> Result<PendingBuffer> {
        let run = |transport: &dyn Transport, backend: &Arc<dyn Backend>, request: &Request<'_>| {
            transport.run_async(backend, request)
        };
        self.issue_with(call, op, Some(x), (numel_held, counts, &[]), &run).map(PendingBuffer)
    }
}
