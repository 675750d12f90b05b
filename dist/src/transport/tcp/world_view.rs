//! One process's view of the world: the status of every rank, and the calls, messages and chunks received but not used yet.

use super::flow_control::{CALL_BYTES, KeptElements, ReceiveWindow, SendWindow, call_bytes};
use super::frame::{CallId, Frame, Probe};
use crate::call::{IssuedCall, Op};
use crate::error::{Error, Result};
use crate::mesh::{AxisSet, Mesh};
use crate::report;
use crate::spin_condvar::SpinCondvar;
use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard};
use crate::world_state::{Failure, RankSnapshot, RankStatus};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// A call of another rank, with the elements that it sent.
#[derive(Debug)]
pub(super) struct ReceivedCall {
    pub(super) issued: IssuedCall,
    /// `None` while the sender keeps them.
    elements: Option<Vec<u8>>,
    /// The bytes that it counts in the queue with its elements.
    counted: usize,
    /// The bytes that it counts among the calls that came without elements.
    announced: usize,
    /// Whether another transport carries its elements.
    pub(super) is_call_only: bool,
}

const _: () =
    assert!(size_of::<ReceivedCall>() <= CALL_BYTES, "queued calls count fewer bytes than they take");

impl ReceivedCall {
    /// The elements of a call that was taken out of its queue.
    pub(super) fn elements(&self) -> &[u8] {
        self.elements.as_ref().expect("bug: a call is used before its elements have arrived")
    }
}

/// The view of one rank.
#[derive(Debug)]
struct Peer {
    status: RankStatus,
    /// Its newest call that this process knows.
    last: IssuedCall,
    /// Whether it has announced that it waits in that call.
    is_waiting: bool,
    /// By the bits of axes, in the order of calls.
    calls: HashMap<u16, VecDeque<ReceivedCall>>,
    messages: HashMap<u16, VecDeque<ReceivedCall>>,
    chunks: HashMap<u16, VecDeque<Vec<u8>>>,
    outgoing: SendWindow,
    incoming: ReceiveWindow,
    /// The most bytes of elements in the queues at any time.
    #[cfg(test)]
    queued_peak: usize,
    /// How long nothing has arrived from it.
    silence: Duration,
    /// The failure of the world that it reported.
    failure: Option<Failure>,
}

impl Peer {
    fn enqueue(&mut self, call: ReceivedCall) {
        self.is_waiting = false;
        self.last.clone_from(&call.issued);
        let is_message = !call.issued.op.is_collective();
        let queues = if is_message { &mut self.messages } else { &mut self.calls };
        queues.entry(call.issued.axes.bits()).or_default().push_back(call);
    }

    /// The first call or message in a queue.
    fn first(&self, axes: AxisSet, is_message: bool) -> Option<&ReceivedCall> {
        let queues = if is_message { &self.messages } else { &self.calls };
        queues.get(&axes.bits())?.front()
    }

    fn queued_call(&mut self, id: CallId) -> Option<&mut ReceivedCall> {
        let queues = if id.is_message { &mut self.messages } else { &mut self.calls };
        queues.get_mut(&id.bits)?.iter_mut().find(|call| call.issued.number == id.number)
    }

    #[cfg(test)]
    fn update_queued_peak(&mut self) {
        let queues = self.calls.values().chain(self.messages.values()).flatten();
        let queued = queues.filter_map(|call| call.elements.as_ref()).map(Vec::len).sum();
        self.queued_peak = self.queued_peak.max(queued);
    }
}

/// One process's view of the world. Reader threads put frames in, the rank takes them out.
#[derive(Debug)]
pub(crate) struct WorldView {
    pub(super) mesh: Mesh,
    pub(super) rank: usize,
    peers: Vec<Mutex<Peer>>,
    failed: AtomicBool,
    failure: Mutex<Option<Failure>>,
    probes: Mutex<Vec<Probe>>,
    /// The number of calls that have arrived without their elements.
    num_announced: AtomicUsize,
    /// Elements that other ranks have asked for, in this order.
    cleared: Mutex<VecDeque<(usize, CallId, KeptElements)>>,
    /// On which the thread waits that sends these.
    has_cleared: Condvar,
    /// The receivers that ask for messages of this rank that another transport carries, in the order of their requests.
    requested: Mutex<VecDeque<(usize, CallId)>>,
    /// On which the rank waits for frames.
    pub(super) condvar: SpinCondvar,
}

