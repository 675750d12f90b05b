//! The planner of routes against an exhaustive search, and every route by value: all pairs of layouts on small meshes.

use shardgrad_dist::{Axis, AxisSet, Mesh, Rank, Result, World};
use shardgrad_kernels::DType;
use shardgrad_tensor::check::{Global, layouts};
use shardgrad_tensor::op::Vjp;
use shardgrad_tensor::ops::Input;
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::{Layout, State, Step, moved, moved_back, op, route};
use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::Location;

const MESHES: [&str; 7] = ["a=2", "a=3", "a=4", "a=2,b=2", "a=2,b=3", "a=3,b=2", "a=1,b=3"];
const SHAPES: [&[usize]; 6] = [&[6, 4], &[5, 3], &[1, 2], &[0, 3], &[7], &[]];

/// The axes that a route may use: those whose place or state changes, and those inside them in the same dims.
fn concerned(from: &Layout, to: &Layout) -> AxisSet {
    let mesh = from.mesh();
    let mut found: AxisSet = mesh.axes().filter(|a| from.state(*a) != to.state(*a)).collect();
    for (x, y) in from.dims().iter().zip(to.dims()) {
        let common =
            x.axes.iter().zip(y.axes.iter()).take_while(|(x, y)| x == y && !found.contains(*x)).count();
        found = x.axes.iter().skip(common).chain(y.axes.iter().skip(common)).fold(found, AxisSet::with);
    }
    found
}

/// Every step that a layout allows: one axis that is the innermost of its dim (or splits none) to any state, and any set of
/// pending axes completed at once.
fn steps(layout: &Layout, free: AxisSet) -> Vec<Step> {
    let mesh = layout.mesh();
    let axes: Vec<Axis> = mesh.axes().filter(|a| mesh.size(*a) > 1 && free.contains(*a)).collect();
    let states: Vec<State> = [State::Invariant, State::Replicate, State::Partial]
        .into_iter()
        .chain((0..layout.ndim()).map(State::Shard))
        .collect();
    let mut found = Vec::new();
    for &axis in &axes {
        let from = layout.state(axis);
        let stays = matches!(from, State::Shard(d) if layout.dims()[d].axes.last() != Some(axis));
        found.extend(states.iter().filter(|to| **to != from && !stays).map(|to| Step::new(axis, *to)));
    }
    let pending: Vec<Axis> = layout.partial().iter().filter(|a| free.contains(*a)).collect();
    for set in 0..1 << pending.len() {
        let chosen: AxisSet =
            pending.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1).map(|(_, a)| *a).collect();
        if chosen.len() > 1 {
            found.extend([State::Invariant, State::Replicate].map(|to| Step::complete(chosen, to)));
        }
    }
    found
}

/// The least cost from a layout to every other, by relaxation until nothing changes.
fn least(from: &Layout, all: &[Layout], free: AxisSet, backward: bool) -> HashMap<String, u64> {
    let mut least = HashMap::from([(from.to_string(), 0)]);
    loop {
        let before = least.clone();
        for at in all {
            let Some(&paid) = least.get(&at.to_string()) else { continue };
            for step in steps(at, free) {
                let cost = paid + moved(at, &step) + if backward { moved_back(at, &step) } else { 0 };
                let known = least.entry(at.after(&step).to_string()).or_insert(u64::MAX);
                *known = cost.min(*known);
            }
        }
        if before == least {
            return least;
        }
    }
}

#[test]
fn no_route_costs_more_than_the_cheapest_of_all() {
    let (mut pairs, mut dearer) = (0, 0);
    for mesh in MESHES {
        let mesh = Mesh::parse(mesh).unwrap();
        for shape in SHAPES {
            let all = layouts(&mesh, DType::F32, shape);
            for from in &all {
                // An axis that stands still takes no part: it could share the work of completing a sum over another, in more
                // calls.
                let mut known: HashMap<u16, [HashMap<String, u64>; 2]> = HashMap::new();
                for to in &all {
                    let free = concerned(from, to);
                    let best = known
                        .entry(free.bits())
                        .or_insert_with(|| [true, false].map(|backward| least(from, &all, free, backward)));
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
                    // A search that forgets the way back is found by this very comparison.
                    let blind = route(from, to, false).unwrap();
                    let walk = blind.steps.iter().fold((from.clone(), 0), |(at, cost), step| {
                        let cost = cost + moved(&at, step) + moved_back(&at, step);
                        (at.after(step), cost)
                    });
                    dearer += usize::from(walk.1 > best[0][&to.to_string()]);
                    pairs += 1;
                }
            }
        }
    }
    assert!(dearer > 100, "the planted planner costs more on {dearer} of {pairs} pairs");
    assert_eq!(pairs, PAIRS);
}

/// Pairs of layouts, all meshes and shapes.
const PAIRS: usize = 10_358;

/// Moves a value and brings a cotangent back; what differs, if anything does.
fn there_and_back(rank: &Rank, x: &Global, [from, to]: [&Layout; 2]) -> Result<Option<String>> {
    let site = Location::caller();
    let op = Redistribute::between(rank, from, to)?;
    let moved = op::apply(&*op, &[&x.place_strided(rank, from)?], &[], site)?.remove(0);
    let there = x.differs(&moved, 0.0, site)?;
    let grads = [Some(x.place_strided(rank, &to.dual())?)];
    let back = op.vjp(&Vjp {
        rank,
        inputs: &[None],
        outputs: &[None],
        input_layouts: std::slice::from_ref(from),
        output_layouts: std::slice::from_ref(to),
        grads: &grads,
        wanted: &[true],
        taken: RefCell::default(),
        sums: &[],
    });
    let back = back.into_iter().next().flatten().expect("a route has an adjoint");
    let found = x.differs(&back, 0.0, site)?;
    let laid = (moved.layout() != to || *back.layout() != from.dual()).then(|| "lies elsewhere".to_string());
    Ok(there.or(found).or(laid).map(|what| format!("{from} -> {to}: {what}")))
}

#[test]
fn every_route_keeps_every_element_both_ways() {
    for text in MESHES {
        let mesh = Mesh::parse(text).unwrap();
        let wrong = World::new(mesh.clone()).threads(1).launch(|rank| {
            let mut wrong = Vec::new();
            for shape in SHAPES {
                let x = Global::draw(&Input::real(shape), 7);
                let all = layouts(rank.mesh(), DType::F64, shape);
                for from in &all {
                    for to in &all {
                        wrong.extend(there_and_back(rank, &x, [from, to])?);
                    }
                }
            }
            Ok(wrong)
        });
        let wrong: Vec<String> = wrong.unwrap().into_iter().flatten().collect();
        assert!(wrong.is_empty(), "on {text}: {} wrong, the first: {}", wrong.len(), wrong[0]);
    }
}
