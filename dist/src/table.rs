//! The world table: where every rank writes what it has called and waits for, and where waiting ranks look
//! for the reason why nobody comes.

use crate::call::{Issued, Op, Request};
use crate::error::{Error, Kind};
use crate::group::Group;
use crate::mesh::{AxisSet, Mesh};
use crate::park::Parking;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use shardgrad_kernels::{Buffer, SyncEvent};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Whether a rank still runs its function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    Returned,
    Failed,
}

/// The last call of a rank, with the buffer that the others may read during it.
#[derive(Debug)]
pub(crate) struct Posted {
    pub(crate) state: State,
    pub(crate) issued: Issued,
    pub(crate) x: Option<Buffer>,
    /// Behind what fills the buffer.
    pub(crate) ready: SyncEvent,
}

/// A message under way: what was called, by whom, and a copy of the contents.
#[derive(Debug)]
pub(crate) struct Letter {
    pub(crate) from: usize,
    pub(crate) issued: Issued,
    pub(crate) x: Buffer,
    /// Behind what fills the buffer.
    pub(crate) ready: SyncEvent,
}

/// One rank's line in the table. Lines lie on cache lines of their own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Entry {
    posted: RwLock<Posted>,
    /// A reduced chunk that the others gather in the second half of an all-reduce, with the point behind what fills it.
    part: RwLock<Option<(Buffer, SyncEvent)>>,
    /// Behind this rank's last reading of buffers that others show.
    read: RwLock<SyncEvent>,
    /// Contents of letters from this rank, each with the point behind its reading: memory of its back end.
    returned: Mutex<Vec<(Buffer, SyncEvent)>>,
    /// Odd from the post until every member of the group has arrived (or the message is there), even
    /// otherwise.
    ticket: AtomicU64,
    inbox: Mutex<VecDeque<Letter>>,
    /// Where this rank waits for letters.
    pub(crate) parking: Parking,
}

impl Entry {
    pub(crate) fn new() -> Entry {
        let posted =
            Posted { state: State::Running, issued: Issued::nothing(), x: None, ready: SyncEvent::default() };
        Entry {
            posted: RwLock::new(posted),
            part: RwLock::new(None),
            read: RwLock::new(SyncEvent::default()),
            returned: Mutex::default(),
            ticket: AtomicU64::new(0),
            inbox: Mutex::default(),
            parking: Parking::default(),
        }
    }

    // A poisoned lock means that its holder panicked: that rank fails the world at its boundary, so the
    // contents are never used for a result, and readers may go on to find that out.

    pub(crate) fn posted(&self) -> RwLockReadGuard<'_, Posted> {
        self.posted.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn posted_mut(&self) -> RwLockWriteGuard<'_, Posted> {
        self.posted.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn part(&self) -> RwLockReadGuard<'_, Option<(Buffer, SyncEvent)>> {
        self.part.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_part(&self, part: Option<(Buffer, SyncEvent)>) {
        *self.part.write().unwrap_or_else(PoisonError::into_inner) = part;
    }

    /// Behind this rank's last reading; a later one than was asked for does no harm, since it lies behind work that was
    /// given already.
    pub(crate) fn read(&self) -> SyncEvent {
        self.read.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_read(&self, mark: SyncEvent) {
        *self.read.write().unwrap_or_else(PoisonError::into_inner) = mark;
    }

    /// Hands back the contents of a letter from this rank, which may be freed behind a point.
    pub(crate) fn give_back(&self, x: Buffer, mark: SyncEvent) {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner).push((x, mark));
    }

