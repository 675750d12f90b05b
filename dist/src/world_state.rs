//! Shared state of a world of threads: the last call of every rank, messages under way, the first failure, and the wait-for graph in
//! which waiting ranks detect deadlocks.

use crate::call::{IssuedCall, Op, Request};
use crate::error::{Error, Kind};
use crate::group_sync::GroupSync;
use crate::mesh::{AxisSet, Mesh};
use crate::spin_condvar::SpinCondvar;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use shardgrad_kernels::{Buffer, SyncEvent};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Whether a rank still runs its function, or how the function ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankStatus {
    Running,
    Returned,
    Failed,
}

/// The last call of a rank, with the buffer that other members may read during the call.
#[derive(Debug)]
pub(crate) struct PostedCall {
    pub(crate) status: RankStatus,
    pub(crate) issued: IssuedCall,
    pub(crate) x: Option<Buffer>,
    /// Recorded behind the work that fills the buffer.
    pub(crate) ready: SyncEvent,
}

/// A sent message that is not received yet: sender, call, and a copy of the contents.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) from: usize,
    pub(crate) issued: IssuedCall,
    pub(crate) x: Buffer,
    /// Recorded behind the work that fills the buffer.
    pub(crate) ready: SyncEvent,
}

/// The shared state of one rank, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct RankState {
    posted: RwLock<PostedCall>,
    /// This rank's chunk of a chunked all-reduce, which the other members gather, with the event behind the work that fills it.
    reduced_chunk: RwLock<Option<(Buffer, SyncEvent)>>,
    /// Recorded behind this rank's last reads of other ranks' buffers.
    last_read: RwLock<SyncEvent>,
    /// Contents of received messages of this rank, each with the event behind the receiver's read: memory of this rank's back end.
    returned: Mutex<Vec<(Buffer, SyncEvent)>>,
    /// Odd while the rank waits: from posting a call until every member of the group has arrived, or the message is there.
    ticket: AtomicU64,
    inbox: Mutex<VecDeque<Message>>,
    /// On which this rank waits for messages.
    pub(crate) condvar: SpinCondvar,
}

impl RankState {
    pub(crate) fn new() -> RankState {
        let posted = PostedCall {
            status: RankStatus::Running,
            issued: IssuedCall::none(),
            x: None,
            ready: SyncEvent::default(),
        };
        RankState {
            posted: RwLock::new(posted),
            reduced_chunk: RwLock::new(None),
            last_read: RwLock::new(SyncEvent::default()),
            returned: Mutex::default(),
            ticket: AtomicU64::new(0),
            inbox: Mutex::default(),
            condvar: SpinCondvar::default(),
        }
    }

    // A poisoned lock means that its holder panicked. That rank then fails the world, so the contents are never used for a result,
    // and readers may go on to find the failure.

    pub(crate) fn posted(&self) -> RwLockReadGuard<'_, PostedCall> {
        self.posted.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn posted_mut(&self) -> RwLockWriteGuard<'_, PostedCall> {
        self.posted.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn reduced_chunk(&self) -> RwLockReadGuard<'_, Option<(Buffer, SyncEvent)>> {
        self.reduced_chunk.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_reduced_chunk(&self, reduced_chunk: Option<(Buffer, SyncEvent)>) {
        *self.reduced_chunk.write().unwrap_or_else(PoisonError::into_inner) = reduced_chunk;
    }

    /// The event behind this rank's last reads. An event later than the caller needs does no harm: it waits for work that is already
    /// queued.
    pub(crate) fn last_read_event(&self) -> SyncEvent {
        self.last_read.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_last_read_event(&self, event: SyncEvent) {
        *self.last_read.write().unwrap_or_else(PoisonError::into_inner) = event;
    }

    /// Returns the contents of a received message to this rank, its sender, which may free them after `event`.
    pub(crate) fn return_buffer(&self, x: Buffer, event: SyncEvent) {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner).push((x, event));
    }