impl WorldView {
    pub(super) fn new(mesh: Mesh, rank: usize) -> WorldView {
        let peer = || Peer {
            status: RankStatus::Running,
            last: IssuedCall::none(),
            is_waiting: false,
            calls: HashMap::new(),
            messages: HashMap::new(),
            chunks: HashMap::new(),
            outgoing: SendWindow::default(),
            incoming: ReceiveWindow::default(),
            #[cfg(test)]
            queued_peak: 0,
            silence: Duration::ZERO,
            failure: None,
        };
        let peers = (0..mesh.num_ranks()).map(|_| Mutex::new(peer())).collect();
        let (failed, failure) = (AtomicBool::new(false), Mutex::new(None));
        WorldView {
            mesh,
            rank,
            peers,
            failed,
            failure,
            probes: Mutex::default(),
            num_announced: AtomicUsize::new(0),
            cleared: Mutex::default(),
            has_cleared: Condvar::new(),
            requested: Mutex::default(),
            condvar: SpinCondvar::default(),
        }
    }

    /// Locks the view of a rank. Poisoning is ignored: a thread that panics with the lock fails the world.
    fn peer(&self, rank: usize) -> MutexGuard<'_, Peer> {
        self.peers[rank].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks a frame from a rank and the lengths of its head and body, before the body is read. The call in the frame determines the
    /// expected length; whether the calls of all members match is compared later.
    ///
    /// # Errors
    /// `Kind::PeerLost` for a frame that a correct rank cannot send here and now, and for more announced calls than a queue holds.
    pub(super) fn check(&self, from: usize, frame: &Frame, head: usize, bytes: usize) -> Result<()> {
        let malformed = || report::malformed(from);
        let of_size = |call: &IssuedCall, due: usize| match bytes == due {
            true => Ok(()),
            false => Err(report::wrong_size(&self.mesh, from, call, bytes, due)),
        };
        let has_room = |bytes: usize, is_eager: bool| self.peer(from).incoming.has_room(bytes, is_eager);
        match frame {
            Frame::Call(call) => {
                of_size(call, self.due_bytes(from, call).ok_or_else(malformed)?)?;
                has_room(call_bytes(head, bytes), true).then_some(()).ok_or_else(malformed)
            }
            Frame::ReadyToSend(call) if bytes == 0 => {
                self.due_bytes(from, call).ok_or_else(malformed)?;
                match has_room(call_bytes(head, 0), false) {
                    true => Ok(()),
                    false => Err(report::too_many_announced(&self.mesh, self.rank, from, call)),
                }
            }
            Frame::Elements(id) if self.peer(from).incoming.is_due(*id, bytes) => Ok(()),
            Frame::Elements(_) => Err(malformed()),
            Frame::ClearToSend(id) if bytes == 0 && self.peer(from).outgoing.is_announced(*id) => Ok(()),
            Frame::ClearToSend(id) | Frame::Hold(id) if !self.peer(from).outgoing.is_kept(*id) => {
                Err(malformed())
            }
            Frame::Credit(bytes) if !self.peer(from).outgoing.may_acknowledge(*bytes) => Err(malformed()),
            Frame::ReducedChunk(bits) => {
                // A reduced chunk arrives after this rank's call, and before its next call.
                let call = self.last(self.rank);
                let (members, group_ranks) = self.group_ranks(from, call.axes).ok_or_else(malformed)?;
                let payload = call.payload(members);
                let is_due = call.axes.bits() == *bits && payload.is_chunked();
                if !is_due || self.has_chunk(from, call.axes) {
                    return Err(malformed());
                }
                of_size(&call, payload.chunk_bytes(group_ranks[0]))
            }
            Frame::CallOnly(call) if bytes == 0 => {
                self.due_bytes(from, call).ok_or_else(malformed)?;
                has_room(call_bytes(head, 0), false).then_some(()).ok_or_else(malformed)
            }
            _ if bytes == 0 => Ok(()),
            _ => Err(malformed()),
        }
    }

    /// The size of this rank's group over some axes, and the group ranks of `from` and of this rank; `None` if `from` is no member.
    fn group_ranks(&self, from: usize, axes: AxisSet) -> Option<(usize, [usize; 2])> {
        let members = self.mesh.group(self.rank, axes);
        let group_rank = |rank: usize| members.iter().position(|member| *member == rank);
        Some((members.len(), [group_rank(from)?, group_rank(self.rank)?]))
    }

    /// The length of the elements that a rank sends to this rank in a call; `None` if the call cannot come from that rank.
    fn due_bytes(&self, from: usize, call: &IssuedCall) -> Option<usize> {
        let (members, group_ranks) = self.group_ranks(from, call.axes)?;
        match call.op {
            Op::Recv { .. } => None,
            Op::Send { to } if to != group_ranks[1] => None,
            _ => Some(call.payload(members).bytes(group_ranks[0], group_ranks[1])),
        }
    }

