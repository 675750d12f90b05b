//! The redistribution planner: the cheapest route from one layout to another (Dijkstra over layouts), by elements moved
//! forward plus backward.
//!
//! All routes compute the identity, forward and backward, so they differ in cost only. Ties go to fewer steps, then to
//! the earlier steps in their order. Only axes whose position or placement changes take part, and axes inside them in
//! the same dims.

use crate::layout::Layout;
use crate::layout::fast_hasher::FastBuildHasher;
use crate::layout::placement::Placement;
pub use crate::layout::step::Step;
use crate::layout::step::{elements_moved, elements_moved_back, elements_moved_backward};
use shardgrad_dist::{Axis, AxisSet, Error, Kind, Result};
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::rc::Rc;

/// Larger graphs are not searched: the route is then built greedily, correct but not always the cheapest. Four axes on
/// four dims stay below.
const NUM_LAYOUTS_MAX: usize = 5_000;
/// A cache with more routes is cleared, so that shapes that change in every step do not fill the memory.
const NUM_ROUTES_MAX: usize = 4_096;

type Steps = SmallVec<[Step; 4]>;

/// The steps that lead from one layout to another. The layout after the last step is equivalent to the target
/// ([`Layout::is_equivalent_to`]): a change of grain that moves no shard boundary needs no step.
#[doc(alias = "redistribute")]
#[doc(alias = "reshard")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// The steps, in order.
    pub steps: SmallVec<[Step; 4]>,
    /// Elements that a rank moves, the maximum over ranks of each step added up.
    pub forward: u64,
    /// The same for the adjoints of the steps; 0 for values without a gradient.
    pub backward: u64,
}

impl Route {
    fn new(from: &Layout, steps: Steps, backward: bool) -> Route {
        let mut route = Route::default();
        let mut at = from.clone();
        for step in &steps {
            route.forward += elements_moved(&at, step);
            route.backward += if backward { elements_moved_backward(&at, step) } else { 0 };
            at = at.after(step);
        }
        Route { steps, ..route }
    }

    /// Returns forward plus backward elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.forward + self.backward
    }
}

/// Finds the cheapest route from one layout to another of the same tensor. `backward` says whether the value needs a
/// gradient, so that the adjoints count.
///
/// # Errors
/// `Kind::Layout` for layouts with different meshes, dtypes or shapes.
#[doc(alias = "redistribute_cost")]
pub fn route(from: &Layout, to: &Layout, backward: bool) -> Result<Route> {
    if from == to {
        return Ok(Route::default());
    }
    if from.mesh() != to.mesh() || from.dtype() != to.dtype() || from.shape() != to.shape() {
        let text = format!("cannot redistribute {from} on {} to {to} on {}", from.mesh(), to.mesh());
        let help = "redistribution keeps mesh, dtype and shape; use cast or reshape for the others";
        return Err(Error::new(Kind::Layout, text).detail("help", help));
    }
    let start = with_grains_of(from.clone(), to);
    let moving = moving_axes(&start, to);
    let steps = match (moving.iter().next(), moving.len()) {
        (None, _) => Steps::new(),
        // With one moving axis the direct step is the cheapest.
        (Some(axis), 1) if start.placement(axis) != to.placement(axis) => {
            SmallVec::from_slice(&[step_to_target(&start, to, axis)])
        }
        _ if num_layouts(moving.len(), from.ndim()) <= NUM_LAYOUTS_MAX => {
            search(&start, to, moving, backward)
        }
        _ => greedy_route(&start, to, moving),
    };
    Ok(Route::new(from, steps, backward))
}

/// Returns the layout with the grains of the target, in all dims where that moves no shard boundary.
fn with_grains_of(mut layout: Layout, to: &Layout) -> Layout {
    for (d, dim) in to.dims().iter().enumerate() {
        let own = layout.dims()[d];
        if own.grain != dim.grain && own.has_same_boundaries(dim.grain, layout.mesh()) {
            layout.set_grain(d, dim.grain);
        }
    }
    layout
}

/// The step that takes an axis to its placement in the target.
fn step_to_target(at: &Layout, to: &Layout, axis: Axis) -> Step {
    step_to_placement(at, axis, to.placement(axis))
}

/// The step that takes an axis to a placement; a dim that the axis joins keeps its grain.
fn step_to_placement(at: &Layout, axis: Axis, placement: Placement) -> Step {
    let grain = match placement {
        Placement::Shard(d) => Some(at.dims()[d].grain),
        _ => None,
    };
    Step { grain, ..Step::new(axis, placement) }
}

