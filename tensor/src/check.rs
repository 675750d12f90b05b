//! Two proofs that an op owes: on every layout that its rule accepts, forward and vjp give what one rank gives; and the
//! vjp agrees with finite differences. The tests of this crate run both on every op; an op written elsewhere can be
//! given to them as a [`Case`] in the same way.

use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{self, Cotangents, DTypes, Op, Vjp, differentiable_args};
use crate::ops::redistribute::Redistribute;
use crate::ops::{Case, Input};
use crate::piece::Piece;
use crate::quotient;
use crate::state::State;
use crate::tensor::Tensor;
use shardgrad_dist::{Axis, Error, Kind, Mesh, Rank, Result, World};
use shardgrad_kernels::DType;
use smallvec::SmallVec;
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
    /// Refused, with help.
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

impl Global {
    /// What a test may feed to an argument: the same elements for the same seed.
    #[must_use]
    pub fn draw(input: &Input, seed: u64) -> Global {
        let shape = input.shape().to_vec();
        let places = 0..shape.iter().product::<usize>() as u64;
        let (dtype, data) = match input {
            Input::Real(_) => (DType::F64, places.map(|i| fraction(seed, i)).collect()),
            Input::Positive(_) => (DType::F64, places.map(|i| 1.5 + fraction(seed, i) / 2.0).collect()),
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

    /// Where this rank's part of a tensor differs from this one, if it does. Every rank calls this together, since
    /// pending sums are completed first.
    fn differs(
        &self,
        x: &Tensor,
        is_exact: bool,
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
            let near = (got - want).abs() <= TOLERANCE * (1.0 + want.abs());
            got == want || (got.is_nan() && want.is_nan()) || (near && !is_exact)
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

/// Inferred and run forward and, where there is something to differentiate, backward.
struct Run {
    inference: Rc<Inference>,
    outputs: SmallVec<[Tensor; 2]>,
    /// In the duals of the arguments' layouts after their steps.
    cotangents: Option<Cotangents>,
}

/// One call on tensors that lie as they may.
struct Call<'a> {
    op: &'a Rc<dyn Op>,
    rank: &'a Rank,
    site: &'static Location<'static>,
}

impl Call<'_> {
    /// Everything that a tape does with one op; `seeds` has the cotangents of the visible outputs, `None` for one that
    /// has no use.
    fn run(&self, args: &[Tensor], seeds: &[Option<Global>], wanted: Option<&[bool]>) -> Result<Run> {
        let layouts: Vec<&Layout> = args.iter().map(Tensor::layout).collect();
        let inference = op::plan(&**self.op, self.rank, &layouts, &[], self.site)?;
        let mut moved = Vec::new();
        for (x, target) in args.iter().zip(&inference.targets) {
            moved.push(match target {
                None => x.clone(),
                Some(to) => {
                    let op = Redistribute::between(self.rank, x.layout(), to)?;
                    op::apply(&op, &[x], &[], self.site)?.remove(0)
                }
            });
        }
        let outputs = op::run(&**self.op, &moved, &inference, self.rank, self.site)?;
        let differentiable = differentiable_args(&**self.op, &layouts);
        let visible = outputs.len() - self.op.num_saved();
        let floats = outputs[..visible].iter().any(|t| t.dtype().is_float());
        if !floats || !differentiable.iter().any(|d| *d) {
            return Ok(Run { inference, outputs, cotangents: None });
        }
        let grads: Vec<Option<Tensor>> = outputs[..visible]
            .iter()
            .zip(seeds)
            .map(|(y, seed)| seed.as_ref().map(|s| s.place(self.rank, &y.layout().dual())).transpose())
            .collect::<Result<_>>()?;
        let keeps = self.op.keeps();
        let kept = |list: &[Tensor], which: &[usize]| -> Vec<Option<Tensor>> {
            list.iter().enumerate().map(|(i, t)| which.contains(&i).then(|| t.clone())).collect()
        };
        let context = Context::of(self.rank);
        let closed = context.set_closed(true);
        let cotangents = self.op.vjp(&Vjp {
            rank: self.rank,
            inputs: &kept(&moved, keeps.inputs),
            outputs: &kept(&outputs, keeps.outputs),
            input_layouts: &moved.iter().map(|t| t.layout().clone()).collect::<Vec<_>>(),
            output_layouts: &outputs.iter().map(|t| t.layout().clone()).collect::<Vec<_>>(),
            grads: &grads,
            wanted: wanted.unwrap_or(&differentiable),
        });
        context.set_closed(closed);
        Ok(Run { inference, outputs, cotangents: Some(cotangents) })
    }

    /// A cotangent brought back over the step that its argument took.
    fn back(&self, x: &Layout, target: &Layout, cotangent: Tensor) -> Result<Tensor> {
        let op = Redistribute::between(self.rank, x, target)?;
        let grads = [Some(cotangent)];
        let back = op.vjp(&Vjp {
            rank: self.rank,
            inputs: &[None],
            outputs: &[None],
            input_layouts: std::slice::from_ref(x),
            output_layouts: std::slice::from_ref(target),
            grads: &grads,
            wanted: &[true],
        });
        Ok(back.into_iter().next().flatten().expect("redistribution has a vjp"))
    }
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
        let call = Call { op: &case.op, rank, site };
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
    let inference = op::plan(&**op, rank, &layouts, &[], site)?;
    let visible = inference.outputs.len() - op.num_saved();
    let draw = |(i, layout): (usize, &Layout)| {
        let drawn = Global::draw(&Input::real(&layout.shape()), seed + 100 + i as u64);
        Some(Global { dtype: layout.dtype(), ..drawn })
    };
    Ok(inference.outputs[..visible].iter().enumerate().map(draw).collect())
}

/// Runs a case with its arguments in some layouts, forward and backward, and compares with the standard. All ranks of
/// the mesh call this together.
///
/// # Errors
/// `Kind::Unsupported` with what is wrong: a value, a layout that is not the dual, a step inside a vjp, a refusal without
/// help.
#[track_caller]
pub fn row(rank: &Rank, case: &Case, standard: &Standard, layouts: &[Layout]) -> Result<Row> {
    let site = Location::caller();
    let wrong = |what: String| {
        let given: Vec<String> = layouts.iter().map(Layout::to_string).collect();
        Err(Error::new(Kind::Unsupported, format!("{:?} on ({}): {what}", case.op, given.join("; "))))
    };
    let args: Vec<&Layout> = layouts.iter().collect();
    if let Some(code) = refusal(rank, case, &args) {
        // The help is a search that is the same on every rank: one of them looks at it.
        let error = (rank.index() == 0).then(|| op::plan(&*case.op, rank, &args, &[], site).err());
        return match error {
            _ if code == "shape" => wrong("refused for its shapes".into()),
            Some(None) => wrong("refused by its rule but planned".into()),
            Some(Some(e)) if !e.details().iter().any(|d| d.0 == "help") => {
                wrong(format!("refused without help: {e}"))
            }
            _ => Ok(Row::Refused),
        };
    }
    let placed: Vec<Tensor> =
        standard.inputs.iter().zip(layouts).map(|(g, l)| g.place(rank, l)).collect::<Result<_>>()?;
    let call = Call { op: &case.op, rank, site };
    let run = call.run(&placed, &standard.seeds, None)?;
    // Every rank goes on to the end, whatever it finds: the others wait for it in the completion of pending sums.
    let mut finding = None;
    for (i, (y, want)) in run.outputs.iter().zip(&standard.outputs).enumerate() {
        let found = want.differs(y, case.is_exact, site)?;
        finding = finding.or(found.map(|f| format!("output {i} ({}) {f}", y.layout())));
    }
    for (i, cotangent) in run.cotangents.into_iter().flatten().enumerate() {
        let (Some(cotangent), Some(want)) = (cotangent, &standard.cotangents[i]) else { continue };
        let target = run.inference.targets[i].as_ref().unwrap_or(&layouts[i]);
        if *cotangent.layout() != target.dual() {
            let (must, is) = (target.dual(), cotangent.layout());
            finding = finding.or(Some(format!("the cotangent of argument {i} must be {must} but is {is}")));
            break;
        }
        let back = if *target == layouts[i] { cotangent } else { call.back(&layouts[i], target, cotangent)? };
        if *back.layout() != layouts[i].dual() {
            let (must, is) = (layouts[i].dual(), back.layout());
            finding =
                finding.or(Some(format!("the cotangent of argument {i} must come back as {must}, not {is}")));
            break;
        }
        let found = want.differs(&back, case.is_exact, site)?;
        finding = finding.or(found.map(|f| format!("the cotangent of argument {i} ({}) {f}", back.layout())));
    }
    let completes = |s: &(usize, Axis, State)| layouts[s.0].partial().contains(s.1);
    match finding {
        Some(what) => wrong(what),
        None if run.inference.steps.is_empty() => Ok(Row::Direct),
        None if run.inference.steps.iter().any(completes) => Ok(Row::Complete),
        None => Ok(Row::Cast),
    }
}

/// The code of the rule's refusal, if it refuses.
fn refusal(rank: &Rank, case: &Case, args: &[&Layout]) -> Option<&'static str> {
    let context = Context::of(rank);
    let dtypes: DTypes = args.iter().map(|l| l.dtype()).collect();
    let num_outputs = context.signature(case.op.signature()).num_outputs();
    let outputs = case.op.dtypes(&dtypes, num_outputs).ok()?;
    case.op.infer(&context, args, &outputs, &[]).err().map(|r| r.code)
}

/// Compares the cotangents of a case, on one rank in f64, with central differences of the forward, element by element;
/// those of each argument alone with those of all together; and those of results without use with those of zeros.
///
/// # Errors
/// `Kind::Unsupported` naming the first argument and element that disagree.
#[track_caller]
pub fn gradients(make: impl Fn() -> Case + Sync, standard: &Standard) -> Result<()> {
    let site = Location::caller();
    World::run(Mesh::single(), |rank| {
        let case = make();
        let probe = Probe { call: Call { op: &case.op, rank, site }, standard };
        for (i, cotangent) in standard.cotangents.iter().enumerate() {
            if let Some(cotangent) = cotangent {
                probe.differences(i, cotangent)?;
                probe.mask(i, cotangent)?;
            }
        }
        (0..standard.seeds.len()).try_for_each(|k| probe.unused(k))
    })?;
    Ok(())
}

/// One case on one rank.
struct Probe<'a> {
    call: Call<'a>,
    standard: &'a Standard,
}