    /// Takes the first call out of a queue, whose elements have arrived. Returns whether [`WorldView::next_reply`] may have something to send
    /// then.
    fn take(
        &self,
        from: usize,
        queue: impl FnOnce(&mut Peer) -> Option<&mut VecDeque<ReceivedCall>>,
    ) -> Option<(ReceivedCall, bool)> {
        let mut peer = self.peer(from);
        let call = queue(&mut peer)?.pop_front()?;
        let is_reply_due = peer.incoming.take(call.counted, call.announced);
        Some((call, is_reply_due))
    }

    /// Stores a frame that a rank has sent, with a head of this length, and that [`WorldView::check`] accepts.
    pub(super) fn receive(&self, from: usize, frame: Frame, head: usize, body: Vec<u8>) {
        let mut peer = self.peer(from);
        match frame {
            Frame::Call(issued) => {
                let counted = if from == self.rank { 0 } else { call_bytes(head, body.len()) };
                peer.incoming.add(counted);
                let (elements, announced, is_call_only) = (Some(body), 0, false);
                peer.enqueue(ReceivedCall { issued, elements, counted, announced, is_call_only });
            }
            Frame::CallOnly(issued) => {
                let announced = call_bytes(head, 0);
                peer.incoming.add_call_only(announced);
                let (elements, counted, is_call_only) = (Some(body), 0, true);
                peer.enqueue(ReceivedCall { issued, elements, counted, announced, is_call_only });
            }
            Frame::ReadyToSend(issued) => {
                let announced = call_bytes(head, 0);
                let bytes = self.due_bytes(from, &issued).unwrap_or(0);
                peer.incoming.announce(CallId::of(&issued), announced, bytes);
                let (elements, counted, is_call_only) = (None, 0, false);
                peer.enqueue(ReceivedCall { issued, elements, counted, announced, is_call_only });
                self.num_announced.fetch_add(1, Ordering::SeqCst);
            }
            Frame::Elements(id) => {
                let counted = peer.incoming.arrive(id);
                if let Some(call) = peer.queued_call(id) {
                    (call.elements, call.counted) = (Some(body), counted);
                }
                self.num_announced.fetch_sub(1, Ordering::SeqCst);
            }
            Frame::ClearToSend(id) if peer.outgoing.take_announced(id) => {
                drop(peer);
                self.requested.lock().unwrap_or_else(PoisonError::into_inner).push_back((from, id));
                return self.condvar.notify_all();
            }
            Frame::ClearToSend(id) => {
                let kept = peer.outgoing.clear(id);
                drop(peer);
                let mut cleared = self.cleared.lock().unwrap_or_else(PoisonError::into_inner);
                cleared.extend(kept.map(|kept| (from, id, kept)));
                drop(cleared);
                self.has_cleared.notify_all();
                return self.condvar.notify_all();
            }
            Frame::Hold(id) => peer.outgoing.hold(id),
            Frame::Credit(bytes) => return peer.outgoing.acknowledge(bytes),
            Frame::ReducedChunk(bits) => peer.chunks.entry(bits).or_default().push_back(body),
            Frame::Waiting(issued) => (peer.last, peer.is_waiting) = (issued, true),
            Frame::Resumed => peer.is_waiting = false,
            Frame::Probe(probe) => self.add_probe(probe),
            Frame::Failed(failure) => {
                peer.failure = Some(failure.clone());
                drop(peer);
                // Failure before status: a thread that sees the status must see the failure too, not a departed rank.
                self.fail(failure);
                self.peer(from).status = RankStatus::Failed;
                return self.condvar.notify_all();
            }
            Frame::Returned(issued) => {
                (peer.status, peer.is_waiting) = (RankStatus::Returned, false);
                peer.last = issued;
            }
        }
        #[cfg(test)]
        peer.update_queued_peak();
        drop(peer);
        self.condvar.notify_all();
    }

    /// Stores a deadlock probe, in place of the last one that came from the same rank on the same way.
    fn add_probe(&self, probe: Probe) {
        let ends = |probe: &Probe| (probe.path[0].0, probe.path[probe.path.len() - 1].0);
        let mut probes = self.probes.lock().unwrap_or_else(PoisonError::into_inner);
        probes.retain(|earlier| ends(earlier) != ends(&probe));
        probes.push(probe);
    }

    /// Whether a call to a rank may be sent with its elements, and so many bytes in all, which then count as sent.
    pub(super) fn reserve(&self, to: usize, bytes: usize) -> bool {
        self.peer(to).outgoing.reserve(bytes)
    }