/// Axes whose position or placement changes, and axes inside them in the same dims of either layout.
fn moving_axes(from: &Layout, to: &Layout) -> AxisSet {
    let mut moving: AxisSet = from.mesh().axes().filter(|a| from.placement(*a) != to.placement(*a)).collect();
    for (a, b) in from.dims().iter().zip(to.dims()) {
        let common = a.axes.iter().zip(b.axes.iter()).take_while(|(x, y)| x == y).count();
        let unchanged = if a.grain == b.grain { common } else { 0 };
        moving =
            a.axes.iter().skip(unchanged).chain(b.axes.iter().skip(unchanged)).fold(moving, AxisSet::with);
    }
    loop {
        let before = moving;
        for dim in from.dims().iter().chain(to.dims()) {
            if let Some(first) = dim.axes.iter().position(|a| moving.contains(a)) {
                moving = dim.axes.iter().skip(first).fold(moving, AxisSet::with);
            }
        }
        if moving == before {
            return moving;
        }
    }
}

/// The number of layouts that some axes can have on a tensor: with i of n axes sharded, C(n, i) choices of them,
/// i! C(i + d - 1, i) ordered lists and 3 placements for each of the others.
fn num_layouts(num_axes: usize, ndim: usize) -> usize {
    let (mut chosen, mut lists, mut total) = (1usize, 1usize, 0usize);
    for i in 0..=num_axes {
        let others = 3usize.saturating_pow((num_axes - i) as u32);
        total = total.saturating_add(chosen.saturating_mul(lists).saturating_mul(others));
        chosen = chosen * (num_axes - i) / (i + 1);
        lists = lists.saturating_mul(ndim + i);
    }
    total
}

/// A node of the search, ordered so that the heap returns the cheapest first.
struct Node {
    cost: u64,
    path: Steps,
    at: Layout,
}

impl Node {
    fn key(&self) -> (u64, usize, &[Step]) {
        (self.cost, self.path.len(), &self.path)
    }
}

impl PartialEq for Node {
    fn eq(&self, other: &Node) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Node {}
impl PartialOrd for Node {
    fn partial_cmp(&self, other: &Node) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Node {
    fn cmp(&self, other: &Node) -> Ordering {
        self.key().cmp(&other.key())
    }
}

fn search(from: &Layout, to: &Layout, moving: AxisSet, backward: bool) -> Steps {
    let mut heap = BinaryHeap::from([Reverse(Node { cost: 0, path: Steps::new(), at: from.clone() })]);
    let mut done = HashSet::with_hasher(FastBuildHasher::default());
    // The cost of a route that is known to lead to the target.
    let mut known_cost = u64::MAX;
    while let Some(Reverse(node)) = heap.pop() {
        if node.at == *to {
            return node.path;
        }
        if !done.insert(node.at.clone()) {
            continue;
        }
        for step in steps_from(&node.at, moving) {
            let forward = node.cost.saturating_add(elements_moved(&node.at, &step));
            if forward > known_cost {
                continue;
            }
            let after = node.at.after(&step);
            let back = if backward { elements_moved_back(&node.at, &step, &after) } else { 0 };
            let (cost, at) = (forward.saturating_add(back), with_grains_of(after, to));
            if cost > known_cost || done.contains(&at) {
                continue;
            }
            if at == *to {
                known_cost = cost;
            }
            let mut path = node.path.clone();
            path.push(step);
            heap.push(Reverse(Node { cost, path, at }));
        }
    }
    unreachable!("every layout leads to every other: all axes may be gathered and split again")
}

/// Returns every step that the moving axes can take.
fn steps_from(at: &Layout, moving: AxisSet) -> Vec<Step> {
    let mut steps = Vec::new();
    for axis in moving.iter() {
        let source = at.placement(axis);
        if let Placement::Shard(d) = source
            && at.dims()[d].axes.last() != Some(axis)
        {
            continue;
        }
        let placements = [Placement::Invariant, Placement::Replicate, Placement::Partial].into_iter();
        // Bools have no partial sum.
        let placements = placements.filter(|s| *s != Placement::Partial || at.dtype() != DType::Bool);
        let placements = placements.chain((0..at.ndim()).map(Placement::Shard)).filter(|s| *s != source);
        steps.extend(placements.map(|s| step_to_placement(at, axis, s)));
    }
    let pending: Vec<Axis> = moving.iter().filter(|a| at.partial().contains(*a)).collect();
    for chosen in 0..1usize << pending.len() {
        let axes: AxisSet = (0..pending.len()).filter(|i| chosen >> i & 1 == 1).map(|i| pending[i]).collect();
        if axes.len() > 1 {
            steps.extend([Placement::Invariant, Placement::Replicate].map(|s| Step::complete(axes, s)));
        }
    }
    steps
}

/// Builds a correct route for any number of axes without a search: shards are gathered from the innermost axis outwards,
/// partial sums are reduced together, and shards are taken in the order of the target.
fn greedy_route(from: &Layout, to: &Layout, moving: AxisSet) -> Steps {
    let mut builder = RouteBuilder { at: from.clone(), steps: Steps::new(), to };
    let resting = |axis: Axis| match to.placement(axis) {
        Placement::Shard(_) => Placement::Replicate,
        placement => placement,
    };
    for dim in from.dims() {
        for axis in dim.axes.iter().rev().filter(|a| moving.contains(*a)) {
            builder.take(Step::new(axis, resting(axis)));
        }
    }
    for placement in [Placement::Invariant, Placement::Replicate] {
        let pending =
            |a: &Axis| builder.at.placement(*a) == Placement::Partial && to.placement(*a) == placement;
        let axes: AxisSet = moving.iter().filter(pending).collect();
        if !axes.is_empty() {
            builder.take(Step::complete(axes, placement));
        }
    }
    for axis in moving.iter().filter(|a| !matches!(to.placement(*a), Placement::Shard(_))) {
        if builder.at.placement(axis) != to.placement(axis) {
            builder.take(Step::new(axis, to.placement(axis)));
        }
    }
    for dim in to.dims() {
        for axis in dim.axes.iter().filter(|a| moving.contains(*a)) {
            builder.take(step_to_target(&builder.at, to, axis));
        }
    }
    builder.steps
}

struct RouteBuilder<'a> {
    at: Layout,
    steps: Steps,
    to: &'a Layout,
}

impl RouteBuilder<'_> {
    fn take(&mut self, step: Step) {
        self.at = with_grains_of(self.at.after(&step), self.to);
        self.steps.push(step);
    }
}

