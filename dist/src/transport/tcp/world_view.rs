//! One process's view of the world: the status of every rank, and the calls, messages and chunks received but not used yet.

use super::frame::{Frame, Probe};
use crate::call::{IssuedCall, Op};
use crate::error::{Error, Result};
use crate::mesh::{AxisSet, Mesh};
use crate::report;
use crate::spin_condvar::SpinCondvar;
use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard};
use crate::world_state::{Failure, RankSnapshot, RankStatus};
use std::collections::{HashMap, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The bytes received from a rank but not used yet, above which its connection is read only while this rank cannot go on.
///
/// So a rank holds for each other rank:
///
/// - while it computes, less than this and one message;
/// - while it waits for other ranks, one message more per [`WAITING_PAUSE`];
/// - while it waits for that rank, or cannot finish a send, what that rank has sent and this rank has not received. Of collectives these
///   are two calls and a chunk for each set of axes, because no rank begins a call before all members have made the one before. Of
///   messages their number is up to the program: two ranks may send each other any number before they receive, and then one of them
///   has to hold what it cannot deliver yet. Without memory for it, the world fails with an error.
const QUEUE_BYTES_MAX: usize = 64 << 20;
/// A rank that waits for others reads one message beyond the limit in this time.
const WAITING_PAUSE: Duration = Duration::from_millis(100);
/// The interval at which a paused reader looks what its rank does.
const ROOM_INTERVAL: Duration = Duration::from_millis(5);

/// What the rank of this process does, as far as its readers need to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Activity {
    /// It computes, and will come back for what has arrived.
    Computes,
    /// It waits for these ranks.
    Waits(Vec<usize>),
    /// It sends, and the receiver may be unable to read before this rank does; or its function has returned.
    Sends,
}