    /// Takes the buffers returned since the last call.
    pub(crate) fn take_returned(&self) -> Vec<(Buffer, SyncEvent)> {
        std::mem::take(&mut *self.returned.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn inbox(&self) -> MutexGuard<'_, VecDeque<Message>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a call, for deadlock detection, and its buffer, filled at `ready`, for the members of the group. A call that
    /// `waits` must be ended by [`RankState::end_wait`] when all members have arrived.
    pub(crate) fn post(&self, request: &Request<'_>, is_waiting: bool, x: Option<&Buffer>, ready: SyncEvent) {
        let mut posted = self.posted_mut();
        posted.issued.set(request);
        posted.x = x.cloned();
        posted.ready = ready;
        drop(posted);
        if is_waiting {
            self.ticket.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Ends the wait of the posted call.
    pub(crate) fn end_wait(&self) {
        self.ticket.fetch_add(1, Ordering::AcqRel);
    }

    /// Takes back the buffer of the posted call.
    pub(crate) fn clear_buffer(&self) {
        self.posted_mut().x = None;
    }

    pub(crate) fn set_status(&self, status: RankStatus) {
        self.posted_mut().status = status;
    }

    pub(crate) fn deliver(&self, message: Message) {
        self.inbox().push_back(message);
        self.condvar.notify_all();
    }

    pub(crate) fn has_message(&self, axes: AxisSet, from: usize) -> bool {
        self.inbox().iter().any(|l| l.from == from && l.issued.axes == axes)
    }

    /// Takes the oldest message of a sender over some axes.
    pub(crate) fn take_message(&self, axes: AxisSet, from: usize) -> Option<Message> {
        let mut inbox = self.inbox();
        let at = inbox.iter().position(|l| l.from == from && l.issued.axes == axes)?;
        inbox.remove(at)
    }
}

/// Why the world has failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// What happened.
    pub(crate) error: Error,
    /// The rank that failed, or that detected the failure.
    pub(crate) origin: usize,
    /// Ranks that return this error itself; all others return `Kind::PeerLost`. Of processes, the first of these reports the error with
    /// its details.
    pub(crate) affected: Vec<usize>,
}

impl Failure {
    /// Whether other ranks detected that the process of `origin` ended, became unresponsive, or sent a malformed message.
    pub(crate) fn is_lost_process(&self) -> bool {
        self.affected.is_empty() && self.error.kind() == Kind::PeerLost
    }

    /// Whether the rank `origin` failed by itself, and no other rank took part.
    pub(crate) fn is_of_origin(&self) -> bool {
        !self.is_lost_process() && self.affected.iter().all(|rank| *rank == self.origin)
    }

    /// Whether a rank returns the error itself.
    pub(crate) fn is_of(&self, rank: usize) -> bool {
        self.affected.contains(&rank) || (self.origin == rank && !self.is_lost_process())
    }

    /// The rank whose process reports the error with its details; all other processes report one line.
    pub(crate) fn reporter(&self) -> usize {
        match self.affected.first() {
            Some(first) => *first,
            None if self.is_lost_process() => usize::from(self.origin == 0),
            None => self.origin,
        }
    }
}

/// A rank from which nothing has arrived for so long is reported as unresponsive.
const SILENCE_MIN: Duration = Duration::from_secs(2);

/// A snapshot of one rank, for error messages.
#[derive(Clone, Debug)]
pub(crate) struct RankSnapshot {
    pub(crate) status: RankStatus,
    pub(crate) issued: IssuedCall,
    /// Whether the rank waited for other ranks throughout the snapshot.
    pub(crate) is_waiting: bool,
    /// The ranks that it waits for.
    pub(crate) absent: Vec<usize>,
    /// How long nothing has arrived from its process, not even a heartbeat; zero for ranks of this process.
    pub(crate) silence: Duration,
}

impl RankSnapshot {
    /// Whether the rank is running but has missed its heartbeats, which are due every second.
    pub(crate) fn is_silent(&self) -> bool {
        self.status == RankStatus::Running && self.silence >= SILENCE_MIN
    }
}

/// One rank in the wait-for graph: the parts of its state that decide for which ranks it waits.
#[derive(Clone, Copy, Debug)]
struct WaitNode {
    status: RankStatus,
    op: Op,
    axes: AxisSet,
    number: u64,
    /// As [`RankSnapshot::is_waiting`].
    is_waiting: bool,
    /// Whether the message that it waits for has been sent.
    has_message: bool,
}

/// The wait-for graph: a consistent view of all ranks. Building it takes time linear in the number of ranks (a snapshot takes
/// quadratic time), because every waiting rank builds it again and again.
#[derive(Debug)]
pub(crate) struct WaitGraph<'a> {
    mesh: &'a Mesh,
    nodes: Vec<WaitNode>,
}

impl WaitGraph<'_> {
    /// Why a rank will wait forever, if it will.
    pub(crate) fn find_deadlock(&self, rank: usize) -> Option<Deadlock> {
        let gone = |r: usize| self.nodes[r].status != RankStatus::Running;
        find_deadlock(self.nodes.len(), rank, &gone, &|r| self.absent(r))
    }

    /// The ranks that a waiting rank still waits for.
    fn absent(&self, rank: usize) -> Vec<usize> {
        let mine = &self.nodes[rank];
        if !mine.is_waiting || mine.has_message {
            return Vec::new();
        }
        let members = self.mesh.group(rank, mine.axes);
        if let Op::Recv { from } = mine.op {
            return vec![members[from]];
        }
        let here = |r: &usize| {
            let other = &self.nodes[*r];
            other.op.is_collective() && other.axes == mine.axes && other.number == mine.number
        };
        members.into_iter().filter(|r| !here(r)).collect()
    }
}

/// Why a wait will never end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Deadlock {
    /// Each of these ranks waits for the next, and the last for the first.
    Cycle(Vec<usize>),
    /// This rank has returned or failed.
    Departed(usize),
}

