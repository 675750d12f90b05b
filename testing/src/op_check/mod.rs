//! Tests that every op must pass: on every layout that its rule accepts, forward and vjp match one rank (layout test);
//! and the vjp matches finite differences (gradcheck). The tests of `shardgrad-tensor` run both on every op;
//! [`check_op!`](crate::check_op!) runs both on an op of yours.

mod call;
mod finite_difference;
mod user_op;

use call::OpCall;
pub use finite_difference::{find_disagreement, gradcheck};
pub use user_op::{CheckCounts, Size, check_op, resize};

use crate::global_tensor::GlobalTensor;
use shardgrad_dist::{Axis, Error, Kind, Mesh, Rank, Result, World};
use shardgrad_tensor::op::{self, DTypes, Op};
use shardgrad_tensor::ops::{Case, Input};
use shardgrad_tensor::{Context, DType, ImplicitStep, Inference, Layout, Placement, Refusal, Repair, Tensor};
use std::panic::Location;
use std::rc::Rc;

/// The relative tolerance between layouts where the arithmetic rounds.
const TOLERANCE: f64 = 1e-12;

/// The reference results of an op call on one rank in f64, for all layouts.
#[derive(Clone, Debug)]
pub struct Reference {
    /// The arguments.
    pub inputs: Vec<GlobalTensor>,
    /// All outputs, saved outputs included.
    pub outputs: Vec<GlobalTensor>,
    /// A cotangent for each visible output.
    pub seeds: Vec<Option<GlobalTensor>>,
    /// The cotangents of the arguments; `None` where there is none.
    pub cotangents: Vec<Option<GlobalTensor>>,
}

/// The decision of the layout rule about one row of layouts, which was then run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOutcome {
    /// Accepted without redistribution.
    Direct,
    /// Accepted with free relabelling (`=` to `~`).
    Cast,
    /// Accepted with a reduced partial sum.
    Complete,
    /// Refused with repairs, and run after one of them.
    Refused,
}

impl Reference {
    /// Whether no number seems to be rounded.
    fn is_dyadic(&self) -> bool {
        self.outputs.iter().chain(self.cotangents.iter().flatten()).all(GlobalTensor::is_dyadic)
    }
}

/// Returns every layout of a shape on a mesh: each axis with each of the four placements, and two axes on one dim in
/// both orders. Bools have no partial sums.
#[must_use]
pub fn layouts(mesh: &Mesh, dtype: DType, shape: &[usize]) -> Vec<Layout> {
    let dims = (0..shape.len()).map(Placement::Shard);
    let whole = [Placement::Invariant, Placement::Replicate, Placement::Partial];
    let placements: Vec<Placement> =
        whole.into_iter().filter(|s| dtype != DType::Bool || *s != Placement::Partial).chain(dims).collect();
    let mut found = vec![(Layout::invariant(mesh, dtype, shape), Vec::<Axis>::new())];
    for axis in mesh.axes().filter(|a| mesh.size(*a) > 1) {
        let grow = |(layout, split): &(Layout, Vec<Axis>)| {
            let mut grown = Vec::new();
            for &placement in &placements {
                grown.push((layout.with_placement(axis, placement), split.clone()));
                if let Placement::Shard(d) = placement {
                    grown.last_mut().expect("pushed just now").1.push(axis);
                    // The same with this axis outside of the axis that already shards the dim.
                    for &other in split.iter().filter(|a| layout.placement(**a) == placement) {
                        let bare = layout.with_placement(other, Placement::Invariant);
                        let swapped = bare
                            .with_placement(axis, Placement::Shard(d))
                            .with_placement(other, Placement::Shard(d));
                        grown.push((swapped, grown.last().expect("pushed just now").1.clone()));
                    }
                }
            }
            grown
        };
        found = found.iter().flat_map(grow).collect();
    }
    found.into_iter().map(|(layout, _)| layout).collect()
}

