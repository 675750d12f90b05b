//! The one handle through which a rank meets the others.

use crate::call::{Call, Op, ReduceOp, Request, Seat};
use crate::error::{Error, Kind, Result};
use crate::mesh::{Axis, AxisSet, Mesh};
use crate::trace::Trace;
use crate::transport::Transport;
use shardgrad_kernels::{Backend, Buffer, DType, Device};
use std::any::{Any, TypeId};
use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A rank of a running [`World`](crate::World). Clones are handles of the same rank; none leaves its thread:
///
/// ```compile_fail,E0277
/// # use shardgrad_dist::{Mesh, World};
/// World::run(Mesh::single(), |rank| Ok(std::thread::scope(|s| s.spawn(|| rank.index()).join().unwrap())))?;
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
///
/// Buffers given to collectives are flat and contiguous from their start; counts are in elements of the dtype
/// of the call. Results are new memory, except that a group of one rank and the root of a broadcast get a
/// handle of the argument. Every method returns an error of kind
/// - `Collective` if the arguments do not fit each other, if members of the group called unlike things, or if
///   ranks wait for each other in a circle;
/// - `PeerLost` if a rank that is waited for has returned, or any rank has failed or sent a malformed message;
/// - `Timeout` after [`World::timeout`](crate::World::timeout), or what [`Rank::patiently`] says;
/// - `DType` for a sum of truth values;
/// - `OutOfMemory`, or whatever else the back end says.
///
/// Arguments that do not fit are refused before the call is issued. Every other error ends the world: all
/// ranks get an error from the call they wait in, and from every later one.
#[derive(Clone)]
pub struct Rank(Rc<Inner>);

struct Inner {
    index: usize,
    mesh: Mesh,
    coordinate: Vec<usize>,
    backend: Arc<dyn Backend>,
    link: Link,
    extensions: Extensions,
}

/// A handful of things, each found by its type: a chain, in which what was lent stays where it is.
#[derive(Default)]
struct Extensions(OnceCell<Box<Extension>>);

struct Extension {
    kind: TypeId,
    /// An `Rc` of the type.
    handle: Box<dyn Any>,
    others: Extensions,
}

/// Gives a transport back the patience that it had.
struct PatienceOf<'a> {
    transport: &'a dyn Transport,
    before: Duration,
}

impl Drop for PatienceOf<'_> {
    fn drop(&mut self) {
        self.transport.be_patient(self.before);
    }
}

/// How calls of a rank leave it.
enum Link {
    /// Through a transport.
    Direct {
        transport: Box<dyn Transport>,
        trace: Trace,
        /// By axes.
        seats: RefCell<Vec<Option<Rc<Seat>>>>,
    },
    /// As calls of the rank of a mesh with one axis more; its axes by ours.
    Slice { outer: Rank, axes: Vec<Axis> },
}

impl Rank {
    pub(crate) fn new(
        mesh: Mesh,
        index: usize,
        backend: Arc<dyn Backend>,
        transport: Box<dyn Transport>,
    ) -> Rank {
        let seats = RefCell::new(vec![None; 1 << mesh.num_axes()]);
        let link = Link::Direct { transport, trace: Trace::default(), seats };
        Rank::linked(mesh, index, backend, link)
    }

    fn linked(mesh: Mesh, index: usize, backend: Arc<dyn Backend>, link: Link) -> Rank {
        let (coordinate, extensions) = (mesh.coordinate(index), Extensions::default());
        Rank(Rc::new(Inner { index, coordinate, backend, link, extensions, mesh }))
    }

    /// This rank in the mesh without an axis: the ranks that share its place on that axis. Layouts, tensors and calls of
    /// the slice know nothing of the axis; its calls are counted, compared and recorded as those of the world.
    ///
    /// # Panics
    /// If the mesh has no such axis.
    #[must_use]
    pub fn slice(&self, axis: Axis) -> Rank {
        let axes: Vec<Axis> = self.mesh().axes().filter(|a| *a != axis).collect();
        assert!(axes.len() < self.mesh().num_axes(), "bug: {axis:?} is no axis of {}", self.mesh());
        let mesh = self.mesh().without(axis);
        let place: Vec<usize> = axes.iter().map(|a| self.coordinate(*a)).collect();
        let index = mesh.rank_at(&place);
        Rank::linked(mesh, index, self.0.backend.clone(), Link::Slice { outer: self.clone(), axes })
    }

