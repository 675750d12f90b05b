//! Generation of random programs: ops of a list on earlier values, with random layouts; a redistribution repairs
//! layouts that an op refuses.
//!
//! A program is generated without values, on one rank of its mesh. One rank then runs it, and the first step with a
//! non-finite or large result is removed with all later ones.

use super::compare::{TestInput, is_moderate};
use super::layout_pattern::LayoutPattern;
use super::program::{Program, Step, ValueRef, Values, case};
use crate::op_check::LayoutCase;
use shardgrad_autograd::Tape;
use shardgrad_dist::{Axis, Mesh, Rank, Result, World};
use shardgrad_tensor::DType;
use shardgrad_tensor::op::DTypes;
use shardgrad_tensor::ops::{Case, Input, OpModule};
use shardgrad_tensor::{Context, Layout, Placement, Tensor, Value};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Upper limits of ranks, axes and steps (redistributions for repair are not counted).
const RANKS_MAX: usize = 8;
const AXES_MAX: usize = 3;
const STEPS_MAX: usize = 20;
/// Percentages of programs that compute in f32, and that have dims of extent 0.
const F32_PERCENT: usize = 30;
const EMPTY_PERCENT: usize = 15;

/// A pseudorandom generator (SplitMix64, Steele et al. 2014).
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// A number in `0..bound`.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound.max(1) as u64) as usize
    }

    /// True with the given probability in percent.
    pub(super) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(super) fn pick<'a, T>(&mut self, list: &'a [T]) -> Option<&'a T> {
        if list.is_empty() { None } else { list.get(self.below(list.len())) }
    }

    /// A random mesh, as text.
    pub(super) fn mesh(&mut self) -> String {
        let (mut left, mut axes) = (RANKS_MAX, Vec::new());
        for name in ["a", "b", "c"].iter().take(1 + self.below(AXES_MAX)) {
            let most = if axes.is_empty() { left } else { left.min(4) };
            let size = 1 + self.below(most);
            left /= size;
            axes.push(format!("{name}={size}"));
        }
        axes.join(",")
    }

    /// A random layout: a random state for each axis, in random order.
    pub(super) fn layout(&mut self, mesh: &Mesh, dtype: DType, shape: &[usize]) -> Layout {
        let mut layout = Layout::invariant(mesh, dtype, shape);
        let mut axes: Vec<Axis> = mesh.axes().collect();
        while !axes.is_empty() {
            let axis = axes.swap_remove(self.below(axes.len()));
            let state = match self.below(3 + 2 * shape.len()) {
                0 => Placement::Invariant,
                1 => Placement::Replicate,
                // Booleans have no sum.
                2 if dtype == DType::Bool => Placement::Invariant,
                2 => Placement::Partial,
                n => Placement::Shard((n - 3) / 2),
            };
            layout = layout.with_placement(axis, state);
        }
        layout
    }
}

/// A program under construction, on one rank without values.
struct ProgramGenerator<'a> {
    ops: &'a [OpModule],
    rank: &'a Rank,
    tape: Tape,
    rng: Rng,
    program: Program,
    values: Values,
    /// Upper bounds (exclusive) of integer values, as far as known without running the program.
    index_bounds: BTreeMap<ValueRef, usize>,
    /// The number of leaves so far, including those of dropped steps, because a tape keeps the first tensor of a key.
    num_leaves: u64,
    /// Whether extents of 0 are drawn.
    has_empty: bool,
}

/// Extents fixed by earlier arguments, by label of the signature.
type Extents = BTreeMap<u8, usize>;

