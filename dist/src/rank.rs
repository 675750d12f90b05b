//! The handle of a rank: its coordinates, its back end, and collectives with other ranks.

mod canonical_sum;
mod issue_order;
mod pending;

pub use pending::PendingBuffer;

use crate::call::{Call, GroupPosition, Op, ReduceOp, Request};
use crate::error::{Error, Kind, Result};
use crate::mesh::{Axis, AxisSet, Mesh};
use crate::trace::Trace;
use crate::transport::{DryRunTransport, Pending, Transport};
use shardgrad_kernels::{Backend, Buffer, DType, Device, Null};
use std::any::{Any, TypeId};
use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A rank of a running [`World`](crate::World), with the collectives of PyTorch's `ProcessGroup`. Clones are handles of the same rank;
/// none leaves its thread:
///
/// ```compile_fail,E0277
/// # use shardgrad_dist::{Mesh, World};
/// World::run(Mesh::single(), |rank| Ok(std::thread::scope(|s| s.spawn(|| rank.index()).join().unwrap())))?;
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
///
/// Buffers passed to collectives are flat and contiguous from their start; counts are in elements of the dtype
/// of the call. Results are new memory, except that a group of one rank and the root of a broadcast get a
/// handle of the argument. Every collective returns an error of kind
/// - `Collective` if the arguments are inconsistent, if members of the group made different calls, or if ranks are deadlocked;
/// - `PeerLost` if an awaited rank has returned, or any rank has failed or sent a malformed message;
/// - `Timeout` after [`World::timeout`](crate::World::timeout), or the longer limit of [`Rank::with_timeout`];
/// - `DType` for a sum of bool elements;
/// - `OutOfMemory`, or any other kind that the back end reports.
///
/// Invalid arguments are rejected before the call is issued. Every other error fails the world: all ranks get an error from the
/// call that they wait in, and from every later call.
#[doc(alias = "ProcessGroup")]
#[doc(alias = "torch.distributed")]
#[doc(alias = "communicator")]
#[derive(Clone)]
pub struct Rank(Rc<Inner>);

struct Inner {
    index: usize,
    mesh: Mesh,
    coordinate: Vec<usize>,
    backend: Arc<dyn Backend>,
    route: Route,
    type_map: TypeMap,
}

/// A type map: at most one value per type, in a linked list, so that references to values stay valid while others are added.
#[derive(Default)]
struct TypeMap(OnceCell<Box<TypeMapEntry>>);

struct TypeMapEntry {
    kind: TypeId,
    /// An `Rc` of the type.
    handle: Box<dyn Any>,
    others: TypeMap,
}

/// Restores the minimum timeout of a transport when dropped.
struct RestoreTimeout<'a> {
    transport: &'a dyn Transport,
    before: Duration,
}

impl Drop for RestoreTimeout<'_> {
    fn drop(&mut self) {
        self.transport.set_min_timeout(self.before);
    }
}

