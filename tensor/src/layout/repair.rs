//! Repairs of a refusal: the cheapest redistributions that make the op accept its arguments, found by search.
//!
//! Every sharded argument may stay, be gathered to `~`, or be exchanged to another dim; where two lists of axes or two
//! grains disagree, one argument may adopt those of the other. Several axes are treated one after another, in mesh order
//! (beam search). Costs count elements forward and backward, the implicit steps that follow included.

use crate::layout::Layout;
use crate::layout::dim::{AxisList, Dim};
use crate::layout::infer::Inference;
use crate::layout::placement::Placement;
use crate::layout::refusal::Refusal;
use crate::layout::route::RouteCache;
use shardgrad_dist::{Axis, AxisSet};
use smallvec::SmallVec;
use std::fmt;

/// The number of repairs in an error.
const NUM_REPAIRS: usize = 3;
/// The number of partial repairs kept while further axes are treated.
const BEAM_WIDTH: usize = 12;
/// With more combinations on one axis, at most two arguments change, or all are gathered.
const NUM_COMBINATIONS_MAX: usize = 4_096;

/// How one argument is redistributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RepairAction {
    /// The axis shards this dim, as its innermost axis (all_to_all).
    Exchange(Axis, usize),
    /// The axis becomes `~` (all_gather).
    Gather(Axis),
    /// Dim `0` takes the list of axes and the grain of dim `2` of argument `1`.
    Adopt(usize, usize, usize),
}

/// An argument and its redistribution.
pub type ArgChange = (usize, RepairAction);

/// Redistributions of arguments that make an op accept them.
#[derive(Clone, Debug)]
pub struct Repair {
    /// The changed arguments, in order.
    pub changes: SmallVec<[ArgChange; 2]>,
    /// The layouts of all arguments after the changes.
    pub args: SmallVec<[Layout; 4]>,
    /// Elements that a rank moves, forward and backward, implicit steps included.
    pub elements: u64,
    /// The same in bytes.
    pub bytes: u64,
    /// The layouts of the outputs.
    pub outputs: SmallVec<[Layout; 1]>,
}

/// The layout inference of an op, its override of the rule included.
pub type Infer<'a> = &'a dyn Fn(&[&Layout]) -> Result<Inference, Refusal>;

/// Returns the three cheapest repairs of a refusal, cheapest first; fewer if there are fewer, none if no redistribution
/// helps. `differentiable` says for each argument whether it has a cotangent.
#[must_use]
pub fn repairs(
    args: &[&Layout],
    differentiable: &[bool],
    refusal: &Refusal,
    routes: &RouteCache,
    infer: Infer<'_>,
) -> Vec<Repair> {
    if matches!(refusal.code, "shape" | "mesh") {
        return Vec::new();
    }
    let search = RepairSearch { args, differentiable, routes, infer };
    let mut found = search.axis_by_axis();
    for (change, layouts) in adopt_layouts(args, refusal) {
        if found.iter().all(|r| r.args != layouts) {
            found.extend(search.adopted(change, layouts));
        }
    }
    cheapest(found, NUM_REPAIRS)
}

fn cheapest(mut found: Vec<Repair>, count: usize) -> Vec<Repair> {
    found.sort_by(|a, b| {
        let key = |r: &Repair| (r.elements, r.changes.len());
        key(a).cmp(&key(b)).then_with(|| a.changes.cmp(&b.changes))
    });
    // Axes of one dim that swap and swap back change nothing: of repairs with equal layouts only the one with the
    // fewest changes is kept.
    let mut beam: Vec<Repair> = Vec::with_capacity(count);
    for repair in found {
        if beam.len() < count && beam.iter().all(|k| k.args != repair.args) {
            beam.push(repair);
        }
    }
    beam
}

struct RepairSearch<'a> {
    args: &'a [&'a Layout],
    differentiable: &'a [bool],
    routes: &'a RouteCache,
    infer: Infer<'a>,
}

