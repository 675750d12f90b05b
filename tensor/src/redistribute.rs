//! The one general door for collectives: running the steps that lead from one layout to another.

use crate::context::Context;
use crate::layout::Layout;
use crate::lineage::Lineage;
use crate::piece::Piece;
use crate::state::State;
use crate::step::Step;
use crate::tensor::Tensor;
use shardgrad_dist::{Axis, AxisSet, Call, Origin, Rank, ReduceOp, Result};
use shardgrad_kernels::{Buffer, DType, Strides};
use std::ops::Range;
use std::panic::Location;

/// Another layout of a plain tensor, made once by whichever op implies it first and kept with the value.
///
/// # Errors
/// What the collectives report.
pub fn implied(x: &Tensor, to: &Layout, site: &'static Location<'static>) -> Result<Tensor> {
    if let Some(form) = x.form(to) {
        return Ok(form);
    }
    let route = Context::of(x.rank()).routes.route(x.layout(), to, x.dtype().is_float())?;
    let form = run(x, &route.steps, to, site)?;
    x.keep_form(form.clone());
    Ok(form)
}

/// Takes the steps one after the other, to a layout that the last one agrees with. Every rank of the groups concerned
/// calls this together.
///
/// # Errors
/// What the collectives report.
pub fn run(x: &Tensor, steps: &[Step], goal: &Layout, site: &'static Location<'static>) -> Result<Tensor> {
    let rank = x.rank();
    let (mut layout, mut piece) = (x.layout().clone(), x.piece().clone());
    for step in steps {
        let to = layout.after(step);
        let lineage = piece.lineage;
        piece = Move { rank, from: &layout, to: &to, axes: step.axes, site }.take(piece, step.to)?;
        piece.lineage = lineage;
        layout = to;
    }
    debug_assert!(layout.agrees(goal), "the steps lead from {} to {goal}, not to {layout}", x.layout());
    Ok(Tensor::assemble(rank, goal.clone(), piece))
}

/// Each element combined over the ranks of some axes, the same on all of them; for ops that end a split by a rule of their
/// own. Without an axis nothing is done.
///
/// # Errors
/// What the collective reports.
pub fn combine(
    rank: &Rank,
    x: Piece,
    axes: AxisSet,
    reduce: ReduceOp,
    site: &'static Location<'static>,
) -> Result<Piece> {
    if axes.is_empty() {
        return Ok(x);
    }
    let flat = x.flat(rank)?;
    let asked = Asked { axes, dtype: x.dtype, lineage: x.lineage, site };
    let buffer = asked.of(rank, |call| rank.all_reduce(call, &flat.buffer, flat.numel(), reduce))?;
    Ok(Piece::received(buffer, x.dtype, &x.view.shape))
}

/// What a call says of itself, beside where the program stands.
struct Asked {
    axes: AxisSet,
    dtype: DType,
    lineage: Lineage,
    site: &'static Location<'static>,
}

impl Asked {
    /// Makes the call.
    fn of(&self, rank: &Rank, call: impl FnOnce(&Call<'_>) -> Result<Buffer>) -> Result<Buffer> {
        let context = Context::of(rank);
        let (path, given) = (context.path(), context.given());
        let origin = Origin { mark: self.lineage.mark(), given: &given };
        let Asked { axes, dtype, site, .. } = *self;
        call(&Call { axes, dtype, phase: context.phase(), path: &path, origin, site })
    }
}

/// One step on one rank.
struct Move<'a> {
    rank: &'a Rank,
    from: &'a Layout,
    to: &'a Layout,
    axes: AxisSet,
    site: &'static Location<'static>,
}

