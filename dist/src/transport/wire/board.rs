//! What one process knows of the other ranks: what came from each and is not used yet, and how each of them is.

use super::frame::{Frame, Probe};
use crate::call::{Issued, Op};
use crate::error::{Error, Result};
use crate::mesh::{AxisSet, Mesh};
use crate::park::Parking;
use crate::report;
use crate::sync::{AtomicBool, Mutex, MutexGuard};
use crate::table::{Failure, Seen, State};
use std::collections::{HashMap, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A call of another rank, with the elements that it sent along.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) issued: Issued,
    pub(super) body: Vec<u8>,
}

/// What is known of one rank.
#[derive(Debug)]
struct Peer {
    state: State,
    /// The newest call of it that this process has heard of.
    last: Issued,
    /// Whether it has told that it waits in that.
    waits: bool,
    /// By the bits of axes, in the order of calls.
    calls: HashMap<u16, VecDeque<Arrived>>,
    letters: HashMap<u16, VecDeque<Arrived>>,
    parts: HashMap<u16, VecDeque<Vec<u8>>>,
    /// How long nothing has come from it.
    silence: Duration,
    /// How the world has failed, as it said last.
    failure: Option<Failure>,
}

/// What one process knows of the world. Threads that read write into it, the rank takes out.
#[derive(Debug)]
pub(crate) struct Board {
    pub(super) mesh: Mesh,
    pub(super) rank: usize,
    peers: Vec<Mutex<Peer>>,
    failed: AtomicBool,
    failure: Mutex<Option<Failure>>,
    probes: Mutex<Vec<Probe>>,
    /// Where the rank waits for whatever comes.
    pub(super) parking: Parking,
}

impl Board {
    pub(super) fn new(mesh: Mesh, rank: usize) -> Board {
        let peer = || Peer {
            state: State::Running,
            last: Issued::nothing(),
            waits: false,
            calls: HashMap::new(),
            letters: HashMap::new(),
            parts: HashMap::new(),
            silence: Duration::ZERO,
            failure: None,
        };
        let peers = (0..mesh.num_ranks()).map(|_| Mutex::new(peer())).collect();
        let (failed, failure) = (AtomicBool::new(false), Mutex::new(None));
        Board { mesh, rank, peers, failed, failure, probes: Mutex::default(), parking: Parking::default() }
    }

    /// A thread that panicked with this lock fails the world by its end.
    fn peer(&self, rank: usize) -> MutexGuard<'_, Peer> {
        self.peers[rank].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compares a frame from a rank, and the bytes that follow it, with the calls that they belong to. How many elements are due, the
    /// call in the frame says; whether the calls of all members are alike is compared later.
    ///
    /// # Errors
    /// Why no rank sends this here and now.
    pub(super) fn check(&self, from: usize, frame: &Frame, bytes: usize) -> Result<()> {
        let malformed = || report::malformed(from);
        let of_size = |call: &Issued, due: usize| match bytes == due {
            true => Ok(()),
            false => Err(report::wrong_size(&self.mesh, (from, call), bytes, due)),
        };
        match frame {
            Frame::Call(call) => {
                let (members, places) = self.places(from, call.axes).ok_or_else(malformed)?;
                match call.op {
                    Op::Recv { .. } => Err(malformed()),
                    Op::Send { to } if to != places[1] => Err(malformed()),
                    _ => of_size(call, call.payload(members).bytes(places[0], places[1])),
                }
            }
            Frame::Part(bits) => {
                // A chunk of a result comes after the call of this rank, and before its next one.
                let call = self.last(self.rank);
                let (members, places) = self.places(from, call.axes).ok_or_else(malformed)?;
                let payload = call.payload(members);
                let is_due = call.axes.bits() == *bits && payload.is_chunked();
                if !is_due || self.has_part(from, call.axes) {
                    return Err(malformed());
                }
                of_size(&call, payload.chunk_bytes(places[0]))
            }
            _ if bytes == 0 => Ok(()),
            _ => Err(malformed()),
        }
    }

    /// The size of the group over some axes in which both a rank and this one are, and the places of the two.
    fn places(&self, from: usize, axes: AxisSet) -> Option<(usize, [usize; 2])> {
        let members = self.mesh.group(self.rank, axes);
        let place = |rank: usize| members.iter().position(|member| *member == rank);
        Some((members.len(), [place(from)?, place(self.rank)?]))
    }

    /// Takes in what a rank has sent.
    pub(super) fn take(&self, from: usize, frame: Frame, body: Vec<u8>) {
        let mut peer = self.peer(from);
        match frame {
            Frame::Call(issued) => {
                let bits = issued.axes.bits();
                peer.waits = false;
                peer.last.clone_from(&issued);
                let is_letter = !issued.op.is_collective();
                let queues = if is_letter { &mut peer.letters } else { &mut peer.calls };
                queues.entry(bits).or_default().push_back(Arrived { issued, body });
            }
            Frame::Part(bits) => peer.parts.entry(bits).or_default().push_back(body),
            Frame::Waits(issued) => (peer.last, peer.waits) = (issued, true),
            Frame::Goes => peer.waits = false,
            Frame::Probe(probe) => self.probes.lock().unwrap_or_else(PoisonError::into_inner).push(probe),
            Frame::Failed(failure) => {
                peer.failure = Some(failure.clone());
                drop(peer);
                // Whoever sees the state sees the failure too, and not a rank that left.
                self.fail(failure);
                self.peer(from).state = State::Failed;
                return self.parking.ring();
            }
            Frame::Returned(issued) => {
                (peer.state, peer.waits) = (State::Returned, false);
                peer.last = issued;
            }
        }
        drop(peer);
        self.parking.ring();
    }

