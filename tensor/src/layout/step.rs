//! One redistribution step: the layout after it, its communication volume, and its adjoint.
//!
//! Of a tensor with N local elements before the axis shards it (other axes applied), n_i of them on member i of k: an
//! all_gather receives N - n_i, a reduce_scatter sends N - n_i, an all_reduce moves 2 (N - c_i) with c_i the flat chunk
//! i of N, an all_to_all max(n_i, n'_i) - o_i with o_i the elements that stay. The cost of a step is the maximum over
//! all ranks. The adjoint of x -> y is dual(y) -> dual(x).

use crate::layout::dim::Dim;
use crate::layout::placement::Placement;
use crate::layout::{Layout, gcd};
use shardgrad_dist::{Axis, AxisSet, Mesh};
use std::cmp::Ordering;

/// A step that moves axes to one placement. Several axes only where partial sums are reduced together.
#[doc(alias = "all_gather")]
#[doc(alias = "reduce_scatter")]
#[doc(alias = "all_reduce")]
#[doc(alias = "all_to_all")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Step {
    /// The axes, all with one placement before the step; a shard is the innermost axis of its dim.
    pub axes: AxisSet,
    /// Their placement after the step.
    pub to: Placement,
    /// For a step to a shard: the new grain of the dim, if it changes. The shard boundaries so far are the same in
    /// both grains.
    pub grain: Option<usize>,
}

impl Step {
    /// Makes a step of one axis.
    #[must_use]
    pub const fn new(axis: Axis, to: Placement) -> Step {
        Step { axes: AxisSet::one(axis), to, grain: None }
    }

    /// Makes a step that reduces several partial sums in one all_reduce.
    #[must_use]
    pub const fn complete(axes: AxisSet, to: Placement) -> Step {
        Step { axes, to, grain: None }
    }

    /// Returns the first axis.
    pub(crate) fn axis(&self) -> Axis {
        self.axes.iter().next().expect("a step concerns at least one axis")
    }
}

/// Steps of one axis come first, in mesh order of the axes, then in the order of the placements.
impl Ord for Step {
    fn cmp(&self, other: &Step) -> Ordering {
        let key = |s: &Step| (s.axes.len(), s.axes, s.to, s.grain);
        key(self).cmp(&key(other))
    }
}

