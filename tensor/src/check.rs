//! Tests that every op must pass: on every layout that its rule accepts, forward and vjp match one rank (layout test);
//! and the vjp matches finite differences (gradcheck). The tests of this crate run both on every op;
//! [`check_op!`](crate::check_op!) runs both on an op of yours.

mod call;
mod finite_difference;
mod user_op;

use call::OpCall;
pub use finite_difference::{find_disagreement, gradcheck};
pub use user_op::{CheckCounts, Size, check_op, resize};

use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::infer::{ImplicitStep, Inference};
use crate::layout::placement::Placement;
use crate::layout::refusal::Refusal;
use crate::layout::repair::Repair;
use crate::op::{self, DTypes, Op};
use crate::ops::{Case, Input};
use crate::tensor::Tensor;
use shardgrad_dist::{Axis, Error, Kind, Mesh, Rank, Result, World};
use shardgrad_kernels::{DType, Dims, Strides};
use std::panic::Location;
use std::rc::Rc;

/// The relative tolerance between layouts where the arithmetic rounds.
const TOLERANCE: f64 = 1e-12;

/// A global tensor on the host: shape, dtype and elements, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct GlobalTensor {
    /// The dtype.
    pub dtype: DType,
    /// The shape.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Vec<f64>,
}

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

/// One of 64 odd multiples of 1/32 between -2 and 2: small sums and products of them are exact.
fn fraction(seed: u64, place: u64) -> f64 {
    (2.0 * (mixed(seed, place) % 64) as f64 - 63.0) / 32.0
}