/// Computes the reference results of a case on one rank, with arguments drawn by a seed.
///
/// # Errors
/// Errors of the op.
#[track_caller]
pub fn reference(make: impl Fn() -> Case + Sync, seed: u64) -> Result<Reference> {
    let site = Location::caller();
    let made = World::run(Mesh::single(), |rank| {
        let case = make();
        let draw = |(i, input)| GlobalTensor::draw(input, seed + i as u64);
        let inputs: Vec<GlobalTensor> = case.inputs.iter().enumerate().map(draw).collect();
        let args: Vec<Tensor> =
            inputs.iter().map(|g| g.distribute(rank, &whole(rank, g))).collect::<Result<_>>()?;
        let call = OpCall { op: &case.op, rank, is_strided: false, site };
        let seeds = seeds(rank, &case.op, &args, seed, site)?;
        let run = call.run(&args, &seeds, None)?;
        let global = |t: &Tensor| Ok(GlobalTensor::of(t.layout(), t.to_local_f64()?));
        let outputs = run.outputs.iter().map(global).collect::<Result<_>>()?;
        let none = || args.iter().map(|_| None).collect();
        let cotangents = run.cotangents.unwrap_or_else(none);
        let cotangents =
            cotangents.iter().map(|c| c.as_ref().map(global).transpose()).collect::<Result<_>>()?;
        Ok(Reference { inputs, outputs, seeds, cotangents })
    })?;
    Ok(made.into_iter().next().expect("a world of one rank"))
}

fn whole(rank: &Rank, x: &GlobalTensor) -> Layout {
    Layout::invariant(rank.mesh(), x.dtype, &x.shape)
}

/// Draws cotangents for the visible outputs of an op.
fn seeds(
    rank: &Rank,
    op: &Rc<dyn Op>,
    args: &[Tensor],
    seed: u64,
    site: &'static Location<'static>,
) -> Result<Vec<Option<GlobalTensor>>> {
    let layouts: Vec<&Layout> = args.iter().map(Tensor::layout).collect();
    let inference = op::plan(&**op, (rank, Context::of(rank)), &layouts, &[], site)?;
    let visible = inference.outputs.len() - op.num_saved();
    let draw = |(i, layout): (usize, &Layout)| {
        let drawn = GlobalTensor::draw(&Input::real(&layout.shape()), seed + 100 + i as u64);
        Some(GlobalTensor { dtype: layout.dtype(), ..drawn })
    };
    Ok(inference.outputs[..visible].iter().enumerate().map(draw).collect())
}

/// How the arguments of a case are distributed, and the repair if the rule refuses them.
#[derive(Clone, Debug)]
pub struct LayoutCase {
    /// The layouts of the arguments.
    pub layouts: Vec<Layout>,
    /// Whether the arguments are strided views with gaps (see [`GlobalTensor::distribute_strided`]).
    pub is_strided: bool,
    /// If the rule refuses the layouts: those of a repair from its error.
    pub repair: Option<Vec<Layout>>,
}

impl LayoutCase {
    /// Asks the layout rule. Of the repairs of a refusal, number `which` (modulo their count) is taken. The answer
    /// is the same on every rank, so one rank may ask for all in a dry run.
    ///
    /// # Errors
    /// `Kind::Unsupported` for a refusal without a repair, or with a repair that the rule refuses too.
    #[track_caller]
    pub fn of(rank: &Rank, case: &Case, layouts: Vec<Layout>, which: usize) -> Result<LayoutCase> {
        let site = Location::caller();
        let args: Vec<&Layout> = layouts.iter().collect();
        let Some(refusal) = refusal(rank, case, &args) else {
            return Ok(LayoutCase { layouts, is_strided: false, repair: None });
        };
        let layout_case = LayoutCase { layouts: layouts.clone(), is_strided: false, repair: None };
        let offers = op::suggested_repairs(&*case.op, rank, &args, &refusal);
        let place = (rank, Context::of(rank));
        if refusal.code == "shape" || offers.is_empty() {
            return layout_case.wrong(case, format!("refused without a repair: {}", refusal.message));
        }
        // Planning searches the repairs again, so only a part of the rows does. Rows go through lists of four to seven layouts per argument;
        // a divisor of such a length would plan one layout of the first argument alone.
        if which.is_multiple_of(11) {
            match op::plan(&*case.op, place, &args, &[], site) {
                Ok(_) => return layout_case.wrong(case, "refused by its layout rule but planned".into()),
                Err(e) => {
                    let is_listed = |offer: &Repair| e.details().iter().any(|d| d.1 == offer.to_string());
                    if !offers.iter().all(is_listed) {
                        return layout_case.wrong(case, format!("refused without its repairs: {e}"));
                    }
                }
            }
        }
        for Repair { args, outputs, .. } in &offers {
            let repaired: Vec<&Layout> = args.iter().collect();
            let visible = |n: &Inference| n.outputs[..n.outputs.len() - case.op.num_saved()].to_vec();
            match op::plan(&*case.op, place, &repaired, &[], site) {
                Ok(inference) if visible(&inference) == outputs.to_vec() => {}
                Ok(inference) => {
                    let (said, is) = (outputs, &inference.outputs);
                    return layout_case.wrong(case, format!("a repair promises {said:?} but gives {is:?}"));
                }
                Err(e) => return layout_case.wrong(case, format!("a repair is refused: {e}")),
            }
        }
        let repair = Some(offers[which % offers.len()].args.to_vec());
        Ok(LayoutCase { repair, ..layout_case })
    }