    /// What was handed back since.
    pub(crate) fn take_returned(&self) -> Vec<(Buffer, SyncEvent)> {
        std::mem::take(&mut *self.returned.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn inbox(&self) -> MutexGuard<'_, VecDeque<Letter>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes down a call for those who ask why nobody comes, and for the members of its group the buffer that they read, which
    /// is filled at `ready`. One that waits must be ended by [`Entry::met`] when all have come.
    pub(crate) fn post(&self, request: &Request<'_>, waits: bool, x: Option<&Buffer>, ready: SyncEvent) {
        let mut posted = self.posted_mut();
        posted.issued.set(request);
        posted.x = x.cloned();
        posted.ready = ready;
        drop(posted);
        if waits {
            self.ticket.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Ends the wait for others.
    pub(crate) fn met(&self) {
        self.ticket.fetch_add(1, Ordering::AcqRel);
    }

    /// Takes back the buffer that was shown.
    pub(crate) fn clear(&self) {
        self.posted_mut().x = None;
    }

    pub(crate) fn set_state(&self, state: State) {
        self.posted_mut().state = state;
    }

    pub(crate) fn deliver(&self, letter: Letter) {
        self.inbox().push_back(letter);
        self.parking.ring();
    }

    pub(crate) fn has_letter(&self, axes: AxisSet, from: usize) -> bool {
        self.inbox().iter().any(|l| l.from == from && l.issued.axes == axes)
    }

    /// The oldest letter of a sender over some axes.
    pub(crate) fn take_letter(&self, axes: AxisSet, from: usize) -> Option<Letter> {
        let mut inbox = self.inbox();
        let at = inbox.iter().position(|l| l.from == from && l.issued.axes == axes)?;
        inbox.remove(at)
    }
}

/// Why the world ends.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// What happened.
    pub(crate) error: Error,
    /// The rank that failed, or that found out.
    pub(crate) origin: usize,
    /// Ranks to which this error itself is returned; all others lost a peer. Of processes, the first of these reports the error
    /// with its details.
    pub(crate) told: Vec<usize>,
}

impl Failure {
    /// Whether other ranks found that the process of the origin ended, fell silent, or sends what is no message.
    pub(crate) fn is_lost_process(&self) -> bool {
        self.told.is_empty() && self.error.kind() == Kind::PeerLost
    }

    /// Whether the origin alone failed, by itself.
    pub(crate) fn is_of_origin(&self) -> bool {
        !self.is_lost_process() && self.told.iter().all(|rank| *rank == self.origin)
    }

    /// Whether the error itself is that of a rank.
    pub(crate) fn is_of(&self, rank: usize) -> bool {
        self.told.contains(&rank) || (self.origin == rank && !self.is_lost_process())
    }

    /// The rank whose process reports the error with its details; the processes of all others say in one line why they stop.
    pub(crate) fn reporter(&self) -> usize {
        match self.told.first() {
            Some(first) => *first,
            None if self.is_lost_process() => usize::from(self.origin == 0),
            None => self.origin,
        }
    }
}

/// From so long a silence on, a rank is said to give no sign of life.
const SILENCE_MIN: Duration = Duration::from_secs(2);

/// What a look at the table tells of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) state: State,
    pub(crate) issued: Issued,
    /// Whether it waited for the arrival of others during the whole look.
    pub(crate) waiting: bool,
    /// Whom it waits for, if it waits.
    pub(crate) absent: Vec<usize>,
    /// How long nothing has come from its process, not even the sign of life of every second; zero for ranks of this process.
    pub(crate) silence: Duration,
}

impl Seen {
    /// Whether a rank that should run gives no sign of life, of which one is due every second.
    pub(crate) fn is_silent(&self) -> bool {
        self.state == State::Running && self.silence >= SILENCE_MIN
    }
}

/// What a glance at the table tells of one rank: no more than decides who waits for whom.
#[derive(Clone, Copy, Debug)]
struct Line {
    state: State,
    op: Op,
    axes: AxisSet,
    number: u64,
    /// As [`Seen::waiting`].
    waiting: bool,
    /// Whether the letter that it waits for is there.
    has_letter: bool,
}

/// One consistent glance at all ranks. It takes time in proportion to them, which a look does to their square; each waiting
/// rank throws one again and again.
#[derive(Debug)]
pub(crate) struct Glance<'a> {
    mesh: &'a Mesh,
    lines: Vec<Line>,
}

impl Glance<'_> {
    /// Why a rank will wait for ever, if it will.
    pub(crate) fn examine(&self, rank: usize) -> Option<Finding> {
        let gone = |r: usize| self.lines[r].state != State::Running;
        examine(self.lines.len(), rank, &gone, &|r| self.absent(r))
    }

    /// The ranks that a rank still misses, if it waits.
    fn absent(&self, rank: usize) -> Vec<usize> {
        let mine = &self.lines[rank];
        if !mine.waiting || mine.has_letter {
            return Vec::new();
        }
        let members = self.mesh.group(rank, mine.axes);
        if let Op::Recv { from } = mine.op {
            return vec![members[from]];
        }
        let here = |r: &usize| {
            let other = &self.lines[*r];
            other.op.is_collective() && other.axes == mine.axes && other.number == mine.number
        };
        members.into_iter().filter(|r| !here(r)).collect()
    }
}

