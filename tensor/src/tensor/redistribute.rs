//! Redistribution: runs the collectives that bring a tensor from one layout to another (`DTensor.redistribute`,
//! `jax.device_put`).

use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::lineage::Lineage;
use crate::layout::placement::Placement;
use crate::layout::step::Step;
use crate::tensor::Tensor;
use shardgrad_dist::{Axis, AxisSet, Call, Origin, PendingBuffer, Rank, ReduceOp, Result};
use shardgrad_kernels::{Buffer, DType, Strides, SumTree};
use std::ops::Range;
use std::panic::Location;

/// Redistributes a plain tensor, and caches the result with the value for the next op that needs the same layout.
///
/// # Errors
/// Errors of the collectives.
pub fn redistribute_cached(x: &Tensor, to: &Layout, site: &'static Location<'static>) -> Result<Tensor> {
    if let Some(other) = x.cached_layout(to) {
        return Ok(other);
    }
    let route = Context::of(x.rank()).routes.route(x.layout(), to, x.dtype().is_float())?;
    let other = run(x, &route.steps, to, site)?;
    x.cache_layout(other.clone());
    Ok(other)
}

/// Runs redistribution steps; the layout after the last step is equivalent to `goal`. A collective call: every rank of
/// the groups concerned calls it together.
///
/// # Errors
/// Errors of the collectives.
#[doc(alias = "redistribute")]
#[doc(alias = "reshard")]
#[doc(alias = "with_sharding_constraint")]
pub fn run(x: &Tensor, steps: &[Step], goal: &Layout, site: &'static Location<'static>) -> Result<Tensor> {
    let rank = x.rank();
    let x = join_axes_of_partial_sum(x.clone(), steps, site)?;
    let (mut layout, mut local) = (x.layout().clone(), x.local().clone());
    for step in steps {
        let to = layout.after(step);
        let lineage = local.lineage;
        local = StepRunner { rank, from: &layout, to: &to, axes: step.axes, site }.run(local, step.to)?;
        local.lineage = lineage;
        layout = to;
    }
    debug_assert!(
        layout.is_equivalent_to(goal),
        "the steps lead from {} to {goal}, not to {layout}",
        x.layout()
    );
    Ok(Tensor::assemble(rank, goal.clone(), local))
}

/// All-reduces the elements over the ranks of some axes with a reduction, for ops that combine shards by a rule of their
/// own. Without axes nothing is done.
///
/// # Errors
/// Errors of the collective.
pub fn all_reduce(
    rank: &Rank,
    x: LocalTensor,
    axes: AxisSet,
    reduce: ReduceOp,
    site: &'static Location<'static>,
) -> Result<LocalTensor> {
    if axes.is_empty() {
        return Ok(x);
    }
    let flat = x.flat(rank)?;
    let call_context = CollectiveContext { axes, dtype: x.dtype, lineage: x.lineage, site };
    let buffer = call_context.of(rank, |call| match reduce {
        ReduceOp::Sum => all_reduce_sum(rank, call, &flat),
        _ => rank.all_reduce(call, &flat.buffer, flat.numel(), reduce),
    })?;
    Ok(LocalTensor::from_buffer(buffer, x.dtype, &x.view.shape))
}

/// Gathers equal numbers of elements from all ranks of some axes, for ops that exchange numbers by a rule of their own: (rank of the
/// group, shape of x), in group order. Without axes, the group is this rank.
///
/// # Errors
/// Errors of the collective.
pub fn all_gather(
    rank: &Rank,
    x: LocalTensor,
    axes: AxisSet,
    site: &'static Location<'static>,
) -> Result<LocalTensor> {
    let flat = x.flat(rank)?;
    let counts = vec![flat.numel(); rank.mesh().group_size(axes)];
    let call_context = CollectiveContext { axes, dtype: x.dtype, lineage: x.lineage, site };
    let buffer = match axes.is_empty() {
        true => flat.buffer,
        false => call_context.of(rank, |call| rank.all_gather(call, &flat.buffer, &counts))?,
    };
    let shape: Vec<usize> = std::iter::once(counts.len()).chain(x.view.shape.iter().copied()).collect();
    Ok(LocalTensor::from_buffer(buffer, x.dtype, &shape))
}

