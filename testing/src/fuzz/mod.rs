//! Fuzzing of whole programs: values and gradients on a random mesh are compared with those of one rank.
//!
//! [`programs`] generates programs over a list of ops. [`model`], or the macro [`fuzz_model!`](crate::fuzz_model!),
//! tests a user's function on random meshes, layouts and float dtypes. Both report the smallest failing case;
//! [`programs`] as Rust code that repeats it. [`check_op!`](crate::check_op!) tests a user's op.

mod layout_pattern;
mod compare;
mod program;
mod draw;
mod shrink;

pub use compare::{TestInput, Verdict};
pub use layout_pattern::LayoutPattern;
pub use program::{Program, Step, ValueRef};

use compare::Comparison;
use draw::Rng;
use shardgrad_autograd::{Tape, Var};
use shardgrad_dist::{Error, Kind, Mesh, Result};
use shardgrad_tensor::DType;
use shardgrad_tensor::ops::{Input, OpModule};

/// The numbers of cases by outcome and content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Cases with the values and gradients of one rank.
    pub right: usize,
    /// Cases without a statement, because results depend on the last bits of the inputs.
    pub ill_posed: usize,
    /// Cases in which an op refused the layouts, or no program was found.
    pub refused: usize,
    /// The steps of all programs.
    pub steps: usize,
    /// Right cases in f32.
    pub in_f32: usize,
    /// Right cases with an empty input.
    pub with_empty: usize,
    /// Right cases with integer or boolean inputs.
    pub with_integers: usize,
    /// Right cases in which tied elements share a gradient.
    pub with_ties: usize,
}

impl Report {
    fn count(&mut self, dtype: DType, inputs: &[TestInput]) {
        self.right += 1;
        self.in_f32 += usize::from(dtype != DType::F64);
        self.with_empty += usize::from(inputs.iter().any(|f| f.input.shape().contains(&0)));
        self.with_integers += usize::from(inputs.iter().any(|f| !f.input.dtype().is_float()));
    }
}

/// Checks random programs over the ops of a list: programs number `first` to `first + count - 1`.
///
/// # Errors
/// `Kind::Unsupported` with the difference, the number of the program, and the smallest failing program as Rust code.
#[doc(alias = "differential testing")]
#[doc(alias = "property testing")]
pub fn programs(ops: &[OpModule], first: u64, count: u64) -> Result<Report> {
    let mut report = Report::default();
    for seed in first..first + count {
        let Some(program) = Program::draw(ops, seed)? else {
            report.refused += 1;
            continue;
        };
        report.steps += program.steps.len();
        let verdict = program.check(ops)?;
        match &verdict {
            Verdict::Right => {
                report.count(program.dtype, &program.inputs);
                report.with_ties += usize::from(program.has_ties(ops)?);
            }
            Verdict::IllPosed => report.ill_posed += 1,
            Verdict::Wrong(_) | Verdict::Refused(_) => {
                return Err(shrunk_error(ops, seed, &program, &verdict));
            }
        }
    }
    Ok(report)
}

/// The error of a failing program, with the program shrunk.
fn shrunk_error(ops: &[OpModule], seed: u64, program: &Program, verdict: &Verdict) -> Error {
    let same = |found: &Verdict| std::mem::discriminant(found) == std::mem::discriminant(verdict);
    let least = program.shrunk(|p| p.check(ops).is_ok_and(|found| same(&found)));
    let what = match least.check(ops) {
        Ok(Verdict::Wrong(what)) => what,
        Ok(Verdict::Refused(error)) => {
            format!("an op refused layouts that it had accepted when the program was generated: {error}")
        }
        other => format!("{other:?}"),
    };
    Error::new(Kind::Unsupported, format!("program {seed} fails: {what}"))
        .detail("repeat", format!("\n{least}"))
}

/// Checks a function of variables on `count` random meshes of up to 8 ranks, with random layouts of its inputs: its
/// values, and the gradients of all float inputs, must be those of one rank in f64, to 1e-7. Every fourth case computes
/// in f32 on the mesh, with whole numbers as inputs and a tolerance of 1e-3. Layouts that an op of the function refuses
/// are counted and skipped.
///
/// # Errors
/// `Kind::Unsupported` with the difference, on the smallest mesh and the plainest layouts that show it, or if every
/// layout was refused. The errors of the function on one rank.
pub fn model(inputs: &[Input], count: u64, f: impl Fn(&[Var]) -> Vec<Var> + Sync) -> Result<Report> {
    let model = |_: &Tape, args: &[Var]| Ok(f(args));
    let test_input = |input: &Input, layout: LayoutPattern| {
        let is_leaf = input.dtype().is_float();
        TestInput { input: input.clone(), layout, is_leaf }
    };
    let mut report = Report::default();
    for seed in 0..count {
        let mut rng = Rng::new(seed);
        let mesh_text = if seed == 0 { "a=1".to_string() } else { rng.mesh() };
        let mesh = Mesh::parse(&mesh_text)?;
        let mut drawn = |input: &Input| {
            test_input(input, LayoutPattern::of(&rng.layout(&mesh, input.dtype(), input.shape())))
        };
        let inputs: Vec<TestInput> = inputs.iter().map(&mut drawn).collect();
        let dtype = if seed % 4 == 3 { DType::F32 } else { DType::F64 };
        let verdict = |mesh: &str, dtype: DType, inputs: &[TestInput]| -> Result<Verdict> {
            let comparison = Comparison { inputs, seed, dtype, is_exact: false, model: &model };
            comparison.on_mesh(&Mesh::parse(mesh)?, &comparison.on_one_rank()?)
        };
        match verdict(&mesh_text, dtype, &inputs)? {
            Verdict::Right => report.count(dtype, &inputs),
            Verdict::IllPosed => report.ill_posed += 1,
            Verdict::Refused(_) => report.refused += 1,
            Verdict::Wrong(what) => {
                let (steps, blocks, outputs) = Default::default();
                let all = Program { mesh: mesh_text, dtype, inputs, steps, blocks, outputs, seed };
                let wrong =
                    |p: &Program| matches!(verdict(&p.mesh, p.dtype, &p.inputs), Ok(Verdict::Wrong(_)));
                let least =
                    all.shrunk(|p| p.inputs.len() == all.inputs.len() && same_shapes(p, &all) && wrong(p));
                let layouts: Vec<String> = least.inputs.iter().map(|f| f.layout.to_string()).collect();
                return Err(Error::new(
                    Kind::Unsupported,
                    format!("the model differs from one rank: {what}"),
                )
                .detail("mesh", least.mesh)
                .detail("inputs", layouts.join("; "))
                .detail("numbers", format!("seed {seed}, in {}", least.dtype)));
            }
        }
    }
    if report.right <= 1 && count > 1 {
        let text = format!("all of {count} random layouts were refused, except on one rank");
        return Err(
            Error::new(Kind::Unsupported, text).detail("help", "call to_layout() inside the function where an op needs another layout, or raise the number of cases")
        );
    }
    Ok(report)
}

/// A function is valid for its shapes only.
fn same_shapes(a: &Program, b: &Program) -> bool {
    a.inputs.iter().zip(&b.inputs).all(|(a, b)| a.input.shape() == b.input.shape())
}
