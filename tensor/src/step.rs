//! One step of redistribution: what it makes of a layout, what it costs, and its adjoint.
//!
//! Of a tensor with N local elements before the axis splits it (other axes applied), n_i of them on member i of k:
//! an all_gather receives N - n_i, a reduce_scatter sends N - n_i, an all_reduce moves 2 (N - c_i) with c_i the flat
//! chunk i of N, an all_to_all max(n_i, n'_i) - o_i with o_i the elements that stay. The cost of a step is the most
//! over all ranks. The adjoint of x -> y is dual(y) -> dual(x).

use crate::dim::Dim;
use crate::layout::{Layout, gcd};
use crate::state::State;
use shardgrad_dist::{Axis, AxisSet, Mesh};
use std::cmp::Ordering;

/// Axes that go to one state. Several axes only where pending sums are completed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Step {
    /// The axes, all in one state before the step; a shard is the innermost axis of its dim.
    pub axes: AxisSet,
    /// Their state after it.
    pub to: State,
    /// For a step to a shard: the grain in which the dim counts from here on, if it is another one. The cuts that the
    /// dim has so far are the same in both grains.
    pub grain: Option<usize>,
}

impl Step {
    /// One axis goes to a state.
    #[must_use]
    pub const fn new(axis: Axis, to: State) -> Step {
        Step { axes: AxisSet::one(axis), to, grain: None }
    }

    /// Several pending sums are completed in one all_reduce.
    #[must_use]
    pub const fn complete(axes: AxisSet, to: State) -> Step {
        Step { axes, to, grain: None }
    }

    /// The first axis, or the only one.
    pub(crate) fn axis(&self) -> Axis {
        self.axes.iter().next().expect("a step concerns at least one axis")
    }
}

/// Steps of one axis first, in mesh order of the axes, then by the order of the states.
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
    /// The layout after a step.
    #[must_use]
    pub fn after(&self, step: &Step) -> Layout {
        let mut layout = self.clone();
        if let (State::Shard(d), Some(grain)) = (step.to, step.grain) {
            layout.set_grain(d, grain);
        }
        for axis in step.axes.iter() {
            layout.set_state(axis, step.to);
        }
        layout
    }
}

/// The step that carries the gradient back over `step`, from `from.after(step).dual()` to `from.dual()`.
#[must_use]
pub fn adjoint(from: &Layout, step: &Step) -> Step {
    let state = from.state(step.axis());
    let grain = match state {
        State::Shard(d) => Some(from.dims()[d].grain),
        _ => None,
    };
    Step { axes: step.axes, to: state.dual(), grain }
}

