//! Ranks as threads of one process: they show each other their buffers in the world table and read them in
//! place.
//!
//! A collective has two meetings: everyone has arrived (calls are compared, peers' buffers are read), and
//! everyone has finished reading. A large all-reduce has a third one between them: every member combines one
//! chunk, then gathers the chunks of the others. Elements are combined by one kernel either way, in the order
//! of the group, so both ways give the same bits.
//!
//! Work that was given to a device may not be done yet when a meeting is over. So whoever shows a buffer shows the point
//! behind what fills it, at which readers let their work begin; and whoever has read shows the point behind that, at
//! which the owners let what comes next begin. Nobody waits for the device. On the CPU there are no such points.
//!
//! There, little is shown as a copy in the group's notes instead, which stays until everyone has come to the next call: no buffer
//! is read in place, so there is no second meeting.
//!
//! Where the back end can do it, each call is a flight: what is copied and summed for it, and all that waits for others, is given
//! beside what the rank computes, which goes on.

use super::{Transport, local};
use crate::call::{Issued, Op, Print, ReduceOp, Request};
use crate::error::{Error, Result};
use crate::group::{Group, NOTE_BYTES, NOTED_MAX};
use crate::park::Watch;
use crate::report;
use crate::sync::{AtomicU64, RwLockReadGuard};
use crate::table::{Entry, Failure, Finding, Letter, Posted, Table};
use shardgrad_kernels::{Allocator, Backend, Buffer, Device, SyncEvent};
use smallvec::SmallVec;
use std::cell::{Cell, OnceCell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Up to about this many ranks read the whole table every ten milliseconds.
const LOOKERS_MAX: usize = 32;

/// What all ranks of one world share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) table: Table,
    pub(crate) timeout: Duration,
    pub(crate) spin: Duration,
    pub(crate) jitter: Option<u64>,
}

impl Shared {
    pub(crate) fn new(table: Table, timeout: Duration, spin: Duration, jitter: Option<u64>) -> Shared {
        Shared { table, timeout, spin, jitter }
    }
}

/// One rank's end.
#[derive(Debug)]
pub(crate) struct Threads {
    shared: Arc<Shared>,
    rank: usize,
    /// By axes.
    groups: Vec<OnceCell<Arc<Group>>>,
    desk: RefCell<Desk>,
    dice: Cell<u64>,
    /// The limit of a wait, where that is longer than the world's.
    patience: Cell<Duration>,
}

/// Where a rank copies what is shown in notes.
#[derive(Debug)]
struct Desk {
    bytes: Box<[u8; NOTE_BYTES]>,
    /// The contents of other members' notes, by place.
    shown: Vec<Buffer>,
}

type Peers<'a> = SmallVec<[RwLockReadGuard<'a, Posted>; 8]>;

/// What the members show, by place.
type Shown<'a> = SmallVec<[Option<&'a Buffer>; 8]>;

impl Transport for Threads {
    fn check(&self) -> Result<()> {
        if self.shared.table.has_failed() {
            return Err(self.released("computes"));
        }
        Ok(())
    }

    fn be_patient(&self, limit: Duration) -> Duration {
        self.patience.replace(limit)
    }

    fn run(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        self.check()?;
        self.shake();
        self.fly(backend, request).map_err(|error| {
            let table = &self.shared.table;
            if table.has_failed() {
                return error;
            }
            // A member that gives up half way (no memory, no kernel) would leave the others waiting.
            let error = error.at(request.call.site).detail("rank", table.mesh.describe(self.rank));
            self.fail(Failure { error: error.clone(), origin: self.rank, told: vec![self.rank] });
            error
        })
    }
}