impl Move<'_> {
    fn take(&self, x: Piece, to: State) -> Result<Piece> {
        let axis = self.axes.iter().next().expect("a step concerns at least one axis");
        match (self.from.state(axis), to) {
            (State::Invariant | State::Replicate, State::Invariant | State::Replicate) => Ok(x),
            (State::Invariant | State::Replicate, State::Shard(d)) => {
                Ok(x.viewed(self.slice(&x, d, self.rank.coordinates())))
            }
            (State::Invariant | State::Replicate, State::Partial) => self.keep_on_first(x, axis),
            (State::Shard(d), State::Partial) => self.pad_with_zeros(&x, d),
            (State::Shard(d), State::Invariant | State::Replicate) => self.all_gather(&x, d, axis),
            (State::Shard(d), State::Shard(e)) => self.all_to_all(&x, d, e, axis),
            (State::Partial, State::Invariant | State::Replicate) => self.all_reduce(&x),
            (State::Partial, State::Shard(d)) => self.reduce_scatter(&x, d, axis),
            (State::Partial, State::Partial) => Ok(x),
        }
    }

    /// Makes a call for elements of some lineage.
    fn call(&self, lineage: Lineage, call: impl FnOnce(&Call<'_>) -> Result<Buffer>) -> Result<Buffer> {
        Asked { axes: self.axes, dtype: self.from.dtype(), lineage, site: self.site }.of(self.rank, call)
    }

    /// The coordinates of the member of this rank's group that stands at `i` on the axis.
    fn member(&self, axis: Axis, i: usize) -> Vec<usize> {
        let mut at = self.rank.coordinates().to_vec();
        at[axis.0 as usize] = i;
        at
    }

    /// The view of what a member keeps along dim `d` of a piece that holds this rank's range under `from`.
    fn slice(&self, x: &Piece, d: usize, member: &[usize]) -> Strides {
        let base = self.from.range(d, self.rank.coordinates()).start;
        let Range { start, end } = self.to.range(d, member);
        x.view.narrow(d, start - base, end - base)
    }

    fn keep_on_first(&self, x: Piece, axis: Axis) -> Result<Piece> {
        if self.rank.coordinate(axis) == 0 {
            Ok(x)
        } else {
            Piece::filled(self.rank, x.dtype, &x.view.shape, 0.0)
        }
    }

    fn pad_with_zeros(&self, x: &Piece, d: usize) -> Result<Piece> {
        let here = self.rank.coordinates();
        let mut full = Piece::filled(self.rank, x.dtype, &self.to.local_shape(here), 0.0)?;
        let (own, base) = (self.from.range(d, here), self.to.range(d, here).start);
        let at = full.view.narrow(d, own.start - base, own.end - base);
        full.write(self.rank, at, x)?;
        Ok(full)
    }

    fn all_reduce(&self, x: &Piece) -> Result<Piece> {
        let flat = x.flat(self.rank)?;
        let buffer = self
            .call(x.lineage, |call| self.rank.all_reduce(call, &flat.buffer, flat.numel(), ReduceOp::Sum))?;
        Ok(Piece::received(buffer, x.dtype, &x.view.shape))
    }

    /// Shapes of the parts that the members hold under the layout in which `axis` splits dim `d`.
    fn part_shapes(&self, split: &Layout, axis: Axis) -> Vec<Vec<usize>> {
        let size = split.mesh().size(axis);
        (0..size).map(|i| split.local_shape(&self.member(axis, i)).to_vec()).collect()
    }

    fn all_gather(&self, x: &Piece, d: usize, axis: Axis) -> Result<Piece> {
        let flat = x.flat(self.rank)?;
        let parts = self.part_shapes(self.from, axis);
        let counts: Vec<usize> = parts.iter().map(|s| s.iter().product()).collect();
        let buffer = self.call(x.lineage, |call| self.rank.all_gather(call, &flat.buffer, &counts))?;
        let gathered = Piece::received(buffer, x.dtype, &[counts.iter().sum()]);
        self.lay_side_by_side(&gathered, &parts, d, &self.to.local_shape(self.rank.coordinates()))
    }

    fn reduce_scatter(&self, x: &Piece, d: usize, axis: Axis) -> Result<Piece> {
        let parts = self.part_shapes(self.to, axis);
        let counts: Vec<usize> = parts.iter().map(|s| s.iter().product()).collect();
        let packed = self.pack(x, d, axis, &counts)?;
        let buffer = self.call(x.lineage, |call| self.rank.reduce_scatter(call, &packed.buffer, &counts))?;
        Ok(Piece::received(buffer, x.dtype, &self.to.local_shape(self.rank.coordinates())))
    }

    fn all_to_all(&self, x: &Piece, d: usize, e: usize, axis: Axis) -> Result<Piece> {
        let here = self.rank.coordinates();
        let (mine_d, mine_e) = (self.from.local_shape(here), self.to.local_shape(here));
        let size = self.from.mesh().size(axis);
        // I send my part of dim `d`, cut along `e` by what each member keeps; I receive the same the other way round.
        let send: Vec<usize> = (0..size)
            .map(|j| cut(&mine_d, e, self.to.range(e, &self.member(axis, j)).len()).iter().product())
            .collect();
        let parts: Vec<Vec<usize>> =
            (0..size).map(|j| cut(&mine_e, d, self.from.range(d, &self.member(axis, j)).len())).collect();
        let recv: Vec<usize> = parts.iter().map(|s| s.iter().product()).collect();
        let packed = self.pack(x, e, axis, &send)?;
        let buffer = self.call(x.lineage, |call| self.rank.all_to_all(call, &packed.buffer, &send, &recv))?;
        let received = Piece::received(buffer, x.dtype, &[recv.iter().sum()]);
        self.lay_side_by_side(&received, &parts, d, &mine_e)
    }

    /// One flat buffer with what each member gets of dim `d` under `to`, member after member.
    fn pack(&self, x: &Piece, d: usize, axis: Axis, counts: &[usize]) -> Result<Piece> {
        if x.view.shape[..d].iter().all(|&n| n == 1) {
            return x.flat(self.rank);
        }
        let total = counts.iter().sum();
        let mut packed = Piece::alloc(self.rank, x.dtype, &[total])?;
        let mut offset = 0;
        for (i, count) in counts.iter().enumerate() {
            let part = x.viewed(self.slice(x, d, &self.member(axis, i)));
            let at = Strides::contiguous(&part.view.shape).at(offset);
            packed.write(self.rank, at, &part)?;
            offset += count;
        }
        Ok(packed)
    }

    /// The parts of a flat buffer, laid side by side along dim `d`.
    fn lay_side_by_side(
        &self,
        flat: &Piece,
        parts: &[Vec<usize>],
        d: usize,
        shape: &[usize],
    ) -> Result<Piece> {
        if shape[..d].iter().all(|&n| n == 1) {
            return Ok(flat.viewed(Strides::contiguous(shape)));
        }
        let mut whole = Piece::alloc(self.rank, flat.dtype, shape)?;
        let (mut offset, mut start) = (0, 0);
        for part in parts {
            let from = flat.viewed(Strides::contiguous(part).at(offset));
            let at = whole.view.narrow(d, start, start + part[d]);
            whole.write(self.rank, at, &from)?;
            offset += from.numel();
            start += part[d];
        }
        Ok(whole)
    }
}

/// A shape with another extent in one dim.
fn cut(shape: &[usize], dim: usize, extent: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape[dim] = extent;
    shape
}