/// The same steps from a layout, of which those that complete pending sums one after the other do so in one all_reduce: copies
/// that a route made axis by axis have adjoints that are told apart by nothing but their axes.
pub(crate) fn completed_together(from: &Layout, steps: Vec<Step>) -> Vec<Step> {
    let mut together: Vec<Step> = Vec::with_capacity(steps.len());
    let (mut at, mut follows) = (from.clone(), false);
    for step in steps {
        let is_whole = matches!(step.to, State::Invariant | State::Replicate);
        let completes = is_whole && at.state(step.axis()) == State::Partial;
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

/// Elements that a rank moves in a step, whatever the algorithm: the most over all ranks.
#[must_use]
pub fn moved(from: &Layout, step: &Step) -> u64 {
    let (axis, mesh) = (step.axis(), from.mesh());
    let source = from.state(axis);
    if source == step.to {
        return 0;
    }
    match (source, step.to) {
        (State::Invariant | State::Replicate, _) | (_, State::Partial) => 0,
        (State::Partial, State::Invariant | State::Replicate) => {
            let numel = most(from, &[]);
            2 * (numel - numel / mesh.group_size(step.axes) as u64)
        }
        (State::Partial, State::Shard(d)) => {
            let split = from.after(step).dims()[d];
            most(from, &[d]) * lost(&split, mesh)
        }
        (State::Shard(d), State::Invariant | State::Replicate) => {
            most(from, &[d]) * lost(&from.dims()[d], mesh)
        }
        (State::Shard(d), State::Shard(e)) => {
            let split = from.after(step).dims()[e];
            most(from, &[d, e]) * exchanged(&from.dims()[d], &split, mesh)
        }
    }
}

/// Elements that a rank moves in the adjoint of a step: the most over all ranks.
#[must_use]
pub fn moved_back(from: &Layout, step: &Step) -> u64 {
    moved(&from.after(step).dual(), &adjoint(from, step))
}

/// The largest number of elements that a rank holds, some dims not counted. Every axis splits one dim at most, so the
/// largest parts of all dims meet on one rank.
fn most(layout: &Layout, skipped: &[usize]) -> u64 {
    let counted = layout.dims().iter().enumerate().filter(|(d, _)| !skipped.contains(d));
    counted.map(|(_, dim)| dim.most(layout.mesh()) as u64).product()
}

/// How often the cuts of a dim need looking at: they repeat, and whole groups of the innermost axis are looked at.
fn period(dim: &Dim, ways: usize, inner: usize) -> usize {
    let repeats = ways / gcd(dim.extent / dim.grain, ways).max(1);
    (repeats / gcd(repeats, inner) * inner).min(ways)
}

/// What each member `i` of the innermost axis holds without that axis and with it: (full, own), over all positions of
/// the outer axes.
fn parts(dim: &Dim, mesh: &Mesh) -> impl Iterator<Item = (usize, u64, u64)> {
    let (dim, ways) = (*dim, dim.axes.ways(mesh));
    let inner = dim.axes.last().map_or(1, |a| mesh.size(a));
    (0..period(&dim, ways, inner)).map(move |i| {
        let outer = i / inner * inner;
        let full = dim.cut(outer + inner, ways) - dim.cut(outer, ways);
        (i % inner, full as u64, (dim.cut(i + 1, ways) - dim.cut(i, ways)) as u64)
    })
}

/// The most of a dim that its innermost axis keeps from a rank.
fn lost(dim: &Dim, mesh: &Mesh) -> u64 {
    parts(dim, mesh).map(|(_, full, own)| full - own).max().unwrap_or(0)
}

/// The most elements of a plane that a rank moves when the innermost axis of `from` becomes the innermost of `to`;
/// both dims are given with that axis.
fn exchanged(from: &Dim, to: &Dim, mesh: &Mesh) -> u64 {
    let size = from.axes.last().map_or(1, |a| mesh.size(a));
    let by_member = |dim: &Dim| {
        let mut seen: Vec<Vec<(u64, u64)>> = vec![Vec::new(); size];
        for (i, full, own) in parts(dim, mesh) {
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

    fn cost(mesh: &str, from: &str, axis: u8, to: State) -> (u64, u64) {
        let mesh = Mesh::parse(mesh).unwrap();
        let (from, step) = (Layout::parse(from, &mesh).unwrap(), Step::new(Axis(axis), to));
        (moved(&from, &step), moved_back(&from, &step))
    }

    #[test]
    fn costs_by_hand() {
        assert_eq!(cost("a=2", "f32[5, 7]", 0, State::Replicate), (0, 36));
        assert_eq!(cost("a=2", "f32[5, 7]", 0, State::Shard(0)), (0, 21));
        assert_eq!(cost("a=3", "f32[5@a, 7]", 0, State::Shard(1)), (10, 10));
        assert_eq!(cost("a=2,b=3", "f32[1@b, 2@a]", 1, State::Partial), (0, 0));
        assert_eq!(cost("a=2", "f32[8, 4] +a", 0, State::Shard(0)), (16, 16));
    }

    #[test]
    fn sums_that_are_completed_in_turn_are_completed_together() {
        let mesh = Mesh::parse("a=2,b=2,c=2").unwrap();
        let (a, b, c) = (Axis(0), Axis(1), Axis(2));
        let of = |from: &str, steps: &[Step]| {
            completed_together(&Layout::parse(from, &mesh).unwrap(), steps.to_vec())
        };
        let [copy, one] = [State::Replicate, State::Invariant];
        let all: AxisSet = [a, b, c].into_iter().collect();
        let steps = [a, b, c].map(|axis| Step::new(axis, one));
        assert_eq!(of("f32[8] +a +b +c", &steps), [Step::complete(all, one)]);
        // A relabel between them, another state, and shards stay as they are.
        assert_eq!(of("f32[8] +a ~b +c", &steps), steps);
        let unlike = [Step::new(a, one), Step::new(b, copy)];
        assert_eq!(of("f32[8] +a +b", &unlike), unlike);
        let scattered = [Step::new(a, State::Shard(0)), Step::new(b, one)];
        assert_eq!(of("f32[8] +a +b", &scattered), scattered);
        let gathered = [Step::new(b, one), Step::new(a, one)];
        assert_eq!(of("f32[8@a] +b", &gathered), gathered);
        let pair: AxisSet = [b, c].into_iter().collect();
        let three = [Step::new(a, State::Shard(0)), Step::new(b, one), Step::new(c, one)];
        assert_eq!(of("f32[8] +a +b +c", &three), [three[0], Step::complete(pair, one)]);
    }

    #[test]
    fn large_meshes_cost_no_time() {
        let tokens = "f32[1048576@a@b, 4096]";
        assert_eq!(cost("a=4096,b=4096", tokens, 1, State::Invariant).0, (256 - 1) * 4096 + 4096);
    }

    #[test]
    fn the_adjoint_ends_in_the_dual_layout() {
        let mesh = Mesh::parse("a=2,b=3").unwrap();
        for (from, axis, to) in [
            ("f32[12:4@a@b, 5]", 1, State::Shard(1)),
            ("f32[12@a, 5] +b", 1, State::Shard(0)),
            ("f32[12:2@a@b, 5]", 1, State::Replicate),
            ("f32[12, 5] ~a", 0, State::Partial),
        ] {
            let from = Layout::parse(from, &mesh).unwrap();
            let step = Step::new(Axis(axis), to);
            assert_eq!(from.after(&step).dual().after(&adjoint(&from, &step)), from.dual());
        }
    }
}
