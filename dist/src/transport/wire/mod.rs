//! Ranks as processes: each tells the others of its group what it calls, with the elements that they need of it, over a
//! connection of its own to each of them.
//!
//! Every member of a group sends its call to all others and goes on when it has the calls of all, so that whatever is unlike is
//! found by each of them alike; there is no second meeting, since what was sent is a copy. Elements are combined by the kernels and
//! in the order of the thread transport: every operand of a small sum goes to everyone, and of a large one chunk i goes to member i,
//! which combines it and sends it back to all. So both transports give the same bits.
//!
//! No table is shared. Whoever waits for long tells so, and asks those whom it waits for whether they wait for it in turn: a
//! question that comes back has gone round a circle of waits, each of which still lasted when it passed, and so lasts for ever.

mod frame;
mod board;
mod link;
mod meeting;
mod parts;
#[cfg(test)]
mod malformed;

pub(crate) use board::Board;
pub(crate) use link::Links;
pub use meeting::Rendezvous;
pub(crate) use meeting::{Facts, Values, WaitHook};

use super::{Transport, local};
use crate::call::{Issued, Op, Request};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::park::Watch;
use crate::report;
use crate::table::{Failure, State};
use board::Arrived;
use frame::{Frame, Probe};
use parts::{combined, form, others, uploaded};
use shardgrad_kernels::host_vec::{try_copied, try_filled};
use shardgrad_kernels::{Backend, Buffer};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who waits longer tells the others, and asks round.
const TOLD_AFTER: Duration = Duration::from_millis(50);
/// How often who waits asks round; in larger worlds less often, since each question goes to many.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// Up to so many ranks ask as often as that.
const ASKERS_MAX: usize = 8;
/// So long a peer may take nothing while it is told how the world has ended.
const LAST_WORD: Duration = Duration::from_secs(1);

/// What a process shares with the threads that read for it.
#[derive(Clone, Debug)]
pub(crate) struct Joint {
    board: Arc<Board>,
    links: Arc<Links>,
}

/// One rank's end.
#[derive(Debug)]
pub(crate) struct Wire {
    joint: Joint,
    timeout: Duration,
    spin: Duration,
    patience: Cell<Duration>,
    /// The elements of the call, as bytes.
    held: RefCell<Vec<u8>>,
    made: RefCell<Made>,
}

/// How often this rank has called, and asked.
#[derive(Debug, Default)]
struct Made {
    /// The number of the last call, by the bits of its axes.
    calls: HashMap<u16, u64>,
    /// That of the last message, by axes and receiver.
    letters: HashMap<(u16, usize), u64>,
    round: u64,
    /// The waits of this rank.
    waits: u64,
    /// The last question of each rank that went on from here, and in which wait.
    passed: HashMap<usize, (u64, u64)>,
}

/// One wait of this rank for others.
struct Wait<'a> {
    request: &'a Request<'a>,
    watch: Watch,
    /// When this rank asks round, counted in waiting.
    next: Duration,
    is_told: bool,
}

impl Joint {
    /// Begins to listen to the others.
    ///
    /// # Errors
    /// As [`Links::start`].
    pub(crate) fn new(
        mesh: &Mesh,
        rank: usize,
        streams: Vec<Option<TcpStream>>,
        timeout: Duration,
    ) -> Result<Joint> {
        let board = Arc::new(Board::new(mesh.clone(), rank));
        let links = Arc::new(Links::start(board.clone(), streams, timeout)?);
        Ok(Joint { board, links })
    }

    /// Ends the world with this error of this rank, unless it has ended.
    pub(crate) fn fail(&self, error: Error) {
        self.board.fail(Failure { error, origin: self.board.rank, told: vec![] });
    }

    /// Tells the others that this rank has returned and waits until all have. Ranks that live may compute for as long as they
    /// like.
    ///
    /// # Errors
    /// How the world has failed; a message that this rank has not received.
    pub(crate) fn leave(&self) -> Result<()> {
        let board = &self.board;
        self.links.tell(&Frame::Returned(board.last(board.rank)), LAST_WORD);
        board.parking.wait(Duration::ZERO, || board.is_over(), || Ok(()))?;
        if let Some(failure) = board.failure() {
            return Err(report::lost(&failure, board.rank, "waits for the others to end"));
        }
        match board.unread() {
            Some((from, issued)) => Err(report::unread(&board.mesh, board.rank, (from, &issued))),
            None => Ok(()),
        }
    }

