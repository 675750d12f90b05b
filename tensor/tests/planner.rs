//! The route planner against an exhaustive search, and the values of every route: all pairs of layouts on small meshes.

use shardgrad_dist::{Axis, AxisSet, Mesh, Rank, Result, World};
use shardgrad_kernels::DType;
use shardgrad_tensor::op::Vjp;
use shardgrad_tensor::ops::Input;
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::{Layout, Op, Placement, Step, elements_moved, elements_moved_backward, op, route};
use shardgrad_testing::GlobalTensor;
use shardgrad_testing::op_check::layouts;
use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::Location;

const MESHES: [&str; 7] = ["a=2", "a=3", "a=4", "a=2,b=2", "a=2,b=3", "a=3,b=2", "a=1,b=3"];
const SHAPES: [&[usize]; 6] = [&[6, 4], &[5, 3], &[1, 2], &[0, 3], &[7], &[]];

/// The axes that a route may use: axes whose dim or state changes, and axes inside of them in the same dims.
fn changed_axes(from: &Layout, to: &Layout) -> AxisSet {
    let mesh = from.mesh();
    let mut found: AxisSet = mesh.axes().filter(|a| from.placement(*a) != to.placement(*a)).collect();
    for (x, y) in from.dims().iter().zip(to.dims()) {
        let common =
            x.axes.iter().zip(y.axes.iter()).take_while(|(x, y)| x == y && !found.contains(*x)).count();
        found = x.axes.iter().skip(common).chain(y.axes.iter().skip(common)).fold(found, AxisSet::with);
    }
    found
}

/// Every step that a layout allows: an axis that is the innermost of its dim (or shards none) to any state, and an all-reduce over
/// any set of partial axes.
fn steps(layout: &Layout, free: AxisSet) -> Vec<Step> {
    let mesh = layout.mesh();
    let axes: Vec<Axis> = mesh.axes().filter(|a| mesh.size(*a) > 1 && free.contains(*a)).collect();
    let states: Vec<Placement> = [Placement::Invariant, Placement::Replicate, Placement::Partial]
        .into_iter()
        .chain((0..layout.ndim()).map(Placement::Shard))
        .collect();
    let mut found = Vec::new();
    for &axis in &axes {
        let from = layout.placement(axis);
        let stays = matches!(from, Placement::Shard(d) if layout.dims()[d].axes.last() != Some(axis));
        found.extend(states.iter().filter(|to| **to != from && !stays).map(|to| Step::new(axis, *to)));
    }
    let partial: Vec<Axis> = layout.partial().iter().filter(|a| free.contains(*a)).collect();
    for set in 0..1 << partial.len() {
        let chosen: AxisSet =
            partial.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1).map(|(_, a)| *a).collect();
        if chosen.len() > 1 {
            found.extend([Placement::Invariant, Placement::Replicate].map(|to| Step::complete(chosen, to)));
        }
    }
    found
}

/// The minimal cost from a layout to every other, by relaxation until nothing changes (Bellman-Ford).
fn min_costs(from: &Layout, all: &[Layout], free: AxisSet, backward: bool) -> HashMap<String, u64> {
    let mut min_costs = HashMap::from([(from.to_string(), 0)]);
    loop {
        let before = min_costs.clone();
        for at in all {
            let Some(&paid) = min_costs.get(&at.to_string()) else { continue };
            for step in steps(at, free) {
                let cost = paid
                    + elements_moved(at, &step)
                    + if backward { elements_moved_backward(at, &step) } else { 0 };
                let known = min_costs.entry(at.after(&step).to_string()).or_insert(u64::MAX);
                *known = cost.min(*known);
            }
        }
        if before == min_costs {
            return min_costs;
        }
    }
}

#[test]
fn routes_are_as_cheap_as_an_exhaustive_search() {
    let (mut pairs, mut costlier) = (0, 0);
    for mesh in MESHES {
        let mesh = Mesh::parse(mesh).unwrap();
        for shape in SHAPES {
            let all = layouts(&mesh, DType::F32, shape);
            for from in &all {
                // An axis that does not change takes no part, although it could share the work of an all-reduce over another axis,
                // with more calls.
                let mut known: HashMap<u16, [HashMap<String, u64>; 2]> = HashMap::new();
                for to in &all {
                    let free = changed_axes(from, to);
                    let best = known.entry(free.bits()).or_insert_with(|| {
                        [true, false].map(|backward| min_costs(from, &all, free, backward))
                    });
                    for (backward, best) in [true, false].into_iter().zip(&*best) {
                        let found = route(from, to, backward).unwrap();
                        assert_eq!(
                            found.elements(),
                            best[&to.to_string()],
                            "{from} -> {to}: {:?}",
                            found.steps
                        );
                        assert_eq!(&found.steps.iter().fold(from.clone(), |l, s| l.after(s)), to);
                    }
                    // Mutation: a search that ignores the cost of the backward is detected by this comparison.
                    let blind = route(from, to, false).unwrap();
                    let walk = blind.steps.iter().fold((from.clone(), 0), |(at, cost), step| {
                        let cost = cost + elements_moved(&at, step) + elements_moved_backward(&at, step);
                        (at.after(step), cost)
                    });
                    costlier += usize::from(walk.1 > best[0][&to.to_string()]);
                    pairs += 1;
                }
            }
        }
    }
    assert!(
        costlier > 100,
        "the planner that ignores the backward costs more on {costlier} of {pairs} pairs"
    );
    assert_eq!(pairs, PAIRS);
}

/// The number of pairs of layouts on all meshes and shapes.
const PAIRS: usize = 10_358;

/// Redistributes a value and its cotangent; returns a difference if there is one.
fn check_round_trip(rank: &Rank, x: &GlobalTensor, [from, to]: [&Layout; 2]) -> Result<Option<String>> {
    let site = Location::caller();
    let op = Redistribute::between(rank, from, to)?;
    let moved = op::apply(&*op, &[&x.distribute_strided(rank, from)?], site)?.remove(0);
    let there = x.find_mismatch(&moved, 0.0, site)?;
    let grads = [Some(x.distribute_strided(rank, &to.dual())?)];
    let back = op.vjp(&Vjp {
        rank,
        inputs: &[None],
        outputs: &[None],
        input_layouts: std::slice::from_ref(from),
        output_layouts: std::slice::from_ref(to),
        grads: &grads,
        needs_input_grad: &[true],
        donated: RefCell::default(),
        accumulators: &[],
    });
    let back = back.into_iter().next().flatten().expect("a route has an adjoint");
    let found = x.find_mismatch(&back, 0.0, site)?;
    let laid = (moved.layout() != to || *back.layout() != from.dual())
        .then(|| "has another layout than planned".to_string());
    Ok(there.or(found).or(laid).map(|what| format!("{from} -> {to}: {what}")))
}

#[test]
fn every_route_preserves_values_and_cotangents() {
    for text in MESHES {
        let mesh = Mesh::parse(text).unwrap();
        let wrong = World::new(mesh.clone()).threads(1).launch(|rank| {
            let mut wrong = Vec::new();
            for shape in SHAPES {
                let x = GlobalTensor::draw(&Input::real(shape), 7);
                let all = layouts(rank.mesh(), DType::F64, shape);
                for from in &all {
                    for to in &all {
                        wrong.extend(check_round_trip(rank, &x, [from, to])?);
                    }
                }
            }
            Ok(wrong)
        });
        let wrong: Vec<String> = wrong.unwrap().into_iter().flatten().collect();
        assert!(wrong.is_empty(), "on {text}: {} wrong, the first: {}", wrong.len(), wrong[0]);
    }
}