impl RepairSearch<'_> {
    fn axis_by_axis(&self) -> Vec<Repair> {
        let mesh = self.args[0].mesh();
        let axes: Vec<Axis> = mesh
            .axes()
            .filter(|a| self.args.iter().any(|l| matches!(l.placement(*a), Placement::Shard(_))))
            .collect();
        let layouts = self.args.iter().map(|l| (*l).clone()).collect();
        let start = Repair {
            changes: SmallVec::new(),
            args: layouts,
            elements: 0,
            bytes: 0,
            outputs: SmallVec::new(),
        };
        let mut beam = vec![start];
        for (n, &axis) in axes.iter().enumerate() {
            let later: AxisSet = axes[n + 1..].iter().copied().collect();
            let changed: Vec<Repair> =
                beam.iter().flat_map(|partial| self.changed_on_axis(partial, axis, later)).collect();
            beam = if later.is_empty() {
                self.accepted_up_to(NUM_REPAIRS, changed, later)
            } else {
                cheapest(self.accepted_up_to(BEAM_WIDTH, changed, later), BEAM_WIDTH)
            };
        }
        beam.retain(|r| !r.changes.is_empty());
        beam
    }

    /// A partial repair with every combination of changes on one more axis. Implicit steps are not counted yet.
    fn changed_on_axis(&self, partial: &Repair, axis: Axis, later: AxisSet) -> Vec<Repair> {
        /// What may become of an argument: its change, its layout, and the elements that it moves.
        type Choice = (Option<RepairAction>, Layout, u64);
        let choices_of = |(i, layout): (usize, &Layout)| -> Vec<Choice> {
            let changes = actions(layout, axis).unwrap_or_default().into_iter().map(Some);
            let layouts =
                std::iter::once(None).chain(changes).map(|change| (change, changed(layout, change)));
            let moving = layouts.map(|(change, to)| {
                let elements = self.elements(i, &without(self.args[i], later), &without(&to, later))?;
                Some((change, to, elements))
            });
            moving.flatten().collect()
        };
        let choices: Vec<Vec<Choice>> = partial.args.iter().enumerate().map(choices_of).collect();
        let all = combinations(&partial.args, axis).into_iter().map(|picks| {
            let (mut changes, mut args) = (partial.changes.clone(), SmallVec::new());
            let (mut elements, mut bytes) = (0u64, 0u64);
            for (i, choices) in choices.iter().enumerate() {
                let change = picks.iter().find(|(arg, _)| *arg == i).map(|(_, change)| *change);
                let (_, layout, moved) = choices.iter().find(|choice| choice.0 == change)?;
                args.push(layout.clone());
                elements = elements.saturating_add(*moved);
                bytes = bytes.saturating_add(moved.saturating_mul(layout.dtype().size() as u64));
            }
            changes.extend(picks);
            changes.sort_by_key(|(i, _)| *i);
            Some(Repair { changes, args, elements, bytes, outputs: SmallVec::new() })
        });
        all.flatten().collect()
    }

    /// The repair in which one argument adopts a list of axes and a grain, if the rule accepts it.
    fn adopted(&self, change: ArgChange, args: SmallVec<[Layout; 4]>) -> Option<Repair> {
        let (arg, _) = change;
        let elements = self.elements(arg, self.args[arg], &args[arg])?;
        let bytes = elements.saturating_mul(args[arg].dtype().size() as u64);
        let changes = SmallVec::from_slice(&[change]);
        self.accepted(Repair { changes, args, elements, bytes, outputs: SmallVec::new() }, AxisSet::EMPTY)
    }

    /// Of changed arguments, those that the rule accepts when the axes that are treated later are ignored, with the cost of the implicit
    /// steps. None that costs more than `count` others with different layouts.
    fn accepted_up_to(&self, count: usize, mut changed: Vec<Repair>, later: AxisSet) -> Vec<Repair> {
        changed.sort_by_key(|repair| repair.elements);
        let mut accepted: Vec<Repair> = Vec::new();
        // The costs of different layouts, in order.
        let mut costs: Vec<u64> = Vec::new();
        for repair in changed {
            // Implicit steps cost more still.
            if costs.get(count - 1).is_some_and(|most| repair.elements > *most) {
                break;
            }
            let Some(repair) = self.accepted(repair, later) else { continue };
            if accepted.iter().all(|other| other.args != repair.args) {
                costs.insert(costs.partition_point(|cost| *cost <= repair.elements), repair.elements);
            }
            accepted.push(repair);
        }
        accepted
    }

    /// The repair with the implicit steps that follow and the outputs, if the rule accepts it when the axes that are treated later are
    /// ignored.
    fn accepted(&self, repair: Repair, later: AxisSet) -> Option<Repair> {
        let shown: SmallVec<[Layout; 4]> = repair.args.iter().map(|l| without(l, later)).collect();
        let inference = (self.infer)(&shown.iter().collect::<SmallVec<[&Layout; 4]>>()).ok()?;
        let (mut elements, mut bytes) = (repair.elements, repair.bytes);
        for (i, (layout, target)) in shown.iter().zip(&inference.targets).enumerate() {
            let Some(target) = target else { continue };
            let implied = self.elements(i, layout, target)?;
            elements = elements.saturating_add(implied);
            bytes = bytes.saturating_add(implied.saturating_mul(layout.dtype().size() as u64));
        }
        Some(Repair { elements, bytes, outputs: inference.outputs, ..repair })
    }

    /// The elements that an argument moves from one layout to another.
    fn elements(&self, arg: usize, from: &Layout, to: &Layout) -> Option<u64> {
        let backward = self.differentiable.get(arg).copied().unwrap_or(true) && to.dtype().is_float();
        if from == to { Some(0) } else { Some(self.routes.route(from, to, backward).ok()?.elements()) }
    }
}