/// The key of a group: the bits of its axes, and its first member.
type GroupKey = (u16, usize);

/// The shared state of a world of threads: all ranks, all groups used so far, and the first failure.
#[derive(Debug)]
pub(crate) struct WorldState {
    pub(crate) mesh: Mesh,
    rank_states: Vec<RankState>,
    groups: Mutex<HashMap<GroupKey, Arc<GroupSync>>>,
    failed: AtomicBool,
    failure: Mutex<Option<Failure>>,
}

impl WorldState {
    pub(crate) fn new(mesh: Mesh) -> WorldState {
        let rank_states = (0..mesh.num_ranks()).map(|_| RankState::new()).collect();
        let (groups, failed, failure) = (Mutex::default(), AtomicBool::new(false), Mutex::new(None));
        WorldState { mesh, rank_states, groups, failed, failure }
    }

    /// The group of a rank over some axes.
    pub(crate) fn group(&self, rank: usize, axes: AxisSet) -> Arc<GroupSync> {
        let fresh = || Arc::new(GroupSync::new(self.mesh.group_size(axes)));
        self.groups().entry(self.group_key(rank, axes)).or_insert_with(fresh).clone()
    }

    fn group_key(&self, rank: usize, axes: AxisSet) -> GroupKey {
        (axes.bits(), self.mesh.first_in_group(rank, axes))
    }

    fn groups(&self) -> MutexGuard<'_, HashMap<GroupKey, Arc<GroupSync>>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn rank_state(&self, rank: usize) -> &RankState {
        &self.rank_states[rank]
    }

    /// Fails the world. Only the first failure is kept.
    pub(crate) fn fail(&self, failure: Failure) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.failed.store(true, Ordering::Release);
    }

    /// Whether the world has failed: one atomic load.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A message that was never received, with its receiver.
    pub(crate) fn unread(&self) -> Option<(usize, Message)> {
        self.rank_states
            .iter()
            .enumerate()
            .find_map(|(to, rank_state)| Some((to, rank_state.inbox().pop_front()?)))
    }

    /// Builds the wait-for graph. A rank counts as waiting only if its ticket did not change from before the first rank was read to
    /// after the last, and if its awaited ranks have not all arrived by then; so all waits in the graph existed at the same time.
    pub(crate) fn wait_graph(&self) -> WaitGraph<'_> {
        let tickets =
            || self.rank_states.iter().map(|e| e.ticket.load(Ordering::Acquire)).collect::<Vec<u64>>();
        let before = tickets();
        let node = |rank_state: &RankState| {
            let posted = rank_state.posted();
            let IssuedCall { op, axes, number, .. } = posted.issued;
            WaitNode { status: posted.status, op, axes, number, is_waiting: false, has_message: false }
        };
        let mut nodes: Vec<WaitNode> = self.rank_states.iter().map(node).collect();
        // After the statuses: a rank that has returned has sent all its messages before.
        for (rank, node) in nodes.iter_mut().enumerate() {
            node.has_message = self.has_message(rank, node);
        }
        let after = tickets();
        let groups = self.groups();
        for (rank, node) in nodes.iter_mut().enumerate() {
            // A rank that has not woken up yet keeps its ticket, although all members have arrived and others may have gone on.
            let have_all_arrived = || {
                groups.get(&self.group_key(rank, node.axes)).is_some_and(|g| g.have_all_arrived(node.number))
            };
            node.is_waiting = before[rank] % 2 == 1
                && before[rank] == after[rank]
                && !(node.op.is_collective() && have_all_arrived());
        }
        drop(groups);
        WaitGraph { mesh: &self.mesh, nodes }
    }

    /// The state of all ranks with everything that error messages show.
    pub(crate) fn snapshot(&self) -> Vec<RankSnapshot> {
        let wait_graph = self.wait_graph();
        let seen = |(rank, node): (usize, &WaitNode)| RankSnapshot {
            status: node.status,
            issued: self.rank_states[rank].posted().issued.clone(),
            is_waiting: node.is_waiting,
            absent: wait_graph.absent(rank),
            silence: Duration::ZERO,
        };
        wait_graph.nodes.iter().enumerate().map(seen).collect()
    }

    /// Whether the message that a recv waits for has been sent.
    fn has_message(&self, rank: usize, node: &WaitNode) -> bool {
        let Op::Recv { from } = node.op else { return false };
        self.rank_states[rank].has_message(node.axes, self.mesh.group(rank, node.axes)[from])
    }
}