/// Why a waiting rank will never be met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// Each of these ranks waits for the next, the last for the first.
    Cycle(Vec<usize>),
    /// This rank is gone.
    Departed(usize),
}

/// A group: the bits of its axes, and its first member.
type Place = (u16, usize);

/// All lines, all groups in which ranks have met, and the first failure.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) mesh: Mesh,
    entries: Vec<Entry>,
    groups: Mutex<HashMap<Place, Arc<Group>>>,
    failed: AtomicBool,
    failure: Mutex<Option<Failure>>,
}

impl Table {
    pub(crate) fn new(mesh: Mesh) -> Table {
        let entries = (0..mesh.num_ranks()).map(|_| Entry::new()).collect();
        let (groups, failed, failure) = (Mutex::default(), AtomicBool::new(false), Mutex::new(None));
        Table { mesh, entries, groups, failed, failure }
    }

    /// The group of a rank over some axes.
    pub(crate) fn group(&self, rank: usize, axes: AxisSet) -> Arc<Group> {
        let fresh = || Arc::new(Group::new(self.mesh.group_size(axes)));
        self.groups().entry(self.place(rank, axes)).or_insert_with(fresh).clone()
    }

    fn place(&self, rank: usize, axes: AxisSet) -> Place {
        (axes.bits(), self.mesh.head(rank, axes))
    }

    fn groups(&self) -> MutexGuard<'_, HashMap<Place, Arc<Group>>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn entry(&self, rank: usize) -> &Entry {
        &self.entries[rank]
    }

    /// Ends the world. Only the first cause is kept.
    pub(crate) fn fail(&self, failure: Failure) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.failed.store(true, Ordering::Release);
    }

    /// Whether the world has ended: one load.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A letter that nobody has read, with its addressee.
    pub(crate) fn unread(&self) -> Option<(usize, Letter)> {
        self.entries.iter().enumerate().find_map(|(to, entry)| Some((to, entry.inbox().pop_front()?)))
    }

    /// One consistent glance at all ranks: a rank counts as waiting only if its ticket did not change between
    /// the time before the first line was read and the time after the last, and if those for whom it waits have not all
    /// arrived by then, so every wait seen was true throughout.
    pub(crate) fn glance(&self) -> Glance<'_> {
        let tickets = || self.entries.iter().map(|e| e.ticket.load(Ordering::Acquire)).collect::<Vec<u64>>();
        let before = tickets();
        let line = |entry: &Entry| {
            let posted = entry.posted();
            let Issued { op, axes, number, .. } = posted.issued;
            Line { state: posted.state, op, axes, number, waiting: false, has_letter: false }
        };
        let mut lines: Vec<Line> = self.entries.iter().map(line).collect();
        // After the states: a rank that has returned has sent all its letters before.
        for (rank, line) in lines.iter_mut().enumerate() {
            line.has_letter = self.has_letter(rank, line);
        }
        let after = tickets();
        let groups = self.groups();
        for (rank, line) in lines.iter_mut().enumerate() {
            // One that has not woken up yet keeps its ticket, while the others may have gone on.
            let has_met = || groups.get(&self.place(rank, line.axes)).is_some_and(|g| g.has_met(line.number));
            line.waiting = before[rank] % 2 == 1
                && before[rank] == after[rank]
                && !(line.op.is_collective() && has_met());
        }
        drop(groups);
        Glance { mesh: &self.mesh, lines }
    }

    /// A glance with all that an error tells.
    pub(crate) fn look(&self) -> Vec<Seen> {
        let glance = self.glance();
        let seen = |(rank, line): (usize, &Line)| Seen {
            state: line.state,
            issued: self.entries[rank].posted().issued.clone(),
            waiting: line.waiting,
            absent: glance.absent(rank),
            silence: Duration::ZERO,
        };
        glance.lines.iter().enumerate().map(seen).collect()
    }

    /// Whether the letter that a recv asks for is there.
    fn has_letter(&self, rank: usize, line: &Line) -> bool {
        let Op::Recv { from } = line.op else { return false };
        self.entries[rank].has_letter(line.axes, self.mesh.group(rank, line.axes)[from])
    }
}