    fn wrong<T>(&self, case: &Case, what: String) -> Result<T> {
        let texts = |layouts: &[Layout]| layouts.iter().map(Layout::to_string).collect::<Vec<_>>().join("; ");
        let views = if self.is_strided { " on views with gaps" } else { "" };
        let repair = self.repair.as_ref().map_or(String::new(), |r| format!(" repaired to ({})", texts(r)));
        let given = texts(&self.layouts);
        Err(Error::new(Kind::Unsupported, format!("{:?} on ({given}){views}{repair}: {what}", case.op)))
    }
}

/// Runs a case with distributed arguments, after its repair if there is one, forward and backward, and compares with the
/// reference. A collective call: all ranks of the mesh call it together.
///
/// # Errors
/// `Kind::Unsupported` with the defect: a value, a layout that is not the dual, an implicit step inside a vjp.
#[track_caller]
pub fn check_row(
    rank: &Rank,
    case: &Case,
    reference: &Reference,
    layout_case: &LayoutCase,
) -> Result<RowOutcome> {
    let site = Location::caller();
    let call = OpCall { op: &case.op, rank, is_strided: layout_case.is_strided, site };
    let (given, taken) = (&layout_case.layouts, layout_case.repair.as_ref().unwrap_or(&layout_case.layouts));
    let place = |((x, given), taken): ((&GlobalTensor, &Layout), &Layout)| {
        let placed = call.distribute(x, given)?;
        if given == taken { Ok(placed) } else { placed.to_layout_at(taken, site) }
    };
    let placed: Vec<Tensor> =
        reference.inputs.iter().zip(given).zip(taken).map(place).collect::<Result<_>>()?;
    let run = call.run(&placed, &reference.seeds, None)?;
    let tolerance = if case.is_exact && reference.is_dyadic() { 0.0 } else { TOLERANCE };
    // Every rank continues to the end, whatever it finds: the others wait for it when partial sums are reduced.
    let mut finding = None;
    for (i, (y, want)) in run.outputs.iter().zip(&reference.outputs).enumerate() {
        let found = want.find_mismatch(y, tolerance, site)?;
        finding = finding.or(found.map(|f| format!("output {i} ({}) {f}", y.layout())));
    }
    for (i, cotangent) in run.cotangents.into_iter().flatten().enumerate() {
        let (Some(cotangent), Some(want)) = (cotangent, &reference.cotangents[i]) else { continue };
        let target = run.inference.targets[i].as_ref().unwrap_or(&taken[i]);
        if *cotangent.layout() != target.dual() {
            let (must, is) = (target.dual(), cotangent.layout());
            finding = finding.or(Some(format!("the cotangent of argument {i} must be {must} but is {is}")));
            break;
        }
        let back = call.back(&given[i], &taken[i], call.back(&taken[i], target, cotangent)?)?;
        if *back.layout() != given[i].dual() {
            let (must, is) = (given[i].dual(), back.layout());
            finding =
                finding.or(Some(format!("the cotangent of argument {i} must come back as {must}, not {is}")));
            break;
        }
        let found = want.find_mismatch(&back, tolerance, site)?;
        finding = finding.or(found.map(|f| format!("the cotangent of argument {i} ({}) {f}", back.layout())));
    }
    let completes = |s: &ImplicitStep| taken[s.arg].partial().contains(s.axis);
    match finding {
        Some(what) => layout_case.wrong(case, what),
        None if layout_case.repair.is_some() => Ok(RowOutcome::Refused),
        None if run.inference.steps.is_empty() => Ok(RowOutcome::Direct),
        None if run.inference.steps.iter().any(completes) => Ok(RowOutcome::Complete),
        None => Ok(RowOutcome::Cast),
    }
}

/// The refusal of the layout rule, if it refuses.
fn refusal(rank: &Rank, case: &Case, args: &[&Layout]) -> Option<Refusal> {
    let context = Context::of(rank);
    let dtypes: DTypes = args.iter().map(|l| l.dtype()).collect();
    let num_outputs = context.signature(case.op.signature()).num_outputs();
    let outputs = case.op.dtypes(&dtypes, num_outputs).ok()?;
    case.op.infer(context, args, &outputs, &[]).err()
}
