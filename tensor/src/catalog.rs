//! The op table: everything that the registry knows of each op, as text. Nothing in it is written by hand but the first
//! paragraph of each op's file; the rest is asked of the ops.

use crate::context::Context;
use crate::layout::Layout;
use crate::op::{self, Op};
use crate::ops::{Case, Input, OPS};
use crate::state::State;
use crate::tensor::Tensor;
use shardgrad_dist::{Axis, Mesh, Rank, Result, World};
use shardgrad_kernels::DType;
use std::collections::HashSet;
use std::panic::Location;
use std::rc::Rc;

/// One form of an op.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    /// Its name in messages and traces.
    pub op: String,
    /// The file of the registry that states it.
    pub file: &'static str,
    /// The first paragraph of that file: what it computes.
    pub doc: String,
    /// Its index signature.
    pub signature: String,
    /// Groups of arguments in which it is linear jointly.
    pub linear_in: Vec<Vec<usize>>,
    /// How many of its outputs are kept for the vjp and hidden.
    pub num_saved: usize,
    /// Dtypes of arguments and outputs: `T` is any float, `acc` its accumulator (f32 for the 16-bit floats).
    pub dtypes: String,
    /// Floating-point operations of the forward pass for each tuple of indices that the signature runs over.
    pub flops_per_index: f64,
    /// What it accepts on one axis without a step: states of the arguments and of the visible outputs. `@d` splits dim d,
    /// `+` is a pending sum, `~` a copy.
    pub rows: Vec<String>,
}

/// Every form of every op of the registry, in its order. Nothing is computed.
///
/// # Errors
/// What the null back end reports: none, unless an op is broken.
pub fn forms() -> Result<Vec<Form>> {
    World::new(Mesh::new(&[("x", 2)])?).dry_run(0, |rank| {
        let (mut forms, mut seen) = (Vec::new(), HashSet::new());
        for entry in OPS {
            for case in (entry.cases)() {
                let dtypes = dtypes(&case, rank);
                if seen.insert((case.op.name(), case.op.signature().to_string(), dtypes.clone())) {
                    forms.push(form(rank, entry.name, paragraph(entry.source), &case, dtypes)?);
                }
            }
        }
        Ok(forms)
    })
}

fn form(rank: &Rank, file: &'static str, doc: String, case: &Case, dtypes: String) -> Result<Form> {
    let op = &case.op;
    Ok(Form {
        op: op.name().to_string(),
        file,
        doc,
        signature: op.signature().to_string(),
        linear_in: op.linear_in().iter().map(|group| group.to_vec()).collect(),
        num_saved: op.num_saved(),
        dtypes,
        flops_per_index: flops_per_index(rank, case)?,
        rows: rows(rank, case),
    })
}

/// The first paragraph of the doc that a file begins with, on one line.
fn paragraph(source: &str) -> String {
    let lines = source.lines().map_while(|l| l.strip_prefix("//! "));
    lines.map(str::trim).collect::<Vec<_>>().join(" ")
}

fn dtype(input: &Input) -> DType {
    match input {
        Input::Index(..) => DType::I64,
        Input::Bool(_) => DType::Bool,
        _ => DType::F64,
    }
}

/// A float dtype that was tried, with the dtypes of the arguments and of the results.
struct Tried(DType, Vec<DType>, Vec<DType>);

/// `T, i64 -> T`: found by asking for the dtypes of outputs for each float dtype.
fn dtypes(case: &Case, rank: &Rank) -> String {
    let num_outputs = Context::of(rank).signature(case.op.signature()).num_outputs();
    // All arguments of one dtype; or all but the first in its accumulator.
    let of = |float_dtype: DType, others: DType| {
        let float = |i: usize| if i == 0 { float_dtype } else { others };
        let given = case.inputs.iter().enumerate();
        let given: Vec<DType> =
            given.map(|(i, x)| Some(dtype(x)).filter(|d| !d.is_float()).unwrap_or(float(i))).collect();
        let made = case.op.dtypes(&given, num_outputs).ok()?;
        Some(Tried(float_dtype, given, made[..num_outputs - case.op.num_saved()].to_vec()))
    };
    let all = |others: fn(DType) -> DType| -> Vec<Tried> {
        DType::FLOATS.iter().filter_map(|&d| of(d, others(d))).collect()
    };
    let (same, wide) = (all(|d| d), all(DType::accumulator));
    let known = if wide.len() > same.len() { wide } else { same };
    let every = known.len() == DType::FLOATS.len();
    let name = |place: &dyn Fn(&Tried) -> DType| {
        let first = place(&known[0]);
        match known.iter().all(|k| place(k) == first) {
            true => first.name().to_string(),
            false if every && known.iter().all(|k| place(k) == k.0) => "T".to_string(),
            false if every && known.iter().all(|k| place(k) == k.0.accumulator()) => "acc".to_string(),
            false => known.iter().map(|k| place(k).name()).collect::<Vec<_>>().join("/"),
        }
    };
    let Some(Tried(_, given, made)) = known.first() else { return String::new() };
    let given: Vec<String> = (0..given.len()).map(|i| name(&|k| k.1[i])).collect();
    let made: Vec<String> = (0..made.len()).map(|i| name(&|k| k.2[i])).collect();
    format!("{} -> {}", given.join(", "), made.join(", "))
}

