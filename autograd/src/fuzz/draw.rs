//! Random programs: ops of a list on values made before, layouts by chance, repairs where an op refuses.
//!
//! A program is drawn without values, on one rank of its mesh; then one rank runs it, and what is not finite or grows large
//! is cut off with all that follows.

use super::marks::Marks;
use super::program::{Place, Program, Step, Values, case};
use super::trial::{Feed, is_moderate};
use crate::tape::Tape;
use shardgrad_dist::{Axis, Mesh, Rank, Result, World};
use shardgrad_tensor::DType;
use shardgrad_tensor::check::Setting;
use shardgrad_tensor::op::DTypes;
use shardgrad_tensor::ops::{Case, Entry, Input};
use shardgrad_tensor::{Context, Layout, State, Tensor, Value};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// At most so many ranks, axes and steps (moves that repair a refusal come on top).
const RANKS_MAX: usize = 8;
const AXES_MAX: usize = 3;
const STEPS_MAX: usize = 20;
/// So many programs of a hundred compute in f32, and have dims of extent 0.
const F32_PERCENT: usize = 30;
const EMPTY_PERCENT: usize = 15;

/// Numbers that look random (the generator SplitMix64, Steele and others 2014).
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// One of `0..bound`.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound.max(1) as u64) as usize
    }

    /// True in so many of a hundred throws.
    pub(super) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(super) fn pick<'a, T>(&mut self, list: &'a [T]) -> Option<&'a T> {
        if list.is_empty() { None } else { list.get(self.below(list.len())) }
    }

    /// A mesh as text.
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

    /// A layout: each axis, in any order, in any state.
    pub(super) fn layout(&mut self, mesh: &Mesh, dtype: DType, shape: &[usize]) -> Layout {
        let mut layout = Layout::invariant(mesh, dtype, shape);
        let mut axes: Vec<Axis> = mesh.axes().collect();
        while !axes.is_empty() {
            let axis = axes.swap_remove(self.below(axes.len()));
            let state = match self.below(3 + 2 * shape.len()) {
                0 => State::Invariant,
                1 => State::Replicate,
                // Truth values have no sum.
                2 if dtype == DType::Bool => State::Invariant,
                2 => State::Partial,
                n => State::Shard((n - 3) / 2),
            };
            layout = layout.with_state(axis, state);
        }
        layout
    }
}

/// A program under way, on one rank without values.
struct Maker<'a> {
    ops: &'a [Entry],
    rank: &'a Rank,
    tape: Tape,
    dice: Dice,
    program: Program,
    values: Values,
    /// By value of integers: they are below this, as far as can be told without running it.
    below: BTreeMap<Place, usize>,
    /// Leaves drawn so far, those of steps that were dropped among them: a tape keeps the first tensor of a key.
    num_leaves: u64,
    /// Whether extents of 0 are drawn.
    has_empty: bool,
}

/// What must hold of the extents of the arguments: by label of the signature, how many.
type Bound = BTreeMap<u8, usize>;

