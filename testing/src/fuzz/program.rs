//! Programs as data: ops of a list by name, redistributions, detached values, and checkpointed blocks.

use super::compare::{Comparison, Results, TestInput, Verdict};
use super::layout_pattern::LayoutPattern;
use shardgrad_autograd::{Tape, Var};
use shardgrad_dist::{Error, Kind, Mesh, Result};
use shardgrad_tensor::ops::{Case, Input, OpModule};
use shardgrad_tensor::{DType, Value};
use std::fmt;
use std::ops::Range;

/// A value of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ValueRef {
    /// An input, by number.
    Input(usize),
    /// A visible output of a step, by step and number.
    Output(usize, usize),
}

/// One step of a program.
#[derive(Clone, Debug)]
pub enum Step {
    /// Applies the op of a case in the list of ops.
    Apply {
        /// The name of the entry in the list.
        op: String,
        /// The number of the case.
        case: usize,
        /// The arguments.
        args: Vec<ValueRef>,
        /// Whether it runs under `no_grad`.
        no_grad: bool,
    },
    /// Redistributes a value to another layout.
    Redistribute(ValueRef, LayoutPattern),
    /// Detaches a value.
    Detach(ValueRef),
}

impl Step {
    pub(super) fn args(&self) -> Vec<ValueRef> {
        match self {
            Step::Apply { args, .. } => args.clone(),
            Step::Redistribute(x, _) | Step::Detach(x) => vec![*x],
        }
    }

    pub(super) fn args_mut(&mut self) -> Vec<&mut ValueRef> {
        match self {
            Step::Apply { args, .. } => args.iter_mut().collect(),
            Step::Redistribute(x, _) | Step::Detach(x) => vec![x],
        }
    }
}

/// A program with its mesh and inputs. `Display` prints it as Rust code.
#[derive(Clone, Debug)]
pub struct Program {
    /// The mesh, as text.
    pub mesh: String,
    /// The dtype of float inputs: f64, or f32 with whole numbers. The reference, one rank, computes in f64.
    pub dtype: DType,
    /// The inputs.
    pub inputs: Vec<TestInput>,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Disjoint ranges of steps that are checkpointed (recomputed in the backward pass).
    pub blocks: Vec<Range<usize>>,
    /// The outputs; all other values are unused.
    pub outputs: Vec<ValueRef>,
    /// The seed of the input values.
    pub seed: u64,
}

/// The case of an entry, by name and number.
pub(super) fn case(ops: &[OpModule], op: &str, case: usize) -> Result<Case> {
    let entry = ops.iter().find(|e| e.name == op);
    entry.and_then(|e| (e.cases)().into_iter().nth(case)).ok_or_else(|| {
        Error::new(Kind::Config, format!("the list of ops has no case {case} of an entry `{op}`"))
    })
}

/// The inputs, and the visible outputs by step.
#[derive(Clone, Debug, Default)]
pub(super) struct Values {
    pub(super) inputs: Vec<Var>,
    pub(super) outputs: Vec<Vec<Var>>,
}

impl Values {
    pub(super) fn get(&self, value: ValueRef) -> Result<&Var> {
        let found = match value {
            ValueRef::Input(i) => self.inputs.get(i),
            ValueRef::Output(step, out) => self.outputs.get(step).and_then(|m| m.get(out)),
        };
        found.ok_or_else(|| Error::new(Kind::Config, format!("the program has no value {value:?}")))
    }

    fn set(&mut self, value: ValueRef, var: Var) {
        match value {
            ValueRef::Input(i) => self.inputs[i] = var,
            ValueRef::Output(step, out) => self.outputs[step][out] = var,
        }
    }
}