/// Counted by the null back end, on whole arguments.
fn flops_per_index(rank: &Rank, case: &Case) -> Result<f64> {
    let whole = |input: &Input| Layout::invariant(rank.mesh(), dtype(input), input.shape());
    let layouts: Vec<Layout> = case.inputs.iter().map(whole).collect();
    let args: Vec<Tensor> = layouts.iter().map(|l| Tensor::zeros(rank, l)).collect::<Result<_>>()?;
    let before = rank.backend().cost().flops;
    let outputs = op::apply(&*case.op, &args.iter().collect::<Vec<_>>(), &[], Location::caller())?;
    let flops = rank.backend().cost().flops - before;
    let made: Vec<Layout> = outputs.iter().map(|t| t.layout().clone()).collect();
    let tuples = op::tuples(&*case.op, rank, &layouts.iter().collect::<Vec<_>>(), &made);
    Ok(flops as f64 / tuples.max(1) as f64)
}

/// The rows that need no step, each argument in each state; all of them copies goes without saying.
fn rows(rank: &Rank, case: &Case) -> Vec<String> {
    let axis = Axis(0);
    let mut tuples: Vec<Vec<State>> = vec![Vec::new()];
    for input in &case.inputs {
        let dims = (0..input.shape().len()).map(State::Shard);
        let states: Vec<State> = dims.chain([State::Partial, State::Replicate]).collect();
        tuples = tuples.iter().flat_map(|t| states.iter().map(|s| [&t[..], &[*s]].concat())).collect();
    }
    let mut rows = Vec::new();
    for states in tuples.iter().filter(|t| t.iter().any(|s| *s != State::Replicate)) {
        let lie = |(input, state): (&Input, &State)| {
            Layout::invariant(rank.mesh(), dtype(input), input.shape()).with_state(axis, *state)
        };
        let layouts: Vec<Layout> = case.inputs.iter().zip(states).map(lie).collect();
        if let Some(made) = accepted(&case.op, rank, &layouts) {
            let names = |states: &mut dyn Iterator<Item = State>| {
                states.map(|s| s.to_string()).collect::<Vec<_>>().join(", ")
            };
            let given = names(&mut states.iter().copied());
            rows.push(format!("{given} -> {}", names(&mut made.iter().map(|l| l.state(axis)))));
        }
    }
    rows
}

/// The layouts of the visible outputs, if no step is needed.
fn accepted(op: &Rc<dyn Op>, rank: &Rank, layouts: &[Layout]) -> Option<Vec<Layout>> {
    let context = Context::of(rank);
    let given: op::DTypes = layouts.iter().map(Layout::dtype).collect();
    let num_outputs = context.signature(op.signature()).num_outputs();
    let made = op.dtypes(&given, num_outputs).ok()?;
    // Asked of the rule itself: a refusal here needs no list of repairs.
    let found = op.infer(context, &layouts.iter().collect::<Vec<_>>(), &made, &[]).ok()?;
    let direct = found.targets.iter().all(Option::is_none);
    direct.then(|| found.outputs[..num_outputs - op.num_saved()].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_by_hand() {
        let forms = forms().unwrap();
        let product = forms.iter().find(|f| f.op == "matmul").unwrap();
        assert_eq!((product.file, &*product.signature), ("einsum", "..m k, k n -> ..m n"));
        assert_eq!((product.linear_in.clone(), product.flops_per_index), (vec![vec![0], vec![1]], 2.0));
        assert_eq!(product.dtypes, "T, T -> T");
        let rows: HashSet<&str> = product.rows.iter().map(String::as_str).collect();
        for row in ["@1, @0 -> +", "~, @1 -> @1", "+, ~ -> +", "~, + -> +"] {
            assert!(rows.contains(row), "{rows:?} has no {row}");
        }
        assert!(!rows.contains("+, + -> +"), "a product of two pending sums is not the pending sum");
        assert!(forms.iter().all(|f| !f.doc.is_empty() && !f.dtypes.is_empty()), "{forms:?}");
        assert_eq!(forms.iter().map(|f| f.file).collect::<HashSet<_>>().len(), OPS.len());
    }
}
