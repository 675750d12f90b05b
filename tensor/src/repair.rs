//! What to do about a refusal: the cheapest changes of layout that the rule accepts, found by trying.
//!
//! Every argument that is split may stay, be gathered to `~`, or be exchanged to another dim; where two lists of axes
//! or two grains disagree, one may adopt those of the other. With several axes one is treated after the other, in mesh order.
//! Costs count elements forward and backward, the implied steps that follow included.

use crate::dim::{AxisList, Dim};
use crate::infer::Inference;
use crate::layout::Layout;
use crate::refusal::Refusal;
use crate::route::RouteCache;
use crate::state::State;
use shardgrad_dist::{Axis, AxisSet};
use smallvec::SmallVec;
use std::fmt;

/// So many repairs are offered.
const NUM_REPAIRS: usize = 3;
/// So many partial repairs are kept while further axes are to be treated.
const NUM_KEPT: usize = 12;
/// Beyond so many combinations on one axis, at most two arguments change, or all are gathered.
const NUM_TRIES_MAX: usize = 4_096;

/// What happens to one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Move {
    /// The axis splits this dim from now on, as its innermost.
    Exchange(Axis, usize),
    /// The axis becomes `~`.
    Gather(Axis),
    /// Dim `0` takes the list of axes and the grain of dim `2` of argument `1`.
    Adopt(usize, usize, usize),
}

/// An argument and what happens to it.
pub type Change = (usize, Move);

/// A change of layouts that makes an op accept its arguments.
#[derive(Clone, Debug)]
pub struct Repair {
    /// Which argument changes how, arguments in order.
    pub changes: SmallVec<[Change; 2]>,
    /// The layouts of all arguments after the changes.
    pub args: SmallVec<[Layout; 4]>,
    /// Elements that a rank moves, forward and backward, implied steps included.
    pub elements: u64,
    /// The same in bytes.
    pub bytes: u64,
    /// The layouts of the outputs.
    pub outputs: SmallVec<[Layout; 1]>,
}

/// What an op does to layouts: its inference, overrides included.
pub type Infer<'a> = &'a dyn Fn(&[&Layout]) -> Result<Inference, Refusal>;

/// The three cheapest repairs of a refusal, cheapest first; fewer if there are fewer, none if no layout would help.
/// `differentiable` says per argument whether it has a cotangent.
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
    let search = Search { args, differentiable, routes, infer };
    let mut found = search.axis_by_axis();
    for layouts in adopted(args, refusal) {
        if found.iter().all(|r| r.args != layouts.1) {
            found.extend(search.judge(SmallVec::from_slice(&[layouts.0]), layouts.1, AxisSet::EMPTY));
        }
    }
    best(found, NUM_REPAIRS)
}

fn best(mut found: Vec<Repair>, count: usize) -> Vec<Repair> {
    found.sort_by(|a, b| {
        let key = |r: &Repair| (r.elements, r.changes.len());
        key(a).cmp(&key(b)).then_with(|| a.changes.cmp(&b.changes))
    });
    // Axes of one dim that change places and back again are no change: of equal layouts the shortest way is told.
    let mut kept: Vec<Repair> = Vec::with_capacity(count);
    for repair in found {
        if kept.len() < count && kept.iter().all(|k| k.args != repair.args) {
            kept.push(repair);
        }
    }
    kept
}

struct Search<'a> {
    args: &'a [&'a Layout],
    differentiable: &'a [bool],
    routes: &'a RouteCache,
    infer: Infer<'a>,
}

impl Search<'_> {
    fn axis_by_axis(&self) -> Vec<Repair> {
        let mesh = self.args[0].mesh();
        let axes: Vec<Axis> = mesh
            .axes()
            .filter(|a| self.args.iter().any(|l| matches!(l.state(*a), State::Shard(_))))
            .collect();
        let layouts = self.args.iter().map(|l| (*l).clone()).collect();
        let start = Repair {
            changes: SmallVec::new(),
            args: layouts,
            elements: 0,
            bytes: 0,
            outputs: SmallVec::new(),
        };
        let mut kept = vec![start];
        for (n, &axis) in axes.iter().enumerate() {
            let later: AxisSet = axes[n + 1..].iter().copied().collect();
            let mut found = Vec::new();
            for partial in &kept {
                for picks in combinations(&partial.args, axis) {
                    let (mut changes, mut layouts) = (partial.changes.clone(), partial.args.clone());
                    for (i, to) in picks {
                        changes.push((i, to));
                        let state = match to {
                            Move::Exchange(_, d) => State::Shard(d),
                            _ => State::Replicate,
                        };
                        layouts[i].set_state(axis, state);
                    }
                    changes.sort_by_key(|(i, _)| *i);
                    found.extend(self.judge(changes, layouts, later));
                }
            }
            kept = if later.is_empty() { found } else { best(found, NUM_KEPT) };
        }
        kept.retain(|r| !r.changes.is_empty());
        kept
    }

    /// The repair with its price, if the rule accepts it once the axes that are treated later are out of the way.
    fn judge(
        &self,
        changes: SmallVec<[Change; 2]>,
        args: SmallVec<[Layout; 4]>,
        later: AxisSet,
    ) -> Option<Repair> {
        let stripped: SmallVec<[Layout; 4]> = args.iter().map(|l| without(l, later)).collect();
        let shown: SmallVec<[&Layout; 4]> = stripped.iter().collect();
        let inference = (self.infer)(&shown).ok()?;
        let (mut elements, mut bytes) = (0u64, 0u64);
        for (i, now) in stripped.iter().enumerate() {
            let backward = self.differentiable.get(i).copied().unwrap_or(true) && now.dtype().is_float();
            let before = without(self.args[i], later);
            let stated = self.routes.route(&before, now, backward).ok()?.elements();
            let implied = match &inference.targets[i] {
                Some(target) => self.routes.route(now, target, backward).ok()?.elements(),
                None => 0,
            };
            let moved = stated.saturating_add(implied);
            elements = elements.saturating_add(moved);
            bytes = bytes.saturating_add(moved.saturating_mul(now.dtype().size() as u64));
        }
        Some(Repair { changes, args, elements, bytes, outputs: inference.outputs })
    }
}

