//! Random tests of whole programs: values and gradients on a mesh are those of one rank.
//!
//! [`programs`] draws programs over a list of ops. [`model`], or the macro [`fuzz_model!`](crate::fuzz_model!), does the same
//! to a function of yours: it draws meshes, and layouts and float dtype of what goes in. Both report the smallest case that goes wrong, as
//! Rust that repeats it. An op of your own is checked by [`check_op!`](shardgrad_tensor::check_op!).

mod marks;
mod trial;
mod program;
mod draw;
mod shrink;

pub use marks::Marks;
pub use program::{Place, Program, Step};
pub use trial::{Feed, Verdict};

use crate::tape::Tape;
use crate::var::Var;
use draw::Dice;
use shardgrad_dist::{Error, Kind, Mesh, Result};
use shardgrad_tensor::DType;
use shardgrad_tensor::ops::{Entry, Input};
use trial::Trial;

/// How many cases came out how, and what was in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Values and gradients are those of one rank.
    pub right: usize,
    /// Nothing can be said: results hang on the last bits of what goes in.
    pub ill_posed: usize,
    /// An op refused the layouts, or chance gave nothing to run.
    pub refused: usize,
    /// Steps of all programs.
    pub steps: usize,
    /// Of those that are right: with floats in f32.
    pub narrow: usize,
    /// Of those that are right: with an input of no elements.
    pub empty: usize,
    /// Of those that are right: with integers or truth values that go in.
    pub whole: usize,
    /// Of those that are right: with elements that tie and share a gradient.
    pub ties: usize,
}

impl Report {
    fn count(&mut self, dtype: DType, inputs: &[Feed]) {
        self.right += 1;
        self.narrow += usize::from(dtype != DType::F64);
        self.empty += usize::from(inputs.iter().any(|f| f.input.shape().contains(&0)));
        self.whole += usize::from(inputs.iter().any(|f| !f.input.dtype().is_float()));
    }
}

/// Checks random programs over the ops of a list: number `first` and the `count - 1` after it.
///
/// # Errors
/// `Kind::Unsupported` with what is wrong, the number of the program, and the smallest one that goes wrong as Rust.
pub fn programs(ops: &[Entry], first: u64, count: u64) -> Result<Report> {
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
                report.ties += usize::from(program.has_ties(ops)?);
            }
            Verdict::IllPosed => report.ill_posed += 1,
            Verdict::Wrong(_) | Verdict::Refused(_) => return Err(told(ops, seed, &program, &verdict)),
        }
    }
    Ok(report)
}

/// The error about a program that went wrong, made small.
fn told(ops: &[Entry], seed: u64, program: &Program, verdict: &Verdict) -> Error {
    let same = |found: &Verdict| std::mem::discriminant(found) == std::mem::discriminant(verdict);
    let least = program.shrunk(|p| p.check(ops).is_ok_and(|found| same(&found)));
    let what = match least.check(ops) {
        Ok(Verdict::Wrong(what)) => what,
        Ok(Verdict::Refused(error)) => format!("refused though it was planned: {error}"),
        other => format!("{other:?}"),
    };
    Error::new(Kind::Unsupported, format!("program {seed} goes wrong: {what}"))
        .detail("repeat", format!("\n{least}"))
}

/// Checks a function of variables on `count` random meshes of up to 8 ranks, with random layouts of what goes in: its
/// values, and the gradients of all floats that go in, are those of one rank in f64, to 1e-7. Every fourth case has f32 on
/// the mesh, whole numbers that go in, and the bound 1e-3. Layouts that an op of the function refuses are counted and passed
/// over.
///
/// # Errors
/// `Kind::Unsupported` with what is wrong, on the smallest mesh and the plainest layouts that show it; or if every layout was
/// refused. What the function reports on one rank.
pub fn model(inputs: &[Input], count: u64, text: impl Fn(&[Var]) -> Vec<Var> + Sync) -> Result<Report> {
    let text = |_: &Tape, args: &[Var]| Ok(text(args));
    let feed = |input: &Input, marks: Marks| {
        let is_leaf = input.dtype().is_float();
        Feed { input: input.clone(), marks, is_leaf }
    };
    let mut report = Report::default();
    for seed in 0..count {
        let mut dice = Dice::new(seed);
        let mesh_text = if seed == 0 { "a=1".to_string() } else { dice.mesh() };
        let mesh = Mesh::parse(&mesh_text)?;
        let mut drawn =
            |input: &Input| feed(input, Marks::of(&dice.layout(&mesh, input.dtype(), input.shape())));
        let inputs: Vec<Feed> = inputs.iter().map(&mut drawn).collect();
        let dtype = if seed % 4 == 3 { DType::F32 } else { DType::F64 };
        let verdict = |mesh: &str, dtype: DType, inputs: &[Feed]| -> Result<Verdict> {
            let trial = Trial { inputs, seed, dtype, is_exact: false, text: &text };
            trial.on_mesh(&Mesh::parse(mesh)?, &trial.on_one_rank()?)
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
                let marks: Vec<String> = least.inputs.iter().map(|f| f.marks.to_string()).collect();
                return Err(Error::new(Kind::Unsupported, format!("the model goes wrong: {what}"))
                    .detail("mesh", least.mesh)
                    .detail("inputs", marks.join("; "))
                    .detail("numbers", format!("seed {seed}, in {}", least.dtype)));
            }
        }
    }
    if report.right <= 1 && count > 1 {
        let text = format!("of {count} random layouts all but one rank's were refused");
        return Err(
            Error::new(Kind::Unsupported, text).detail("help", "state layouts inside, or ask for more cases")
        );
    }
    Ok(report)
}

/// A function is made for its shapes.
fn same_shapes(a: &Program, b: &Program) -> bool {
    a.inputs.iter().zip(&b.inputs).all(|(a, b)| a.input.shape() == b.input.shape())
}

/// Checks a model of yours on random meshes and layouts: its inputs (see [`Input`]), how many cases, and a function of
/// variables. Gives what [`model`] gives.
///
/// ```
/// use shardgrad_autograd::{Var, fuzz_model};
/// use shardgrad_tensor::Value;
/// use shardgrad_tensor::ops::Input;
///
/// let report = fuzz_model!(
///     [Input::real(&[4, 3]), Input::real(&[3, 5])],
///     30,
///     |x: &[Var]| vec![x[0].matmul(&x[1]).tanh()]
/// )?;
/// assert!(report.right > 1);
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
#[macro_export]
macro_rules! fuzz_model {
    ([$($input:expr),* $(,)?], $count:expr, $text:expr $(,)?) => {
        $crate::fuzz::model(&[$($input),*], $count, $text)
    };
}