impl ProgramGenerator<'_> {
    /// All values so far, of one dtype or of any.
    fn values_of(&self, dtype: Option<DType>) -> Vec<ValueRef> {
        let inputs = (0..self.values.inputs.len()).map(ValueRef::Input);
        let made = self.values.outputs.iter().enumerate();
        let made = made.flat_map(|(step, m)| (0..m.len()).map(move |out| ValueRef::Output(step, out)));
        let fits = |p: &ValueRef| dtype.is_none_or(|d| self.values.get(*p).is_ok_and(|v| v.dtype() == d));
        inputs.chain(made).filter(fits).collect()
    }

    /// The dtype of an input in this program.
    fn dtype(&self, input: &Input) -> DType {
        if input.dtype().is_float() { self.program.dtype } else { input.dtype() }
    }

    /// A random extent: 1 to 5, in some programs also 0.
    fn extent(&mut self) -> usize {
        if self.has_empty && self.rng.chance(25) { 0 } else { 1 + self.rng.below(5) }
    }

    /// Adds an input.
    fn new_input(&mut self, input: Input) -> Result<ValueRef> {
        let dtype = self.dtype(&input);
        let is_leaf = dtype.is_float() && self.rng.chance(80);
        let layout = self.rng.layout(self.rank.mesh(), dtype, input.shape());
        let x = Tensor::zeros(self.rank, &layout)?;
        let at = self.program.inputs.len();
        if let Input::Index(_, most) = input {
            self.index_bounds.insert(ValueRef::Input(at), most);
        }
        self.num_leaves += 1;
        self.values.inputs.push(match is_leaf {
            true => self.tape.leaf(self.num_leaves, &x),
            false => self.tape.constant(x),
        });
        self.program.inputs.push(TestInput { input, layout: LayoutPattern::of(&layout), is_leaf });
        Ok(ValueRef::Input(at))
    }

    fn push(&mut self, step: Step) -> Result<usize> {
        let made = Program::step(self.ops, &self.tape, &step, &self.values)?;
        let at = self.program.steps.len();
        if made.iter().any(|v| v.dtype() == DType::I64) {
            // Integer results are elements of integer arguments, or indices into a dim.
            let mut most = 1;
            for arg in step.args() {
                let extents = self.values.get(arg)?.shape().iter().copied().max();
                let known = self.index_bounds.get(&arg).copied();
                most = most.max(known.unwrap_or(0)).max(extents.unwrap_or(0));
            }
            self.index_bounds.extend((0..made.len()).map(|out| (ValueRef::Output(at, out), most)));
        }
        self.values.outputs.push(made);
        self.program.steps.push(step);
        Ok(at)
    }

    /// Adds a random step, if one is possible.
    fn add_step(&mut self) -> Result<()> {
        let all = self.values_of(None);
        match self.rng.below(100) {
            0..16 => {
                let Some(&x) = self.rng.pick(&all) else { return Ok(()) };
                let (shape, dtype) = (self.values.get(x)?.shape(), self.values.get(x)?.dtype());
                let to = self.rng.layout(self.rank.mesh(), dtype, &shape);
                self.push(Step::Redistribute(x, LayoutPattern::of(&to))).map(|_| ())
            }
            16..20 => match self.rng.pick(&all) {
                Some(&x) => self.push(Step::Detach(x)).map(|_| ()),
                None => Ok(()),
            },
            _ => self.apply(),
        }
    }

    fn apply(&mut self) -> Result<()> {
        let ops = self.ops;
        let Some(entry) = self.rng.pick(ops) else { return Ok(()) };
        let number = self.rng.below((entry.cases)().len());
        let case = case(ops, entry.name, number)?;
        if self.program.dtype != DType::F64 && !self.keeps_float_dtype(&case) {
            return Ok(());
        }
        let Some(mut args) = self.args(&case)? else { return Ok(()) };
        let layouts: Vec<Layout> =
            args.iter().map(|a| Ok(self.values.get(*a)?.layout().clone())).collect::<Result<_>>()?;
        let placement = LayoutCase::of(self.rank, &case, layouts.clone(), self.rng.below(3))?;
        for (i, to) in placement.repair.iter().flatten().enumerate().filter(|(i, to)| **to != layouts[*i]) {
            args[i] = ValueRef::Output(self.push(Step::Redistribute(args[i], LayoutPattern::of(to)))?, 0);
        }
        let no_grad = self.rng.chance(5);
        self.push(Step::Apply { op: entry.name.into(), case: number, args, no_grad }).map(|_| ())
    }

    /// Whether all float results of a case have the dtype of its float inputs, so that one rank can run it in f64.
    fn keeps_float_dtype(&self, case: &Case) -> bool {
        let count = Context::of(self.rank).signature(case.op.signature()).num_outputs();
        let made = |float: DType| {
            let of = |i: &Input| if i.dtype().is_float() { float } else { i.dtype() };
            case.op.dtypes(&case.inputs.iter().map(of).collect::<DTypes>(), count)
        };
        match (made(DType::F64), made(self.program.dtype)) {
            (Ok(wide), Ok(in_f32)) => wide.iter().zip(&in_f32).all(|(w, n)| !w.is_float() || w != n),
            _ => false,
        }
    }

    /// An earlier value that fits as an argument of a case.
    fn existing_arg(
        &mut self,
        requirements: &CaseInputs<'_>,
        i: usize,
        bound: &mut Extents,
    ) -> Result<Option<ValueRef>> {
        let input = &requirements.case.inputs[i];
        let most = requirements.index_bound(i, bound).unwrap_or(usize::MAX);
        let fits = |value: &ValueRef| {
            let found = self.values.get(*value).expect("a value of the list").shape();
            let fits = |(d, (&n, &want)): (usize, (&usize, &usize))| match requirements.label(i, d) {
                Some(label) if want != 1 => bound.get(&label).is_none_or(|b| *b == n),
                _ => n == want,
            };
            found.len() == input.shape().len()
                && found.iter().zip(input.shape()).enumerate().all(fits)
                && self.index_bounds.get(value).is_none_or(|b| *b <= most)
        };
        let fitting: Vec<ValueRef> =
            self.values_of(Some(self.dtype(input))).into_iter().filter(fits).collect();
        if !self.rng.chance(85) {
            return Ok(None);
        }
        let Some(&value) = self.rng.pick(&fitting) else { return Ok(None) };
        for (d, n) in self.values.get(value)?.shape().iter().enumerate() {
            bound.extend(requirements.label(i, d).map(|label| (label, *n)));
        }
        Ok(Some(value))
    }

    /// A new input as an argument of a case; `None` if its indices would have an empty range.
    fn new_arg(
        &mut self,
        requirements: &CaseInputs<'_>,
        i: usize,
        bound: &mut Extents,
    ) -> Result<Option<ValueRef>> {
        let input = &requirements.case.inputs[i];
        let mut shape = Vec::new();
        for (d, &n) in input.shape().iter().enumerate() {
            shape.push(match requirements.label(i, d).filter(|_| n != 1) {
                Some(label) if bound.contains_key(&label) => bound[&label],
                Some(label) => *bound.entry(label).insert_entry(self.extent()).get(),
                None => n,
            });
        }
        match requirements.index_bound(i, bound) {
            Some(0) if !shape.contains(&0) => Ok(None),
            Some(most) => self.new_input(Input::Index(shape, most)).map(Some),
            None => self.new_input(input.with_shape(&shape)).map(Some),
        }
    }

    /// Arguments for a case: earlier values where they fit, else new inputs. Integers come last, since some are indices
    /// into the other arguments.
    fn args(&mut self, case: &Case) -> Result<Option<Vec<ValueRef>>> {
        let requirements = CaseInputs::of(self.rank, case);
        let (mut bound, mut args) = (Extents::new(), vec![None; case.inputs.len()]);
        let is_index = |i: &usize| matches!(case.inputs[*i], Input::Index(..));
        let others = || (0..case.inputs.len()).filter(|i| !is_index(i));
        for i in others().filter(|i| matches!(case.inputs[*i], Input::Real(_) | Input::Bool(_))) {
            args[i] = self.existing_arg(&requirements, i, &mut bound)?;
        }
        let has_none = others().count() > 0 && args.iter().all(Option::is_none);
        if has_none && !self.values_of(Some(self.program.dtype)).is_empty() && self.rng.chance(70) {
            return Ok(None);
        }
        for i in others().chain((0..case.inputs.len()).filter(is_index)) {
            if is_index(&i) {
                args[i] = self.existing_arg(&requirements, i, &mut bound)?;
            }
            if args[i].is_none() {
                args[i] = self.new_arg(&requirements, i, &mut bound)?;
            }
            if args[i].is_none() {
                return Ok(None);
            }
        }
        Ok(args.into_iter().collect())
    }
}