impl Threads {
    pub(crate) fn new(shared: Arc<Shared>, rank: usize) -> Threads {
        let num_sets = 1 << shared.table.mesh.num_axes();
        let seed = shared.jitter.unwrap_or(0) ^ (rank as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let (groups, patience) = (vec![OnceCell::new(); num_sets], Cell::new(Duration::ZERO));
        let desk = RefCell::new(Desk { bytes: Box::new([0; NOTE_BYTES]), shown: Vec::new() });
        Threads { rank, groups, desk, dice: Cell::new(seed), patience, shared }
    }

    /// How long a wait may last.
    fn limit(&self) -> Duration {
        self.shared.timeout.max(self.patience.get())
    }

    fn entry(&self, rank: usize) -> &Entry {
        self.shared.table.entry(rank)
    }

    fn fail(&self, failure: Failure) {
        self.shared.table.fail(failure);
    }

    /// The error with which this rank has to stop, once the world has failed.
    fn released(&self, doing: &str) -> crate::error::Error {
        let table = &self.shared.table;
        let failure = table.failure().expect("a failed world has a cause");
        if failure.told.contains(&self.rank) {
            return failure.error;
        }
        report::lost(&failure, self.rank, doing)
    }

    fn group(&self, request: &Request<'_>) -> &Group {
        let axes = request.call.axes;
        self.groups[usize::from(axes.bits())].get_or_init(|| self.shared.table.group(self.rank, axes))
    }

    fn collective(&self, backend: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        let size = request.call.dtype.size();
        let y = match request.result_numel() {
            Some(_) if is_root(request) => request.x.cloned(),
            Some(numel) => Some(backend.alloc(numel * size)?),
            None => None,
        };
        let (group, ready) = (self.group(request), backend.record_event()?);
        if ready.is_complete() && backend.device() == Device::Cpu && fits_notes(request) {
            return self.by_notes(backend, request, group, y);
        }
        self.in_place(backend, request, group, ready, y)
    }

    /// Meets once: everyone shows a copy.
    fn by_notes(
        &self,
        backend: &dyn Backend,
        request: &Request<'_>,
        group: &Group,
        y: Option<Buffer>,
    ) -> Result<Option<Buffer>> {
        let (size, seat) = (request.call.dtype.size(), request.seat);
        let Desk { bytes, shown } = &mut *self.desk.borrow_mut();
        let mine = &mut bytes[..request.shown_numel(seat.place) * size];
        if let Some(x) = request.x {
            backend.download(x, mine)?;
        }
        self.entry(self.rank).post(request, true, None, SyncEvent::default());
        self.arrive(group, request, mine)?;
        self.shake();
        let mut y = match y {
            Some(y) if !is_root(request) => y,
            done => return Ok(done),
        };
        while shown.len() < seat.size() {
            // Not of the back end, whose account is that of tensors.
            shown.push(Allocator::with_limit(0).alloc(NOTE_BYTES)?);
        }
        for (place, shown) in shown[..seat.size()].iter_mut().enumerate().filter(|(i, _)| *i != seat.place) {
            let theirs = &mut bytes[..request.shown_numel(place) * size];
            if !group.read(place, request.number, theirs) {
                let issued = self.entry(request.seat.members[place]).posted().issued.clone();
                return Err(self.short(request.seat.members[place], &issued, 0, theirs.len()));
            }
            backend.upload(theirs, shown)?;
        }
        let of = |place: usize| request.x.filter(|_| place == seat.place).or(Some(&shown[place]));
        local::form(backend, request, &(0..seat.size()).map(of).collect::<Shown<'_>>(), &mut y)?;
        Ok(Some(y))
    }

    /// Meets before and behind the reading of what everyone shows where it lies.
    fn in_place(
        &self,
        backend: &dyn Backend,
        request: &Request<'_>,
        group: &Group,
        ready: SyncEvent,
        mut y: Option<Buffer>,
    ) -> Result<Option<Buffer>> {
        // Where work is done when it is given, nothing has to wait for it.
        let is_later = !ready.is_complete();
        self.entry(self.rank).post(request, true, request.x, ready);
        self.arrive(group, request, &[])?;
        {
            let peers = self.peers(request);
            for (from, peer) in peers.iter().enumerate() {
                backend.wait_event(&peer.ready)?;
                let due = peer.issued.payload(peers.len()).argument_bytes(from, request.seat.place);
                let shown = peer.x.as_ref().map_or(0, Buffer::bytes);
                if shown < due {
                    return Err(self.short(request.seat.members[from], &peer.issued, shown, due));
                }
            }
            match (request.op, &mut y) {
                (Op::AllReduce(how), Some(y)) if request.payload().is_chunked() => {
                    self.all_reduce_in_chunks(backend, request, how, group, peers, y)?;
                }
                (Op::AllToAll, Some(y)) => exchange(backend, request, &peers, y)?,
                (_, Some(y)) if !is_root(request) => {
                    let shown: Shown<'_> = peers.iter().map(|p| p.x.as_ref()).collect();
                    local::form(backend, request, &shown, y)?;
                }
                _ => {}
            }
        }
        self.shake();
        if is_later {
            self.entry(self.rank).set_read(backend.record_event()?);
        }
        self.meet(group, &group.left, request, false)?;
        for &peer in request.seat.members.iter().filter(|_| is_later) {
            backend.wait_event(&self.entry(peer).read())?;
        }
        self.entry(self.rank).clear();
        if request.payload().is_chunked() {
            self.entry(self.rank).set_part(None);
        }
        Ok(y)
    }

    /// Comes to the first meeting, with contents for all, and compares the calls.
    fn arrive(&self, group: &Group, request: &Request<'_>, contents: &[u8]) -> Result<()> {
        group.show(request.seat.place, request.number, Print::of(request), contents);
        self.meet(group, &group.arrived, request, true)?;
        self.entry(self.rank).met();
        // Splits differ from member to member. Whoever has posted an unlike call does not post another one.
        if group.prints_agree(request.number) && request.op != Op::AllToAll {
            return Ok(());
        }
        self.compare(request, &self.peers(request))
    }

    fn peers(&self, request: &Request<'_>) -> Peers<'_> {
        request.seat.members.iter().map(|&r| self.entry(r).posted()).collect()
    }

    /// Carries a call out, as a flight where the back end knows such.
    fn fly(&self, own: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        let backend = own.begin_async()?.unwrap_or(own);
        if let Some(x) = request.x {
            backend.record_stream(x);
        }
        let outcome = self.collect_returned(backend).and_then(|()| match request.op {
            Op::Send { to } => self.send(backend, request, to).map(|()| None),
            Op::Recv { from } => self.recv(backend, request, from).map(Some),
            _ => self.collective(backend, request),
        });
        // Whatever has come of it: others may have begun to read.
        let ended = own.end_async();
        let y = outcome?;
        ended?;
        Ok(y)
    }

    /// The error of a rank whose buffer is shorter than what its call brings to this one.
    fn short(&self, from: usize, issued: &Issued, bytes: usize, due: usize) -> Error {
        report::wrong_size(&self.shared.table.mesh, (from, issued), bytes, due)
    }

    /// Ends the world if the members of a group have called unlike things: all of them find that out here.
    fn compare(&self, request: &Request<'_>, peers: &Peers<'_>) -> Result<()> {
        let calls: SmallVec<[_; 8]> = peers.iter().map(|p| &p.issued).collect();
        let members = &request.seat.members;
        match report::mismatch(&self.shared.table.mesh, members, &calls) {
            None => Ok(()),
            Some(error) => {
                self.fail(Failure { error: error.clone(), origin: self.rank, told: members.clone() });
                Err(error)
            }
        }
    }

    fn all_reduce_in_chunks(
        &self,
        backend: &dyn Backend,
        request: &Request<'_>,
        how: ReduceOp,
        group: &Group,
        peers: Peers<'_>,
        y: &mut Buffer,
    ) -> Result<()> {
        let (dtype, seat, payload) = (request.call.dtype, request.seat, request.payload());
        let mine = payload.chunk(seat.place);
        let mut part = backend.alloc(payload.chunk_bytes(seat.place))?;
        local::combine(backend, dtype, how, buffers(&peers), &mine, &mut part)?;
        drop(peers);
        self.entry(self.rank).set_part(Some((part, backend.record_event()?)));
        self.shake();
        self.meet(group, &group.combined, request, false)?;
        for (i, &rank) in seat.members.iter().enumerate() {
            let part = self.entry(rank).part();
            let (part, ready) = part.as_ref().expect("every member has shown its chunk");
            backend.wait_event(ready)?;
            if part.bytes() < payload.chunk_bytes(i) {
                let issued = self.entry(rank).posted().issued.clone();
                return Err(self.short(rank, &issued, part.bytes(), payload.chunk_bytes(i)));
            }
            let chunk = payload.chunk(i);
            local::copy(backend, dtype, part, 0..chunk.len(), y, chunk.start)?;
        }
        Ok(())
    }

    /// Comes to a meeting and waits until every member has come.
    fn meet(&self, group: &Group, count: &AtomicU64, request: &Request<'_>, arriving: bool) -> Result<()> {
        let mut watch = Watch::default();
        let look_around = || self.look_around(request, &mut watch, arriving);
        group.come(count, self.shared.spin, look_around)
    }

    /// What a waiting rank does every ten milliseconds: has the world failed, will nobody come, is it too
    /// late?
    fn look_around(&self, request: &Request<'_>, watch: &mut Watch, arriving: bool) -> Result<()> {
        let (table, mesh) = (&self.shared.table, &self.shared.table.mesh);
        let late = watch.wake(Instant::now()) > self.limit();
        // In large worlds each rank reads the whole table less often, so that reading it stays cheap.
        let turn = watch.num_naps.is_multiple_of(1 + mesh.num_ranks() / LOOKERS_MAX);
        watch.num_naps += 1;
        let due = !table.has_failed() && (arriving && turn || late);
        let finding = if due { table.glance().examine(self.rank) } else { None };
        if finding.is_some() || due && late {
            let seen = table.look();
            let error = match finding {
                Some(Finding::Cycle(ranks)) => Some((report::cycle(mesh, &seen, &ranks), ranks)),
                Some(Finding::Departed(gone)) => {
                    Some((report::departed(mesh, &seen, self.rank, gone), request.seat.members.clone()))
                }
                None if late && arriving && !seen[self.rank].absent.is_empty() => {
                    let error = report::overdue(mesh, &seen, self.rank, self.limit());
                    Some((error, request.seat.members.clone()))
                }
                None if late && !arriving => {
                    let error = report::unfinished(mesh, self.rank, &seen[self.rank].issued, self.limit());
                    Some((error, request.seat.members.clone()))
                }
                None => None,
            };
            if let Some((error, told)) = error {
                self.fail(Failure { error, origin: self.rank, told });
            }
        }
        if table.has_failed() {
            let call = self.entry(self.rank).posted().issued.text(mesh, self.rank);
            return Err(self.released(&format!("waits in {call}")));
        }
        Ok(())
    }

    /// Frees the contents of letters that were read since, behind their reading.
    fn collect_returned(&self, backend: &dyn Backend) -> Result<()> {
        for (x, read) in self.entry(self.rank).take_returned() {
            backend.record_stream(&x);
            backend.wait_event(&read)?;
            drop(x);
        }
        Ok(())
    }

    /// Leaves a copy with the receiver and waits for nobody.
    fn send(&self, backend: &dyn Backend, request: &Request<'_>, to: usize) -> Result<()> {
        let (dtype, numel) = (request.call.dtype, request.counts[0]);
        let mut copied = backend.alloc(numel * dtype.size())?;
        if let Some(x) = request.x {
            local::copy(backend, dtype, x, 0..numel, &mut copied, 0)?;
        }
        let me = self.entry(self.rank);
        let ready = backend.record_event()?;
        me.post(request, false, None, SyncEvent::default());
        let issued = me.posted().issued.clone();
        let letter = Letter { from: self.rank, issued, x: copied, ready };
        self.entry(request.seat.members[to]).deliver(letter);
        Ok(())
    }

    fn recv(&self, backend: &dyn Backend, request: &Request<'_>, from: usize) -> Result<Buffer> {
        let (dtype, numel, axes) = (request.call.dtype, request.counts[0], request.call.axes);
        let mut y = backend.alloc(numel * dtype.size())?;
        let (me, from_place, from) = (self.entry(self.rank), from, request.seat.members[from]);
        me.post(request, true, None, SyncEvent::default());
        let mut watch = Watch::default();
        let there = || me.has_letter(axes, from);
        me.parking.wait(self.shared.spin, there, || self.look_around(request, &mut watch, true))?;
        me.met();
        let letter = me.take_letter(axes, from).expect("only its addressee takes a letter");
        let sent = (letter.from, &letter.issued);
        let mismatch = report::wrong_letter(&self.shared.table.mesh, sent, self.rank, &me.posted().issued);
        if let Some(error) = mismatch {
            self.fail(Failure { error: error.clone(), origin: self.rank, told: vec![self.rank, from] });
            return Err(error);
        }
        let due = letter.issued.payload(request.seat.size()).argument_bytes(from_place, request.seat.place);
        if letter.x.bytes() < due {
            return Err(self.short(from, &letter.issued, letter.x.bytes(), due));
        }
        backend.wait_event(&letter.ready)?;
        local::copy(backend, dtype, &letter.x, 0..numel, &mut y, 0)?;
        let read = backend.record_event()?;
        if !read.is_complete() {
            self.entry(from).give_back(letter.x, read);
        }
        Ok(y)
    }

    /// With jitter, sleeps for a random moment, or lets others go first, or does neither.
    fn shake(&self) {
        if self.shared.jitter.is_none() {
            return;
        }
        let mut z = self.dice.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
        self.dice.set(z);
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

/// Whether this rank has what all get.
pub(super) fn is_root(request: &Request<'_>) -> bool {
    matches!(request.op, Op::Broadcast { root } if root == request.seat.place)
}

/// Whether what each member shows fits into its note. All members decide alike, or their prints differ.
fn fits_notes(request: &Request<'_>) -> bool {
    let places = 0..request.seat.size();
    let bytes = |place: usize| request.shown_numel(place) * request.call.dtype.size();
    request.op != Op::AllToAll
        && places.len() <= NOTED_MAX
        && places.map(bytes).all(|bytes| bytes <= NOTE_BYTES)
}

/// The buffers that all members show, in the order of the group.
fn buffers<'a>(peers: &'a Peers<'_>) -> impl Iterator<Item = &'a Buffer> {
    peers.iter().map(|p| p.x.as_ref().expect("every member of a reduction shows a buffer"))
}

/// Picks from what every member sends what is for this rank.
fn exchange(backend: &dyn Backend, request: &Request<'_>, peers: &Peers<'_>, y: &mut Buffer) -> Result<()> {
    let (dtype, place, received) = (request.call.dtype, request.seat.place, request.received);
    for (i, x) in buffers(peers).enumerate() {
        let sent = peers[i].issued.payload(peers.len()).elements(i, place);
        local::copy(backend, dtype, x, sent, y, local::before(received, i))?;
    }
    Ok(())
}