    /// Tells the others why the world has failed, whoever found out first: some may not have heard of it yet. Returns the error with
    /// which this process ends, from the one with which its rank has ended.
    pub(crate) fn part(&self, error: Error) -> Error {
        let board = &self.board;
        let Some(failure) = board.failure() else { return error };
        self.links.tell(&Frame::Failed(failure.clone()), LAST_WORD);
        // All ranks may have found the same, each by itself.
        let is_own = failure.told.is_empty() && failure.is_of(board.rank);
        let alike = is_own.then(|| self.links.linger()).and_then(|()| board.alike(&failure.error));
        report::last_error(&failure, alike.as_ref(), board.rank, error)
    }
}

impl Transport for Wire {
    fn check(&self) -> Result<()> {
        if self.joint.board.has_failed() {
            return Err(self.released("computes"));
        }
        Ok(())
    }

    fn be_patient(&self, limit: Duration) -> Duration {
        self.patience.replace(limit)
    }

    fn run(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        self.check()?;
        let outcome = match request.op {
            Op::Send { to } => self.send(backend, request, request.seat.members[to]).map(|()| None),
            Op::Recv { from } => self.recv(backend, request, request.seat.members[from]).map(Some),
            _ => self.collective(backend, request),
        };
        outcome.map_err(|error| {
            let board = &self.joint.board;
            if board.has_failed() {
                return error;
            }
            // A member that gives up half way (no memory, no kernel) would leave the others waiting.
            let error = error.at(request.call.site).detail("rank", board.mesh.describe(board.rank));
            self.fail(error.clone(), vec![board.rank]);
            error
        })
    }
}

impl Wire {
    pub(crate) fn new(joint: Joint, timeout: Duration, spin: Duration) -> Wire {
        let (patience, held, made) = (Cell::new(Duration::ZERO), RefCell::default(), RefCell::default());
        Wire { joint, timeout, spin, patience, held, made }
    }

    /// How long a wait may last.
    fn limit(&self) -> Duration {
        self.timeout.max(self.patience.get())
    }

    fn rank(&self) -> usize {
        self.joint.board.rank
    }

    /// Ends the world for everyone.
    fn fail(&self, error: Error, told: Vec<usize>) {
        self.joint.board.fail(Failure { error, origin: self.rank(), told });
        // Another one may have come first.
        let first = self.joint.board.failure().expect("a failed world has a cause");
        self.joint.links.tell(&Frame::Failed(first), LAST_WORD);
    }

    /// The error with which this rank has to stop, once the world has failed.
    fn released(&self, doing: &str) -> Error {
        let board = &self.joint.board;
        let failure = board.failure().expect("a failed world has a cause");
        if failure.told.contains(&board.rank) {
            return failure.error;
        }
        report::lost(&failure, board.rank, doing)
    }

    /// What this rank calls, noted for those who ask why it does not come elsewhere.
    fn issue(&self, request: &Request<'_>) -> Issued {
        let mut issued = Issued::nothing();
        issued.set(request);
        self.joint.board.note(&issued);
        let (bits, made) = (issued.axes.bits(), &mut *self.made.borrow_mut());
        match request.op {
            Op::Send { to } => drop(made.letters.insert((bits, request.seat.members[to]), issued.number)),
            Op::Recv { .. } => {}
            _ => drop(made.calls.insert(bits, issued.number)),
        }
        issued
    }

    /// Writes a frame to a rank, however long it takes within the limit.
    fn write(&self, to: usize, head: &mut [u8], body: &[u8], issued: &Issued) -> Result<()> {
        let mut watch = Watch::default();
        self.joint.links.send(to, head, body, || {
            self.check()?;
            if watch.wake(Instant::now()) <= self.limit() {
                return Ok(());
            }
            let (board, me) = (&self.joint.board, self.rank());
            let seen = &board.look(&[to])[to];
            let error = report::not_taken(&board.mesh, me, (to, seen), issued, self.limit());
            self.fail(error.clone(), vec![self.rank()]);
            Err(error)
        })
    }