/// Sends pieces of unequal size to all ranks of some axes, for ops that exchange rows by a rule of their own: `sent[j]` elements to
/// member j, `received[i]` from member i, both in group order. Returns the received elements as one dim.
///
/// # Errors
/// Errors of the collective, also where two ranks disagree about the size of a piece.
pub fn all_to_all(
    rank: &Rank,
    x: LocalTensor,
    axes: AxisSet,
    [sent, received]: [&[usize]; 2],
    site: &'static Location<'static>,
) -> Result<LocalTensor> {
    let flat = x.flat(rank)?;
    let call_context = CollectiveContext { axes, dtype: x.dtype, lineage: x.lineage, site };
    let buffer = call_context.of(rank, |call| rank.all_to_all(call, &flat.buffer, sent, received))?;
    Ok(LocalTensor::from_buffer(buffer, x.dtype, &[received.iter().sum()]))
}

/// Sends a local tensor to the rank with group rank `to` over some axes without waiting for the receiver, for ops that exchange local
/// tensors by a rule of their own.
///
/// # Errors
/// Errors of the message.
pub(crate) fn send(
    rank: &Rank,
    x: &LocalTensor,
    (axes, to): (AxisSet, usize),
    site: &'static Location<'static>,
) -> Result<()> {
    let flat = x.flat(rank)?;
    let call_context = CollectiveContext { axes, dtype: x.dtype, lineage: x.lineage, site };
    call_context.of(rank, |call| rank.send(call, &flat.buffer, flat.numel(), to))
}

/// Receives the next local tensor of the rank with group rank `from` over some axes: of a dtype, a lineage and a shape.
///
/// # Errors
/// Errors of the message.
pub(crate) fn recv(
    rank: &Rank,
    (dtype, lineage, shape): (DType, Lineage, &[usize]),
    (axes, from): (AxisSet, usize),
    site: &'static Location<'static>,
) -> Result<LocalTensor> {
    let call_context = CollectiveContext { axes, dtype, lineage, site };
    let buffer = call_context.of(rank, |call| rank.recv(call, shape.iter().product(), from))?;
    Ok(LocalTensor { lineage, ..LocalTensor::from_buffer(buffer, dtype, shape) })
}

/// The bytes from which a collective is handed to the communication thread: of fewer, handing over costs more than it hides on one
/// machine.
pub(super) const ASYNC_BYTES_MIN: usize = 64 << 10;

/// Gathers these numbers of elements from the ranks of an axis into one flat tensor, in group order. The call blocks unless it
/// `may_overlap` with later work.
///
/// # Errors
/// Errors of the collective.
pub(super) fn all_gather_parts(
    rank: &Rank,
    (own, lineage): (&LocalTensor, Lineage),
    counts: &[usize],
    axis: Axis,
    may_overlap: bool,
    site: &'static Location<'static>,
) -> Result<PendingTensor> {
    let (dtype, numel) = (own.dtype, counts.iter().sum::<usize>());
    let call_context = CollectiveContext { axes: AxisSet::one(axis), dtype, lineage, site };
    let result =
        call_context.of(rank, |call| match may_overlap && numel * dtype.size() >= ASYNC_BYTES_MIN {
            true => rank.all_gather_async(call, &own.buffer, counts),
            false => rank.all_gather(call, &own.buffer, counts).map(PendingBuffer::from),
        })?;
    Ok(PendingTensor { result, dtype, numel })
}

/// A flat tensor from other ranks that may still be under way.
#[derive(Debug)]
pub(super) struct PendingTensor {
    result: PendingBuffer,
    dtype: DType,
    numel: usize,
}

impl PendingTensor {
    /// Whether the tensor may still be under way, on all ranks alike.
    pub(super) fn is_async(&self) -> bool {
        self.result.is_async()
    }

    /// Waits for the tensor: one dim.
    ///
    /// # Errors
    /// Errors of the collective.
    pub(super) fn wait(self) -> Result<LocalTensor> {
        Ok(LocalTensor::from_buffer(self.result.wait()?, self.dtype, &[self.numel]))
    }
}

