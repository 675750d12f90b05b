//! Ways in which calls reach the other ranks.

mod local;
pub(crate) mod record;
pub(crate) mod thread;
pub(crate) mod wire;
#[cfg(all(loom, test))]
mod rendezvous;
#[cfg(test)]
mod short;

use crate::call::Request;
use crate::error::Result;
use shardgrad_kernels::{Backend, Buffer};
use std::fmt;
use std::time::Duration;

/// What carries the calls of one rank. Requests are checked, counted and recorded before they come here;
/// groups of one rank come only for messages to itself.
pub(crate) trait Transport: fmt::Debug {
    /// One load when all is well; the error with which this rank has to stop otherwise.
    fn check(&self) -> Result<()>;

    /// Carries out a call. The result is new memory of the back end (or a handle of the argument), and no
    /// other rank holds the argument any more. An error ends the world for all ranks.
    fn run(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>>;

    /// From now on a wait is too long after this time, or after the limit of the world if that is longer. Gives what was
    /// said before.
    fn be_patient(&self, limit: Duration) -> Duration;
}