impl Maker<'_> {
    /// All values so far, of one dtype or of any.
    fn places(&self, dtype: Option<DType>) -> Vec<Place> {
        let inputs = (0..self.values.inputs.len()).map(Place::Input);
        let made = self.values.made.iter().enumerate();
        let made = made.flat_map(|(step, m)| (0..m.len()).map(move |out| Place::Made(step, out)));
        let fits = |p: &Place| dtype.is_none_or(|d| self.values.get(*p).is_ok_and(|v| v.dtype() == d));
        inputs.chain(made).filter(fits).collect()
    }

    /// The dtype in which an input goes into this program.
    fn dtype(&self, input: &Input) -> DType {
        if input.dtype().is_float() { self.program.dtype } else { input.dtype() }
    }

    /// An extent: one of 1 to 5, in some programs 0 too.
    fn extent(&mut self) -> usize {
        if self.has_empty && self.dice.chance(25) { 0 } else { 1 + self.dice.below(5) }
    }

    /// Something new that goes in.
    fn feed(&mut self, input: Input) -> Result<Place> {
        let dtype = self.dtype(&input);
        let is_leaf = dtype.is_float() && self.dice.chance(80);
        let layout = self.dice.layout(self.rank.mesh(), dtype, input.shape());
        let x = Tensor::zeros(self.rank, &layout)?;
        let at = self.program.inputs.len();
        if let Input::Index(_, most) = input {
            self.below.insert(Place::Input(at), most);
        }
        self.num_leaves += 1;
        self.values.inputs.push(match is_leaf {
            true => self.tape.leaf(self.num_leaves, &x),
            false => self.tape.constant(x),
        });
        self.program.inputs.push(Feed { input, marks: Marks::of(&layout), is_leaf });
        Ok(Place::Input(at))
    }

    fn push(&mut self, step: Step) -> Result<usize> {
        let made = Program::step(self.ops, &self.tape, &step, &self.values)?;
        let at = self.program.steps.len();
        if made.iter().any(|v| v.dtype() == DType::I64) {
            // Integers are some of those that go in, or places in a dim.
            let mut most = 1;
            for arg in step.args() {
                let extents = self.values.get(arg)?.shape().iter().copied().max();
                let known = self.below.get(&arg).copied();
                most = most.max(known.unwrap_or(0)).max(extents.unwrap_or(0));
            }
            self.below.extend((0..made.len()).map(|out| (Place::Made(at, out), most)));
        }
        self.values.made.push(made);
        self.program.steps.push(step);
        Ok(at)
    }

    /// One more step, if chance finds one that is possible.
    fn grow(&mut self) -> Result<()> {
        let places = self.places(None);
        match self.dice.below(100) {
            0..16 => {
                let Some(&x) = self.dice.pick(&places) else { return Ok(()) };
                let (shape, dtype) = (self.values.get(x)?.shape(), self.values.get(x)?.dtype());
                let to = self.dice.layout(self.rank.mesh(), dtype, &shape);
                self.push(Step::Move(x, Marks::of(&to))).map(|_| ())
            }
            16..20 => match self.dice.pick(&places) {
                Some(&x) => self.push(Step::Detach(x)).map(|_| ()),
                None => Ok(()),
            },
            _ => self.apply(),
        }
    }

    fn apply(&mut self) -> Result<()> {
        let ops = self.ops;
        let Some(entry) = self.dice.pick(ops) else { return Ok(()) };
        let number = self.dice.below((entry.cases)().len());
        let case = case(ops, entry.name, number)?;
        if self.program.dtype != DType::F64 && !self.follows(&case) {
            return Ok(());
        }
        let Some(mut args) = self.args(&case)? else { return Ok(()) };
        let layouts: Vec<Layout> =
            args.iter().map(|a| Ok(self.values.get(*a)?.layout().clone())).collect::<Result<_>>()?;
        let setting = Setting::of(self.rank, &case, layouts.clone(), self.dice.below(3))?;
        for (i, to) in setting.repair.iter().flatten().enumerate().filter(|(i, to)| **to != layouts[*i]) {
            args[i] = Place::Made(self.push(Step::Move(args[i], Marks::of(to)))?, 0);
        }
        let is_quiet = self.dice.chance(5);
        self.push(Step::Apply { op: entry.name.into(), case: number, args, is_quiet }).map(|_| ())
    }

    /// Whether all floats that a case makes are of the dtype of those that go in, so that one rank can run it in f64.
    fn follows(&self, case: &Case) -> bool {
        let count = Context::of(self.rank).signature(case.op.signature()).num_outputs();
        let made = |float: DType| {
            let of = |i: &Input| if i.dtype().is_float() { float } else { i.dtype() };
            case.op.dtypes(&case.inputs.iter().map(of).collect::<DTypes>(), count)
        };
        match (made(DType::F64), made(self.program.dtype)) {
            (Ok(wide), Ok(narrow)) => wide.iter().zip(&narrow).all(|(w, n)| !w.is_float() || w != n),
            _ => false,
        }
    }

    /// A value made before that can be an argument of a case.
    fn known(&mut self, wanted: &Wanted<'_>, i: usize, bound: &mut Bound) -> Result<Option<Place>> {
        let input = &wanted.case.inputs[i];
        let most = wanted.most(i, bound).unwrap_or(usize::MAX);
        let fits = |place: &Place| {
            let found = self.values.get(*place).expect("a value of the list").shape();
            let fits = |(d, (&n, &want)): (usize, (&usize, &usize))| match wanted.label(i, d) {
                Some(label) if want != 1 => bound.get(&label).is_none_or(|b| *b == n),
                _ => n == want,
            };
            found.len() == input.shape().len()
                && found.iter().zip(input.shape()).enumerate().all(fits)
                && self.below.get(place).is_none_or(|b| *b <= most)
        };
        let fitting: Vec<Place> = self.places(Some(self.dtype(input))).into_iter().filter(fits).collect();
        if !self.dice.chance(85) {
            return Ok(None);
        }
        let Some(&place) = self.dice.pick(&fitting) else { return Ok(None) };
        for (d, n) in self.values.get(place)?.shape().iter().enumerate() {
            bound.extend(wanted.label(i, d).map(|label| (label, *n)));
        }
        Ok(Some(place))
    }

    /// A new input that can be an argument of a case; `None` where it would point into nothing.
    fn fresh(&mut self, wanted: &Wanted<'_>, i: usize, bound: &mut Bound) -> Result<Option<Place>> {
        let input = &wanted.case.inputs[i];
        let mut shape = Vec::new();
        for (d, &n) in input.shape().iter().enumerate() {
            shape.push(match wanted.label(i, d).filter(|_| n != 1) {
                Some(label) if bound.contains_key(&label) => bound[&label],
                Some(label) => *bound.entry(label).insert_entry(self.extent()).get(),
                None => n,
            });
        }
        match wanted.most(i, bound) {
            Some(0) if !shape.contains(&0) => Ok(None),
            Some(most) => self.feed(Input::Index(shape, most)).map(Some),
            None => self.feed(input.with_shape(&shape)).map(Some),
        }
    }

    /// Arguments for a case: values made before where they fit, new ones otherwise. Integers come last, since some point
    /// into the others.
    fn args(&mut self, case: &Case) -> Result<Option<Vec<Place>>> {
        let wanted = Wanted::of(self.rank, case);
        let (mut bound, mut args) = (Bound::new(), vec![None; case.inputs.len()]);
        let is_index = |i: &usize| matches!(case.inputs[*i], Input::Index(..));
        let others = || (0..case.inputs.len()).filter(|i| !is_index(i));
        for i in others().filter(|i| matches!(case.inputs[*i], Input::Real(_) | Input::Bool(_))) {
            args[i] = self.known(&wanted, i, &mut bound)?;
        }
        let has_none = others().count() > 0 && args.iter().all(Option::is_none);
        if has_none && !self.places(Some(self.program.dtype)).is_empty() && self.dice.chance(70) {
            return Ok(None);
        }
        for i in others().chain((0..case.inputs.len()).filter(is_index)) {
            if is_index(&i) {
                args[i] = self.known(&wanted, i, &mut bound)?;
            }
            if args[i].is_none() {
                args[i] = self.fresh(&wanted, i, &mut bound)?;
            }
            if args[i].is_none() {
                return Ok(None);
            }
        }
        Ok(args.into_iter().collect())
    }
}