/// Sums flat local tensors over some axes, for tensors that share a collective. With `counts` member i gets so many elements of the sum,
/// otherwise each member all of it. The call blocks unless it `may_overlap` with later work.
///
/// # Errors
/// Errors of the collective.
pub(super) fn sum_packed(
    rank: &Rank,
    (packed, lineage): (&LocalTensor, Lineage),
    counts: Option<&[usize]>,
    axes: AxisSet,
    may_overlap: bool,
    site: &'static Location<'static>,
) -> Result<PendingTensor> {
    let (x, dtype, whole) = (&packed.buffer, packed.dtype, packed.numel());
    let call_context = CollectiveContext { axes, dtype, lineage, site };
    let result = call_context.of(rank, |call| match (counts, may_overlap && !rounds_nodes(rank, dtype)) {
        (None, true) => rank.all_reduce_async(call, x, whole, ReduceOp::Sum),
        (None, false) => all_reduce_sum(rank, call, packed).map(PendingBuffer::from),
        (Some(counts), true) => rank.reduce_scatter_async(call, x, counts),
        (Some(counts), false) => reduce_scatter_sum(rank, call, packed, counts).map(PendingBuffer::from),
    })?;
    let numel = counts.map_or(whole, |counts| counts[rank.group_rank(axes)]);
    Ok(PendingTensor { result, dtype, numel })
}

/// Whether a sum over ranks rounds each node of its tree, as the ranks do that hold several leaves of a canonical sum. A plain
/// reduction of 16-bit floats rounds once.
fn rounds_nodes(rank: &Rank, dtype: DType) -> bool {
    dtype.is_float() && dtype.accumulator() != dtype && Context::of(rank).sum_tree().is_some()
}

/// Sums a flat local tensor over the ranks of a call.
fn all_reduce_sum(rank: &Rank, call: &Call<'_>, x: &LocalTensor) -> Result<Buffer> {
    match rounds_nodes(rank, x.dtype) {
        // One root of each rank: the tree over the ranks is the upper part of the tree over the leaves.
        true => {
            let tree = SumTree::new(rank.mesh().group_size(call.axes));
            rank.all_reduce_canonical(call, &x.buffer, x.numel(), tree)
        }
        false => rank.all_reduce(call, &x.buffer, x.numel(), ReduceOp::Sum),
    }
}

/// Sums a flat local tensor over the ranks of a call, and returns the part of this rank, from the start of the buffer.
fn reduce_scatter_sum(rank: &Rank, call: &Call<'_>, x: &LocalTensor, counts: &[usize]) -> Result<Buffer> {
    if !rounds_nodes(rank, x.dtype) {
        return rank.reduce_scatter(call, &x.buffer, counts);
    }
    let own = rank.group_rank(call.axes);
    let sum = LocalTensor::from_buffer(all_reduce_sum(rank, call, x)?, x.dtype, &[x.numel()]);
    let start: usize = counts[..own].iter().sum();
    Ok(sum.with_view(sum.view.narrow(0, start, start + counts[own])).to_dtype(rank, x.dtype)?.buffer)
}

/// Completes a partial sum where sums are canonical, and returns it as the term of the first rank, the others' terms being -0: what is
/// then added to it, or rounded, rounds the sum of all leaves. Returns the tensor itself where there is nothing to complete.
///
/// # Errors
/// Errors of the collective.
pub fn complete_partial_sum(x: Tensor, site: &'static Location<'static>) -> Result<Tensor> {
    let (rank, mesh) = (x.rank(), x.layout().mesh());
    let axes: AxisSet = x.layout().partial().iter().filter(|axis| mesh.size(*axis) > 1).collect();
    let context = Context::of(rank);
    if axes.is_empty() || context.sum_tree().is_none() {
        return Ok(x);
    }
    let lineage = x.local().lineage;
    let sum = all_reduce(rank, x.local().clone(), axes, ReduceOp::Sum, site)?;
    let term = match rank.group_rank(axes) {
        0 => sum,
        _ => LocalTensor::full(rank, sum.dtype, &sum.view.shape, context.zero())?,
    };
    Ok(Tensor::assemble(rank, x.layout().clone(), LocalTensor { lineage, ..term }))
}