    /// The rank of the whole world that this is, or is a slice of.
    #[must_use]
    pub fn world(&self) -> &Rank {
        match &self.0.link {
            Link::Direct { .. } => self,
            Link::Slice { outer, .. } => outer.world(),
        }
    }

    /// The number of this rank in the mesh.
    #[must_use]
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The mesh of the world.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// Where this rank stands on an axis.
    #[must_use]
    pub fn coordinate(&self, axis: Axis) -> usize {
        self.0.coordinate[axis.0 as usize]
    }

    /// Where this rank stands on each axis.
    #[must_use]
    pub fn coordinates(&self) -> &[usize] {
        &self.0.coordinate
    }

    /// This rank with its place in the world, as messages name it: `5 (dp=1, tp=1) of mesh(dp=2, tp=4)`.
    #[must_use]
    pub fn describe(&self) -> String {
        let world = self.world();
        world.mesh().describe(world.index())
    }

    /// The place of this rank in its group over some axes: mixed radix in mesh order, the outermost axis
    /// first.
    #[must_use]
    pub fn group_index(&self, axes: AxisSet) -> usize {
        axes.iter().fold(0, |place, a| place * self.mesh().size(a) + self.coordinate(a))
    }

    /// Where kernels of this rank run.
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.0.backend
    }

    /// Whether buffers have no contents, because the world only records.
    #[must_use]
    pub fn is_dry(&self) -> bool {
        self.0.backend.device() == Device::Null
    }

    /// Stops this rank if the world has failed: one load when it has not. Ops call it, so that a rank that
    /// computes without meeting anybody is released too.
    ///
    /// # Panics
    /// Unwinds with the [`Error`] of the failure ([`Error::raise`]).
    pub fn check(&self) {
        match &self.0.link {
            Link::Direct { transport, .. } => transport.check().unwrap_or_else(|error| error.raise()),
            Link::Slice { outer, .. } => outer.check(),
        }
    }

    /// Runs `f`, in which a wait of this rank is an error after `limit` only, where that is longer than
    /// [`World::timeout`](crate::World::timeout): for calls before which another rank does what may take long for good
    /// reasons, such as writing to a disk. Where a rank has gone, or waits in a circle, is told as soon as ever.
    pub fn patiently<T>(&self, limit: Duration, f: impl FnOnce() -> T) -> T {
        match &self.0.link {
            Link::Direct { transport, .. } => {
                let before = transport.be_patient(limit);
                if before > limit {
                    transport.be_patient(before);
                }
                // After an unwinding too.
                let _back = PatienceOf { transport: &**transport, before };
                f()
            }
            Link::Slice { outer, .. } => outer.patiently(limit, f),
        }
    }

    /// What this rank has called; slices share the trace of their world.
    #[must_use]
    pub fn trace(&self) -> &Trace {
        match &self.0.link {
            Link::Direct { trace, .. } => trace,
            Link::Slice { outer, .. } => outer.trace(),
        }
    }

    /// The one `T` of this rank, made by `Default` when first asked for: a place for caches of upper crates.
    #[must_use]
    pub fn extension<T: Default + 'static>(&self) -> &Rc<T> {
        let kind = TypeId::of::<T>();
        let mut place = &self.0.extensions;
        loop {
            match place.0.get() {
                Some(here) if here.kind == kind => {
                    return here
                        .handle
                        .downcast_ref()
                        .expect("a place holds the type that it is filed under");
                }
                Some(other) => place = &other.others,
                None => {
                    // To make it may ask for others, which then lie here.
                    let handle = Box::new(Rc::new(T::default()));
                    let fresh = Extension { kind, handle, others: Extensions::default() };
                    let _ = place.0.set(Box::new(fresh));
                }
            }
        }
    }

    /// Combines `numel` elements of all members, y = x_0 op x_1 op ..., in a fixed balanced tree over the
    /// place in the group. Everyone gets the same bits. 16-bit floats are combined in f32 and rounded once.
    ///
    /// # Errors
    /// See [`Rank`].
    pub fn all_reduce(&self, call: &Call<'_>, x: &Buffer, numel: usize, op: ReduceOp) -> Result<Buffer> {
        self.issue(call, Op::AllReduce(op), Some(x), numel, &[numel], &[])
    }

    /// Joins the parts of all members in the order of the group; member i brings `counts[i]` elements.
    ///
    /// # Errors
    /// See [`Rank`].
    pub fn all_gather(&self, call: &Call<'_>, x: &Buffer, counts: &[usize]) -> Result<Buffer> {
        let place = self.one_each(call, "all_gather", counts)?;
        self.issue(call, Op::AllGather, Some(x), counts[place], counts, &[])
    }

    /// Sums what all members bring (`counts` added up, each) as [`Rank::all_reduce`] does; member i gets
    /// chunk i of the sum, `counts[i]` elements long.
    ///
    /// # Errors
    /// See [`Rank`].
    pub fn reduce_scatter(&self, call: &Call<'_>, x: &Buffer, counts: &[usize]) -> Result<Buffer> {
        self.one_each(call, "reduce_scatter", counts)?;
        self.issue(call, Op::ReduceScatter, Some(x), counts.iter().sum(), counts, &[])
    }

    /// Exchanges pieces: `x` holds `send[j]` elements for each member j one after another; the result holds
    /// `recv[i]` elements from each member i one after another. `send[j]` here is `recv[i]` there.
    ///
    /// # Errors
    /// See [`Rank`].
    pub fn all_to_all(&self, call: &Call<'_>, x: &Buffer, send: &[usize], recv: &[usize]) -> Result<Buffer> {
        self.one_each(call, "all_to_all", send)?;
        self.one_each(call, "all_to_all", recv)?;
        self.issue(call, Op::AllToAll, Some(x), send.iter().sum(), send, recv)
    }

    /// Hands the `numel` elements of the member at place `root` to all; only that member brings a buffer.
    ///
    /// # Errors
    /// See [`Rank`].
    pub fn broadcast(
        &self,
        call: &Call<'_>,
        x: Option<&Buffer>,
        numel: usize,
        root: usize,
    ) -> Result<Buffer> {
        let seat = self.peer(call, "broadcast", root)?;
        if seat.place == root && x.is_none() {
            return Err(refuse(call, "broadcast: the root brings no buffer"));
        }
        let x = x.filter(|_| seat.place == root);
        let held = if x.is_some() { numel } else { 0 };
        self.issue(call, Op::Broadcast { root }, x, held, &[numel], &[])
    }

    /// Leaves `numel` elements with the member at place `to` and returns without waiting for it. Messages of
    /// a pair over the same axes are received in the order in which they were sent; one that is never
    /// received is an error of the launch.
    ///
    /// # Errors
    /// See [`Rank`].
    pub fn send(&self, call: &Call<'_>, x: &Buffer, numel: usize, to: usize) -> Result<()> {
        self.peer(call, "send", to)?;
        self.post(call, Op::Send { to }, Some(x), numel, &[numel], &[])?;
        Ok(())
    }

    /// Waits for the next `numel` elements from the member at place `from`.
    ///
    /// # Errors
    /// See [`Rank`].
    pub fn recv(&self, call: &Call<'_>, numel: usize, from: usize) -> Result<Buffer> {
        self.peer(call, "recv", from)?;
        self.issue(call, Op::Recv { from }, None, 0, &[numel], &[])
    }

    /// Waits until every member of the group is here. The dtype of the call is compared like any other's.
    ///
    /// # Errors
    /// See [`Rank`].
    pub fn barrier(&self, call: &Call<'_>) -> Result<()> {
        self.post(call, Op::Barrier, None, 0, &[], &[])?;
        Ok(())
    }

    fn seat(&self, call: &Call<'_>) -> Result<Rc<Seat>> {
        let here = self.mesh().num_axes();
        if usize::from(call.axes.bits()) >= 1 << here {
            let why = format!("a call over axes {:?} that {} does not have", call.axes, self.mesh());
            return Err(Error::new(Kind::Mesh, why).at(call.site));
        }
        match &self.0.link {
            Link::Direct { seats, .. } => {
                let fresh = || Rc::new(Seat::new(self.mesh(), self.index(), call.axes));
                let mut seats = seats.borrow_mut();
                Ok(seats[usize::from(call.axes.bits())].get_or_insert_with(fresh).clone())
            }
            Link::Slice { outer, axes } => outer.seat(&translated(call, axes)),
        }
    }

    /// The place of this rank, if there is one count for each member of the group.
    fn one_each(&self, call: &Call<'_>, name: &str, counts: &[usize]) -> Result<usize> {
        let seat = self.seat(call)?;
        if counts.len() != seat.size() {
            let (got, size) = (counts.len(), seat.size());
            return Err(refuse(call, format!("{name}: {got} counts for a group of {size} ranks")));
        }
        Ok(seat.place)
    }

    fn peer(&self, call: &Call<'_>, name: &str, place: usize) -> Result<Rc<Seat>> {
        let seat = self.seat(call)?;
        if place >= seat.size() {
            let size = seat.size();
            return Err(refuse(
                call,
                format!("{name}: there is no place {place} in a group of {size} ranks"),
            ));
        }
        Ok(seat)
    }

    fn issue(
        &self,
        call: &Call<'_>,
        op: Op,
        x: Option<&Buffer>,
        held: usize,
        counts: &[usize],
        received: &[usize],
    ) -> Result<Buffer> {
        Ok(self.post(call, op, x, held, counts, received)?.expect("a call with a result has one"))
    }

    /// Checks, numbers, records and carries out a call whose argument holds `held` elements.
    fn post(
        &self,
        call: &Call<'_>,
        op: Op,
        x: Option<&Buffer>,
        held: usize,
        counts: &[usize],
        received: &[usize],
    ) -> Result<Option<Buffer>> {
        let seat = self.seat(call)?;
        if let Some(x) = x
            && x.bytes() / call.dtype.size() < held
        {
            let (name, dtype, bytes) = (op.name(), call.dtype, x.bytes());
            return Err(refuse(
                call,
                format!("{name}: a buffer of {bytes} bytes cannot hold {dtype}[{held}]"),
            ));
        }
        if call.dtype == DType::Bool && matches!(op, Op::AllReduce(ReduceOp::Sum) | Op::ReduceScatter) {
            let why = format!("{}: truth values have no sum; reduce with max (any) or min (all)", op.name());
            return Err(Error::new(Kind::DType, why).at(call.site));
        }
        if seat.size() == 1 && op == Op::AllToAll && counts != received {
            return Err(refuse(
                call,
                format!("all_to_all: {counts:?} to itself, but {received:?} from itself"),
            ));
        }
        let (transport, trace) = match &self.0.link {
            Link::Direct { transport, trace, .. } => (transport, trace),
            Link::Slice { outer, axes } => {
                return outer.post(&translated(call, axes), op, x, held, counts, received);
            }
        };
        let request = Request { call, op, seat: &seat, number: seat.count(op), counts, received, x };
        trace.add(&request);
        if seat.size() == 1 && op.is_collective() {
            transport.check()?;
            return Ok(x.cloned());
        }
        transport.run(&*self.0.backend, &request)
    }
}

/// A call of a slice as its outer rank makes it.
fn translated<'a>(call: &Call<'a>, axes: &[Axis]) -> Call<'a> {
    Call { axes: call.axes.iter().map(|a| axes[usize::from(a.0)]).collect(), ..*call }
}

fn refuse(call: &Call<'_>, why: impl Into<String>) -> Error {
    Error::new(Kind::Collective, why).at(call.site)
}

impl PartialEq for Rank {
    fn eq(&self, other: &Rank) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Rank {}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.mesh().describe(self.index()))
    }
}