/// A layout after a change on an axis.
fn changed(layout: &Layout, change: Option<RepairAction>) -> Layout {
    match change {
        None | Some(RepairAction::Adopt(..)) => layout.clone(),
        Some(RepairAction::Exchange(axis, d)) => layout.with_placement(axis, Placement::Shard(d)),
        Some(RepairAction::Gather(axis)) => layout.with_placement(axis, Placement::Replicate),
    }
}

fn without(layout: &Layout, axes: AxisSet) -> Layout {
    axes.iter().fold(layout.clone(), |l, a| l.with_placement(a, Placement::Invariant))
}

/// All combinations of changes to the arguments that an axis shards.
fn combinations(args: &[Layout], axis: Axis) -> Vec<Vec<ArgChange>> {
    let choices: Vec<(usize, Vec<RepairAction>)> =
        args.iter().enumerate().filter_map(|(i, l)| Some((i, actions(l, axis)?))).collect();
    let count = choices.iter().fold(1usize, |n, (_, c)| n.saturating_mul(c.len() + 1));
    let changes_max = if count <= NUM_COMBINATIONS_MAX { choices.len() } else { 2 };
    let mut all = vec![Vec::new()];
    for (i, actions) in &choices {
        for n in 0..all.len() {
            if all[n].len() < changes_max {
                for to in actions {
                    let mut longer: Vec<ArgChange> = all[n].clone();
                    longer.push((*i, *to));
                    all.push(longer);
                }
            }
        }
    }
    if changes_max < choices.len() {
        all.push(choices.iter().map(|(i, _)| (*i, RepairAction::Gather(axis))).collect());
    }
    all
}

/// The possible changes of one argument on an axis; `None` if the axis does not shard the argument.
fn actions(layout: &Layout, axis: Axis) -> Option<Vec<RepairAction>> {
    let Placement::Shard(source) = layout.placement(axis) else { return None };
    let innermost = layout.dims()[source].axes.last() == Some(axis);
    let dims = (0..layout.ndim()).filter(|d| *d != source || !innermost);
    Some(dims.map(|d| RepairAction::Exchange(axis, d)).chain([RepairAction::Gather(axis)]).collect())
}

/// For two positions that disagree: either argument with the list of axes and the grain of the other.
fn adopt_layouts(args: &[&Layout], refusal: &Refusal) -> Vec<(ArgChange, SmallVec<[Layout; 4]>)> {
    let (&[(i, d), (j, e)], "order" | "grain") = (&refusal.positions[..], refusal.code) else {
        return Vec::new();
    };
    let one = |(i, d): (usize, usize), (j, e): (usize, usize)| {
        let model = args[j].dims()[e];
        let old = args[i];
        let freed = old.dims()[d].axes.iter().filter(|a| !model.axes.contains(*a));
        let (mut partial, mut replicate) = (old.partial(), freed.fold(old.replicate(), AxisSet::with));
        for axis in model.axes.iter() {
            (partial, replicate) = (partial.without(axis), replicate.without(axis));
        }
        let keeps = |axes: AxisList| axes.iter().filter(|a| !model.axes.contains(*a)).collect();
        let dims = old.dims().iter().enumerate().map(|(n, dim)| {
            if n == d { Dim { extent: dim.extent, ..model } } else { Dim { axes: keeps(dim.axes), ..*dim } }
        });
        let layout = Layout::new(old.mesh(), old.dtype(), dims, partial, replicate).ok()?;
        let mut layouts: SmallVec<[Layout; 4]> = args.iter().map(|l| (*l).clone()).collect();
        layouts[i] = layout;
        Some(((i, RepairAction::Adopt(d, j, e)), layouts))
    };
    [one((i, d), (j, e)), one((j, e), (i, d))].into_iter().flatten().collect()
}