impl Program {
    /// Runs one step on a tape.
    pub(super) fn step(ops: &[OpModule], tape: &Tape, step: &Step, values: &Values) -> Result<Vec<Var>> {
        match step {
            Step::Apply { op, case: number, args, no_grad } => {
                let op = case(ops, op, *number)?.op;
                let args: Vec<&Var> = args.iter().map(|a| values.get(*a)).collect::<Result<_>>()?;
                let apply = || Var::apply(op.clone(), &args).into_vec();
                Ok(if *no_grad { tape.no_grad(apply) } else { apply() })
            }
            Step::Redistribute(x, pattern) => {
                let x = values.get(*x)?;
                // One rank needs no redistribution.
                if x.rank().mesh().num_ranks() == 1 {
                    return Ok(vec![x.clone()]);
                }
                let to = pattern.layout(x.rank().mesh(), x.dtype(), &x.shape())?;
                Ok(vec![x.to_layout(&to)])
            }
            Step::Detach(x) => Ok(vec![values.get(*x)?.detach()]),
        }
    }

    /// Runs a block of steps as a checkpoint.
    fn block(&self, ops: &[OpModule], tape: &Tape, block: &Range<usize>, values: &mut Values) -> Result<()> {
        let mut taken: Vec<ValueRef> = Vec::new();
        for value in self.steps[block.clone()].iter().flat_map(Step::args) {
            let is_outer = !matches!(value, ValueRef::Output(step, _) if step >= block.start);
            if is_outer && !taken.contains(&value) {
                taken.push(value);
            }
        }
        let args: Vec<Var> = taken.iter().map(|p| values.get(*p).cloned()).collect::<Result<_>>()?;
        let mut counts = Vec::new();
        let made = tape.checkpoint(&args, |fresh| {
            let mut inner = values.clone();
            // Every second external value is passed as an argument; the others are captured.
            let passed = taken.iter().zip(fresh).step_by(2);
            passed.for_each(|(value, var)| inner.set(*value, var.clone()));
            for step in &self.steps[block.clone()] {
                let made = Program::step(ops, tape, step, &inner)?;
                counts.push(made.len());
                inner.outputs.push(made);
            }
            Ok(inner.outputs.drain(block.start..).flatten().collect())
        })?;
        let mut made = made.into_iter();
        values.outputs.extend(counts.into_iter().map(|n| made.by_ref().take(n).collect()));
        Ok(())
    }

    fn run(&self, ops: &[OpModule], tape: &Tape, inputs: &[Var]) -> Result<Values> {
        let mut values = Values { inputs: inputs.to_vec(), outputs: Vec::new() };
        while values.outputs.len() < self.steps.len() {
            let at = values.outputs.len();
            match self.blocks.iter().find(|b| b.start == at && !b.is_empty()) {
                Some(block) => self.block(ops, tape, block, &mut values)?,
                None => {
                    let made = Program::step(ops, tape, &self.steps[at], &values)?;
                    values.outputs.push(made);
                }
            }
        }
        Ok(values)
    }

    /// Whether no step rounds on small binary fractions. In f32, ops that share gradients among equal elements are not
    /// exact: whole numbers are often equal, and a gradient shared by three is rounded.
    fn is_exact(&self, ops: &[OpModule]) -> bool {
        let is_exact = |c: Case| c.is_exact && (self.dtype == DType::F64 || !c.has_tied_gradients);
        self.steps.iter().all(|step| match step {
            Step::Apply { op, case: number, .. } => case(ops, op, *number).is_ok_and(is_exact),
            _ => true,
        })
    }