/// What a case asks of its arguments.
struct Wanted<'a> {
    case: &'a Case,
    /// By argument and dim, the label; empty where the case takes no other extents.
    labels: Vec<Vec<u8>>,
}

impl Wanted<'_> {
    fn of<'a>(rank: &Rank, case: &'a Case) -> Wanted<'a> {
        let signature = Context::of(rank).signature(case.op.signature());
        let ndim = |i: usize| case.inputs.get(i).map_or(0, |input| input.shape().len());
        let bound = if case.is_fixed { None } else { signature.bind(ndim, |_| None).ok() };
        let labels = bound.map(|l| l.inputs().to_vec()).filter(|l| l.len() >= case.inputs.len());
        Wanted { case, labels: labels.unwrap_or_default() }
    }

    fn label(&self, i: usize, d: usize) -> Option<u8> {
        self.labels.get(i)?.get(d).copied()
    }

    /// Of integers, what they must be below: a bound goes with the dim that they point into.
    fn most(&self, i: usize, bound: &Bound) -> Option<usize> {
        let Input::Index(_, most) = self.case.inputs[i] else { return None };
        let dims =
            self.case.inputs.iter().zip(&self.labels).flat_map(|(input, l)| input.shape().iter().zip(l));
        let dims = dims.filter(|(n, _)| **n == most).filter_map(|(_, label)| bound.get(label).copied());
        Some(dims.min().unwrap_or(most))
    }
}