/// Passes a call to the transport.
type Run = dyn Fn(&dyn Transport, &Arc<dyn Backend>, &Request<'_>) -> Result<Pending>;

/// How the calls of a rank reach its transport.
enum Route {
    /// Directly: this is the rank of the whole world.
    Direct {
        transport: Box<dyn Transport>,
        trace: Trace,
        /// By the bits of the axes.
        positions: RefCell<Vec<Option<Rc<GroupPosition>>>>,
    },
    /// As calls of the outer rank, whose mesh has one axis more. `axes` maps axes of the slice to axes of the outer mesh.
    Slice { outer: Rank, axes: Vec<Axis> },
}

impl Rank {
    pub(crate) fn new(
        mesh: Mesh,
        index: usize,
        backend: Arc<dyn Backend>,
        transport: Box<dyn Transport>,
    ) -> Rank {
        let positions = RefCell::new(vec![None; 1 << mesh.num_axes()]);
        let route = Route::Direct { transport, trace: Trace::default(), positions };
        Rank::with_route(mesh, index, backend, route)
    }

    fn with_route(mesh: Mesh, index: usize, backend: Arc<dyn Backend>, route: Route) -> Rank {
        let (coordinate, type_map) = (mesh.coordinate(index), TypeMap::default());
        Rank(Rc::new(Inner { index, coordinate, backend, route, type_map, mesh }))
    }

    /// This rank in the mesh without an axis: the sub-mesh of the ranks with its coordinate on that axis. Layouts, tensors and calls
    /// of the slice do not see the axis; its calls are numbered, compared and recorded as calls of the world.
    ///
    /// # Panics
    /// If the mesh has no such axis.
    #[must_use]
    pub fn slice(&self, axis: Axis) -> Rank {
        let axes: Vec<Axis> = self.mesh().axes().filter(|a| *a != axis).collect();
        assert!(axes.len() < self.mesh().num_axes(), "bug: {axis:?} is no axis of {}", self.mesh());
        let mesh = self.mesh().without(axis);
        let coordinate: Vec<usize> = axes.iter().map(|a| self.coordinate(*a)).collect();
        let index = mesh.rank_at(&coordinate);
        Rank::with_route(mesh, index, self.0.backend.clone(), Route::Slice { outer: self.clone(), axes })
    }

    /// A rank of a [dry run](crate::World::dry_run), whose trace is enabled.
    pub(crate) fn of_dry_run(mesh: &Mesh, index: usize, memory_bytes_max: usize) -> Rank {
        let backend = Null::with_limit(memory_bytes_max);
        let rank = Rank::new(mesh.clone(), index, backend, Box::new(DryRunTransport));
        rank.trace().enable();
        rank
    }

    /// A rank of a dry run at the same place of the same mesh, which computes nothing and communicates with no rank: a program that runs
    /// on the twin leaves a trace and a count of memory, prepacked operands excepted. Each call returns another twin.
    #[must_use]
    pub fn dry_twin(&self) -> Rank {
        match &self.0.route {
            Route::Direct { .. } => Rank::of_dry_run(self.mesh(), self.index(), 1),
            Route::Slice { outer, axes } => {
                let sliced_off = outer.mesh().axes().find(|axis| !axes.contains(axis));
                outer.dry_twin().slice(sliced_off.expect("bug: a slice has all axes of its outer mesh"))
            }
        }
    }

    /// The rank of the whole world that this rank is, or is a slice of.
    #[must_use]
    pub fn world(&self) -> &Rank {
        match &self.0.route {
            Route::Direct { .. } => self,
            Route::Slice { outer, .. } => outer.world(),
        }
    }

    /// The number of this rank in the mesh, from 0.
    #[doc(alias = "get_rank")]
    #[must_use]
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The mesh of this rank: that of the world, or of the [slice](Rank::slice).
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// The coordinate of this rank on an axis.
    #[doc(alias = "get_local_rank")]
    #[must_use]
    pub fn coordinate(&self, axis: Axis) -> usize {
        self.0.coordinate[axis.0 as usize]
    }

    /// The coordinates of this rank, by axis.
    #[doc(alias = "get_coordinate")]
    #[must_use]
    pub fn coordinates(&self) -> &[usize] {
        &self.0.coordinate
    }

    /// This rank with its coordinates in the world, as error messages name it: `5 (dp=1, tp=1) of mesh(dp=2, tp=4)`.
    #[must_use]
    pub fn describe(&self) -> String {
        let world = self.world();
        world.mesh().describe(world.index())
    }

    /// The rank of this rank in its group over a set of axes: mixed radix in mesh order, the outermost axis first.
    #[doc(alias = "get_group_rank")]
    #[must_use]
    pub fn group_rank(&self, axes: AxisSet) -> usize {
        axes.iter().fold(0, |index, a| index * self.mesh().size(a) + self.coordinate(a))
    }

    /// The back end that runs the kernels of this rank.
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.0.backend
    }

    /// Whether this is a [dry run](crate::World::dry_run), in which buffers have no contents.
    #[must_use]
    pub fn is_dry_run(&self) -> bool {
        self.0.backend.device() == Device::Null
    }

    /// Unwinds if the world has failed; otherwise costs one atomic load. Ops call it, so that a rank that computes without
    /// communicating stops too.
    ///
    /// # Panics
    /// Unwinds with the [`Error`] of the failure ([`Error::raise`]).
    pub fn check(&self) {
        match &self.0.route {
            Route::Direct { transport, .. } => transport.check().unwrap_or_else(|error| error.raise()),
            Route::Slice { outer, .. } => outer.check(),
        }
    }

    /// Runs `f` with a longer timeout: waits of this rank fail after `limit`, or after [`World::timeout`](crate::World::timeout) if that
    /// is longer. For calls before which another rank may legitimately take long, such as writing to a disk. A departed rank or a
    /// deadlock is still reported at once.
    pub fn with_timeout<T>(&self, limit: Duration, f: impl FnOnce() -> T) -> T {
        match &self.0.route {
            Route::Direct { transport, .. } => {
                let before = transport.set_min_timeout(limit);
                if before > limit {
                    transport.set_min_timeout(before);
                }
                // Restored after a panic too.
                let _restore = RestoreTimeout { transport: &**transport, before };
                f()
            }
            Route::Slice { outer, .. } => outer.with_timeout(limit, f),
        }
    }

    /// Waits for all [asynchronous collectives](Rank::all_reduce_async).
    pub(crate) fn finish(&self) -> Result<()> {
        match &self.0.route {
            Route::Direct { transport, .. } => transport.finish(),
            Route::Slice { outer, .. } => outer.finish(),
        }
    }

    /// Ends what the transport has started for this rank, whose function has ended, perhaps with an error.
    pub(crate) fn close(&self, error: Option<&Error>) {
        match &self.0.route {
            Route::Direct { transport, .. } => transport.close(error),
            Route::Slice { outer, .. } => outer.close(error),
        }
    }

    /// The trace of this rank's collectives; slices share the trace of the world.
    #[must_use]
    pub fn trace(&self) -> &Trace {
        match &self.0.route {
            Route::Direct { trace, .. } => trace,
            Route::Slice { outer, .. } => outer.trace(),
        }
    }

    /// The value of type `T` of this rank, created by `Default` on first use: storage for caches of the crates above.
    #[must_use]
    pub fn extension<T: Default + 'static>(&self) -> &Rc<T> {
        let kind = TypeId::of::<T>();
        let mut node = &self.0.type_map;
        loop {
            match node.0.get() {
                Some(here) if here.kind == kind => {
                    return here.handle.downcast_ref().expect("bug: the value of a type has another type");
                }
                Some(other) => node = &other.others,
                None => {
                    // `T::default` may itself call this method, and append before this value.
                    let handle = Box::new(Rc::new(T::default()));
                    let fresh = TypeMapEntry { kind, handle, others: TypeMap::default() };
                    let _ = node.0.set(Box::new(fresh));
                }
            }
        }
    }

    /// Reduces `numel` elements over all members of the group, y = x_0 op x_1 op ..., in a fixed balanced tree over the group
    /// ranks. All members get the same bits. 16-bit floats are reduced in f32 and rounded once.
    ///
    /// # Errors
    /// See [`Rank`].
    #[doc(alias = "allreduce")]
    #[doc(alias = "psum")]
    #[doc(alias = "pmax")]
    #[doc(alias = "pmin")]
    pub fn all_reduce(&self, call: &Call<'_>, x: &Buffer, numel: usize, op: ReduceOp) -> Result<Buffer> {
        self.issue_with_result(call, Op::AllReduce(op), Some(x), numel, &[numel], &[])
    }

    /// Concatenates the buffers of all members in the order of group ranks; member i passes `counts[i]` elements.
    ///
    /// # Errors
    /// See [`Rank`].
    #[doc(alias = "allgather")]
    #[doc(alias = "all_gather_into_tensor")]
    pub fn all_gather(&self, call: &Call<'_>, x: &Buffer, counts: &[usize]) -> Result<Buffer> {
        let group_rank = self.check_counts(call, "all_gather", counts)?;
        self.issue_with_result(call, Op::AllGather, Some(x), counts[group_rank], counts, &[])
    }

    /// Sums the buffers of all members as [`Rank::all_reduce`] does and gives member i chunk i of the sum, `counts[i]` elements. Each
    /// member passes as many elements as `counts` adds up to.
    ///
    /// # Errors
    /// See [`Rank`].
    #[doc(alias = "reduce_scatter_tensor")]
    #[doc(alias = "psum_scatter")]
    pub fn reduce_scatter(&self, call: &Call<'_>, x: &Buffer, counts: &[usize]) -> Result<Buffer> {
        self.check_counts(call, "reduce_scatter", counts)?;
        self.issue_with_result(call, Op::ReduceScatter, Some(x), counts.iter().sum(), counts, &[])
    }

    /// Sends one part of `x` to each member and receives one part from each: `x` holds `send[j]` elements for each member j in order,
    /// the result `recv[i]` elements from each member i in order. `send[j]` of member i must equal `recv[i]` of member j.
    ///
    /// # Errors
    /// See [`Rank`].
    #[doc(alias = "all_to_all_single")]
    #[doc(alias = "alltoall")]
    pub fn all_to_all(&self, call: &Call<'_>, x: &Buffer, send: &[usize], recv: &[usize]) -> Result<Buffer> {
        self.check_counts(call, "all_to_all", send)?;
        self.check_counts(call, "all_to_all", recv)?;
        self.issue_with_result(call, Op::AllToAll, Some(x), send.iter().sum(), send, recv)
    }

    /// Copies the `numel` elements of the member with group rank `root` to all members; only the root needs to pass a buffer.
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
        let position = self.check_peer(call, "broadcast", root)?;
        if position.group_rank == root && x.is_none() {
            return Err(invalid_call(
                call,
                "broadcast: the root passes no buffer: give `x` on the rank whose group rank is `root`",
            ));
        }
        let x = x.filter(|_| position.group_rank == root);
        let numel_held = if x.is_some() { numel } else { 0 };
        self.issue_with_result(call, Op::Broadcast { root }, x, numel_held, &[numel], &[])
    }

    /// Sends `numel` elements to the member with group rank `to`, without waiting for its recv (buffered send). A process that sends more
    /// than the receiver's queue holds (65 MiB) waits while the receiver computes; ranks that send to each other before they receive go
    /// on. Between GPUs that NCCL connects, the sender holds `x` on its GPU until the receiver asks for it; 16,384 messages that no rank
    /// has asked for are an error. Messages of a pair of ranks over the same axes are received in the order in which they were sent. A
    /// message that is never received is an error of the launch.
    ///
    /// # Errors
    /// See [`Rank`].
    #[doc(alias = "isend")]
    pub fn send(&self, call: &Call<'_>, x: &Buffer, numel: usize, to: usize) -> Result<()> {
        self.check_peer(call, "send", to)?;
        self.issue(call, Op::Send { to }, Some(x), numel, &[numel], &[])?;
        Ok(())
    }

    /// Receives the next message, of `numel` elements, from the member with group rank `from`. Blocks until it arrives.
    ///
    /// # Errors
    /// See [`Rank`].
    #[doc(alias = "irecv")]
    pub fn recv(&self, call: &Call<'_>, numel: usize, from: usize) -> Result<Buffer> {
        self.check_peer(call, "recv", from)?;
        self.issue_with_result(call, Op::Recv { from }, None, 0, &[numel], &[])
    }

    /// Waits until every member of the group has called `barrier`. The dtype of the call is compared as for any collective.
    ///
    /// # Errors
    /// See [`Rank`].
    pub fn barrier(&self, call: &Call<'_>) -> Result<()> {
        self.issue(call, Op::Barrier, None, 0, &[], &[])?;
        Ok(())
    }

    fn position(&self, call: &Call<'_>) -> Result<Rc<GroupPosition>> {
        let here = self.mesh().num_axes();
        if usize::from(call.axes.bits()) >= 1 << here {
            let (bits, mesh) = (call.axes.bits(), self.mesh());
            let why = format!("the call names axes (bits {bits:#b}) that {mesh} does not have");
            return Err(Error::new(Kind::Mesh, why).at(call.site));
        }
        match &self.0.route {
            Route::Direct { positions, .. } => {
                let fresh = || Rc::new(GroupPosition::new(self.mesh(), self.index(), call.axes));
                let mut positions = positions.borrow_mut();
                Ok(positions[usize::from(call.axes.bits())].get_or_insert_with(fresh).clone())
            }
            Route::Slice { outer, axes } => outer.position(&to_outer_call(call, axes)),
        }
    }

    /// Checks that there is one count per member of the group. Returns the group rank of this rank.
    fn check_counts(&self, call: &Call<'_>, name: &str, counts: &[usize]) -> Result<usize> {
        let position = self.position(call)?;
        if counts.len() != position.size() {
            let (got, size) = (counts.len(), position.size());
            return Err(invalid_call(
                call,
                format!(
                    "{name}: {got} counts for a group of {size} ranks: give one count per rank of the group"
                ),
            ));
        }
        Ok(position.group_rank)
    }

    fn check_peer(&self, call: &Call<'_>, name: &str, group_rank: usize) -> Result<Rc<GroupPosition>> {
        let position = self.position(call)?;
        if group_rank >= position.size() {
            let size = position.size();
            return Err(invalid_call(
                call,
                format!("{name}: there is no group rank {group_rank} in a group of {size} ranks"),
            ));
        }
        Ok(position)
    }

    fn issue_with_result(
        &self,
        call: &Call<'_>,
        op: Op,
        x: Option<&Buffer>,
        numel_held: usize,
        counts: &[usize],
        received: &[usize],
    ) -> Result<Buffer> {
        Ok(self.issue(call, op, x, numel_held, counts, received)?.expect("bug: a call without a result"))
    }

    /// Issues a call and waits for its result.
    fn issue(
        &self,
        call: &Call<'_>,
        op: Op,
        x: Option<&Buffer>,
        numel_held: usize,
        counts: &[usize],
        received: &[usize],
    ) -> Result<Option<Buffer>> {
        let run = |transport: &dyn Transport, backend: &Arc<dyn Backend>, request: &Request<'_>| {
            transport.run(&**backend, request).map(Pending::Done)
        };
        self.issue_with(call, op, x, (numel_held, counts, received), &run)?.wait()
    }

    /// Checks, numbers and records a call whose argument must hold `numel_held` elements, and passes the call to the transport by `run`.
    fn issue_with(
        &self,
        call: &Call<'_>,
        op: Op,
        x: Option<&Buffer>,
        (numel_held, counts, received): (usize, &[usize], &[usize]),
        run: &Run,
    ) -> Result<Pending> {
        let position = self.position(call)?;
        if let Some(x) = x
            && x.bytes() / call.dtype.size() < numel_held
        {
            let (name, dtype, bytes) = (op.name(), call.dtype, x.bytes());
            return Err(invalid_call(
                call,
                format!("{name}: a buffer of {bytes} bytes is too short for {dtype}[{numel_held}]"),
            ));
        }
        if call.dtype == DType::Bool && matches!(op, Op::AllReduce(ReduceOp::Sum) | Op::ReduceScatter) {
            let why = format!(
                "{}: bool elements cannot be summed: all_reduce them with max (any) or min (all)",
                op.name()
            );
            return Err(Error::new(Kind::DType, why).at(call.site));
        }
        if position.size() == 1 && op == Op::AllToAll && counts != received {
            return Err(invalid_call(
                call,
                format!(
                    "all_to_all: the only rank of the group sends {counts:?} elements to itself, but receives {received:?}"
                ),
            ));
        }
        let (transport, trace) = match &self.0.route {
            Route::Direct { transport, trace, .. } => (transport, trace),
            Route::Slice { outer, axes } => {
                return outer.issue_with(
                    &to_outer_call(call, axes),
                    op,
                    x,
                    (numel_held, counts, received),
                    run,
                );
            }
        };
        let request =
            Request { call, op, position: &position, number: position.count(op), counts, received, x };
        trace.add(&request);
        if position.size() == 1 && op.is_collective() {
            transport.check()?;
            return Ok(Pending::Done(x.cloned()));
        }
        run(&**transport, &self.0.backend, &request)
    }
}

/// Translates a call of a slice to the axes of its outer rank.
fn to_outer_call<'a>(call: &Call<'a>, axes: &[Axis]) -> Call<'a> {
    Call { axes: call.axes.iter().map(|a| axes[usize::from(a.0)]).collect(), ..*call }
}

fn invalid_call(call: &Call<'_>, why: impl Into<String>) -> Error {
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
