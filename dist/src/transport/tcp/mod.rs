//! The TCP transport between processes, with a connection between each pair of ranks.
//!
//! Every member of a group sends its call to all other members, with the elements that each of them needs, and continues when it
//! has received the calls of all. So every member compares all calls; there is no second barrier, because what was sent is a copy.
//! The kernels of the thread transport reduce elements in the same order: every operand of a small sum goes to all members; of a
//! large sum, chunk i goes to member i, which reduces the chunk and sends it to all. So both transports give the same bits.
//!
//! Elements that the receiver has no room for stay with their sender until it asks for them ([`flow_control`]).
//!
//! There is no shared wait-for graph. Deadlocks are detected by edge chasing (Chandy, Misra, Haas 1983): a rank that waits for long
//! announces that, and sends a probe to the ranks that it waits for; a rank that waits itself forwards the probe to the ranks that
//! it waits for. A probe that returns to its sender has followed a cycle of waits, each of which was still lasting when the probe
//! passed, and so lasts forever.

mod record;
mod handshake;
mod link;
mod listener;
mod frame;
mod flow_control;
mod world_view;
mod reader;
mod connections;
mod rendezvous;
pub(crate) mod wire_fuzz;
mod assemble;
mod wait;
#[cfg(feature = "nccl")]
mod agreement;
#[cfg(feature = "nccl")]
mod announced;
#[cfg(test)]
mod malformed_tests;
#[cfg(test)]
mod queue_tests;

#[cfg(feature = "nccl")]
pub(crate) use agreement::PendingCalls;
#[cfg(feature = "nccl")]
pub(crate) use announced::{MessageId, Received, SentCall};
pub(crate) use connections::Connections;
pub use rendezvous::Rendezvous;
pub(crate) use rendezvous::{ConsistentValues, RankGpu, WaitHook, WorldConfig};
pub(crate) use world_view::WorldView;

use super::overlapped::TwoEnded;
use super::{Transport, buffer_ops};
use crate::call::{IssuedCall, Op, Request};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::report;
use crate::spin_condvar::WaitClock;
use crate::sync::{Mutex, MutexGuard};
use crate::world_state::Failure;
use assemble::{form_result, other_group_ranks, reduce_range, upload};
use flow_control::call_bytes;
use frame::{CallId, Frame, PREFIX_BYTES};
use link::Link;
use shardgrad_kernels::host_vec::{try_copied, try_zeroed};
use shardgrad_kernels::{Backend, Buffer};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::panic::Location;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use wait::AwaitedCall;
use world_view::ReceivedCall;

/// The timeout for sending a status frame, such as a failure, to a peer that reads nothing.
const FINAL_SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// One process's end of a world: its connections, and its view of the other ranks. Shared with the threads that read.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    view: Arc<WorldView>,
    connections: Arc<Connections>,
}

/// The TCP transport of one rank.
#[derive(Debug)]
pub(crate) struct TcpTransport {
    endpoint: Endpoint,
    timeout: Duration,
    spin: Duration,
    min_timeout: Cell<Duration>,
    /// The argument of the current call, as bytes on the host; shared with the elements that this rank keeps for others.
    argument: RefCell<Arc<Vec<u8>>>,
    /// Shared by both ends of the rank, and with the comparer of its calls over NCCL.
    counters: Arc<Mutex<CallCounters>>,
}

/// The numbers of this rank's last calls, messages and probes.
#[derive(Debug, Default)]
struct CallCounters {
    /// The number of the last call, by the bits of its axes.
    calls: HashMap<u16, u64>,
    /// The number of the last message, by the bits of its axes and its receiver.
    messages: HashMap<(u16, usize), u64>,
    /// The number of this rank's last probe.
    round: u64,
    /// The number of waits of this rank.
    waits: u64,
    /// The last forwarded probe of each rank, and the wait in which it was forwarded.
    forwarded: HashMap<usize, (u64, u64)>,
}

impl Endpoint {
    /// Starts reading from the connections to the other ranks.
    ///
    /// # Errors
    /// As [`Connections::start`].
    pub(crate) fn new(
        mesh: &Mesh,
        rank: usize,
        links: Vec<Option<Link>>,
        timeout: Duration,
    ) -> Result<Endpoint> {
        let view = Arc::new(WorldView::new(mesh.clone(), rank));
        let connections = Arc::new(Connections::start(view.clone(), links, timeout)?);
        Ok(Endpoint { view, connections })
    }

    /// Fails the world with an error of this rank, unless it has failed already.
    pub(crate) fn fail(&self, error: Error) {
        self.view.fail(Failure { error, origin: self.view.rank, affected: vec![] });
    }

