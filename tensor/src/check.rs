//! Two proofs that an op owes: on every layout that its rule accepts, forward and vjp give what one rank gives; and the
//! vjp agrees with finite differences. The tests of this crate run both on every op; an op written elsewhere is
//! given to them by [`check_op!`](crate::check_op!).

mod call;
mod differences;
mod own;

use call::Call;
pub use differences::gradients;
pub use own::{Size, Tried, op, resized};

use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{self, DTypes, Op};
use crate::ops::{Case, Input};
use crate::piece::Piece;
use crate::refusal::Refusal;
use crate::repair::Repair;
use crate::state::State;
use crate::tensor::Tensor;
use shardgrad_dist::{Axis, Error, Kind, Mesh, Rank, Result, World};
use shardgrad_kernels::{DType, Dims, Strides};
use std::panic::Location;
use std::rc::Rc;

/// The largest part of a value by which a layout may change it where the arithmetic rounds.
const TOLERANCE: f64 = 1e-12;

/// A global tensor of a call: shape, dtype and elements, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Global {
    /// Its dtype.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: Vec<f64>,
}

/// What one rank makes of a call, in f64: the standard for all layouts.
#[derive(Clone, Debug)]
pub struct Standard {
    /// The arguments.
    pub inputs: Vec<Global>,
    /// All outputs, saved ones included.
    pub outputs: Vec<Global>,
    /// A cotangent for each visible output.
    pub seeds: Vec<Option<Global>>,
    /// The cotangents of the arguments; `None` where there is none.
    pub cotangents: Vec<Option<Global>>,
}

/// What the rule said to one row of layouts, which was then run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// Accepted without a step.
    Direct,
    /// Accepted with free casts.
    Cast,
    /// Accepted with a pending sum completed.
    Complete,
    /// Refused with help, and run after a repair that the help offers.
    Refused,
}

/// One of 64 odd multiples of 1/32 between -2 and 2: small sums and products of them are exact.
fn fraction(seed: u64, place: u64) -> f64 {
    (2.0 * (mixed(seed, place) % 64) as f64 - 63.0) / 32.0
}

