//! The transport between threads of one process: ranks publish their buffers in the shared world state and read each other's
//! buffers in place.
//!
//! A collective has two barriers: all members have arrived (calls are compared, then peers' buffers are read), and all members have
//! finished reading. A large all-reduce has a third barrier between them: every member reduces one chunk (reduce-scatter), then
//! gathers the chunks of the others (all-gather). One kernel reduces elements in the order of group ranks either way, so both
//! algorithms give the same bits.
//!
//! Work queued on a device may still be running when a barrier is passed. So a rank publishes a buffer with an event behind the work
//! that fills it, on which readers' streams wait; and after reading it publishes an event behind its reads, on which the owner's
//! stream waits before it reuses the buffer. No thread waits for the device. On the CPU these events are always complete.
//!
//! On the CPU, small payloads are copied into the slots of the group instead ([`crate::group_sync`]). A slot stays valid until all
//! members have arrived at the next call, so there is no second barrier.
//!
//! If the back end supports asynchronous collectives, the copies and sums of a call, and its waits for other ranks, run on the
//! communication stream, and the rank's own stream goes on computing.

use super::overlapped::TwoEnded;
use super::{Transport, buffer_ops};
use crate::call::{Fingerprint, IssuedCall, Op, ReduceOp, Request};
use crate::error::{Error, Result};
use crate::group_sync::{GroupSync, INLINE_BYTES_MAX, INLINE_RANKS_MAX};
use crate::report;
use crate::spin_condvar::WaitClock;
use crate::sync::{AtomicU64, RwLockReadGuard};
use crate::world_state::{Deadlock, Failure, Message, PostedCall, RankState, WorldState};
use shardgrad_kernels::{Allocator, Backend, Buffer, Device, SyncEvent};
use smallvec::SmallVec;
use std::cell::{Cell, OnceCell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Up to about this many ranks build the wait-for graph at every wake-up (ten milliseconds); more ranks build it less often.
const FREQUENT_CHECKERS_MAX: usize = 32;

/// The state that all ranks of one world share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) world: WorldState,
    pub(crate) timeout: Duration,
    pub(crate) spin: Duration,
    pub(crate) delay_seed: Option<u64>,
}

impl Shared {
    pub(crate) fn new(
        world: WorldState,
        timeout: Duration,
        spin: Duration,
        delay_seed: Option<u64>,
    ) -> Shared {
        Shared { world, timeout, spin, delay_seed }
    }
}

/// The thread transport of one rank.
#[derive(Debug)]
pub(crate) struct ThreadTransport {
    shared: Arc<Shared>,
    rank: usize,
    /// How long a waiting rank spins before it sleeps.
    spin: Duration,
    /// By the bits of the axes.
    groups: Vec<OnceCell<Arc<GroupSync>>>,
    inline: RefCell<InlineBuffers>,
    delay_rng: Cell<u64>,
    /// The minimum timeout of a wait; the timeout of the world applies if that is longer.
    min_timeout: Cell<Duration>,
}

/// The buffers of a rank for inline payloads.
#[derive(Debug)]
struct InlineBuffers {
    bytes: Box<[u8; INLINE_BYTES_MAX]>,
    /// The payloads of the other members, by group rank.
    published: Vec<Buffer>,
}

type Peers<'a> = SmallVec<[RwLockReadGuard<'a, PostedCall>; 8]>;

/// The published buffers of the members, by group rank.
type Shown<'a> = SmallVec<[Option<&'a Buffer>; 8]>;

impl Transport for ThreadTransport {
    fn check(&self) -> Result<()> {
        if self.shared.world.has_failed() {
            return Err(self.failure_error("computes"));
        }
        Ok(())
    }

    fn set_min_timeout(&self, limit: Duration) -> Duration {
        self.min_timeout.replace(limit)
    }

    fn run(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        self.check()?;
        self.delay_at_random();
        self.run_async(backend, request).map_err(|error| {
            let world = &self.shared.world;
            if world.has_failed() {
                return error;
            }
            // Fail the world: a member that stops half way (no memory, no kernel) would leave the others waiting.
            let error = error.at(request.call.site).detail("rank", world.mesh.describe(self.rank));
            self.fail(Failure { error: error.clone(), origin: self.rank, affected: vec![self.rank] });
            error
        })
    }
}

