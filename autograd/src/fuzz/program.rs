//! Programs as data: ops of a list by name, changes of layout, places where gradients stop, blocks that are computed again.

use super::marks::Marks;
use super::trial::{Feed, Made, Trial, Verdict};
use crate::tape::Tape;
use crate::var::Var;
use shardgrad_dist::{Error, Kind, Mesh, Result};
use shardgrad_tensor::ops::{Case, Entry, Input};
use shardgrad_tensor::{DType, Value};
use std::fmt;
use std::ops::Range;

/// A value of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Something that goes in, by number.
    Input(usize),
    /// A visible output of a step.
    Made(usize, usize),
}

/// What a step does to values.
#[derive(Clone, Debug)]
pub enum Step {
    /// Applies the op of a case of an entry of the list.
    Apply {
        /// The entry.
        op: String,
        /// The number of the case.
        case: usize,
        /// The arguments.
        args: Vec<Place>,
        /// Whether it happens under `no_grad`.
        is_quiet: bool,
    },
    /// Another layout of a value.
    Move(Place, Marks),
    /// The value, cut off.
    Detach(Place),
}

impl Step {
    pub(super) fn args(&self) -> Vec<Place> {
        match self {
            Step::Apply { args, .. } => args.clone(),
            Step::Move(x, _) | Step::Detach(x) => vec![*x],
        }
    }

    pub(super) fn args_mut(&mut self) -> Vec<&mut Place> {
        match self {
            Step::Apply { args, .. } => args.iter_mut().collect(),
            Step::Move(x, _) | Step::Detach(x) => vec![x],
        }
    }
}

/// A whole program with its mesh and what goes into it. Its `Display` is Rust that makes it.
#[derive(Clone, Debug)]
pub struct Program {
    /// The mesh, as text.
    pub mesh: String,
    /// Of the floats that go in: f64, or f32 with whole numbers. One rank, the standard, computes in f64.
    pub dtype: DType,
    /// What goes in.
    pub inputs: Vec<Feed>,
    /// What happens, in order.
    pub steps: Vec<Step>,
    /// Ranges of steps, apart from each other, that are computed again in the backward pass.
    pub blocks: Vec<Range<usize>>,
    /// What comes out; everything else is unused.
    pub outputs: Vec<Place>,
    /// Of the numbers that go in.
    pub seed: u64,
}

/// The case of a name and a number.
pub(super) fn case(ops: &[Entry], op: &str, case: usize) -> Result<Case> {
    let entry = ops.iter().find(|e| e.name == op);
    entry.and_then(|e| (e.cases)().into_iter().nth(case)).ok_or_else(|| {
        Error::new(Kind::Config, format!("the list of ops has no case {case} of an entry `{op}`"))
    })
}

/// By step, its visible outputs; what goes in comes first.
#[derive(Clone, Debug, Default)]
pub(super) struct Values {
    pub(super) inputs: Vec<Var>,
    pub(super) made: Vec<Vec<Var>>,
}

impl Values {
    pub(super) fn get(&self, place: Place) -> Result<&Var> {
        let found = match place {
            Place::Input(i) => self.inputs.get(i),
            Place::Made(step, out) => self.made.get(step).and_then(|m| m.get(out)),
        };
        found.ok_or_else(|| Error::new(Kind::Config, format!("no value stands at {place:?}")))
    }

    fn set(&mut self, place: Place, var: Var) {
        match place {
            Place::Input(i) => self.inputs[i] = var,
            Place::Made(step, out) => self.made[step][out] = var,
        }
    }
}