/// One line: `exchange argument 0 to dim 1 (20 elements, 80 bytes; result f32[5, 4] +a)`.
impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (i, to)) in self.changes.iter().enumerate() {
            let mesh = self.args[*i].mesh();
            // A mesh with one axis needs no axis name.
            let over = |axis: Axis| {
                if mesh.num_axes() > 1 { format!(" over {}", mesh.name(axis)) } else { String::new() }
            };
            f.write_str(if n > 0 { " and " } else { "" })?;
            match to {
                RepairAction::Exchange(axis, d) => {
                    write!(f, "exchange argument {i} to dim {d}{}", over(*axis))?
                }
                RepairAction::Gather(axis) => write!(f, "gather argument {i}{}", over(*axis))?,
                RepairAction::Adopt(..) => write!(f, "redistribute argument {i} to {}", self.args[*i])?,
            }
        }
        let outputs: Vec<String> = self.outputs.iter().map(Layout::to_string).collect();
        write!(f, " ({} elements, {} bytes; result {})", self.elements, self.bytes, outputs.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::infer::{Rule, infer};
    use crate::layout::signature::Signature;
    use shardgrad_dist::Mesh;
    use shardgrad_kernels::DType;

    fn help(mesh: &str, signature: &str, args: &[&str]) -> Vec<String> {
        let mesh = Mesh::parse(mesh).unwrap();
        let layouts: Vec<Layout> = args.iter().map(|t| Layout::parse(t, &mesh).unwrap()).collect();
        let args: Vec<&Layout> = layouts.iter().collect();
        let signature = Signature::parse(signature).unwrap();
        let rule = Rule { signature: &signature, linear_in: &[&[0], &[1]], differentiable: &[] };
        let run = |args: &[&Layout]| infer(&rule, args, &[DType::F32], &[]);
        let refusal = run(&args).unwrap_err();
        let found = repairs(&args, &[], &refusal, &RouteCache::default(), &run);
        for repair in &found {
            assert!(run(&repair.args.iter().collect::<Vec<_>>()).is_ok(), "{repair}");
        }
        found.iter().map(Repair::to_string).collect()
    }

    #[test]
    fn matmul_repairs_are_listed_by_cost() {
        assert_eq!(
            help("a=3", "..m k, k n -> ..m n", &["f32[5@a, 7]", "f32[7@a, 4]"]),
            [
                "exchange argument 0 to dim 1 (20 elements, 80 bytes; result f32[5, 4] +a)",
                "gather argument 1 (40 elements, 160 bytes; result f32[5@a, 4])",
                "gather argument 0 (56 elements, 224 bytes; result f32[5, 4] +a)",
            ]
        );
    }

    #[test]
    fn several_axes_are_repaired_in_mesh_order() {
        let lines = help("a=2,b=2", "..m k, k n -> ..m n", &["f32[8@a@b, 8]", "f32[8@a, 8@b]"]);
        assert_eq!(lines.len(), 3);
        assert!(lines[0].contains(" over a") && lines[0].contains(" over b"), "{lines:?}");
    }

    #[test]
    fn repairs_adopt_axis_lists_and_grains() {
        let lines = help("a=2,b=2", "..m, ..m -> ..m", &["f32[8@a@b]", "f32[8@b@a]"]);
        assert!(lines.iter().any(|l| l.contains("argument 1 to dim 0 over b")), "{lines:?}");
        let lines = help("a=2", "..m, ..m -> ..m", &["f32[12:4@a, 5]", "f32[12@a, 5]"]);
        assert!(
            lines.iter().any(|l| l.starts_with("redistribute argument 1 to f32[12:4@a, 5]")),
            "{lines:?}"
        );
    }

    #[test]
    fn mismatched_extents_have_no_repair() {
        assert!(help("a=2", "..m, ..m -> ..m", &["f32[4@a]", "f32[5]"]).is_empty());
    }

    #[test]
    fn many_arguments_are_searched_in_bounded_time() {
        let signature = ["..m d!"; 12].join(", ") + " -> ..m e";
        let args = ["f32[4, 4, 4@a]"; 12];
        let mesh = Mesh::parse("a=2").unwrap();
        let layouts: Vec<Layout> = args.iter().map(|t| Layout::parse(t, &mesh).unwrap()).collect();
        let args: Vec<&Layout> = layouts.iter().collect();
        let signature = Signature::parse(&signature).unwrap();
        let rule = Rule { signature: &signature, linear_in: &[], differentiable: &[] };
        let want = Layout::invariant(&mesh, DType::F32, &[4, 4, 48]);
        let run = |args: &[&Layout]| infer(&rule, args, &[DType::F32], &[Some(&want)]);
        let found = repairs(&args, &[], &run(&args).unwrap_err(), &RouteCache::default(), &run);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].changes.len(), 12);
    }
}