/// A number that looks random (the finaliser of SplitMix64, Steele and others 2014).
fn mixed(seed: u64, place: u64) -> u64 {
    let mut z =
        seed.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Standard {
    /// Whether the numbers look as if nothing was rounded on the way to them.
    fn is_dyadic(&self) -> bool {
        self.outputs.iter().chain(self.cotangents.iter().flatten()).all(Global::is_dyadic)
    }
}

impl Global {
    /// What a test may feed to an argument: the same elements for the same seed.
    #[must_use]
    pub fn draw(input: &Input, seed: u64) -> Global {
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
        Global { dtype, shape, data }
    }

    fn of(layout: &Layout, data: Vec<f64>) -> Global {
        Global { dtype: layout.dtype(), shape: layout.shape().to_vec(), data }
    }

    /// This rank's part under a layout. On pending axes the ranks get parts that look random and add up to the value.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn place(&self, rank: &Rank, layout: &Layout) -> Result<Tensor> {
        let layout = layout.with_dtype(self.dtype);
        let pending = layout.partial();
        let (members, me) = (rank.mesh().group_size(pending) as u64, rank.group_index(pending) as u64);
        let noise = |at: usize, member: u64| {
            let x = fraction(at as u64, member + 1);
            if self.dtype.is_float() { x } else { (x * 4.0).trunc() }
        };
        let part = |at: usize| match me {
            _ if me + 1 < members => noise(at, me),
            _ => self.data[at] - (0..members - 1).map(|m| noise(at, m)).sum::<f64>(),
        };
        let local: Vec<f64> = places(&layout, rank).into_iter().map(part).collect();
        let piece = Piece::upload(rank, &layout.local_shape(rank.coordinates()), &local)?;
        let piece = if self.dtype == DType::F64 { piece } else { piece.converted(rank, self.dtype)? };
        Ok(Tensor::assemble(rank, layout, piece))
    }

    /// As [`Global::place`], but on a view with gaps whose first dim runs fastest, so that no two neighbours of a row lie
    /// side by side. What lies in the gaps is no number, or no index.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn place_strided(&self, rank: &Rank, layout: &Layout) -> Result<Tensor> {
        let dense = self.place(rank, layout)?;
        let shape = dense.piece().view.shape.clone();
        let (mut strides, mut step) = (Dims::new(), 2);
        for &n in &shape {
            strides.push(step);
            step *= n.max(1) + 1;
        }
        let gap = if self.dtype.is_float() { f64::NAN } else { 77.0 };
        let mut piece = Piece::filled(rank, self.dtype, &[step + 1], gap)?;
        let view = Strides::new(shape, strides, 1);
        piece.write(rank, view.clone(), dense.piece())?;
        Ok(Tensor::assemble(rank, dense.layout().clone(), piece.viewed(view)))
    }

    /// Whether every element is a multiple of 2^-24 below 2^24: what comes of small binary fractions where nothing is
    /// rounded.
    #[must_use]
    pub fn is_dyadic(&self) -> bool {
        let unit = f64::from(1 << 24);
        self.data.iter().all(|x| x.abs() < unit && (x * unit).fract() == 0.0)
    }

    /// Where this rank's part of a tensor differs from this one by more than `tolerance` (1 + |its element|), if it does.
    /// Every rank calls this together, since pending sums are completed first.
    ///
    /// # Errors
    /// What the collectives report.
    pub fn differs(
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
            whole = whole.with_state(axis, State::Invariant);
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

/// The global row-major places of this rank's elements, row-major.
fn places(layout: &Layout, rank: &Rank) -> Vec<usize> {
    let mut places = vec![0];
    for d in 0..layout.ndim() {
        let range = layout.range(d, rank.coordinates());
        places = places.iter().flat_map(|at| range.clone().map(move |i| at * layout.extent(d) + i)).collect();
    }
    places
}

/// Every layout of a shape on a mesh: each axis in each of the four states, and two axes on one dim in both orders. Truth
/// values have no sum, so no pending state.
#[must_use]
pub fn layouts(mesh: &Mesh, dtype: DType, shape: &[usize]) -> Vec<Layout> {
    let dims = (0..shape.len()).map(State::Shard);
    let whole = [State::Invariant, State::Replicate, State::Partial];
    let states: Vec<State> =
        whole.into_iter().filter(|s| dtype != DType::Bool || *s != State::Partial).chain(dims).collect();
    let mut found = vec![(Layout::invariant(mesh, dtype, shape), Vec::<Axis>::new())];
    for axis in mesh.axes().filter(|a| mesh.size(*a) > 1) {
        let grow = |(layout, split): &(Layout, Vec<Axis>)| {
            let mut grown = Vec::new();
            for &state in &states {
                grown.push((layout.with_state(axis, state), split.clone()));
                if let State::Shard(d) = state {
                    grown.last_mut().expect("pushed just now").1.push(axis);
                    // The same with this axis outside of the one that splits the dim already.
                    for &other in split.iter().filter(|a| layout.state(**a) == state) {
                        let bare = layout.with_state(other, State::Invariant);
                        let turned =
                            bare.with_state(axis, State::Shard(d)).with_state(other, State::Shard(d));
                        grown.push((turned, grown.last().expect("pushed just now").1.clone()));
                    }
                }
            }
            grown
        };
        found = found.iter().flat_map(grow).collect();
    }
    found.into_iter().map(|(layout, _)| layout).collect()
}

/// What one rank makes of a case, with arguments drawn by a seed.
///
/// # Errors
/// What the op reports.
#[track_caller]
pub fn standard(make: impl Fn() -> Case + Sync, seed: u64) -> Result<Standard> {
    let site = Location::caller();
    let made = World::run(Mesh::single(), |rank| {
        let case = make();
        let draw = |(i, input)| Global::draw(input, seed + i as u64);
        let inputs: Vec<Global> = case.inputs.iter().enumerate().map(draw).collect();
        let args: Vec<Tensor> =
            inputs.iter().map(|g| g.place(rank, &whole(rank, g))).collect::<Result<_>>()?;
        let call = Call { op: &case.op, rank, is_strided: false, site };
        let seeds = seeds(rank, &case.op, &args, seed, site)?;
        let run = call.run(&args, &seeds, None)?;
        let global = |t: &Tensor| Ok(Global::of(t.layout(), t.to_local_f64()?));
        let outputs = run.outputs.iter().map(global).collect::<Result<_>>()?;
        let none = || args.iter().map(|_| None).collect();
        let cotangents = run.cotangents.unwrap_or_else(none);
        let cotangents =
            cotangents.iter().map(|c| c.as_ref().map(global).transpose()).collect::<Result<_>>()?;
        Ok(Standard { inputs, outputs, seeds, cotangents })
    })?;
    Ok(made.into_iter().next().expect("a world of one rank"))
}

fn whole(rank: &Rank, x: &Global) -> Layout {
    Layout::invariant(rank.mesh(), x.dtype, &x.shape)
}

/// Cotangents for the visible outputs of an op.
fn seeds(
    rank: &Rank,
    op: &Rc<dyn Op>,
    args: &[Tensor],
    seed: u64,
    site: &'static Location<'static>,
) -> Result<Vec<Option<Global>>> {
    let layouts: Vec<&Layout> = args.iter().map(Tensor::layout).collect();
    let inference = op::plan(&**op, (rank, Context::of(rank)), &layouts, &[], site)?;
    let visible = inference.outputs.len() - op.num_saved();
    let draw = |(i, layout): (usize, &Layout)| {
        let drawn = Global::draw(&Input::real(&layout.shape()), seed + 100 + i as u64);
        Some(Global { dtype: layout.dtype(), ..drawn })
    };
    Ok(inference.outputs[..visible].iter().enumerate().map(draw).collect())
}

/// How the arguments of a case lie, and what the rule says to it.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The layouts of the arguments.
    pub layouts: Vec<Layout>,
    /// Whether they lie on views with gaps (see [`Global::place_strided`]).
    pub is_strided: bool,
    /// If the rule refuses the layouts: those of a repair that its help offers.
    pub repair: Option<Vec<Layout>>,
}

