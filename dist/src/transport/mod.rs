//! Transports: how collectives and messages reach other ranks. Threads share memory ([`thread`]); processes use TCP (`tcp`), and NCCL
//! between GPUs (`nccl`).

pub(crate) mod buffer_ops;
mod call_queue;
pub(crate) mod overlapped;
pub(crate) mod thread;
#[cfg(feature = "processes")]
pub(crate) mod tcp;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
#[cfg(all(loom, test))]
mod loom_tests;
#[cfg(test)]
mod short_buffer_tests;

use crate::call::Request;
use crate::error::{Error, Result};
use overlapped::QueuedResult;
use shardgrad_kernels::{Backend, Buffer};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The transport of one rank. Requests are checked, counted and recorded before; groups of one rank get here only with messages of
/// the rank to itself.
pub(crate) trait Transport: fmt::Debug {
    /// Returns the error with which this rank has to stop if the world has failed; otherwise costs one atomic load.
    fn check(&self) -> Result<()>;

    /// Executes a call. The result is new memory of the back end, or a handle of the argument; afterwards no other rank holds the
    /// argument. An error fails the world for all ranks.
    fn run(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>>;

    /// Issues a collective whose result may come later. By default executes the call.
    fn run_async(&self, backend: &Arc<dyn Backend>, request: &Request<'_>) -> Result<Pending> {
        self.run(&**backend, request).map(Pending::Done)
    }

    /// Waits for all issued collectives.
    fn finish(&self) -> Result<()> {
        Ok(())
    }

    /// Ends what the transport has started for its rank, which has ended, perhaps with an error. No call follows.
    fn close(&self, error: Option<&Error>) {
        let _ = error;
    }

    /// Sets the minimum timeout: from now on a wait fails after `limit`, or after the timeout of the world if that is longer. Returns
    /// the previous minimum.
    fn set_min_timeout(&self, limit: Duration) -> Duration;
}

/// The result of a collective that was issued.
#[derive(Debug)]
pub(crate) enum Pending {
    /// There; `None` for calls without a result.
    Done(Option<Buffer>),
    /// Of a dry run, which counts memory as if the argument were held until the wait.
    Simulated { y: Option<Buffer>, _x: Option<Buffer> },
    /// With the communication thread.
    Queued(QueuedResult),
}

impl Pending {
    /// Waits for the result.
    pub(crate) fn wait(self) -> Result<Option<Buffer>> {
        match self {
            Pending::Done(y) | Pending::Simulated { y, .. } => Ok(y),
            Pending::Queued(result) => result.wait(),
        }
    }
}

/// What a transport needs until all ranks of the world have returned, longer than a rank lives.
#[cfg(feature = "processes")]
pub(crate) trait TransportSession: fmt::Debug {
    /// Ends the session after all ranks have returned.
    fn finish(&self) -> Result<()>;

    /// Ends the session after the world has failed, and adds to the error of this rank what fails meanwhile.
    fn abort(&self, error: Error) -> Error;

    /// The error of this rank in place of one that only follows from the failure of the world.
    fn explain(&self, error: Error) -> Error;
}

/// The transport of dry runs: never waits; results have a size but no contents. Calls are already in the trace of the rank.
#[derive(Debug)]
pub(crate) struct DryRunTransport;

impl Transport for DryRunTransport {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        let bytes = |numel: usize| numel * request.call.dtype.size();
        Ok(request.result_numel().map(|numel| backend.alloc(bytes(numel))).transpose()?)
    }

    fn run_async(&self, backend: &Arc<dyn Backend>, request: &Request<'_>) -> Result<Pending> {
        let y = self.run(&**backend, request)?;
        Ok(Pending::Simulated { y, _x: request.x.cloned() })
    }

    fn set_min_timeout(&self, limit: Duration) -> Duration {
        limit
    }
}