    /// Announces that this rank has returned and waits until all ranks have returned, without a timeout: other ranks may still
    /// compute.
    ///
    /// # Errors
    /// The failure of the world; `Kind::Collective` for a message that this rank has not received.
    pub(crate) fn finish(&self) -> Result<()> {
        let view = &self.view;
        self.connections.send_to_all(&Frame::Returned(view.last(view.rank)), FINAL_SEND_TIMEOUT);
        view.condvar.wait(Duration::ZERO, || view.is_over(), || Ok(()))?;
        if let Some(failure) = view.failure() {
            return Err(report::lost(&failure, view.rank, "waits for the others to end"));
        }
        match view.unread() {
            Some((from, issued)) => Err(report::not_received(&view.mesh, view.rank, from, &issued)),
            None => Ok(()),
        }
    }

    /// Fails the world with an error of this rank, and sends the failure to all ranks while this one may still compute.
    #[cfg(feature = "nccl")]
    pub(crate) fn fail_everywhere(&self, error: Error) {
        self.fail(error);
        let first = self.view.failure().expect("bug: a failed world without a failure");
        self.connections.send_to_all(&Frame::Failed(first), FINAL_SEND_TIMEOUT);
    }

    /// The error of a GPU that waits too long in a call.
    #[cfg(feature = "nccl")]
    pub(crate) fn stuck(&self, call: &str, limit: Duration) -> Error {
        report::stuck(&self.view.mesh, self.view.rank, call, limit)
    }

    /// Whether the world has failed.
    #[cfg(feature = "nccl")]
    pub(crate) fn has_failed(&self) -> bool {
        self.view.has_failed()
    }

    /// The error with which this rank stops after the world has failed; `doing` continues `rank 3 ...`.
    pub(crate) fn failure_error(&self, doing: &str) -> Error {
        let failure = self.view.failure().expect("bug: a failed world without a failure");
        if failure.affected.contains(&self.view.rank) {
            return failure.error;
        }
        report::lost(&failure, self.view.rank, doing)
    }

    /// Sends the failure of the world to all other ranks, which may not know it yet. Returns the error that this process reports, from
    /// the error with which its rank ended.
    pub(crate) fn abort(&self, error: Error) -> Error {
        let view = &self.view;
        let Some(failure) = view.failure() else { return error };
        self.connections.send_to_all(&Frame::Failed(failure.clone()), FINAL_SEND_TIMEOUT);
        // All ranks may have failed independently with the same error; the lowest rank reports it.
        let is_own = failure.affected.is_empty() && failure.is_of(view.rank);
        let earlier = is_own
            .then(|| self.connections.wait_for_final_frames())
            .and_then(|()| view.failure_with_same_error(&failure.error));
        report::last_error(&failure, earlier.as_ref(), view.rank, error)
    }
}

impl Transport for TcpTransport {
    fn check(&self) -> Result<()> {
        if self.endpoint.view.has_failed() {
            return Err(self.failure_error("computes"));
        }
        Ok(())
    }

    fn set_min_timeout(&self, limit: Duration) -> Duration {
        self.min_timeout.replace(limit)
    }

    fn run(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        self.check()?;
        let outcome = match request.op {
            Op::Send { to } => self.send(backend, request, request.position.members[to]).map(|()| None),
            Op::Recv { from } => self.recv(backend, request, request.position.members[from]).map(Some),
            _ => self.collective(backend, request),
        };
        outcome.map_err(|error| self.fail_call(request, error))
    }
}

impl TwoEnded for TcpTransport {
    fn other_end(&self) -> TcpTransport {
        let (endpoint, counters) = (self.endpoint.clone(), self.counters.clone());
        TcpTransport { counters, ..TcpTransport::new(endpoint, self.timeout, Duration::ZERO) }
    }

    fn fail_world(&self, error: Error) {
        self.endpoint.fail(error);
    }
}

impl TcpTransport {
    pub(crate) fn new(endpoint: Endpoint, timeout: Duration, spin: Duration) -> TcpTransport {
        let (min_timeout, argument, counters) =
            (Cell::new(Duration::ZERO), RefCell::default(), Arc::default());
        TcpTransport { endpoint, timeout, spin, min_timeout, argument, counters }
    }

    /// The timeout of a wait.
    pub(crate) fn limit(&self) -> Duration {
        self.timeout.max(self.min_timeout.get())
    }

    fn rank(&self) -> usize {
        self.endpoint.view.rank
    }

    /// Fails the world with the error of a call, unless it has failed already: a member that stops half way (no memory, no kernel) would
    /// leave the others waiting. Returns the error of the call.
    pub(crate) fn fail_call(&self, request: &Request<'_>, error: Error) -> Error {
        self.fail_at(request.call.site, error)
    }