impl Setting {
    /// Asks the rule. Of the repairs of a refusal number `which` is taken, counted round. The answer is the same on every
    /// rank, so one of them may ask, in a dry run, for all.
    ///
    /// # Errors
    /// `Kind::Unsupported` for a refusal without a repair, or with one that the rule refuses in its turn.
    #[track_caller]
    pub fn of(rank: &Rank, case: &Case, layouts: Vec<Layout>, which: usize) -> Result<Setting> {
        let site = Location::caller();
        let args: Vec<&Layout> = layouts.iter().collect();
        let Some(refusal) = refusal(rank, case, &args) else {
            return Ok(Setting { layouts, is_strided: false, repair: None });
        };
        let setting = Setting { layouts: layouts.clone(), is_strided: false, repair: None };
        let offers = op::offers(&*case.op, rank, &args, &refusal);
        let context = Context::of(rank);
        let place = (rank, context);
        match op::plan(&*case.op, place, &args, &[], site) {
            _ if refusal.code == "shape" => return setting.wrong(case, "refused for its shapes".into()),
            Ok(_) => return setting.wrong(case, "refused by its rule but planned".into()),
            Err(e) if offers.is_empty() || !e.details().iter().any(|d| d.0 == "help") => {
                return setting.wrong(case, format!("refused without help: {e}"));
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
                    return setting.wrong(case, format!("a repair promises {said:?} and gives {is:?}"));
                }
                Err(e) => return setting.wrong(case, format!("a repair is refused: {e}")),
            }
        }
        let repair = Some(offers[which % offers.len()].args.to_vec());
        Ok(Setting { repair, ..setting })
    }

    fn wrong<T>(&self, case: &Case, what: String) -> Result<T> {
        let texts = |layouts: &[Layout]| layouts.iter().map(Layout::to_string).collect::<Vec<_>>().join("; ");
        let views = if self.is_strided { " on views with gaps" } else { "" };
        let repair = self.repair.as_ref().map_or(String::new(), |r| format!(" repaired to ({})", texts(r)));
        let given = texts(&self.layouts);
        Err(Error::new(Kind::Unsupported, format!("{:?} on ({given}){views}{repair}: {what}", case.op)))
    }
}

/// Runs a case in a setting, after its repair if it has one, forward and backward, and compares with the standard. All ranks
/// of the mesh call this together.
///
/// # Errors
/// `Kind::Unsupported` with what is wrong: a value, a layout that is not the dual, a step inside a vjp.
#[track_caller]
pub fn row(rank: &Rank, case: &Case, standard: &Standard, setting: &Setting) -> Result<Row> {
    let site = Location::caller();
    let call = Call { op: &case.op, rank, is_strided: setting.is_strided, site };
    let (given, taken) = (&setting.layouts, setting.repair.as_ref().unwrap_or(&setting.layouts));
    let place = |((x, given), taken): ((&Global, &Layout), &Layout)| {
        let placed = call.place(x, given)?;
        if given == taken { Ok(placed) } else { placed.to_layout_at(taken, site) }
    };
    let placed: Vec<Tensor> =
        standard.inputs.iter().zip(given).zip(taken).map(place).collect::<Result<_>>()?;
    let run = call.run(&placed, &standard.seeds, None)?;
    let tolerance = if case.is_exact && standard.is_dyadic() { 0.0 } else { TOLERANCE };
    // Every rank goes on to the end, whatever it finds: the others wait for it in the completion of pending sums.
    let mut finding = None;
    for (i, (y, want)) in run.outputs.iter().zip(&standard.outputs).enumerate() {
        let found = want.differs(y, tolerance, site)?;
        finding = finding.or(found.map(|f| format!("output {i} ({}) {f}", y.layout())));
    }
    for (i, cotangent) in run.cotangents.into_iter().flatten().enumerate() {
        let (Some(cotangent), Some(want)) = (cotangent, &standard.cotangents[i]) else { continue };
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
        let found = want.differs(&back, tolerance, site)?;
        finding = finding.or(found.map(|f| format!("the cotangent of argument {i} ({}) {f}", back.layout())));
    }
    let completes = |s: &(usize, Axis, State)| taken[s.0].partial().contains(s.1);
    match finding {
        Some(what) => setting.wrong(case, what),
        None if setting.repair.is_some() => Ok(Row::Refused),
        None if run.inference.steps.is_empty() => Ok(Row::Direct),
        None if run.inference.steps.iter().any(completes) => Ok(Row::Complete),
        None => Ok(Row::Cast),
    }
}

/// The rule's refusal, if it refuses.
fn refusal(rank: &Rank, case: &Case, args: &[&Layout]) -> Option<Refusal> {
    let context = Context::of(rank);
    let dtypes: DTypes = args.iter().map(|l| l.dtype()).collect();
    let num_outputs = context.signature(case.op.signature()).num_outputs();
    let outputs = case.op.dtypes(&dtypes, num_outputs).ok()?;
    case.op.infer(context, args, &outputs, &[]).err()
}