impl Program {
    /// Runs one step on a tape.
    pub(super) fn step(ops: &[Entry], tape: &Tape, step: &Step, values: &Values) -> Result<Vec<Var>> {
        match step {
            Step::Apply { op, case: number, args, is_quiet } => {
                let op = case(ops, op, *number)?.op;
                let args: Vec<&Var> = args.iter().map(|a| values.get(*a)).collect::<Result<_>>()?;
                let apply = || Var::apply(op.clone(), &args).into_vec();
                Ok(if *is_quiet { tape.no_grad(apply) } else { apply() })
            }
            Step::Move(x, marks) => {
                let x = values.get(*x)?;
                // On one rank there is nothing to move.
                if x.rank().mesh().num_ranks() == 1 {
                    return Ok(vec![x.clone()]);
                }
                let to = marks.layout(x.rank().mesh(), x.dtype(), &x.shape())?;
                Ok(vec![x.to_layout(&to)])
            }
            Step::Detach(x) => Ok(vec![values.get(*x)?.detach()]),
        }
    }

    /// Runs a block so that it is computed again.
    fn block(&self, ops: &[Entry], tape: &Tape, block: &Range<usize>, values: &mut Values) -> Result<()> {
        let mut taken: Vec<Place> = Vec::new();
        for place in self.steps[block.clone()].iter().flat_map(Step::args) {
            let is_outer = !matches!(place, Place::Made(step, _) if step >= block.start);
            if is_outer && !taken.contains(&place) {
                taken.push(place);
            }
        }
        let args: Vec<Var> = taken.iter().map(|p| values.get(*p).cloned()).collect::<Result<_>>()?;
        let mut counts = Vec::new();
        let made = tape.checkpoint(&args, |fresh| {
            let mut inner = values.clone();
            // Every other value is not taken as an argument but found around the block.
            let passed = taken.iter().zip(fresh).step_by(2);
            passed.for_each(|(place, var)| inner.set(*place, var.clone()));
            for step in &self.steps[block.clone()] {
                let made = Program::step(ops, tape, step, &inner)?;
                counts.push(made.len());
                inner.made.push(made);
            }
            Ok(inner.made.drain(block.start..).flatten().collect())
        })?;
        let mut made = made.into_iter();
        values.made.extend(counts.into_iter().map(|n| made.by_ref().take(n).collect()));
        Ok(())
    }

    fn run(&self, ops: &[Entry], tape: &Tape, inputs: &[Var]) -> Result<Values> {
        let mut values = Values { inputs: inputs.to_vec(), made: Vec::new() };
        while values.made.len() < self.steps.len() {
            let at = values.made.len();
            match self.blocks.iter().find(|b| b.start == at && !b.is_empty()) {
                Some(block) => self.block(ops, tape, block, &mut values)?,
                None => {
                    let made = Program::step(ops, tape, &self.steps[at], &values)?;
                    values.made.push(made);
                }
            }
        }
        Ok(values)
    }

    /// Whether no step rounds on small binary fractions. Whole numbers, which f32 gets, are often equal, and a gradient that
    /// three of them share is rounded.
    fn is_exact(&self, ops: &[Entry]) -> bool {
        let is_exact = |c: Case| c.is_exact && (self.dtype == DType::F64 || !c.shares_gradients);
        self.steps.iter().all(|step| match step {
            Step::Apply { op, case: number, .. } => case(ops, op, *number).is_ok_and(is_exact),
            _ => true,
        })
    }