impl PartialOrd for Step {
    fn partial_cmp(&self, other: &Step) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Layout {
    /// Returns the layout after a step.
    #[must_use]
    pub fn after(&self, step: &Step) -> Layout {
        let mut layout = self.clone();
        if let (Placement::Shard(d), Some(grain)) = (step.to, step.grain) {
            layout.set_grain(d, grain);
        }
        for axis in step.axes.iter() {
            layout.set_placement(axis, step.to);
        }
        layout
    }
}

/// Returns the adjoint step, which carries the gradient back over `step`: from `from.after(step).dual()` to
/// `from.dual()`.
#[must_use]
pub fn adjoint(from: &Layout, step: &Step) -> Step {
    let placement = from.placement(step.axis());
    let grain = match placement {
        Placement::Shard(d) => Some(from.dims()[d].grain),
        _ => None,
    };
    Step { axes: step.axes, to: placement.dual(), grain }
}

/// Merges consecutive all_reduces: steps that reduce partial sums one after another become one all_reduce over all their
/// axes. Routes relabel copies axis by axis, so their adjoints are such steps.
pub(crate) fn merge_all_reduces(from: &Layout, steps: Vec<Step>) -> Vec<Step> {
    let mut together: Vec<Step> = Vec::with_capacity(steps.len());
    let (mut at, mut follows) = (from.clone(), false);
    for step in steps {
        let is_reduced = matches!(step.to, Placement::Invariant | Placement::Replicate);
        let completes = is_reduced && at.placement(step.axis()) == Placement::Partial;
        at = at.after(&step);
        match together.last_mut() {
            Some(last) if completes && follows && last.to == step.to => {
                *last = Step::complete(last.axes.union(step.axes), step.to);
            }
            _ => together.push(step),
        }
        follows = completes;
    }
    together
}

/// Returns the elements that a rank sends or receives in a step, whatever the algorithm: the maximum over all ranks.
#[doc(alias = "communication_volume")]
#[must_use]
pub fn elements_moved(from: &Layout, step: &Step) -> u64 {
    elements_moved_from(from, from.placement(step.axis()), step)
}

/// Returns the elements that a rank sends or receives in the adjoint of a step: the maximum over all ranks.
#[must_use]
pub fn elements_moved_backward(from: &Layout, step: &Step) -> u64 {
    elements_moved_back(from, step, &from.after(step))
}

/// [`elements_moved_backward`] of a step to the layout `after`.
pub(crate) fn elements_moved_back(from: &Layout, step: &Step, after: &Layout) -> u64 {
    // The dual of a layout has the same dims.
    elements_moved_from(after, after.placement(step.axis()).dual(), &adjoint(from, step))
}

/// [`elements_moved`] from a layout in which the axes of the step have another placement.
fn elements_moved_from(from: &Layout, source: Placement, step: &Step) -> u64 {
    let mesh = from.mesh();
    if source == step.to {
        return 0;
    }
    match (source, step.to) {
        (Placement::Invariant | Placement::Replicate, _) | (_, Placement::Partial) => 0,
        (Placement::Partial, Placement::Invariant | Placement::Replicate) => {
            let numel = max_local_numel(from, &[]);
            2 * (numel - numel / mesh.group_size(step.axes) as u64)
        }
        (Placement::Partial, Placement::Shard(d)) => {
            max_local_numel(from, &[d]) * max_missing(&split(from, step, d), mesh)
        }
        (Placement::Shard(d), Placement::Invariant | Placement::Replicate) => {
            max_local_numel(from, &[d]) * max_missing(&from.dims()[d], mesh)
        }
        (Placement::Shard(d), Placement::Shard(e)) => {
            max_local_numel(from, &[d, e]) * max_exchanged(&from.dims()[d], &split(from, step, e), mesh)
        }
    }
}

/// The dim that a step shards, after it.
fn split(from: &Layout, step: &Step, d: usize) -> Dim {
    let dim = from.dims()[d];
    let split = step.axes.iter().filter(|axis| from.mesh().size(*axis) > 1);
    let axes = split.fold(dim.axes, |axes, axis| axes.without(axis).with(axis));
    Dim { axes, grain: step.grain.unwrap_or(dim.grain), ..dim }
}

/// The largest number of elements that a rank holds, skipping some dims. Every axis shards at most one dim, so one rank
/// holds the largest shard of every dim.
pub(crate) fn max_local_numel(layout: &Layout, skipped: &[usize]) -> u64 {
    let counted = layout.dims().iter().enumerate().filter(|(d, _)| !skipped.contains(d));
    counted.map(|(_, dim)| dim.max_local_extent(layout.mesh()) as u64).product()
}

/// How many shards need looking at: the shard boundaries are periodic, and whole groups of the innermost axis are
/// needed.
fn period(dim: &Dim, num_shards: usize, inner: usize) -> usize {
    let repeats = num_shards / gcd(dim.extent / dim.grain, num_shards).max(1);
    (repeats / gcd(repeats, inner) * inner).min(num_shards)
}

/// For each member `i` of the innermost axis, at each position of the outer axes: the extent without that axis and with
/// it, as (i, full, own).
fn member_extents(dim: &Dim, mesh: &Mesh) -> impl Iterator<Item = (usize, u64, u64)> {
    let (dim, num_shards) = (*dim, dim.axes.num_shards(mesh));
    let inner = dim.axes.last().map_or(1, |a| mesh.size(a));
    (0..period(&dim, num_shards, inner)).map(move |i| {
        let outer = i / inner * inner;
        let full = dim.shard_start(outer + inner, num_shards) - dim.shard_start(outer, num_shards);
        (i % inner, full as u64, (dim.shard_start(i + 1, num_shards) - dim.shard_start(i, num_shards)) as u64)
    })
}

/// The largest part of a dim that a rank lacks because of the innermost axis.
fn max_missing(dim: &Dim, mesh: &Mesh) -> u64 {
    member_extents(dim, mesh).map(|(_, full, own)| full - own).max().unwrap_or(0)
}

/// The largest number of elements of a plane that a rank moves when the innermost axis of `from` becomes the innermost
/// of `to`; both dims include that axis.
fn max_exchanged(from: &Dim, to: &Dim, mesh: &Mesh) -> u64 {
    let size = from.axes.last().map_or(1, |a| mesh.size(a));
    let by_member = |dim: &Dim| {
        let mut seen: Vec<Vec<(u64, u64)>> = vec![Vec::new(); size];
        for (i, full, own) in member_extents(dim, mesh) {
            if !seen[i].contains(&(full, own)) {
                seen[i].push((full, own));
            }
        }
        seen
    };
    let (old, new) = (by_member(from), by_member(to));
    let mut worst = 0;
    for (old, new) in old.iter().zip(&new) {
        for (full, own) in old {
            for (new_full, new_own) in new {
                worst = worst.max((own * new_full).max(full * new_own) - own * new_own);
            }
        }
    }
    worst
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(mesh: &str, from: &str, axis: u8, to: Placement) -> (u64, u64) {
        let mesh = Mesh::parse(mesh).unwrap();
        let (from, step) = (Layout::parse(from, &mesh).unwrap(), Step::new(Axis(axis), to));
        (elements_moved(&from, &step), elements_moved_backward(&from, &step))
    }

    #[test]
    fn elements_moved_match_hand_computed_values() {
        assert_eq!(cost("a=2", "f32[5, 7]", 0, Placement::Replicate), (0, 36));
        assert_eq!(cost("a=2", "f32[5, 7]", 0, Placement::Shard(0)), (0, 21));
        assert_eq!(cost("a=3", "f32[5@a, 7]", 0, Placement::Shard(1)), (10, 10));
        assert_eq!(cost("a=2,b=3", "f32[1@b, 2@a]", 1, Placement::Partial), (0, 0));
        assert_eq!(cost("a=2", "f32[8, 4] +a", 0, Placement::Shard(0)), (16, 16));
    }

    #[test]
    fn consecutive_all_reduces_are_merged() {
        let mesh = Mesh::parse("a=2,b=2,c=2").unwrap();
        let (a, b, c) = (Axis(0), Axis(1), Axis(2));
        let of = |from: &str, steps: &[Step]| {
            merge_all_reduces(&Layout::parse(from, &mesh).unwrap(), steps.to_vec())
        };
        let [copy, one] = [Placement::Replicate, Placement::Invariant];
        let all: AxisSet = [a, b, c].into_iter().collect();
        let steps = [a, b, c].map(|axis| Step::new(axis, one));
        assert_eq!(of("f32[8] +a +b +c", &steps), [Step::complete(all, one)]);
        // Not merged: steps with a relabelling between them, steps to another placement, and shards.
        assert_eq!(of("f32[8] +a ~b +c", &steps), steps);
        let unlike = [Step::new(a, one), Step::new(b, copy)];
        assert_eq!(of("f32[8] +a +b", &unlike), unlike);
        let scattered = [Step::new(a, Placement::Shard(0)), Step::new(b, one)];
        assert_eq!(of("f32[8] +a +b", &scattered), scattered);
        let gathered = [Step::new(b, one), Step::new(a, one)];
        assert_eq!(of("f32[8@a] +b", &gathered), gathered);
        let pair: AxisSet = [b, c].into_iter().collect();
        let three = [Step::new(a, Placement::Shard(0)), Step::new(b, one), Step::new(c, one)];
        assert_eq!(of("f32[8] +a +b +c", &three), [three[0], Step::complete(pair, one)]);
    }

    #[test]
    fn cost_of_a_large_mesh_is_computed_quickly() {
        let tokens = "f32[1048576@a@b, 4096]";
        assert_eq!(cost("a=4096,b=4096", tokens, 1, Placement::Invariant).0, (256 - 1) * 4096 + 4096);
    }

    #[test]
    fn adjoint_ends_in_the_dual_layout() {
        let mesh = Mesh::parse("a=2,b=3").unwrap();
        for (from, axis, to) in [
            ("f32[12:4@a@b, 5]", 1, Placement::Shard(1)),
            ("f32[12@a, 5] +b", 1, Placement::Shard(0)),
            ("f32[12:2@a@b, 5]", 1, Placement::Replicate),
            ("f32[12, 5] ~a", 0, Placement::Partial),
        ] {
            let from = Layout::parse(from, &mesh).unwrap();
            let step = Step::new(Axis(axis), to);
            assert_eq!(from.after(&step).dual().after(&adjoint(&from, &step)), from.dual());
        }
    }
}