/// A call of another rank, with the elements that it sent.
#[derive(Debug)]
pub(super) struct ReceivedCall {
    pub(super) issued: IssuedCall,
    pub(super) body: Vec<u8>,
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
    /// The bytes of these.
    queued_bytes: usize,
    /// How long nothing has arrived from it.
    silence: Duration,
    /// The failure of the world that it reported.
    failure: Option<Failure>,
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
    activity: Mutex<Activity>,
    /// On which readers wait for room in their queues.
    room: Condvar,
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
            queued_bytes: 0,
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
            activity: Mutex::new(Activity::Computes),
            room: Condvar::new(),
            condvar: SpinCondvar::default(),
        }
    }

    /// Locks the view of a rank. Poisoning is ignored: a thread that panics with the lock fails the world.
    fn peer(&self, rank: usize) -> MutexGuard<'_, Peer> {
        self.peers[rank].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks a frame from a rank and the length of its body, before the body is read. The call in the frame determines the expected
    /// length; whether the calls of all members match is compared later.
    ///
    /// # Errors
    /// `Kind::PeerLost` for a frame that a correct rank cannot send here and now.
    pub(super) fn check(&self, from: usize, frame: &Frame, bytes: usize) -> Result<()> {
        let malformed = || report::malformed(from);
        let of_size = |call: &IssuedCall, due: usize| match bytes == due {
            true => Ok(()),
            false => Err(report::wrong_size(&self.mesh, from, call, bytes, due)),
        };
        match frame {
            Frame::Call(call) => {
                let (members, group_ranks) = self.group_ranks(from, call.axes).ok_or_else(malformed)?;
                match call.op {
                    Op::Recv { .. } => Err(malformed()),
                    Op::Send { to } if to != group_ranks[1] => Err(malformed()),
                    _ => of_size(call, call.payload(members).bytes(group_ranks[0], group_ranks[1])),
                }
            }
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
            Frame::Announced(call) => match self.group_ranks(from, call.axes) {
                Some(_) if call.op.is_collective() && bytes == 0 => Ok(()),
                _ => Err(malformed()),
            },
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

    /// Waits, in the thread that reads from a rank, until less than [`QUEUE_BYTES_MAX`] bytes from it are queued, so that a rank that runs
    /// ahead is slowed down by its connection. Returns at once if this rank waits for that rank, or sends: the receiver may be sending
    /// too, and then neither would read. While this rank waits for others, returns after a pause: these may wait for the rank whose
    /// connection is not read.
    pub(super) fn wait_for_room(&self, from: usize, is_over: impl Fn() -> bool) {
        let is_full = || self.peer(from).queued_bytes >= QUEUE_BYTES_MAX;
        if !is_full() {
            return;
        }
        let mut waits_since = None;
        let mut activity = self.activity.lock().unwrap_or_else(PoisonError::into_inner);
        while is_full() && !self.has_failed() && !is_over() {
            match &*activity {
                Activity::Sends => return,
                Activity::Computes => waits_since = None,
                Activity::Waits(ranks) if ranks.contains(&from) => return,
                Activity::Waits(_) => {
                    let since: &Instant = waits_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= WAITING_PAUSE {
                        return;
                    }
                }
            }
            activity =
                self.room.wait_timeout(activity, ROOM_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sets what this rank does.
    pub(super) fn set_activity(&self, activity: Activity) {
        *self.activity.lock().unwrap_or_else(PoisonError::into_inner) = activity;
    }

    /// Takes what `pop` returns out of a queue; its bytes make room.
    fn take<T>(
        &self,
        from: usize,
        pop: impl FnOnce(&mut Peer) -> Option<T>,
        bytes: impl FnOnce(&T) -> usize,
    ) -> Option<T> {
        let mut peer = self.peer(from);
        let taken = pop(&mut peer)?;
        let was_full = peer.queued_bytes >= QUEUE_BYTES_MAX;
        peer.queued_bytes -= bytes(&taken);
        drop(peer);
        if was_full {
            self.room.notify_all();
        }
        Some(taken)
    }

    /// Stores a frame that a rank has sent.
    pub(super) fn receive(&self, from: usize, frame: Frame, body: Vec<u8>) {
        let mut peer = self.peer(from);
        peer.queued_bytes += body.len();
        match frame {
            Frame::Call(issued) | Frame::Announced(issued) => {
                let bits = issued.axes.bits();
                peer.is_waiting = false;
                peer.last.clone_from(&issued);
                let is_message = !issued.op.is_collective();
                let queues = if is_message { &mut peer.messages } else { &mut peer.calls };
                queues.entry(bits).or_default().push_back(ReceivedCall { issued, body });
            }
            Frame::ReducedChunk(bits) => peer.chunks.entry(bits).or_default().push_back(body),
            Frame::Waiting(issued) => (peer.last, peer.is_waiting) = (issued, true),
            Frame::Resumed => peer.is_waiting = false,
            Frame::Probe(probe) => self.probes.lock().unwrap_or_else(PoisonError::into_inner).push(probe),
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
        drop(peer);
        self.condvar.notify_all();
    }

    /// Delivers a message of this rank to itself.
    pub(super) fn deliver_to_self(&self, issued: IssuedCall, body: Vec<u8>) {
        self.receive(self.rank, Frame::Call(issued), body);
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

    pub(super) fn has_call(&self, from: usize, axes: AxisSet) -> bool {
        self.peer(from).calls.get(&axes.bits()).is_some_and(|queue| !queue.is_empty())
    }

    pub(super) fn has_message(&self, from: usize, axes: AxisSet) -> bool {
        self.peer(from).messages.get(&axes.bits()).is_some_and(|queue| !queue.is_empty())
    }

    pub(super) fn has_chunk(&self, from: usize, axes: AxisSet) -> bool {
        self.peer(from).chunks.get(&axes.bits()).is_some_and(|queue| !queue.is_empty())
    }

    pub(super) fn take_call(&self, from: usize, axes: AxisSet) -> Option<ReceivedCall> {
        self.take(from, |peer| peer.calls.get_mut(&axes.bits())?.pop_front(), |call| call.body.len())
    }

    pub(super) fn take_message(&self, from: usize, axes: AxisSet) -> Option<ReceivedCall> {
        self.take(from, |peer| peer.messages.get_mut(&axes.bits())?.pop_front(), |message| message.body.len())
    }

    pub(super) fn take_chunk(&self, from: usize, axes: AxisSet) -> Option<Vec<u8>> {
        self.take(from, |peer| peer.chunks.get_mut(&axes.bits())?.pop_front(), Vec::len)
    }

    pub(super) fn take_probes(&self) -> Vec<Probe> {
        std::mem::take(&mut *self.probes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether every other rank has returned, or the world has failed.
    pub(super) fn is_over(&self) -> bool {
        let returned = |rank: usize| rank == self.rank || self.status(rank) == RankStatus::Returned;
        self.has_failed() || (0..self.peers.len()).all(returned)
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Whether the reader of the connection to `from` pauses while its rank is in this state.
    fn is_paused(view: &WorldView, from: usize, activity: Activity) -> bool {
        view.set_activity(activity);
        let looks = std::cell::Cell::new(0);
        // Paused readers look again and again whether the world is over.
        view.wait_for_room(from, || {
            looks.set(looks.get() + 1);
            looks.get() == 3
        });
        looks.get() > 1
    }

    #[test]
    fn full_queue_pauses_its_connection_unless_its_rank_cannot_go_on() {
        let mesh = Mesh::new(&[("tp", 3)]).unwrap();
        let view = WorldView::new(mesh.clone(), 0);
        let message = |bytes: usize| {
            let mut issued = IssuedCall::none();
            (issued.op, issued.axes) = (Op::Send { to: 0 }, mesh.all_axes());
            view.receive(1, Frame::Call(issued), vec![0; bytes]);
        };
        message(QUEUE_BYTES_MAX - 1);
        assert!(!is_paused(&view, 1, Activity::Computes), "there is room");
        message(1);
        for (activity, expected) in [
            (Activity::Computes, true),
            (Activity::Waits(vec![2]), true),
            (Activity::Waits(vec![2, 1]), false),
            (Activity::Sends, false),
        ] {
            assert_eq!(is_paused(&view, 1, activity.clone()), expected, "{activity:?}");
            assert!(!is_paused(&view, 2, activity), "another rank has its own queue");
        }
        assert!(view.take_message(1, mesh.all_axes()).is_some());
        assert!(!is_paused(&view, 1, Activity::Computes), "there is room again");
    }

    #[test]
    fn wait_for_other_ranks_takes_in_one_message_after_a_pause() {
        let mesh = Mesh::new(&[("tp", 3)]).unwrap();
        let view = WorldView::new(mesh.clone(), 0);
        let mut issued = IssuedCall::none();
        (issued.op, issued.axes) = (Op::Send { to: 0 }, mesh.all_axes());
        view.receive(1, Frame::Call(issued), vec![0; QUEUE_BYTES_MAX]);
        view.set_activity(Activity::Waits(vec![2]));
        // Returns although the world is not over.
        view.wait_for_room(1, || false);
    }
}