    /// As [`TcpTransport::fail_call`], for the call that user code makes at `site`.
    fn fail_at(&self, site: &'static Location<'static>, error: Error) -> Error {
        let view = &self.endpoint.view;
        if view.has_failed() {
            return error;
        }
        let error = error.at(site).detail("rank", view.mesh.describe(view.rank));
        self.fail(error.clone(), vec![view.rank]);
        error
    }

    /// Fails the world and sends the failure to all ranks.
    fn fail(&self, error: Error, affected: Vec<usize>) {
        self.endpoint.view.fail(Failure { error, origin: self.rank(), affected });
        // Another failure may have been first.
        let first = self.endpoint.view.failure().expect("bug: a failed world without a failure");
        self.endpoint.connections.send_to_all(&Frame::Failed(first), FINAL_SEND_TIMEOUT);
    }

    /// The error with which this rank stops after the world has failed.
    fn failure_error(&self, doing: &str) -> Error {
        self.endpoint.failure_error(doing)
    }

    /// Describes a call and stores its number, for the detection of deadlocks.
    fn issue(&self, request: &Request<'_>) -> IssuedCall {
        let mut issued = IssuedCall::none();
        issued.set(request);
        self.endpoint.view.set_last_call(&issued);
        match request.op {
            Op::Send { to } => self.count_message(&issued, request.position.members[to]),
            Op::Recv { .. } => {}
            _ => self.count_call(&issued),
        }
        issued
    }

    /// Stores the number of a collective call.
    fn count_call(&self, issued: &IssuedCall) {
        self.counters().calls.insert(issued.axes.bits(), issued.number);
    }

    /// Stores the number of a message to a rank.
    fn count_message(&self, issued: &IssuedCall, to: usize) {
        self.counters().messages.insert((issued.axes.bits(), to), issued.number);
    }

    fn counters(&self) -> MutexGuard<'_, CallCounters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a frame to a rank, within the timeout.
    fn write(&self, to: usize, head: &mut [u8], body: &[u8], issued: &IssuedCall) -> Result<()> {
        let mut clock = WaitClock::default();
        self.endpoint.connections.send(to, head, body, || self.check_send(&mut clock, to, issued))
    }

    /// Checks a send that cannot go on: returns an error if the world has failed, or the timeout is exceeded.
    fn check_send(&self, clock: &mut WaitClock, to: usize, issued: &IssuedCall) -> Result<()> {
        self.check()?;
        if clock.advance(Instant::now()) <= self.limit() {
            return Ok(());
        }
        let (view, me) = (&self.endpoint.view, self.rank());
        let seen = &view.snapshot(&[to])[to];
        let error = report::send_timed_out(&view.mesh, me, to, seen, issued, self.limit());
        self.fail(error.clone(), vec![me]);
        Err(error)
    }

    /// Sends a call with a range of the argument. If the receiver has no room for it, sends the call alone and keeps the elements until it
    /// asks for them. Returns whether this rank keeps them.
    fn send_call(
        &self,
        to: usize,
        head: &mut [u8],
        elements: Range<usize>,
        issued: &IssuedCall,
    ) -> Result<bool> {
        let (view, argument) = (&self.endpoint.view, &*self.argument.borrow());
        if view.reserve(to, call_bytes(head.len() - PREFIX_BYTES, elements.len())) {
            return self.write(to, head, &argument[elements], issued).map(|()| false);
        }
        view.keep(to, CallId::of(issued), argument.clone(), elements);
        self.write(to, &mut Frame::ReadyToSend(issued.clone()).encode(), &[], issued).map(|()| true)
    }