/// Why a rank will wait forever, if it will: a rank that it waits for has ended, or waits, directly or through others, for this rank.
/// `absent` gives the ranks that a rank waits for; it is called once per reachable rank.
fn find_deadlock(
    num_ranks: usize,
    rank: usize,
    gone: &dyn Fn(usize) -> bool,
    absent: &dyn Fn(usize) -> Vec<usize>,
) -> Option<Deadlock> {
    let first = absent(rank);
    if let Some(gone) = first.iter().find(|r| gone(**r)) {
        return Some(Deadlock::Departed(*gone));
    }
    let mut visited = vec![false; num_ranks];
    let mut path = vec![rank];
    extend_path(&first, absent, &mut visited, &mut path).then_some(Deadlock::Cycle(path))
}

/// Depth-first search: extends `path` along the waits until it leads back to its first rank. Returns whether it does.
fn extend_path(
    waits_for: &[usize],
    absent: &dyn Fn(usize) -> Vec<usize>,
    visited: &mut [bool],
    path: &mut Vec<usize>,
) -> bool {
    for &next in waits_for {
        if next == path[0] {
            return true;
        }
        if !std::mem::replace(&mut visited[next], true) {
            path.push(next);
            if extend_path(&absent(next), absent, visited, path) {
                return true;
            }
            path.pop();
        }
    }
    false
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::call::{Call, GroupPosition, Origin, Phase};
    use shardgrad_kernels::DType;
    use std::cell::Cell;

    /// The deadlock found for a rank, where rank i waits for `waits[i]` and `gone` has ended; and how often `absent` was called.
    fn found(waits: &[&[usize]], gone: Option<usize>, rank: usize) -> (Option<Deadlock>, usize) {
        let asked = Cell::new(0);
        let absent = |r: usize| {
            asked.set(asked.get() + 1);
            waits[r].to_vec()
        };
        (find_deadlock(waits.len(), rank, &|r| Some(r) == gone, &absent), asked.get())
    }

    #[test]
    fn deadlock_is_found_by_its_members_only() {
        let waits: [&[usize]; 6] = [&[1], &[2, 3], &[], &[4], &[1], &[0]];
        let of = |rank| found(&waits, None, rank).0;
        assert_eq!(of(1), Some(Deadlock::Cycle(vec![1, 3, 4])));
        assert_eq!(of(0), None);
        assert_eq!(of(5), None);
        assert_eq!(found(&[&[0]], None, 0).0, Some(Deadlock::Cycle(vec![0])));
    }

    #[test]
    fn sleeping_rank_is_not_waiting_once_all_have_arrived() {
        let mesh = Mesh::new(&[("x", 2)]).unwrap();
        let (world, axes) = (WorldState::new(mesh.clone()), mesh.all_axes());
        let (phase, site) = (Phase::Control, std::panic::Location::caller());
        let call = Call { axes, dtype: DType::F32, phase, path: "", origin: Origin::default(), site };
        let (op, position) = (Op::Barrier, GroupPosition::new(&mesh, 0, axes));
        let request =
            Request { call: &call, op, position: &position, number: 1, counts: &[], received: &[], x: None };
        let group = world.group(0, axes);
        world.rank_state(0).post(&request, true, None, SyncEvent::default());
        let nap = std::time::Duration::ZERO;
        let mut seen = Vec::new();
        // While rank 0 sleeps, rank 1 arrives, and returns.
        let arrived = group.wait_for_all(&group.arrived, nap, || {
            if seen.is_empty() {
                seen.push(world.wait_graph().absent(0));
                group
                    .wait_for_all(&group.arrived, nap, || unreachable!("the last member does not wait"))
                    .unwrap();
                world.rank_state(1).set_status(RankStatus::Returned);
                seen.push(world.wait_graph().absent(0));
                assert_eq!(world.wait_graph().find_deadlock(0), None);
            }
            Ok(())
        });
        assert!(arrived.is_ok() && seen == [vec![1], vec![]], "{seen:?}");
    }

    #[test]
    fn chain_that_ends_at_a_computing_rank_is_no_deadlock() {
        let waits: [&[usize]; 3] = [&[1], &[2], &[]];
        assert_eq!(found(&waits, None, 0).0, None);
        assert_eq!(found(&waits, Some(2), 1).0, Some(Deadlock::Departed(2)));
        assert_eq!(found(&waits, Some(2), 0).0, None);
    }

    #[test]
    fn each_rank_is_visited_once() {
        let all: Vec<usize> = (1..100).collect();
        let chain: Vec<Vec<usize>> =
            (0..100).map(|r| all.iter().copied().filter(|s| *s > r).collect()).collect();
        let waits: Vec<&[usize]> = chain.iter().map(Vec::as_slice).collect();
        assert_eq!(found(&waits, None, 0), (None, 100));
        // Ranks that are not reachable along waits are not visited.
        assert_eq!(found(&waits, None, 97), (None, 3));
    }
}