    /// The elements that this rank brings, as bytes.
    fn hold(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<()> {
        let bytes = request.shown_numel(request.seat.place) * request.call.dtype.size();
        let held = &mut *self.held.borrow_mut();
        let len = if request.x.is_some() { bytes } else { 0 };
        if len > held.capacity() {
            *held = Vec::new();
            *held = try_filled(0, len, "a message to other ranks")?;
        }
        held.resize(len, 0);
        Ok(request.x.map_or(Ok(()), |x| backend.download(x, held))?)
    }

    fn collective(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        let (seat, size, payload) = (request.seat, request.call.dtype.size(), request.payload());
        self.hold(backend, request)?;
        let issued = self.issue(request);
        let mut head = Frame::Call(issued.clone()).head();
        for place in others(request) {
            let part = payload.elements(seat.place, place);
            let held = self.held.borrow();
            self.write(seat.members[place], &mut head, &held[part.start * size..part.end * size], &issued)?;
        }
        let axes = request.call.axes;
        self.wait(request, |board, member| board.has_call(member, axes))?;
        let take = |place: usize| self.joint.board.take_call(seat.members[place], axes);
        let arrived: Vec<Option<Arrived>> = (0..seat.size()).map(take).collect();
        self.compare(request, &issued, &arrived)?;
        let brought: Vec<&[u8]> =
            arrived.iter().map(|one| one.as_ref().map_or(&[][..], |one| &one.body)).collect();
        match payload.is_chunked() {
            true => self.all_reduce_in_chunks(backend, request, &issued, &brought).map(Some),
            false => form(backend, request, &brought),
        }
    }

    /// Ends the world if the members of a group have called unlike things: all of them find that out.
    fn compare(&self, request: &Request<'_>, own: &Issued, arrived: &[Option<Arrived>]) -> Result<()> {
        let calls: SmallVec<[&Issued; 8]> =
            arrived.iter().map(|one| one.as_ref().map_or(own, |one| &one.issued)).collect();
        let members = &request.seat.members;
        match report::mismatch(&self.joint.board.mesh, members, &calls) {
            None => Ok(()),
            Some(error) => {
                self.fail(error.clone(), members.clone());
                Err(error)
            }
        }
    }

    /// Combines one chunk of what all have brought and gets those of the others.
    fn all_reduce_in_chunks(
        &self,
        backend: &dyn Backend,
        request: &Request<'_>,
        issued: &Issued,
        brought: &[&[u8]],
    ) -> Result<Buffer> {
        let (seat, dtype, axes, payload) =
            (request.seat, request.call.dtype, request.call.axes, request.payload());
        let range = |place: usize| payload.chunk(place);
        let mine = combined(backend, request, brought, &range(seat.place))?;
        let mut own = try_filled(0, payload.chunk_bytes(seat.place), "a message to other ranks")?;
        backend.download(&mine, &mut own)?;
        let mut head = Frame::Part(axes.bits()).head();
        for place in others(request) {
            self.write(seat.members[place], &mut head, &own, issued)?;
        }
        self.wait(request, |board, member| board.has_part(member, axes))?;
        let mut y = backend.alloc(request.counts[0] * dtype.size())?;
        for place in 0..seat.size() {
            let theirs = self.joint.board.take_part(seat.members[place], axes);
            let part = theirs.map_or(Ok(mine.clone()), |theirs| uploaded(backend, &theirs))?;
            local::copy(backend, dtype, &part, 0..range(place).len(), &mut y, range(place).start)?;
        }
        Ok(y)
    }

    /// Sends a copy to the receiver and waits for nobody.
    fn send(&self, backend: &dyn Backend, request: &Request<'_>, to: usize) -> Result<()> {
        self.hold(backend, request)?;
        let issued = self.issue(request);
        if to == self.rank() {
            self.joint.board.keep(issued, try_copied(&self.held.borrow(), "a message to this rank itself")?);
            return Ok(());
        }
        self.write(to, &mut Frame::Call(issued.clone()).head(), &self.held.borrow(), &issued)
    }

    fn recv(&self, backend: &dyn Backend, request: &Request<'_>, from: usize) -> Result<Buffer> {
        let (issued, axes) = (self.issue(request), request.call.axes);
        self.wait(request, |board, member| member != from || board.has_letter(from, axes))?;
        let letter = self.joint.board.take_letter(from, axes).expect("only its addressee takes a letter");
        let (mesh, me) = (&self.joint.board.mesh, self.rank());
        if let Some(error) = report::wrong_letter(mesh, (from, &letter.issued), me, &issued) {
            self.fail(error.clone(), vec![me, from]);
            return Err(error);
        }
        uploaded(backend, &letter.body)
    }

    /// Waits until what is asked for has come from every other member, or from this rank itself if it is the one that is asked.
    fn wait(&self, request: &Request<'_>, has_come: impl Fn(&Board, usize) -> bool) -> Result<()> {
        let board = &self.joint.board;
        let is_alone = matches!(request.op, Op::Recv { .. });
        let missing = |member: &usize| (is_alone || *member != board.rank) && !has_come(board, *member);
        let absent = || request.seat.members.iter().copied().filter(missing).collect::<Vec<usize>>();
        let done = || !request.seat.members.iter().any(&missing);
        self.made.borrow_mut().waits += 1;
        let mut wait = Wait { request, watch: Watch::default(), next: TOLD_AFTER, is_told: false };
        board.parking.wait(self.spin, done, || self.look_around(&mut wait, &absent))?;
        if wait.is_told {
            self.joint.links.tell(&Frame::Goes, LAST_WORD);
        }
        Ok(())
    }

    /// What a waiting rank does every ten milliseconds, and whenever something comes: has the world failed, will nobody come, is
    /// it too late?
    fn look_around(&self, wait: &mut Wait<'_>, absent: &dyn Fn() -> Vec<usize>) -> Result<()> {
        let (board, me) = (&self.joint.board, self.rank());
        let waited = wait.watch.wake(Instant::now());
        let (members, mesh) = (&wait.request.seat.members, &board.mesh);
        if !board.has_failed() {
            let gone = absent().into_iter().find(|r| *r != me && board.state(*r) != State::Running);
            // It may have sent what is waited for before it left.
            let gone = gone.filter(|gone| absent().contains(gone));
            if absent().contains(&me) {
                self.fail(report::cycle(mesh, &board.look(&[me]), &[me]), vec![me]);
            } else if let Some(gone) = gone {
                let error = report::departed(mesh, &board.look(&absent()), me, gone);
                self.fail(error, with_last(members, &[gone]));
            } else if waited > self.limit() && !absent().is_empty() {
                let error = report::overdue(mesh, &board.look(&absent()), me, self.limit());
                self.fail(error, with_last(members, &absent()));
            } else {
                self.ask(wait, waited, &absent());
            }
        }
        if board.has_failed() {
            let call = board.last(me).text(mesh, me);
            return Err(self.released(&format!("waits in {call}")));
        }
        Ok(())
    }

    /// Tells of this wait, asks those whom this rank waits for whether they wait for it, and passes the questions of others on.
    fn ask(&self, wait: &mut Wait<'_>, waited: Duration, absent: &[usize]) {
        let (board, links, me) = (&self.joint.board, &self.joint.links, self.rank());
        let own = board.last(me);
        for probe in board.take_probes() {
            self.pass_on(probe, &own, absent);
        }
        if waited < wait.next {
            return;
        }
        let num_ranks = board.mesh.num_ranks();
        wait.next = waited + ASK_EVERY * num_ranks.div_ceil(ASKERS_MAX) as u32;
        if !std::mem::replace(&mut wait.is_told, true) {
            links.tell(&Frame::Waits(own.clone()), LAST_WORD);
        }
        let round = {
            let made = &mut *self.made.borrow_mut();
            made.round += 1;
            made.round
        };
        self.send_probe(&Probe { round, path: vec![(me, own)] }, absent);
    }

    /// Sends a question on to those whom this rank waits for; one of its own that has come back ends the world.
    fn pass_on(&self, mut probe: Probe, own: &Issued, absent: &[usize]) {
        let (board, me) = (&self.joint.board, self.rank());
        let (first, asked) = &probe.path[0];
        let (sender, call) = &probe.path[probe.path.len() - 1];
        if !self.is_owed(*sender, call) {
            return;
        }
        if *first == me {
            if board.still_waits_in(asked) {
                let ranks: Vec<usize> = probe.path.iter().map(|(rank, _)| *rank).collect();
                let mut seen = board.look(absent);
                probe.path.into_iter().for_each(|(rank, issued)| seen[rank].issued = issued);
                let error = report::cycle(&board.mesh, &seen, &ranks);
                self.fail(error, with_last(&ranks, &[]));
            }
            return;
        }
        let made = &mut *self.made.borrow_mut();
        let now = (probe.round, made.waits);
        let is_new = made.passed.insert(*first, now) != Some(now);
        if is_new && probe.path.iter().all(|(rank, _)| *rank != me) {
            probe.path.push((me, own.clone()));
            self.send_probe(&probe, absent);
        }
    }

    fn send_probe(&self, probe: &Probe, to: &[usize]) {
        let mut head = Frame::Probe(probe.clone()).head();
        for to in to {
            // Whether the world has failed is seen soon enough.
            let _ = self.joint.links.send(*to, &mut head, &[], || self.check());
        }
    }

    /// Whether a rank still waits for this one in a call: whether this one has not made its own yet.
    fn is_owed(&self, by: usize, call: &Issued) -> bool {
        let (bits, made) = (call.axes.bits(), self.made.borrow());
        let number = match call.op {
            Op::Recv { .. } => made.letters.get(&(bits, by)),
            _ => made.calls.get(&bits),
        };
        number.is_none_or(|number| *number < call.number)
    }
}

/// Some ranks by their numbers, those last that may have nothing to say: the first one reports an error.
fn with_last(ranks: &[usize], last: &[usize]) -> Vec<usize> {
    let mut sorted = ranks.to_vec();
    sorted.sort_by_key(|rank| (last.contains(rank), *rank));
    sorted
}