/// Why a rank will wait forever, if it will: someone it waits for is gone, or waits (in the end) for it. `absent` gives whom a
/// rank waits for; it is asked once of each rank that matters.
fn examine(
    num_ranks: usize,
    rank: usize,
    gone: &dyn Fn(usize) -> bool,
    absent: &dyn Fn(usize) -> Vec<usize>,
) -> Option<Finding> {
    let first = absent(rank);
    if let Some(gone) = first.iter().find(|r| gone(**r)) {
        return Some(Finding::Departed(*gone));
    }
    let mut visited = vec![false; num_ranks];
    let mut path = vec![rank];
    path_back(&first, absent, &mut visited, &mut path).then_some(Finding::Cycle(path))
}

/// Extends a path along the waits, from one for some ranks, until it leads back to its first rank.
fn path_back(
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
            if path_back(&absent(next), absent, visited, path) {
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
    use crate::call::{Call, Origin, Phase, Seat};
    use shardgrad_kernels::DType;
    use std::cell::Cell;

    /// What is found of a rank where each waits for these, and one may be gone; and how often it was asked who waits for whom.
    fn found(waits: &[&[usize]], gone: Option<usize>, rank: usize) -> (Option<Finding>, usize) {
        let asked = Cell::new(0);
        let absent = |r: usize| {
            asked.set(asked.get() + 1);
            waits[r].to_vec()
        };
        (examine(waits.len(), rank, &|r| Some(r) == gone, &absent), asked.get())
    }

    #[test]
    fn a_circle_is_found_by_its_members_only() {
        let waits: [&[usize]; 6] = [&[1], &[2, 3], &[], &[4], &[1], &[0]];
        let of = |rank| found(&waits, None, rank).0;
        assert_eq!(of(1), Some(Finding::Cycle(vec![1, 3, 4])));
        assert_eq!(of(0), None);
        assert_eq!(of(5), None);
        assert_eq!(found(&[&[0]], None, 0).0, Some(Finding::Cycle(vec![0])));
    }

    #[test]
    fn one_whom_all_have_met_waits_no_more_though_it_sleeps() {
        let mesh = Mesh::new(&[("x", 2)]).unwrap();
        let (table, axes) = (Table::new(mesh.clone()), mesh.all_axes());
        let (phase, site) = (Phase::Control, std::panic::Location::caller());
        let call = Call { axes, dtype: DType::F32, phase, path: "", origin: Origin::default(), site };
        let (op, seat) = (Op::Barrier, Seat::new(&mesh, 0, axes));
        let request =
            Request { call: &call, op, seat: &seat, number: 1, counts: &[], received: &[], x: None };
        let group = table.group(0, axes);
        table.entry(0).post(&request, true, None, SyncEvent::default());
        let nap = std::time::Duration::ZERO;
        let mut seen = Vec::new();
        // While it naps, the other one comes, and leaves for good.
        let arrived = group.come(&group.arrived, nap, || {
            if seen.is_empty() {
                seen.push(table.glance().absent(0));
                group.come(&group.arrived, nap, || unreachable!("it is the last")).unwrap();
                table.entry(1).set_state(State::Returned);
                seen.push(table.glance().absent(0));
                assert_eq!(table.glance().examine(0), None);
            }
            Ok(())
        });
        assert!(arrived.is_ok() && seen == [vec![1], vec![]], "{seen:?}");
    }

    #[test]
    fn a_chain_that_ends_at_a_computing_rank_is_no_circle() {
        let waits: [&[usize]; 3] = [&[1], &[2], &[]];
        assert_eq!(found(&waits, None, 0).0, None);
        assert_eq!(found(&waits, Some(2), 1).0, Some(Finding::Departed(2)));
        assert_eq!(found(&waits, Some(2), 0).0, None);
    }

    #[test]
    fn no_rank_is_asked_twice_whom_it_waits_for() {
        let all: Vec<usize> = (1..100).collect();
        let chain: Vec<Vec<usize>> =
            (0..100).map(|r| all.iter().copied().filter(|s| *s > r).collect()).collect();
        let waits: Vec<&[usize]> = chain.iter().map(Vec::as_slice).collect();
        assert_eq!(found(&waits, None, 0), (None, 100));
        // Ranks that it does not wait for, directly or through others, are not asked at all.
        assert_eq!(found(&waits, None, 97), (None, 3));
    }
}