/// A pseudorandom number (the finaliser of SplitMix64, Steele and others 2014).
fn mixed(seed: u64, place: u64) -> u64 {
    let mut z =
        seed.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Reference {
    /// Whether no number seems to be rounded.
    fn is_dyadic(&self) -> bool {
        self.outputs.iter().chain(self.cotangents.iter().flatten()).all(GlobalTensor::is_dyadic)
    }
}

impl GlobalTensor {
    /// Draws an argument for a test: the same elements for the same seed.
    #[must_use]
    pub fn draw(input: &Input, seed: u64) -> GlobalTensor {
        let shape = input.shape().to_vec();
        let places = 0..shape.iter().product::<usize>() as u64;
        let (dtype, data) = match input {
            Input::Real(_) => (DType::F64, places.map(|i| fraction(seed, i)).collect()),
            Input::Positive(_) => (DType::F64, places.map(|i| 1.5 + fraction(seed, i) / 2.0).collect()),
            Input::Offset(_, centre) => (DType::F64, places.map(|i| centre + fraction(seed, i)).collect()),
            Input::Distinct(_) => {
                let mut order: Vec<u64> = places.clone().collect();
                order.sort_unstable_by_key(|i| mixed(seed, *i));
                (DType::F64, order.iter().map(|&i| i as f64 / 8.0 - places.end as f64 / 16.0).collect())
            }
            Input::Index(_, bound) => {
                (DType::I64, places.map(|i| (mixed(seed, i) % *bound as u64) as f64).collect())
            }
            Input::Bool(_) => (DType::Bool, places.map(|i| (mixed(seed, i) % 2) as f64).collect()),
        };
        GlobalTensor { dtype, shape, data }
    }

    fn of(layout: &Layout, data: Vec<f64>) -> GlobalTensor {
        GlobalTensor { dtype: layout.dtype(), shape: layout.shape().to_vec(), data }
    }

    /// Distributes the tensor: this rank's local tensor under a layout. On partial axes the ranks get random-looking
    /// terms that add up to the value.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "distribute_tensor")]
    pub fn distribute(&self, rank: &Rank, layout: &Layout) -> Result<Tensor> {
        let layout = layout.with_dtype(self.dtype);
        let pending = layout.partial();
        let (members, me) = (rank.mesh().group_size(pending) as u64, rank.group_rank(pending) as u64);
        let noise = |at: usize, member: u64| {
            let x = fraction(at as u64, member + 1);
            if self.dtype.is_float() { x } else { (x * 4.0).trunc() }
        };
        let part = |at: usize| match me {
            _ if me + 1 < members => noise(at, me),
            _ => self.data[at] - (0..members - 1).map(|m| noise(at, m)).sum::<f64>(),
        };
        let values: Vec<f64> = places(&layout, rank).into_iter().map(part).collect();
        let local = LocalTensor::upload(rank, &layout.local_shape(rank.coordinates()), &values)?;
        let local = if self.dtype == DType::F64 { local } else { local.to_dtype(rank, self.dtype)? };
        Ok(Tensor::assemble(rank, layout, local))
    }

    /// As [`GlobalTensor::distribute`], but as a strided view with gaps whose first dim is the fastest, so that no
    /// two neighbours of a row are adjacent. The gaps hold NaN, or an invalid index.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn distribute_strided(&self, rank: &Rank, layout: &Layout) -> Result<Tensor> {
        let dense = self.distribute(rank, layout)?;
        let shape = dense.local().view.shape.clone();
        let (mut strides, mut step) = (Dims::new(), 2);
        for &n in &shape {
            strides.push(step);
            step *= n.max(1) + 1;
        }
        let gap = if self.dtype.is_float() { f64::NAN } else { 77.0 };
        let mut local = LocalTensor::full(rank, self.dtype, &[step + 1], gap)?;
        let view = Strides::new(shape, strides, 1);
        local.write(rank, view.clone(), dense.local())?;
        Ok(Tensor::assemble(rank, dense.layout().clone(), local.with_view(view)))
    }

    /// Whether every element is a multiple of 2^-24 below 2^24: results of small binary fractions without rounding.
    #[must_use]
    pub fn is_dyadic(&self) -> bool {
        let unit = f64::from(1 << 24);
        self.data.iter().all(|x| x.abs() < unit && (x * unit).fract() == 0.0)
    }

    /// Returns where this rank's part of a tensor differs from this one by more than `tolerance` (1 + |element|), if
    /// anywhere. A collective call: partial sums are reduced first.
    ///
    /// # Errors
    /// Errors of the collectives.
    pub fn find_mismatch(
        &self,
        x: &Tensor,
        tolerance: f64,
        site: &'static Location<'static>,
    ) -> Result<Option<String>> {
        let (rank, mut whole) = (x.rank(), x.layout().clone());
        if x.shape().as_slice() != self.shape || x.dtype() != self.dtype {
            return Ok(Some(format!("is {} instead of {}{:?}", x.layout(), self.dtype, self.shape)));
        }
        for axis in x.layout().partial().iter() {
            whole = whole.with_placement(axis, Placement::Invariant);
        }
        let got = x.to_layout_at(&whole, site)?.to_local_f64()?;
        let same = |got: f64, want: f64| {
            let near = (got - want).abs() <= tolerance * (1.0 + want.abs());
            got == want || (got.is_nan() && want.is_nan()) || near
        };
        let wrong = places(&whole, rank).into_iter().zip(&got).find(|&(at, &got)| !same(got, self.data[at]));
        Ok(wrong.map(|(at, got)| format!("is {got} instead of {} at global element {at}", self.data[at])))
    }
}

/// Returns the row-major global index of each local element.
fn places(layout: &Layout, rank: &Rank) -> Vec<usize> {
    let mut places = vec![0];
    for d in 0..layout.ndim() {
        let range = layout.range(d, rank.coordinates());
        places = places.iter().flat_map(|at| range.clone().map(move |i| at * layout.extent(d) + i)).collect();
    }
    places
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
        let context = Context::of(rank);
        let place = (rank, context);
        match op::plan(&*case.op, place, &args, &[], site) {
            _ if refusal.code == "shape" => return layout_case.wrong(case, "refused for its shapes".into()),
            Ok(_) => return layout_case.wrong(case, "refused by its layout rule but planned".into()),
            Err(e) if offers.is_empty() || !e.details().iter().any(|d| d.0 == "help") => {
                return layout_case.wrong(case, format!("refused without help: {e}"));
            }
            Err(_) => {}
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