/// Completes a partial sum where sums are canonical and the steps would complete it over one axis after another, which is no order of
/// the tree: the axes of a partial sum shard one dim, whose leaves all their ranks join at once. Otherwise returns the tensor itself.
///
/// # Errors
/// Errors of the collective.
pub fn join_axes_of_partial_sum(
    x: Tensor,
    steps: &[Step],
    site: &'static Location<'static>,
) -> Result<Tensor> {
    let (layout, mesh) = (x.layout(), x.layout().mesh());
    let is_several = || layout.partial().iter().filter(|axis| mesh.size(*axis) > 1).nth(1).is_some();
    if !is_several() || Context::of(x.rank()).sum_tree().is_none() {
        return Ok(x);
    }
    let mut at = layout.clone();
    for step in steps {
        let (before, after) = (at.partial(), at.after(step).partial());
        let is_part = before != after && after.iter().any(|axis| mesh.size(axis) > 1);
        if is_part {
            return complete_partial_sum(x, site);
        }
        at = at.after(step);
    }
    Ok(x)
}

/// Sums local tensors of one shape over the leaves of a tree, of which each rank of some axes passes the sums of its maximal nodes in
/// order ([`Rank::all_reduce_canonical`]). Returns the sum of all leaves.
///
/// # Errors
/// Errors of the collective.
pub fn sum_roots_of_ranks(
    rank: &Rank,
    roots: &[LocalTensor],
    axes: AxisSet,
    tree: SumTree,
    site: &'static Location<'static>,
) -> Result<LocalTensor> {
    let (first, numel) = (&roots[0], roots[0].numel());
    let mut joined = LocalTensor::alloc(rank, first.dtype, &[roots.len() * numel])?;
    for (i, root) in roots.iter().enumerate() {
        joined.write(rank, Strides::contiguous(&root.view.shape).at(i * numel), root)?;
    }
    let call_context = CollectiveContext { axes, dtype: first.dtype, lineage: first.lineage, site };
    let sum = call_context.of(rank, |call| rank.all_reduce_canonical(call, &joined.buffer, numel, tree))?;
    Ok(LocalTensor::from_buffer(sum, first.dtype, &first.view.shape))
}

/// What a collective call reports besides the state of the context.
struct CollectiveContext {
    axes: AxisSet,
    dtype: DType,
    lineage: Lineage,
    site: &'static Location<'static>,
}

impl CollectiveContext {
    /// Makes the call.
    fn of<T>(&self, rank: &Rank, call: impl FnOnce(&Call<'_>) -> Result<T>) -> Result<T> {
        let context = Context::of(rank);
        let (path, recent) = (context.path(), context.recent_tensors());
        let origin = Origin { hash: self.lineage.fingerprint(), recent_inputs: &recent };
        let CollectiveContext { axes, dtype, site, .. } = *self;
        call(&Call { axes, dtype, phase: context.phase(), path: &path, origin, site })
    }
}

/// Runs one step on one rank.
pub(super) struct StepRunner<'a> {
    pub(super) rank: &'a Rank,
    pub(super) from: &'a Layout,
    pub(super) to: &'a Layout,
    pub(super) axes: AxisSet,
    pub(super) site: &'static Location<'static>,
}