    /// Downloads the argument of a call to the host.
    fn download_argument(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<()> {
        let bytes = request.published_numel(request.position.group_rank) * request.call.dtype.size();
        let shared = &mut *self.argument.borrow_mut();
        let len = if request.x.is_some() { bytes } else { 0 };
        if Arc::get_mut(shared).is_none_or(|argument| len > argument.capacity()) {
            *shared = Arc::default();
            *shared = Arc::new(try_zeroed(len, "a message to other ranks")?);
        }
        let argument = Arc::get_mut(shared).expect("bug: a new buffer is shared");
        argument.resize(len, 0);
        Ok(request.x.map_or(Ok(()), |x| backend.download(x, argument))?)
    }

    fn collective(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        let (position, size, payload) = (request.position, request.call.dtype.size(), request.payload());
        self.download_argument(backend, request)?;
        let issued = self.issue(request);
        let mut head = Frame::Call(issued.clone()).encode();
        for group_rank in other_group_ranks(request) {
            let part = payload.elements(position.group_rank, group_rank);
            let bytes = part.start * size..part.end * size;
            self.send_call(position.members[group_rank], &mut head, bytes, &issued)?;
        }
        let axes = request.call.axes;
        self.wait_for_calls(request)?;
        let take = |&member: &usize| self.reply_after(member, self.endpoint.view.take_call(member, axes));
        let arrived: Vec<Option<ReceivedCall>> = position.members.iter().map(take).collect();
        self.compare(&position.members, &issued, &arrived)?;
        // Ranks whose transports differ do not connect.
        let is_call_only = |one: &Option<ReceivedCall>| one.as_ref().is_some_and(|one| one.is_call_only);
        if let Some(member) = arrived.iter().position(is_call_only) {
            return Err(report::malformed(position.members[member]));
        }
        let received: Vec<&[u8]> =
            arrived.iter().map(|one| one.as_ref().map_or(&[][..], ReceivedCall::elements)).collect();
        match payload.is_chunked() {
            true => self.all_reduce_in_chunks(backend, request, &issued, &received).map(Some),
            false => form_result(backend, request, &received),
        }
    }

    /// Fails the world if the members of a group made different calls; all members detect that.
    fn compare(&self, members: &[usize], own: &IssuedCall, arrived: &[Option<ReceivedCall>]) -> Result<()> {
        let calls: SmallVec<[&IssuedCall; 8]> =
            arrived.iter().map(|one| one.as_ref().map_or(own, |one| &one.issued)).collect();
        match report::mismatch(&self.endpoint.view.mesh, members, &calls) {
            None => Ok(()),
            Some(error) => {
                self.fail(error.clone(), members.to_vec());
                Err(error)
            }
        }
    }

    /// The chunked all-reduce: reduces this rank's chunk from the received operands and exchanges reduced chunks.
    fn all_reduce_in_chunks(
        &self,
        backend: &dyn Backend,
        request: &Request<'_>,
        issued: &IssuedCall,
        received: &[&[u8]],
    ) -> Result<Buffer> {
        let (position, dtype, axes, payload) =
            (request.position, request.call.dtype, request.call.axes, request.payload());
        let range = |group_rank: usize| payload.chunk(group_rank);
        let mine = reduce_range(backend, request, received, &range(position.group_rank))?;
        let mut own = try_zeroed(payload.chunk_bytes(position.group_rank), "a message to other ranks")?;
        backend.download(&mine, &mut own)?;
        let mut head = Frame::ReducedChunk(axes.bits()).encode();
        for group_rank in other_group_ranks(request) {
            self.write(position.members[group_rank], &mut head, &own, issued)?;
        }
        self.wait(AwaitedCall::of(request), false, |view, member| view.has_chunk(member, axes), &mut || {
            Ok(())
        })?;
        let mut y = backend.alloc(request.counts[0] * dtype.size())?;
        for group_rank in 0..position.size() {
            let theirs = self.endpoint.view.take_chunk(position.members[group_rank], axes);
            let part = theirs.map_or(Ok(mine.clone()), |theirs| upload(backend, &theirs))?;
            buffer_ops::copy(
                backend,
                dtype,
                &part,
                0..range(group_rank).len(),
                &mut y,
                range(group_rank).start,
            )?;
        }
        Ok(y)
    }

    /// Sends a message without waiting for its recv, unless the receiver computes and has no room for it.
    fn send(&self, backend: &dyn Backend, request: &Request<'_>, to: usize) -> Result<()> {
        self.download_argument(backend, request)?;
        let issued = self.issue(request);
        if to == self.rank() {
            let elements = try_copied(&self.argument.borrow(), "a message to this rank itself")?;
            self.endpoint.view.deliver_to_self(issued, elements);
            return Ok(());
        }
        let (mut head, elements) = (Frame::Call(issued.clone()).encode(), 0..self.argument.borrow().len());
        if self.send_call(to, &mut head, elements, &issued)? {
            self.wait_for_answer(to, &issued)?;
        }
        Ok(())
    }

    fn recv(&self, backend: &dyn Backend, request: &Request<'_>, from: usize) -> Result<Buffer> {
        let message = self.take_message(request, from)?;
        // Ranks whose transports differ do not connect.
        if message.is_call_only {
            return Err(report::malformed(from));
        }
        upload(backend, message.elements())
    }

    /// Waits for the message of a recv and compares both calls.
    fn take_message(&self, request: &Request<'_>, from: usize) -> Result<ReceivedCall> {
        let (issued, axes) = (self.issue(request), request.call.axes);
        self.wait_for_calls(request)?;
        let message = self.reply_after(from, self.endpoint.view.take_message(from, axes));
        let message = message.expect("bug: the awaited message is missing");
        let (mesh, me) = (&self.endpoint.view.mesh, self.rank());
        match report::wrong_message(mesh, from, &message.issued, me, &issued) {
            None => Ok(message),
            Some(error) => {
                self.fail(error.clone(), vec![me, from]);
                Err(error)
            }
        }
    }
}