    /// Leaves a message of this rank with itself.
    pub(super) fn keep(&self, issued: Issued, body: Vec<u8>) {
        self.take(self.rank, Frame::Call(issued), body);
    }

    /// Takes note that nothing more comes from a rank, and why. Where it has not returned, that ends the world.
    pub(super) fn lose(&self, rank: usize, why: &Error) {
        let peer = self.peer(rank);
        if peer.state != State::Running {
            return;
        }
        let last = (peer.last.number > 0).then(|| ("last call", peer.last.text(&self.mesh, rank)));
        drop(peer);
        let error = Error::new(why.kind(), why.message()).detail("rank", self.mesh.describe(rank));
        let details = last.into_iter().chain(why.details().iter().cloned());
        let error = details.fold(error, |error, (label, text)| error.detail(label, text));
        self.fail(Failure { error, origin: rank, told: vec![] });
        self.peer(rank).state = State::Failed;
        self.parking.ring();
    }

    /// Takes note of how long nothing has come from a rank.
    pub(super) fn set_silence(&self, rank: usize, silence: Duration) {
        self.peer(rank).silence = silence;
    }

    /// Whether no other rank runs its function any more, as far as they have said.
    pub(super) fn have_all_ended(&self) -> bool {
        (0..self.peers.len()).all(|rank| rank == self.rank || self.state(rank) != State::Running)
    }

    /// The failure of a rank of lower number that failed by itself, with the message of this one's.
    pub(super) fn alike(&self, own: &Error) -> Option<Failure> {
        let is_alike = |rank: usize, failure: &Failure| {
            let error = &failure.error;
            failure.origin == rank
                && failure.told.is_empty()
                && (error.kind(), error.message()) == (own.kind(), own.message())
        };
        (0..self.rank)
            .find_map(|rank| self.peer(rank).failure.clone().filter(|failure| is_alike(rank, failure)))
    }

    /// Ends the world, as far as this process knows. Only the first cause is kept.
    pub(super) fn fail(&self, failure: Failure) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.failed.store(true, Ordering::Release);
        self.parking.ring();
    }

    /// Whether the world has ended: one load.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes down what this rank calls.
    pub(super) fn note(&self, issued: &Issued) {
        self.peer(self.rank).last.clone_from(issued);
    }

    /// What a rank has called last, as far as this process has heard.
    pub(super) fn last(&self, rank: usize) -> Issued {
        self.peer(rank).last.clone()
    }

    pub(super) fn state(&self, rank: usize) -> State {
        self.peer(rank).state
    }

    pub(super) fn has_call(&self, from: usize, axes: AxisSet) -> bool {
        self.peer(from).calls.get(&axes.bits()).is_some_and(|queue| !queue.is_empty())
    }

    pub(super) fn has_letter(&self, from: usize, axes: AxisSet) -> bool {
        self.peer(from).letters.get(&axes.bits()).is_some_and(|queue| !queue.is_empty())
    }

    pub(super) fn has_part(&self, from: usize, axes: AxisSet) -> bool {
        self.peer(from).parts.get(&axes.bits()).is_some_and(|queue| !queue.is_empty())
    }

    pub(super) fn take_call(&self, from: usize, axes: AxisSet) -> Option<Arrived> {
        self.peer(from).calls.get_mut(&axes.bits())?.pop_front()
    }

    pub(super) fn take_letter(&self, from: usize, axes: AxisSet) -> Option<Arrived> {
        self.peer(from).letters.get_mut(&axes.bits())?.pop_front()
    }

    pub(super) fn take_part(&self, from: usize, axes: AxisSet) -> Option<Vec<u8>> {
        self.peer(from).parts.get_mut(&axes.bits())?.pop_front()
    }

    pub(super) fn take_probes(&self) -> Vec<Probe> {
        std::mem::take(&mut *self.probes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether every other rank has returned, or the world has failed.
    pub(super) fn is_over(&self) -> bool {
        let returned = |rank: usize| rank == self.rank || self.state(rank) == State::Returned;
        self.has_failed() || (0..self.peers.len()).all(returned)
    }

    /// A message to this rank that it has not received, with its sender.
    pub(super) fn unread(&self) -> Option<(usize, Issued)> {
        let letter = |rank: usize| {
            let peer = self.peer(rank);
            peer.letters.values().flatten().next().map(|letter| (rank, letter.issued.clone()))
        };
        (0..self.peers.len()).find_map(letter)
    }

    /// What is known of all ranks, where this one waits for those.
    pub(super) fn look(&self, absent: &[usize]) -> Vec<Seen> {
        let seen = |rank: usize| {
            let peer = self.peer(rank);
            let is_own = rank == self.rank;
            Seen {
                state: peer.state,
                issued: peer.last.clone(),
                waiting: peer.waits || is_own,
                absent: if is_own { absent.to_vec() } else { Vec::new() },
                silence: peer.silence,
            }
        };
        (0..self.peers.len()).map(seen).collect()
    }

    /// Whether the newest call of this rank is the one in which it waited when it told so.
    pub(super) fn still_waits_in(&self, asked: &Issued) -> bool {
        let peer = self.peer(self.rank);
        let is_same_end = match (peer.last.op, asked.op) {
            (Op::Recv { from }, Op::Recv { from: asked }) => from == asked,
            (own, asked) => own.is_collective() && asked.is_collective(),
        };
        is_same_end && peer.last.axes == asked.axes && peer.last.number == asked.number
    }
}