impl Probe<'_> {
    fn wrong<T>(&self, what: String) -> Result<T> {
        Err(Error::new(Kind::Unsupported, format!("{:?}: {what}", self.call.op)))
    }

    fn args(&self, inputs: &[Global]) -> Result<Vec<Tensor>> {
        inputs.iter().map(|g| g.place(self.call.rank, &whole(self.call.rank, g))).collect()
    }

    /// The sum of the products of results and seeds.
    fn loss(&self, inputs: &[Global]) -> Result<f64> {
        let args = self.args(inputs)?;
        let refs: Vec<&Tensor> = args.iter().collect();
        let outputs = op::apply(self.call.op, &refs, &[], self.call.site)?;
        let mut loss = 0.0;
        for (y, seed) in outputs.iter().zip(self.standard.seeds.iter().flatten()) {
            loss += y.to_local_f64()?.iter().zip(&seed.data).map(|(y, s)| y * s).sum::<f64>();
        }
        Ok(loss)
    }

    fn differences(&self, i: usize, cotangent: &Global) -> Result<()> {
        let mut inputs = self.standard.inputs.clone();
        let found = quotient::disagreement(&cotangent.data, |at, by| {
            let x = inputs[i].data[at];
            inputs[i].data[at] = x + by;
            let loss = self.loss(&inputs);
            inputs[i].data[at] = x;
            loss
        })?;
        match found {
            None => Ok(()),
            Some((at, claimed, quotient)) => {
                self.wrong(format!("cotangent {i} is {claimed} at element {at}, differences say {quotient}"))
            }
        }
    }

    fn mask(&self, i: usize, cotangent: &Global) -> Result<()> {
        let args = self.args(&self.standard.inputs)?;
        let only: Vec<bool> = (0..args.len()).map(|k| k == i).collect();
        let cotangents = self.call.run(&args, &self.standard.seeds, Some(&only))?.cotangents;
        for (k, alone) in cotangents.into_iter().flatten().enumerate() {
            let same = match &alone {
                None => k != i,
                Some(alone) => k == i && cotangent.differs(alone, true, self.call.site)?.is_none(),
            };
            if !same {
                return self.wrong(format!("asked for cotangent {i} alone, the vjp gives {alone:?} for {k}"));
            }
        }
        Ok(())
    }

    fn unused(&self, k: usize) -> Result<()> {
        let args = self.args(&self.standard.inputs)?;
        let mut seeds = self.standard.seeds.clone();
        seeds[k] = seeds[k].take().map(|s| Global { data: vec![0.0; s.data.len()], ..s });
        let zeros = self.call.run(&args, &seeds, None)?.cotangents;
        seeds[k] = None;
        let unused = self.call.run(&args, &seeds, None)?.cotangents;
        for (zero, none) in zeros.into_iter().flatten().zip(unused.into_iter().flatten()) {
            let (Some(zero), Some(none)) = (zero, none) else { continue };
            let zero = Global::of(zero.layout(), zero.to_local_f64()?);
            if let Some(found) = zero.differs(&none, true, self.call.site)? {
                return self
                    .wrong(format!("with result {k} unused a cotangent {found}, the value for zeros"));
            }
        }
        Ok(())
    }
}