impl StepRunner<'_> {
    pub(super) fn run(&self, x: LocalTensor, to: Placement) -> Result<LocalTensor> {
        let axis = self.axes.iter().next().expect("a step has at least one axis");
        match (self.from.placement(axis), to) {
            (Placement::Invariant | Placement::Replicate, Placement::Invariant | Placement::Replicate) => {
                Ok(x)
            }
            (Placement::Invariant | Placement::Replicate, Placement::Shard(d)) => {
                Ok(x.with_view(self.slice(&x, d, self.rank.coordinates())))
            }
            (Placement::Invariant | Placement::Replicate, Placement::Partial) => {
                self.zero_except_first(x, axis)
            }
            (Placement::Shard(d), Placement::Partial) => self.pad_with_zeros(&x, d),
            (Placement::Shard(d), Placement::Invariant | Placement::Replicate) => {
                self.all_gather(&x, d, axis)
            }
            (Placement::Shard(d), Placement::Shard(e)) => self.all_to_all(&x, d, e, axis),
            (Placement::Partial, Placement::Invariant | Placement::Replicate) => self.all_reduce(&x),
            (Placement::Partial, Placement::Shard(d)) => self.reduce_scatter(&x, d, axis),
            (Placement::Partial, Placement::Partial) => Ok(x),
        }
    }

    /// Makes a collective call for elements of some lineage.
    fn call<T>(&self, lineage: Lineage, call: impl FnOnce(&Call<'_>) -> Result<T>) -> Result<T> {
        CollectiveContext { axes: self.axes, dtype: self.from.dtype(), lineage, site: self.site }
            .of(self.rank, call)
    }

    /// Returns the coordinates of the member at position `i` of this rank's group along an axis.
    fn group_member(&self, axis: Axis, i: usize) -> Vec<usize> {
        let mut at = self.rank.coordinates().to_vec();
        at[axis.0 as usize] = i;
        at
    }

    /// The view of the part that a member keeps along dim `d`, in a local tensor that holds this rank's range under
    /// `from`.
    fn slice(&self, x: &LocalTensor, d: usize, member: &[usize]) -> Strides {
        let base = self.from.range(d, self.rank.coordinates()).start;
        let Range { start, end } = self.to.range(d, member);
        x.view.narrow(d, start - base, end - base)
    }

    fn zero_except_first(&self, x: LocalTensor, axis: Axis) -> Result<LocalTensor> {
        if self.rank.coordinate(axis) == 0 {
            Ok(x)
        } else {
            LocalTensor::full(self.rank, x.dtype, &x.view.shape, Context::of(self.rank).zero())
        }
    }

    fn pad_with_zeros(&self, x: &LocalTensor, d: usize) -> Result<LocalTensor> {
        let here = self.rank.coordinates();
        let zero = Context::of(self.rank).zero();
        let mut full = LocalTensor::full(self.rank, x.dtype, &self.to.local_shape(here), zero)?;
        let (own, base) = (self.from.range(d, here), self.to.range(d, here).start);
        let at = full.view.narrow(d, own.start - base, own.end - base);
        full.write(self.rank, at, x)?;
        Ok(full)
    }

    fn all_reduce(&self, x: &LocalTensor) -> Result<LocalTensor> {
        let flat = x.flat(self.rank)?;
        let buffer = self.call(x.lineage, |call| all_reduce_sum(self.rank, call, &flat))?;
        Ok(LocalTensor::from_buffer(buffer, x.dtype, &x.view.shape))
    }

    /// The local shapes of the members under the layout in which `axis` shards dim `d`.
    pub(super) fn part_shapes(&self, split: &Layout, axis: Axis) -> Vec<Vec<usize>> {
        let size = split.mesh().size(axis);
        (0..size).map(|i| split.local_shape(&self.group_member(axis, i)).to_vec()).collect()
    }

    fn all_gather(&self, x: &LocalTensor, d: usize, axis: Axis) -> Result<LocalTensor> {
        let flat = x.flat(self.rank)?;
        let parts = self.part_shapes(self.from, axis);
        let counts: Vec<usize> = parts.iter().map(|s| s.iter().product()).collect();
        let buffer = self.call(x.lineage, |call| self.rank.all_gather(call, &flat.buffer, &counts))?;
        let gathered = LocalTensor::from_buffer(buffer, x.dtype, &[counts.iter().sum()]);
        self.concat_parts(&gathered, &parts, d, &self.to.local_shape(self.rank.coordinates()))
    }

    fn reduce_scatter(&self, x: &LocalTensor, d: usize, axis: Axis) -> Result<LocalTensor> {
        let parts = self.part_shapes(self.to, axis);
        let counts: Vec<usize> = parts.iter().map(|s| s.iter().product()).collect();
        let packed = self.pack(x, d, axis, &counts)?;
        let buffer = self.call(x.lineage, |call| reduce_scatter_sum(self.rank, call, &packed, &counts))?;
        Ok(LocalTensor::from_buffer(buffer, x.dtype, &self.to.local_shape(self.rank.coordinates())))
    }

    fn all_to_all(&self, x: &LocalTensor, d: usize, e: usize, axis: Axis) -> Result<LocalTensor> {
        let here = self.rank.coordinates();
        let (mine_d, mine_e) = (self.from.local_shape(here), self.to.local_shape(here));
        let size = self.from.mesh().size(axis);
        // This rank sends its part of dim `d`, cut along `e` by what each member keeps, and receives the
        // opposite.
        let send: Vec<usize> = (0..size)
            .map(|j| {
                with_extent(&mine_d, e, self.to.range(e, &self.group_member(axis, j)).len()).iter().product()
            })
            .collect();
        let parts: Vec<Vec<usize>> = (0..size)
            .map(|j| with_extent(&mine_e, d, self.from.range(d, &self.group_member(axis, j)).len()))
            .collect();
        let recv: Vec<usize> = parts.iter().map(|s| s.iter().product()).collect();
        let packed = self.pack(x, e, axis, &send)?;
        let buffer = self.call(x.lineage, |call| self.rank.all_to_all(call, &packed.buffer, &send, &recv))?;
        let received = LocalTensor::from_buffer(buffer, x.dtype, &[recv.iter().sum()]);
        self.concat_parts(&received, &parts, d, &mine_e)
    }

    /// The part of dim `d` that the member at position `i` of this rank's group along an axis keeps.
    pub(super) fn part_of(&self, x: &LocalTensor, d: usize, axis: Axis, i: usize) -> LocalTensor {
        x.with_view(self.slice(x, d, &self.group_member(axis, i)))
    }

    /// Packs what each member gets of dim `d` under `to` into one flat buffer, member after member.
    pub(super) fn pack(
        &self,
        x: &LocalTensor,
        d: usize,
        axis: Axis,
        counts: &[usize],
    ) -> Result<LocalTensor> {
        if x.view.shape[..d].iter().all(|&n| n == 1) {
            return x.flat(self.rank);
        }
        let total = counts.iter().sum();
        let mut packed = LocalTensor::alloc(self.rank, x.dtype, &[total])?;
        let mut offset = 0;
        for (i, count) in counts.iter().enumerate() {
            let part = self.part_of(x, d, axis, i);
            let at = Strides::contiguous(&part.view.shape).at(offset);
            packed.write(self.rank, at, &part)?;
            offset += count;
        }
        Ok(packed)
    }

    /// Concatenates the parts of a flat buffer along dim `d`.
    fn concat_parts(
        &self,
        flat: &LocalTensor,
        parts: &[Vec<usize>],
        d: usize,
        shape: &[usize],
    ) -> Result<LocalTensor> {
        let offsets = parts.iter().scan(0, |end, part| {
            let start = *end;
            *end += part.iter().product::<usize>();
            Some(start)
        });
        self.concat_parts_at(flat, parts, offsets, d, shape)
    }

    /// Concatenates parts along dim `d` that begin at these offsets of a flat buffer.
    pub(super) fn concat_parts_at(
        &self,
        flat: &LocalTensor,
        parts: &[Vec<usize>],
        offsets: impl Iterator<Item = usize>,
        d: usize,
        shape: &[usize],
    ) -> Result<LocalTensor> {
        if flat.numel() == shape.iter().product::<usize>() && shape[..d].iter().all(|&n| n == 1) {
            return Ok(flat.with_view(Strides::contiguous(shape)));
        }
        let mut whole = LocalTensor::alloc(self.rank, flat.dtype, shape)?;
        let mut start = 0;
        for (part, offset) in parts.iter().zip(offsets) {
            let from = flat.with_view(Strides::contiguous(part).at(offset));
            let at = whole.view.narrow(d, start, start + part[d]);
            whole.write(self.rank, at, &from)?;
            start += part[d];
        }
        Ok(whole)
    }
}

/// Returns a shape with another extent in one dim.
fn with_extent(shape: &[usize], dim: usize, extent: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape[dim] = extent;
    shape
}