    /// Keeps elements for a rank until it asks for them.
    pub(super) fn keep(&self, to: usize, id: CallId, buffer: Arc<Vec<u8>>, range: Range<usize>) {
        self.peer(to).outgoing.keep(id, buffer, range);
    }

    /// Lets a rank ask for a message that another transport carries, which is announced to it next.
    #[cfg(feature = "nccl")]
    pub(super) fn announce(&self, to: usize, id: CallId) {
        self.peer(to).outgoing.announce(id);
    }

    /// Whether a rank asks for a message that another transport carries.
    #[cfg(feature = "nccl")]
    pub(super) fn has_requested(&self) -> bool {
        !self.requested.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Takes the next request for a message that another transport carries: the receiver and the message.
    #[cfg(feature = "nccl")]
    pub(super) fn take_requested(&self) -> Option<(usize, CallId)> {
        self.requested.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Whether a rank has neither asked for elements that this rank keeps nor replied that it cannot, and may still do so.
    pub(super) fn is_unanswered(&self, to: usize, id: CallId) -> bool {
        let peer = self.peer(to);
        peer.status == RankStatus::Running && peer.outgoing.is_unanswered(id)
    }

    /// The number of calls that have arrived without their elements.
    pub(super) fn num_announced(&self) -> usize {
        self.num_announced.load(Ordering::SeqCst)
    }

    /// The next reply to a rank, after a call of it was taken.
    pub(super) fn next_reply(&self, from: usize) -> Option<Frame> {
        self.peer(from).incoming.next_reply()
    }

    /// The next reply to a rank while this rank waits for its next call over some axes or its next message (`true`), or cannot go on for
    /// another reason: see [`ReceiveWindow::next_waiting_reply`].
    pub(super) fn next_waiting_reply(
        &self,
        from: usize,
        awaited: Option<(AxisSet, bool)>,
        pause: Duration,
    ) -> Option<Frame> {
        let mut peer = self.peer(from);
        let awaited = awaited.and_then(|(axes, is_message)| peer.first(axes, is_message));
        let awaited = awaited.map(|call| CallId::of(&call.issued));
        peer.incoming.next_waiting_reply(awaited, pause)
    }

    /// Waits, in the thread that sends them, for elements that a rank has asked for. `None` if `is_over`.
    pub(super) fn next_cleared(&self, is_over: impl Fn() -> bool) -> Option<(usize, CallId, KeptElements)> {
        let mut cleared = self.cleared.lock().unwrap_or_else(PoisonError::into_inner);
        while !is_over() {
            if let Some(next) = cleared.pop_front() {
                return Some(next);
            }
            cleared = self.has_cleared.wait(cleared).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Wakes the thread that sends elements, once nothing is left to send.
    pub(super) fn end_cleared(&self) {
        drop(self.cleared.lock().unwrap_or_else(PoisonError::into_inner));
        self.has_cleared.notify_all();
    }

    /// Delivers a message of this rank to itself.
    pub(super) fn deliver_to_self(&self, issued: IssuedCall, body: Vec<u8>) {
        self.receive(self.rank, Frame::Call(issued), 0, body);
    }

    /// Marks a rank as lost, with the reason. Fails the world if the rank has not returned.
    pub(super) fn mark_lost(&self, rank: usize, why: &Error) {
        let peer = self.peer(rank);
        if peer.status != RankStatus::Running {
            return;
        }
        let last = (peer.last.number > 0).then(|| ("last call", peer.last.text(&self.mesh, rank)));
        drop(peer);
        let error = Error::new(why.kind(), why.message()).detail("rank", self.mesh.describe(rank));
        let details = last.into_iter().chain(why.details().iter().cloned());
        let error = details.fold(error, |error, (label, text)| error.detail(label, text));
        self.fail(Failure { error, origin: rank, affected: vec![] });
        self.peer(rank).status = RankStatus::Failed;
        self.condvar.notify_all();
    }

    /// Sets how long nothing has arrived from a rank.
    pub(super) fn set_silence(&self, rank: usize, silence: Duration) {
        self.peer(rank).silence = silence;
    }

    /// Whether all other ranks have reported the end of their functions.
    pub(super) fn have_all_finished(&self) -> bool {
        (0..self.peers.len()).all(|rank| rank == self.rank || self.status(rank) != RankStatus::Running)
    }

    /// The failure of a rank with a lower number that failed independently with the same error as this rank.
    pub(super) fn failure_with_same_error(&self, own: &Error) -> Option<Failure> {
        let is_same_error = |rank: usize, failure: &Failure| {
            let error = &failure.error;
            failure.origin == rank
                && failure.affected.is_empty()
                && (error.kind(), error.message()) == (own.kind(), own.message())
        };
        (0..self.rank)
            .find_map(|rank| self.peer(rank).failure.clone().filter(|failure| is_same_error(rank, failure)))
    }

    /// Fails the world in the view of this process. Only the first failure is kept.
    pub(super) fn fail(&self, failure: Failure) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.failed.store(true, Ordering::Release);
        self.condvar.notify_all();
    }

    /// Whether the world has failed: one atomic load.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stores the newest call of this rank.
    pub(super) fn set_last_call(&self, issued: &IssuedCall) {
        self.peer(self.rank).last.clone_from(issued);
    }

    /// The newest call of a rank that this process knows.
    pub(super) fn last(&self, rank: usize) -> IssuedCall {
        self.peer(rank).last.clone()
    }

    pub(super) fn status(&self, rank: usize) -> RankStatus {
        self.peer(rank).status
    }

    /// Whether a call or message of a rank has arrived, perhaps without its elements.
    pub(super) fn has_call(&self, from: usize, axes: AxisSet, is_message: bool) -> bool {
        self.peer(from).first(axes, is_message).is_some()
    }

    pub(super) fn has_chunk(&self, from: usize, axes: AxisSet) -> bool {
        self.peer(from).chunks.get(&axes.bits()).is_some_and(|queue| !queue.is_empty())
    }

    /// Whether the elements of the first call in a queue have arrived.
    pub(super) fn has_elements(&self, from: usize, axes: AxisSet, is_message: bool) -> bool {
        self.peer(from).first(axes, is_message).is_some_and(|call| call.elements.is_some())
    }

    /// Takes the first call of a rank, whose elements have arrived, and whether a reply may be due.
    pub(super) fn take_call(&self, from: usize, axes: AxisSet) -> Option<(ReceivedCall, bool)> {
        self.take(from, |peer| peer.calls.get_mut(&axes.bits()))
    }

    /// Takes the first message of a rank, whose elements have arrived, and whether a reply may be due.
    pub(super) fn take_message(&self, from: usize, axes: AxisSet) -> Option<(ReceivedCall, bool)> {
        self.take(from, |peer| peer.messages.get_mut(&axes.bits()))
    }

    pub(super) fn take_chunk(&self, from: usize, axes: AxisSet) -> Option<Vec<u8>> {
        self.peer(from).chunks.get_mut(&axes.bits())?.pop_front()
    }

    pub(super) fn take_probes(&self) -> Vec<Probe> {
        std::mem::take(&mut *self.probes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether every other rank has returned, or the world has failed.
    pub(super) fn is_over(&self) -> bool {
        let returned = |rank: usize| rank == self.rank || self.status(rank) == RankStatus::Returned;
        self.has_failed() || (0..self.peers.len()).all(returned)
    }

    /// The most bytes of elements of a rank's calls and messages that were queued at any time.
    #[cfg(test)]
    pub(super) fn queued_peak(&self, from: usize) -> usize {
        self.peer(from).queued_peak
    }

    /// A message to this rank that was never received, with its sender.
    pub(super) fn unread(&self) -> Option<(usize, IssuedCall)> {
        let message = |rank: usize| {
            let peer = self.peer(rank);
            peer.messages.values().flatten().next().map(|message| (rank, message.issued.clone()))
        };
        (0..self.peers.len()).find_map(message)
    }

    /// A snapshot of all ranks for error messages, while this rank waits for the ranks `absent`.
    pub(super) fn snapshot(&self, absent: &[usize]) -> Vec<RankSnapshot> {
        let seen = |rank: usize| {
            let peer = self.peer(rank);
            let is_own = rank == self.rank;
            RankSnapshot {
                status: peer.status,
                issued: peer.last.clone(),
                is_waiting: peer.is_waiting || is_own,
                absent: if is_own { absent.to_vec() } else { Vec::new() },
                silence: peer.silence,
            }
        };
        (0..self.peers.len()).map(seen).collect()
    }

    /// Whether this rank's newest call is still the call that its probe named.
    pub(super) fn still_waits_in(&self, asked: &IssuedCall) -> bool {
        let peer = self.peer(self.rank);
        let is_same_end = match (peer.last.op, asked.op) {
            (Op::Recv { from }, Op::Recv { from: asked }) => from == asked,
            (own, asked) => own.is_collective() && asked.is_collective(),
        };
        is_same_end && peer.last.axes == asked.axes && peer.last.number == asked.number
    }
}