    fn with_trial<T>(&self, ops: &[Entry], f: impl FnOnce(&Trial<'_>) -> T) -> T {
        let text = |tape: &Tape, inputs: &[Var]| {
            let values = self.run(ops, tape, inputs)?;
            self.outputs.iter().map(|p| values.get(*p).cloned()).collect()
        };
        let Program { inputs, seed, dtype, .. } = self;
        f(&Trial { inputs, seed: *seed, dtype: *dtype, is_exact: self.is_exact(ops), text: &text })
    }

    /// What one rank makes of it in f64.
    pub(super) fn on_one_rank(&self, ops: &[Entry]) -> Result<Made> {
        self.with_trial(ops, |trial| trial.on_one_rank())
    }

    /// Whether an op whose equal elements share a gradient has such elements.
    pub(super) fn has_ties(&self, ops: &[Entry]) -> Result<bool> {
        let shares = |op: &str, number| case(ops, op, number).is_ok_and(|c| c.shares_gradients);
        let pair = |(at, step): (usize, &Step)| match step {
            Step::Apply { op, case, args, .. } if shares(op, *case) => Some([args[0], Place::Made(at, 0)]),
            _ => None,
        };
        let outputs: Vec<Place> = self.steps.iter().enumerate().filter_map(pair).flatten().collect();
        if outputs.is_empty() {
            return Ok(false);
        }
        let made = Program { outputs, ..self.clone() }.on_one_rank(ops)?.outputs;
        Ok(made.chunks(2).any(|pair| tie(&pair[0].data, &pair[1].data)))
    }

    /// Runs the program on one rank in f64 and on its mesh, and compares values and gradients. `ops` is the list that its steps name.
    ///
    /// # Errors
    /// What one rank reports; `Kind::Mesh` for a mesh that is none, `Kind::Config` for marks that do not fit.
    pub fn check(&self, ops: &[Entry]) -> Result<Verdict> {
        let mesh = Mesh::parse(&self.mesh)?;
        self.with_trial(ops, |trial| trial.on_mesh(&mesh, &trial.on_one_rank()?))
    }
}

/// Whether several of some elements are the largest, or the smallest, of their row, from the extremes of the rows.
fn tie(x: &[f64], extremes: &[f64]) -> bool {
    let largest = |x: &[f64]| x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let smallest = |x: &[f64]| x.iter().copied().fold(f64::INFINITY, f64::min);
    // All elements that equal the extreme of all rows are extremes of their own rows.
    let most = if largest(x) == largest(extremes) { largest(x) } else { smallest(x) };
    let count = |x: &[f64]| x.iter().filter(|x| **x == most).count();
    count(x) > count(extremes)
}

/// An input as Rust.
struct Written<'a>(&'a Input);

impl fmt::Display for Written<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Input::Index(shape, bound) => write!(f, "Input::Index(vec!{shape:?}, {bound})"),
            // The others print as they are written, but for the list.
            other => write!(f, "Input::{}", format!("{other:?}").replace('[', "vec![")),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = |p: &Place| match p {
            Place::Input(i) => format!("Place::Input({i})"),
            Place::Made(step, out) => format!("Place::Made({step}, {out})"),
        };
        let places = |all: &[Place]| all.iter().map(place).collect::<Vec<_>>().join(", ");
        writeln!(f, "Program {{\n    mesh: {:?}.into(),\n    dtype: DType::{:?},", self.mesh, self.dtype)?;
        writeln!(f, "    inputs: vec![")?;
        for Feed { input, marks, is_leaf } in &self.inputs {
            let (input, marks) = (Written(input), format!("Marks::parse(\"{marks}\")?"));
            writeln!(f, "        Feed {{ input: {input}, marks: {marks}, is_leaf: {is_leaf} }},")?;
        }
        writeln!(f, "    ],\n    steps: vec![")?;
        for step in &self.steps {
            match step {
                Step::Apply { op, case, args, is_quiet } => writeln!(
                    f,
                    "        Step::Apply {{ op: {op:?}.into(), case: {case}, args: vec![{}], is_quiet: {is_quiet} }},",
                    places(args)
                )?,
                Step::Move(x, marks) => {
                    writeln!(f, "        Step::Move({}, Marks::parse(\"{marks}\")?),", place(x))?;
                }
                Step::Detach(x) => writeln!(f, "        Step::Detach({}),", place(x))?,
            }
        }
        writeln!(f, "    ],\n    blocks: vec!{:?},", self.blocks)?;
        write!(f, "    outputs: vec![{}],\n    seed: {},\n}}\n.check(OPS)?", places(&self.outputs), self.seed)
    }
}