    fn with_comparison<T>(&self, ops: &[OpModule], f: impl FnOnce(&Comparison<'_>) -> T) -> T {
        let model = |tape: &Tape, inputs: &[Var]| {
            let values = self.run(ops, tape, inputs)?;
            self.outputs.iter().map(|p| values.get(*p).cloned()).collect()
        };
        let Program { inputs, seed, dtype, .. } = self;
        f(&Comparison { inputs, seed: *seed, dtype: *dtype, is_exact: self.is_exact(ops), model: &model })
    }

    /// The results of one rank in f64.
    pub(super) fn on_one_rank(&self, ops: &[OpModule]) -> Result<Results> {
        self.with_comparison(ops, |trial| trial.on_one_rank())
    }

    /// Whether an op that shares a gradient among equal elements has such elements.
    pub(super) fn has_ties(&self, ops: &[OpModule]) -> Result<bool> {
        let shares = |op: &str, number| case(ops, op, number).is_ok_and(|c| c.has_tied_gradients);
        let pair = |(at, step): (usize, &Step)| match step {
            Step::Apply { op, case, args, .. } if shares(op, *case) => {
                Some([args[0], ValueRef::Output(at, 0)])
            }
            _ => None,
        };
        let outputs: Vec<ValueRef> = self.steps.iter().enumerate().filter_map(pair).flatten().collect();
        if outputs.is_empty() {
            return Ok(false);
        }
        let made = Program { outputs, ..self.clone() }.on_one_rank(ops)?.outputs;
        Ok(made.chunks(2).any(|pair| tie(&pair[0].data, &pair[1].data)))
    }

    /// Runs the program on one rank in f64 and on its mesh, and compares values and gradients. `ops` is the list that
    /// its steps name.
    ///
    /// # Errors
    /// The errors of one rank; `Kind::Mesh` for an invalid mesh, `Kind::Config` for layout patterns that do not fit.
    pub fn check(&self, ops: &[OpModule]) -> Result<Verdict> {
        let mesh = Mesh::parse(&self.mesh)?;
        self.with_comparison(ops, |trial| trial.on_mesh(&mesh, &trial.on_one_rank()?))
    }
}

/// Whether several elements of a row are its largest, or its smallest, given the elements and the extremes of the rows.
fn tie(x: &[f64], extremes: &[f64]) -> bool {
    let largest = |x: &[f64]| x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let smallest = |x: &[f64]| x.iter().copied().fold(f64::INFINITY, f64::min);
    // Elements equal to the extreme of all rows are extremes of their own rows.
    let most = if largest(x) == largest(extremes) { largest(x) } else { smallest(x) };
    let count = |x: &[f64]| x.iter().filter(|x| **x == most).count();
    count(x) > count(extremes)
}

/// Prints an input as Rust code.
struct InputCode<'a>(&'a Input);

impl fmt::Display for InputCode<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Input::Index(shape, bound) => write!(f, "Input::Index(vec!{shape:?}, {bound})"),
            // The others print as their `Debug` form, with `vec!` for the list.
            other => write!(f, "Input::{}", format!("{other:?}").replace('[', "vec![")),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value_code = |p: &ValueRef| match p {
            ValueRef::Input(i) => format!("ValueRef::Input({i})"),
            ValueRef::Output(step, out) => format!("ValueRef::Output({step}, {out})"),
        };
        let value_list = |all: &[ValueRef]| all.iter().map(value_code).collect::<Vec<_>>().join(", ");
        writeln!(f, "Program {{\n    mesh: {:?}.into(),\n    dtype: DType::{:?},", self.mesh, self.dtype)?;
        writeln!(f, "    inputs: vec![")?;
        for TestInput { input, layout: pattern, is_leaf } in &self.inputs {
            let (input, pattern) = (InputCode(input), format!("LayoutPattern::parse(\"{pattern}\")?"));
            writeln!(f, "        TestInput {{ input: {input}, layout: {pattern}, is_leaf: {is_leaf} }},")?;
        }
        writeln!(f, "    ],\n    steps: vec![")?;
        for step in &self.steps {
            match step {
                Step::Apply { op, case, args, no_grad } => writeln!(
                    f,
                    "        Step::Apply {{ op: {op:?}.into(), case: {case}, args: vec![{}], no_grad: {no_grad} }},",
                    value_list(args)
                )?,
                Step::Redistribute(x, pattern) => {
                    writeln!(
                        f,
                        "        Step::Redistribute({}, LayoutPattern::parse(\"{pattern}\")?),",
                        value_code(x)
                    )?;
                }
                Step::Detach(x) => writeln!(f, "        Step::Detach({}),", value_code(x))?,
            }
        }
        writeln!(f, "    ],\n    blocks: vec!{:?},", self.blocks)?;
        write!(
            f,
            "    outputs: vec![{}],\n    seed: {},\n}}\n.check(OPS)?",
            value_list(&self.outputs),
            self.seed
        )
    }
}