fn without(layout: &Layout, axes: AxisSet) -> Layout {
    axes.iter().fold(layout.clone(), |l, a| l.with_state(a, State::Invariant))
}

/// Everything that may be done to the arguments that an axis splits: per combination the arguments that change.
fn combinations(args: &[Layout], axis: Axis) -> Vec<Vec<Change>> {
    let choices: Vec<(usize, Vec<Move>)> =
        args.iter().enumerate().filter_map(|(i, l)| Some((i, moves(l, axis)?))).collect();
    let count = choices.iter().fold(1usize, |n, (_, c)| n.saturating_mul(c.len() + 1));
    let changes_max = if count <= NUM_TRIES_MAX { choices.len() } else { 2 };
    let mut all = vec![Vec::new()];
    for (i, moves) in &choices {
        for n in 0..all.len() {
            if all[n].len() < changes_max {
                for to in moves {
                    let mut longer: Vec<Change> = all[n].clone();
                    longer.push((*i, *to));
                    all.push(longer);
                }
            }
        }
    }
    if changes_max < choices.len() {
        all.push(choices.iter().map(|(i, _)| (*i, Move::Gather(axis))).collect());
    }
    all
}

/// What may be done to one argument on an axis; `None` if the axis does not split it.
fn moves(layout: &Layout, axis: Axis) -> Option<Vec<Move>> {
    let State::Shard(source) = layout.state(axis) else { return None };
    let innermost = layout.dims()[source].axes.last() == Some(axis);
    let dims = (0..layout.ndim()).filter(|d| *d != source || !innermost);
    Some(dims.map(|d| Move::Exchange(axis, d)).chain([Move::Gather(axis)]).collect())
}

/// For two places that disagree: either argument with the list of axes and the grain of the other.
fn adopted(args: &[&Layout], refusal: &Refusal) -> Vec<(Change, SmallVec<[Layout; 4]>)> {
    let (&[(i, d), (j, e)], "order" | "grain") = (&refusal.places[..], refusal.code) else {
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
        Some(((i, Move::Adopt(d, j, e)), layouts))
    };
    [one((i, d), (j, e)), one((j, e), (i, d))].into_iter().flatten().collect()
}

/// One line: `exchange argument 0 to dim 1 (20 elements, 80 bytes; result f32[5, 4] +a)`.
impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (i, to)) in self.changes.iter().enumerate() {
            let mesh = self.args[*i].mesh();
            // On one axis there is nothing to tell apart.
            let over = |axis: Axis| {
                if mesh.num_axes() > 1 { format!(" over {}", mesh.name(axis)) } else { String::new() }
            };
            f.write_str(if n > 0 { " and " } else { "" })?;
            match to {
                Move::Exchange(axis, d) => write!(f, "exchange argument {i} to dim {d}{}", over(*axis))?,
                Move::Gather(axis) => write!(f, "gather argument {i}{}", over(*axis))?,
                Move::Adopt(..) => write!(f, "redistribute argument {i} to {}", self.args[*i])?,
            }
        }
        let outputs: Vec<String> = self.outputs.iter().map(Layout::to_string).collect();
        write!(f, " ({} elements, {} bytes; result {})", self.elements, self.bytes, outputs.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::infer::{Rule, infer};
    use crate::signature::Signature;
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
    fn the_example_of_the_specification() {
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
    fn several_axes_are_repaired_one_after_the_other() {
        let lines = help("a=2,b=2", "..m k, k n -> ..m n", &["f32[8@a@b, 8]", "f32[8@a, 8@b]"]);
        assert_eq!(lines.len(), 3);
        assert!(lines[0].contains(" over a") && lines[0].contains(" over b"), "{lines:?}");
    }

    #[test]
    fn lists_and_grains_may_be_adopted() {
        let lines = help("a=2,b=2", "..m, ..m -> ..m", &["f32[8@a@b]", "f32[8@b@a]"]);
        assert!(lines.iter().any(|l| l.contains("argument 1 to dim 0 over b")), "{lines:?}");
        let lines = help("a=2", "..m, ..m -> ..m", &["f32[12:4@a, 5]", "f32[12@a, 5]"]);
        assert!(
            lines.iter().any(|l| l.starts_with("redistribute argument 1 to f32[12:4@a, 5]")),
            "{lines:?}"
        );
    }

    #[test]
    fn no_layout_helps_against_extents() {
        assert!(help("a=2", "..m, ..m -> ..m", &["f32[4@a]", "f32[5]"]).is_empty());
    }

    #[test]
    fn many_arguments_do_not_explode() {
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