impl TwoEnded for ThreadTransport {
    fn other_end(&self) -> ThreadTransport {
        ThreadTransport { spin: Duration::ZERO, ..ThreadTransport::new(self.shared.clone(), self.rank) }
    }

    fn fail_world(&self, error: Error) {
        self.fail(Failure { error, origin: self.rank, affected: vec![] });
    }
}

impl ThreadTransport {
    pub(crate) fn new(shared: Arc<Shared>, rank: usize) -> ThreadTransport {
        let num_sets = 1 << shared.world.mesh.num_axes();
        let seed = shared.delay_seed.unwrap_or(0) ^ (rank as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let (groups, min_timeout) = (vec![OnceCell::new(); num_sets], Cell::new(Duration::ZERO));
        let inline =
            RefCell::new(InlineBuffers { bytes: Box::new([0; INLINE_BYTES_MAX]), published: Vec::new() });
        let spin = shared.spin;
        ThreadTransport { rank, spin, groups, inline, delay_rng: Cell::new(seed), min_timeout, shared }
    }

    /// The timeout of a wait.
    fn limit(&self) -> Duration {
        self.shared.timeout.max(self.min_timeout.get())
    }

    fn rank_state(&self, rank: usize) -> &RankState {
        self.shared.world.rank_state(rank)
    }

    fn fail(&self, failure: Failure) {
        self.shared.world.fail(failure);
    }

    /// The error with which this rank stops after the world has failed.
    fn failure_error(&self, doing: &str) -> crate::error::Error {
        let world = &self.shared.world;
        let failure = world.failure().expect("bug: a failed world without a failure");
        if failure.affected.contains(&self.rank) {
            return failure.error;
        }
        report::lost(&failure, self.rank, doing)
    }

    fn group(&self, request: &Request<'_>) -> &GroupSync {
        let axes = request.call.axes;
        self.groups[usize::from(axes.bits())].get_or_init(|| self.shared.world.group(self.rank, axes))
    }

    fn collective(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        let size = request.call.dtype.size();
        let y = match request.result_numel() {
            Some(_) if is_root(request) => request.x.cloned(),
            Some(numel) => Some(backend.alloc(numel * size)?),
            None => None,
        };
        let (group, ready) = (self.group(request), backend.record_event()?);
        if ready.is_complete() && backend.device() == Device::Cpu && fits_inline(request) {
            return self.collective_inline(backend, request, group, y);
        }
        self.collective_in_place(backend, request, group, ready, y)
    }

    /// A collective with inline payloads and one barrier.
    fn collective_inline(
        &self,
        backend: &dyn Backend,
        request: &Request<'_>,
        group: &GroupSync,
        y: Option<Buffer>,
    ) -> Result<Option<Buffer>> {
        let (size, position) = (request.call.dtype.size(), request.position);
        let InlineBuffers { bytes, published } = &mut *self.inline.borrow_mut();
        let mine = &mut bytes[..request.published_numel(position.group_rank) * size];
        if let Some(x) = request.x {
            backend.download(x, mine)?;
        }
        self.rank_state(self.rank).post(request, true, None, SyncEvent::default());
        self.publish_and_arrive(group, request, mine)?;
        self.delay_at_random();
        let mut y = match y {
            Some(y) if !is_root(request) => y,
            done => return Ok(done),
        };
        while published.len() < position.size() {
            // Not allocated by the back end, whose memory statistics count tensors.
            published.push(Allocator::with_limit(0).alloc(INLINE_BYTES_MAX)?);
        }
        for (group_rank, published) in
            published[..position.size()].iter_mut().enumerate().filter(|(i, _)| *i != position.group_rank)
        {
            let theirs = &mut bytes[..request.published_numel(group_rank) * size];
            if !group.read(group_rank, request.number, theirs) {
                let issued = self.rank_state(request.position.members[group_rank]).posted().issued.clone();
                return Err(self.short_buffer(
                    request.position.members[group_rank],
                    &issued,
                    0,
                    theirs.len(),
                ));
            }
            backend.upload(theirs, published)?;
        }
        let of = |group_rank: usize| {
            request.x.filter(|_| group_rank == position.group_rank).or(Some(&published[group_rank]))
        };
        buffer_ops::form_result(
            backend,
            request,
            &(0..position.size()).map(of).collect::<Shown<'_>>(),
            &mut y,
        )?;
        Ok(Some(y))
    }

    /// A collective in place: members read each other's buffers between two barriers.
    fn collective_in_place(
        &self,
        backend: &dyn Backend,
        request: &Request<'_>,
        group: &GroupSync,
        ready: SyncEvent,
        mut y: Option<Buffer>,
    ) -> Result<Option<Buffer>> {
        // If queued work is already complete, no stream has to wait for it.
        let is_async = !ready.is_complete();
        self.rank_state(self.rank).post(request, true, request.x, ready);
        self.publish_and_arrive(group, request, &[])?;
        {
            let peers = self.peers(request);
            for (from, peer) in peers.iter().enumerate() {
                backend.wait_event(&peer.ready)?;
                let due = peer.issued.payload(peers.len()).argument_bytes(from, request.position.group_rank);
                let published = peer.x.as_ref().map_or(0, Buffer::bytes);
                if published < due {
                    return Err(self.short_buffer(
                        request.position.members[from],
                        &peer.issued,
                        published,
                        due,
                    ));
                }
            }
            match (request.op, &mut y) {
                (Op::AllReduce(reduce_op), Some(y)) if request.payload().is_chunked() => {
                    self.all_reduce_in_chunks(backend, request, reduce_op, group, peers, y)?;
                }
                (Op::AllToAll, Some(y)) => exchange(backend, request, &peers, y)?,
                (_, Some(y)) if !is_root(request) => {
                    let published: Shown<'_> = peers.iter().map(|p| p.x.as_ref()).collect();
                    buffer_ops::form_result(backend, request, &published, y)?;
                }
                _ => {}
            }
        }
        self.delay_at_random();
        if is_async {
            self.rank_state(self.rank).set_last_read_event(backend.record_event()?);
        }
        self.wait_for_all(group, &group.finished, request, false)?;
        for &peer in request.position.members.iter().filter(|_| is_async) {
            backend.wait_event(&self.rank_state(peer).last_read_event())?;
        }
        self.rank_state(self.rank).clear_buffer();
        if request.payload().is_chunked() {
            self.rank_state(self.rank).set_reduced_chunk(None);
        }
        Ok(y)
    }

    /// Publishes the fingerprint and an inline payload, waits until all members have arrived, and compares the calls.
    fn publish_and_arrive(&self, group: &GroupSync, request: &Request<'_>, contents: &[u8]) -> Result<()> {
        group.publish(request.position.group_rank, request.number, Fingerprint::of(request), contents);
        self.wait_for_all(group, &group.arrived, request, true)?;
        self.rank_state(self.rank).end_wait();
        // Splits of an all_to_all differ between members, so they are always compared. Posted calls stay: a rank with a different call
        // stops before it posts another.
        if group.fingerprints_agree(request.number) && request.op != Op::AllToAll {
            return Ok(());
        }
        self.compare(request, &self.peers(request))
    }

    fn peers(&self, request: &Request<'_>) -> Peers<'_> {
        request.position.members.iter().map(|&r| self.rank_state(r).posted()).collect()
    }

    /// Executes a call, as an asynchronous collective if the back end supports that.
    fn run_async(&self, own: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        let backend = own.begin_async()?.unwrap_or(own);
        if let Some(x) = request.x {
            backend.record_stream(x);
        }
        let outcome = self.free_returned_buffers(backend).and_then(|()| match request.op {
            Op::Send { to } => self.send(backend, request, to).map(|()| None),
            Op::Recv { from } => self.recv(backend, request, from).map(Some),
            _ => self.collective(backend, request),
        });
        // After an error too: other ranks may have begun to read.
        let ended = own.end_async();
        let y = outcome?;
        ended?;
        Ok(y)
    }

    /// The error of a rank whose buffer is shorter than its call states.
    fn short_buffer(&self, from: usize, issued: &IssuedCall, bytes: usize, due: usize) -> Error {
        report::wrong_size(&self.shared.world.mesh, from, issued, bytes, due)
    }

    /// Fails the world if the members of a group made different calls; all members detect that here.
    fn compare(&self, request: &Request<'_>, peers: &Peers<'_>) -> Result<()> {
        let calls: SmallVec<[_; 8]> = peers.iter().map(|p| &p.issued).collect();
        let members = &request.position.members;
        match report::mismatch(&self.shared.world.mesh, members, &calls) {
            None => Ok(()),
            Some(error) => {
                self.fail(Failure { error: error.clone(), origin: self.rank, affected: members.clone() });
                Err(error)
            }
        }
    }

    /// The chunked all-reduce: reduces this rank's chunk of all members' buffers, then gathers the chunks of the others.
    fn all_reduce_in_chunks(
        &self,
        backend: &dyn Backend,
        request: &Request<'_>,
        reduce_op: ReduceOp,
        group: &GroupSync,
        peers: Peers<'_>,
        y: &mut Buffer,
    ) -> Result<()> {
        let (dtype, position, payload) = (request.call.dtype, request.position, request.payload());
        let mine = payload.chunk(position.group_rank);
        let mut part = backend.alloc(payload.chunk_bytes(position.group_rank))?;
        buffer_ops::reduce(backend, dtype, reduce_op, buffers(&peers), &mine, &mut part)?;
        drop(peers);
        self.rank_state(self.rank).set_reduced_chunk(Some((part, backend.record_event()?)));
        self.delay_at_random();
        self.wait_for_all(group, &group.reduced, request, false)?;
        for (i, &rank) in position.members.iter().enumerate() {
            let part = self.rank_state(rank).reduced_chunk();
            let (part, ready) = part.as_ref().expect("bug: a member without a chunk");
            backend.wait_event(ready)?;
            if part.bytes() < payload.chunk_bytes(i) {
                let issued = self.rank_state(rank).posted().issued.clone();
                return Err(self.short_buffer(rank, &issued, part.bytes(), payload.chunk_bytes(i)));
            }
            let chunk = payload.chunk(i);
            buffer_ops::copy(backend, dtype, part, 0..chunk.len(), y, chunk.start)?;
        }
        Ok(())
    }

    /// Waits at a barrier until every member has arrived.
    fn wait_for_all(
        &self,
        group: &GroupSync,
        count: &AtomicU64,
        request: &Request<'_>,
        is_arriving: bool,
    ) -> Result<()> {
        let mut clock = WaitClock::default();
        let check_wait = || self.check_wait(request, &mut clock, is_arriving);
        group.wait_for_all(count, self.spin, check_wait)
    }

    /// Checks a wait, every ten milliseconds: returns an error if the world has failed, the rank is deadlocked, or the wait exceeds its
    /// timeout.
    fn check_wait(&self, request: &Request<'_>, clock: &mut WaitClock, is_arriving: bool) -> Result<()> {
        let (world, mesh) = (&self.shared.world, &self.shared.world.mesh);
        let is_late = clock.advance(Instant::now()) > self.limit();
        // In large worlds each rank builds the wait-for graph less often, to keep the total cost low.
        let is_turn = clock.num_wakeups.is_multiple_of(1 + mesh.num_ranks() / FREQUENT_CHECKERS_MAX);
        clock.num_wakeups += 1;
        let due = !world.has_failed() && (is_arriving && is_turn || is_late);
        let deadlock = if due { world.wait_graph().find_deadlock(self.rank) } else { None };
        if deadlock.is_some() || due && is_late {
            let seen = world.snapshot();
            let error = match deadlock {
                Some(Deadlock::Cycle(ranks)) => Some((report::cycle(mesh, &seen, &ranks), ranks)),
                Some(Deadlock::Departed(gone)) => {
                    Some((report::departed(mesh, &seen, self.rank, gone), request.position.members.clone()))
                }
                None if is_late && is_arriving && !seen[self.rank].absent.is_empty() => {
                    let error = report::timed_out(mesh, &seen, self.rank, self.limit());
                    Some((error, request.position.members.clone()))
                }
                None if is_late && !is_arriving => {
                    let error = report::unfinished(mesh, self.rank, &seen[self.rank].issued, self.limit());
                    Some((error, request.position.members.clone()))
                }
                None => None,
            };
            if let Some((error, affected)) = error {
                self.fail(Failure { error, origin: self.rank, affected });
            }
        }
        if world.has_failed() {
            let call = self.rank_state(self.rank).posted().issued.text(mesh, self.rank);
            return Err(self.failure_error(&format!("waits in {call}")));
        }
        Ok(())
    }

    /// Frees the contents of messages of this rank that were received since, after the receivers' reads.
    fn free_returned_buffers(&self, backend: &dyn Backend) -> Result<()> {
        for (x, read) in self.rank_state(self.rank).take_returned() {
            backend.record_stream(&x);
            backend.wait_event(&read)?;
            drop(x);
        }
        Ok(())
    }

    /// Delivers a copy to the receiver without waiting.
    fn send(&self, backend: &dyn Backend, request: &Request<'_>, to: usize) -> Result<()> {
        let (dtype, numel) = (request.call.dtype, request.counts[0]);
        let mut copied = backend.alloc(numel * dtype.size())?;
        if let Some(x) = request.x {
            buffer_ops::copy(backend, dtype, x, 0..numel, &mut copied, 0)?;
        }
        let me = self.rank_state(self.rank);
        let ready = backend.record_event()?;
        me.post(request, false, None, SyncEvent::default());
        let issued = me.posted().issued.clone();
        let message = Message { from: self.rank, issued, x: copied, ready };
        self.rank_state(request.position.members[to]).deliver(message);
        Ok(())
    }

    fn recv(&self, backend: &dyn Backend, request: &Request<'_>, from: usize) -> Result<Buffer> {
        let (dtype, numel, axes) = (request.call.dtype, request.counts[0], request.call.axes);
        let mut y = backend.alloc(numel * dtype.size())?;
        let (me, from_group_rank, from) = (self.rank_state(self.rank), from, request.position.members[from]);
        me.post(request, true, None, SyncEvent::default());
        let mut clock = WaitClock::default();
        let there = || me.has_message(axes, from);
        me.condvar.wait(self.spin, there, || self.check_wait(request, &mut clock, true))?;
        me.end_wait();
        let message = me.take_message(axes, from).expect("bug: another rank took the message");
        let (mesh, sent) = (&self.shared.world.mesh, &message.issued);
        let mismatch = report::wrong_message(mesh, message.from, sent, self.rank, &me.posted().issued);
        if let Some(error) = mismatch {
            self.fail(Failure { error: error.clone(), origin: self.rank, affected: vec![self.rank, from] });
            return Err(error);
        }
        let due = message
            .issued
            .payload(request.position.size())
            .argument_bytes(from_group_rank, request.position.group_rank);
        if message.x.bytes() < due {
            return Err(self.short_buffer(from, &message.issued, message.x.bytes(), due));
        }
        backend.wait_event(&message.ready)?;
        buffer_ops::copy(backend, dtype, &message.x, 0..numel, &mut y, 0)?;
        let read = backend.record_event()?;
        if !read.is_complete() {
            self.rank_state(from).return_buffer(message.x, read);
        }
        Ok(y)
    }

    /// With random delays, sleeps for a moment, yields, or does neither, at random.
    fn delay_at_random(&self) {
        if self.shared.delay_seed.is_none() {
            return;
        }
        let mut z = self.delay_rng.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
        self.delay_rng.set(z);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        match z % 8 {
            0 => std::thread::sleep(Duration::from_micros(z >> 32 & 127)),
            1..4 => std::thread::yield_now(),
            _ => {}
        }
    }
}

/// Whether this rank is the root of a broadcast, whose argument is the result.
pub(super) fn is_root(request: &Request<'_>) -> bool {
    matches!(request.op, Op::Broadcast { root } if root == request.position.group_rank)
}

/// Whether the payload of each member fits into its slot. All members decide the same way, or their fingerprints differ.
fn fits_inline(request: &Request<'_>) -> bool {
    let group_ranks = 0..request.position.size();
    let bytes = |group_rank: usize| request.published_numel(group_rank) * request.call.dtype.size();
    request.op != Op::AllToAll
        && group_ranks.len() <= INLINE_RANKS_MAX
        && group_ranks.map(bytes).all(|bytes| bytes <= INLINE_BYTES_MAX)
}

/// The published buffers of all members, in the order of group ranks.
fn buffers<'a>(peers: &'a Peers<'_>) -> impl Iterator<Item = &'a Buffer> {
    peers.iter().map(|p| p.x.as_ref().expect("bug: a member of a reduction without a buffer"))
}

/// The all_to_all: copies from every member's buffer the part for this rank.
fn exchange(backend: &dyn Backend, request: &Request<'_>, peers: &Peers<'_>, y: &mut Buffer) -> Result<()> {
    let (dtype, group_rank, received) = (request.call.dtype, request.position.group_rank, request.received);
    for (i, x) in buffers(peers).enumerate() {
        let sent = peers[i].issued.payload(peers.len()).elements(i, group_rank);
        buffer_ops::copy(backend, dtype, x, sent, y, buffer_ops::offset(received, i))?;
    }
    Ok(())
}