/// The requirements of a case on its arguments.
struct CaseInputs<'a> {
    case: &'a Case,
    /// The signature label by argument and dim; empty if the case allows no other extents.
    labels: Vec<Vec<u8>>,
}

impl CaseInputs<'_> {
    fn of<'a>(rank: &Rank, case: &'a Case) -> CaseInputs<'a> {
        let signature = Context::of(rank).signature(case.op.signature());
        let ndim = |i: usize| case.inputs.get(i).map_or(0, |input| input.shape().len());
        let bound = if case.has_fixed_shape { None } else { signature.bind(ndim, |_| None).ok() };
        let labels = bound.map(|l| l.inputs().to_vec()).filter(|l| l.len() >= case.inputs.len());
        CaseInputs { case, labels: labels.unwrap_or_default() }
    }

    fn label(&self, i: usize, d: usize) -> Option<u8> {
        self.labels.get(i)?.get(d).copied()
    }

    /// The exclusive upper bound of an index argument: the extent of the dim that it indexes.
    fn index_bound(&self, i: usize, bound: &Extents) -> Option<usize> {
        let Input::Index(_, most) = self.case.inputs[i] else { return None };
        let dims =
            self.case.inputs.iter().zip(&self.labels).flat_map(|(input, l)| input.shape().iter().zip(l));
        let dims = dims.filter(|(n, _)| **n == most).filter_map(|(_, label)| bound.get(label).copied());
        Some(dims.min().unwrap_or(most))
    }
}