impl Program {
    /// A random program over the ops of a list. `None` where chance gave nothing that can be run.
    ///
    /// # Errors
    /// What a mesh without values reports.
    pub fn draw(ops: &[Entry], seed: u64) -> Result<Option<Program>> {
        let mut dice = Dice::new(seed);
        let mesh = dice.mesh();
        let dtype = if dice.chance(F32_PERCENT) { DType::F32 } else { DType::F64 };
        let has_empty = dice.chance(EMPTY_PERCENT);
        let drawn = World::new(Mesh::parse(&mesh)?).dry_run(0, |rank| {
            let (inputs, steps, blocks, outputs) = Default::default();
            let program = Program { mesh: mesh.clone(), dtype, inputs, steps, blocks, outputs, seed };
            let (tape, values, below) = (Tape::new(rank), Values::default(), BTreeMap::new());
            let mut maker = Maker { ops, rank, tape, dice, program, values, below, num_leaves: 0, has_empty };
            for _ in 0..1 + maker.dice.below(STEPS_MAX) {
                let before = (maker.program.clone(), maker.values.clone());
                // What an op refuses altogether (extents, dtypes) is tried and dropped.
                if !matches!(catch_unwind(AssertUnwindSafe(|| maker.grow())), Ok(Ok(()))) {
                    Context::of(rank).set_closed(false);
                    maker.tape.no_grad(|| ());
                    (maker.program, maker.values) = before;
                }
            }
            Ok((maker.program, maker.dice))
        })?;
        let (mut program, mut dice) = drawn;
        program.cut(ops);
        program.choose(ops, &mut dice);
        Ok(if program.outputs.is_empty() { None } else { Some(program) })
    }

    /// Cuts off the first step whose result is not moderate, and all that follow.
    fn cut(&mut self, ops: &[Entry]) {
        while !self.steps.is_empty() {
            let counts = |step: &Step| match step {
                Step::Apply { op, case: number, .. } => case(ops, op, *number).map_or(0, |c| {
                    let signature = shardgrad_tensor::Signature::parse(c.op.signature());
                    signature.map_or(0, |s| s.num_outputs() - c.op.num_saved())
                }),
                _ => 1,
            };
            let all: Vec<Place> = (self.steps.iter().enumerate())
                .flat_map(|(at, step)| (0..counts(step)).map(move |out| Place::Made(at, out)))
                .collect();
            self.outputs = all.clone();
            let bad = match self.on_one_rank(ops) {
                Ok(made) => {
                    all.iter().zip(&made.outputs).find(|(_, x)| !is_moderate(x, self.dtype)).map(|(p, _)| *p)
                }
                Err(_) => all.last().copied(),
            };
            match bad {
                Some(Place::Made(step, _)) => self.steps.truncate(step),
                _ => return,
            }
        }
        self.outputs.clear();
    }

    /// Chooses what comes out and what is computed again, so that gradients are moderate too.
    fn choose(&mut self, ops: &[Entry], dice: &mut Dice) {
        while !self.steps.is_empty() {
            let made = |p: &Place| matches!(p, Place::Made(step, _) if *step < self.steps.len());
            let all: Vec<Place> = std::mem::take(&mut self.outputs).into_iter().filter(made).collect();
            self.outputs = (0..1 + dice.below(3)).filter_map(|_| dice.pick(&all).copied()).collect();
            self.blocks.clear();
            if dice.chance(40) {
                let from = dice.below(self.steps.len());
                self.blocks.push(from..from + 1 + dice.below(self.steps.len() - from));
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