/// A target, whether adjoints count, and the route to the target.
type CachedRoute = (Layout, bool, Rc<Route>);

/// A cache of routes. It only saves repeated searches, and never changes a value.
#[derive(Debug, Default)]
pub struct RouteCache {
    found: RefCell<HashMap<Layout, Vec<CachedRoute>, FastBuildHasher>>,
}

impl RouteCache {
    /// [`route`], cached.
    ///
    /// # Errors
    /// As [`route`].
    pub fn route(&self, from: &Layout, to: &Layout, backward: bool) -> Result<Rc<Route>> {
        if let Some(list) = self.found.borrow().get(from)
            && let Some((_, _, found)) = list.iter().find(|(l, b, _)| *b == backward && l == to)
        {
            return Ok(found.clone());
        }
        let found = Rc::new(route(from, to, backward)?);
        let mut all = self.found.borrow_mut();
        if all.len() >= NUM_ROUTES_MAX {
            all.clear();
        }
        all.entry(from.clone()).or_default().push((to.clone(), backward, found.clone()));
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::Mesh;

    fn find(mesh: &Mesh, from: &str, to: &str) -> (Layout, Layout, Route) {
        let (from, to) = (Layout::parse(from, mesh).unwrap(), Layout::parse(to, mesh).unwrap());
        let found = route(&from, &to, true).unwrap();
        (from, to, found)
    }

    /// Every layout of a shape on a mesh.
    fn layouts(mesh: &Mesh, shape: &[usize]) -> Vec<Layout> {
        let mut all = HashSet::from([Layout::invariant(mesh, shardgrad_kernels::DType::F32, shape)]);
        loop {
            let more: Vec<Layout> = all
                .iter()
                .flat_map(|l| steps_from(l, mesh.axes().collect()).into_iter().map(|s| l.after(&s)))
                .filter(|l| !all.contains(l))
                .collect();
            if more.is_empty() {
                return all.into_iter().collect();
            }
            all.extend(more);
        }
    }

    #[test]
    fn direct_step_is_the_cheapest_on_one_axis() {
        for mesh in ["a=2", "a=3", "a=4"] {
            let mesh = Mesh::parse(mesh).unwrap();
            for shape in [[5, 7], [1, 7], [2, 7], [0, 3], [1, 1]] {
                let all = layouts(&mesh, &shape);
                assert_eq!(all.len(), 5);
                for (from, to) in
                    all.iter().flat_map(|f| all.iter().map(move |t| (f, t))).filter(|(f, t)| f != t)
                {
                    for backward in [false, true] {
                        let direct = route(from, to, backward).unwrap();
                        assert_eq!(direct.steps.len(), 1);
                        let searched = search(from, to, mesh.axes().collect(), backward);
                        assert_eq!(direct, Route::new(from, searched, backward), "{from} -> {to}");
                    }
                }
            }
        }
    }

    #[test]
    fn routes_and_their_adjoints_end_in_the_right_layouts() {
        let mesh = Mesh::parse("a=2,b=3").unwrap();
        let all = layouts(&mesh, &[7, 4]);
        assert_eq!(all.len(), 27);
        for (from, to) in all.iter().flat_map(|f| all.iter().map(move |t| (f, t))) {
            let moving = moving_axes(from, to);
            for steps in [route(from, to, true).unwrap().steps, greedy_route(from, to, moving)] {
                let (mut at, mut back) = (from.clone(), Vec::new());
                for step in &steps {
                    back.push(crate::layout::step::adjoint(&at, step));
                    at = at.after(step);
                }
                assert_eq!(at, *to);
                let home = back.iter().rev().fold(to.dual(), |l, s| l.after(s));
                assert_eq!(home, from.dual());
            }
        }
    }

    #[test]
    fn sharded_weights_are_relabelled_before_all_gather() {
        let mesh = Mesh::parse("r=2,s=2").unwrap();
        let (_, _, found) = find(&mesh, "f32[8@s, 4]", "f32[8, 4] ~r ~s");
        let (r, s) = (Axis(0), Axis(1));
        assert_eq!(
            found.steps.as_slice(),
            [Step::new(r, Placement::Replicate), Step::new(s, Placement::Replicate)]
        );
        assert_eq!((found.forward, found.backward), (16, 16 + 16));
    }

    #[test]
    fn partial_sums_are_reduced_together() {
        let mesh = Mesh::parse("a=2,b=2").unwrap();
        let (_, _, found) = find(&mesh, "f32[8] +a +b", "f32[8]");
        let both = mesh.axes().collect();
        assert_eq!(found.steps.as_slice(), [Step::complete(both, Placement::Invariant)]);
        assert_eq!(found.elements(), 12);
    }

    #[test]
    fn changing_a_grain_is_free_unless_shard_boundaries_move() {
        let mesh = Mesh::parse("a=2,b=2").unwrap();
        let (_, _, found) = find(&mesh, "f32[16:4@a, 3:3]", "f32[16:8@a, 3]");
        assert!(found.steps.is_empty());
        for (from, to) in [("f32[12:4@a, 8]", "f32[12@a, 8]"), ("f32[12:4@a@b, 8]", "f32[12:6@a, 8] ~b")] {
            let (from, to, found) = find(&mesh, from, to);
            let end = found.steps.iter().fold(from.clone(), |l, s| l.after(s));
            assert!(end.is_equivalent_to(&to) && found.elements() > 0, "{from} -> {to}: {end}");
            let mut adjoints = Vec::new();
            found.steps.iter().fold(from.clone(), |l, s| {
                adjoints.push(crate::layout::step::adjoint(&l, s));
                l.after(s)
            });
            assert!(adjoints.iter().rev().fold(to.dual(), |l, s| l.after(s)).is_equivalent_to(&from.dual()));
        }
    }

    #[test]
    fn many_axes_use_the_greedy_route() {
        let mesh = Mesh::parse("a=2,b=2,c=2,d=2,e=2,f=2").unwrap();
        let (from, to, found) = find(&mesh, "f32[64@a@b@c, 64@d] +e +f", "f32[64@c@b, 64] ~a ~d ~e ~f");
        assert_eq!(found.steps.iter().fold(from, |l, s| l.after(s)), to);
        assert!(num_layouts(6, 2) > NUM_LAYOUTS_MAX && num_layouts(4, 4) <= NUM_LAYOUTS_MAX);
        assert_eq!(
            (num_layouts(2, 2), num_layouts(3, 3), num_layouts(3, 4), num_layouts(4, 3)),
            (27, 276, 435, 2133)
        );
    }

    #[test]
    fn cache_returns_the_same_route_and_refuses_other_shapes() {
        let mesh = Mesh::parse("a=2").unwrap();
        let (from, to, found) = find(&mesh, "f32[8@a]", "f32[8]");
        let cache = RouteCache::default();
        let first = cache.route(&from, &to, true).unwrap();
        assert_eq!(*first, found);
        assert!(Rc::ptr_eq(&first, &cache.route(&from, &to, true).unwrap()));
        assert!(!Rc::ptr_eq(&first, &cache.route(&from, &to, false).unwrap()));
        assert!(route(&from, &Layout::parse("f32[4]", &mesh).unwrap(), true).is_err());
    }
}