impl Program {
    /// A random program over the ops of a list. `None` if no runnable program was found.
    ///
    /// # Errors
    /// The errors of a dry run on the mesh.
    pub fn draw(ops: &[OpModule], seed: u64) -> Result<Option<Program>> {
        let mut rng = Rng::new(seed);
        let mesh = rng.mesh();
        let dtype = if rng.chance(F32_PERCENT) { DType::F32 } else { DType::F64 };
        let has_empty = rng.chance(EMPTY_PERCENT);
        let drawn = World::new(Mesh::parse(&mesh)?).dry_run(0, |rank| {
            let (inputs, steps, blocks, outputs) = Default::default();
            let program = Program { mesh: mesh.clone(), dtype, inputs, steps, blocks, outputs, seed };
            let (tape, values, index_bounds) = (Tape::new(rank), Values::default(), BTreeMap::new());
            let mut generator = ProgramGenerator {
                ops,
                rank,
                tape,
                rng,
                program,
                values,
                index_bounds,
                num_leaves: 0,
                has_empty,
            };
            for _ in 0..1 + generator.rng.below(STEPS_MAX) {
                let before = (generator.program.clone(), generator.values.clone());
                // Steps that an op refuses altogether (extents, dtypes) are dropped.
                if !matches!(catch_unwind(AssertUnwindSafe(|| generator.add_step())), Ok(Ok(()))) {
                    (generator.program, generator.values) = before;
                }
            }
            Ok((generator.program, generator.rng))
        })?;
        let (mut program, mut rng) = drawn;
        program.truncate(ops);
        program.choose_outputs(ops, &mut rng);
        Ok(if program.outputs.is_empty() { None } else { Some(program) })
    }

    /// Removes the first step with a result that is not moderate, and all later ones.
    fn truncate(&mut self, ops: &[OpModule]) {
        while !self.steps.is_empty() {
            let counts = |step: &Step| match step {
                Step::Apply { op, case: number, .. } => case(ops, op, *number).map_or(0, |c| {
                    let signature = shardgrad_tensor::Signature::parse(c.op.signature());
                    signature.map_or(0, |s| s.num_outputs() - c.op.num_saved())
                }),
                _ => 1,
            };
            let all: Vec<ValueRef> = (self.steps.iter().enumerate())
                .flat_map(|(at, step)| (0..counts(step)).map(move |out| ValueRef::Output(at, out)))
                .collect();
            self.outputs = all.clone();
            let bad = match self.on_one_rank(ops) {
                Ok(made) => {
                    all.iter().zip(&made.outputs).find(|(_, x)| !is_moderate(x, self.dtype)).map(|(p, _)| *p)
                }
                Err(_) => all.last().copied(),
            };
            match bad {
                Some(ValueRef::Output(step, _)) => self.steps.truncate(step),
                _ => return,
            }
        }
        self.outputs.clear();
    }

    /// Chooses outputs and checkpointed blocks such that gradients are moderate too.
    fn choose_outputs(&mut self, ops: &[OpModule], rng: &mut Rng) {
        while !self.steps.is_empty() {
            let made = |p: &ValueRef| matches!(p, ValueRef::Output(step, _) if *step < self.steps.len());
            let all: Vec<ValueRef> = std::mem::take(&mut self.outputs).into_iter().filter(made).collect();
            self.outputs = (0..1 + rng.below(3)).filter_map(|_| rng.pick(&all).copied()).collect();
            self.blocks.clear();
            if rng.chance(40) {
                let from = rng.below(self.steps.len());
                self.blocks.push(from..from + 1 + rng.below(self.steps.len() - from));
            }
            if self.on_one_rank(ops).is_ok_and(|made| made.is_moderate(self.dtype)) {
                return;
            }
            self.outputs = all;
            self.steps.pop();
        }
        self.outputs.clear();
    }
}
