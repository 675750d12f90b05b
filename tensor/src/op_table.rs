//! The op table: signature, dtypes, layout rule and cost of every op, as text. Only the first paragraph of each op's
//! file or row is written by hand; the rest is computed from the ops.

use crate::execution::context::Context;
use crate::layout::Layout;
use crate::layout::placement::Placement;
use crate::op::{self, Op};
use crate::ops::{Case, Input, OPS};
use crate::tensor::Tensor;
use shardgrad_dist::{Axis, Mesh, Rank, Result, World};
use shardgrad_kernels::DType;
use std::collections::HashSet;
use std::panic::Location;
use std::rc::Rc;

/// One form of an op in the table.
#[derive(Clone, Debug, PartialEq)]
pub struct OpEntry {
    /// The name in messages and traces.
    pub op: String,
    /// The file or row of the registry that defines the op.
    pub file: &'static str,
    /// The first paragraph of its doc: what the op computes.
    pub doc: String,
    /// The index signature.
    pub signature: String,
    /// Groups of arguments in which the op is jointly linear.
    pub linear_in: Vec<Vec<usize>>,
    /// The number of outputs that are saved for the vjp and hidden.
    pub num_saved: usize,
    /// Dtypes of arguments and outputs: `T` is any float, `acc` its accumulator (f32 for the 16-bit floats).
    pub dtypes: String,
    /// Floating-point operations of the forward pass for each index tuple of the signature.
    pub flops_per_index: f64,
    /// The layouts accepted on one axis without redistribution: placements of the arguments and of the visible
    /// outputs. `@d` shards dim d, `+` is a partial sum, `~` a replica.
    pub rows: Vec<String>,
}

/// Returns every form of every op of the registry, in its order. Runs on the null back end.
///
/// # Errors
/// Errors of the null back end: none, unless an op is broken.
pub fn entries() -> Result<Vec<OpEntry>> {
    World::new(Mesh::new(&[("x", 2)])?).dry_run(0, |rank| {
        let (mut entries, mut seen) = (Vec::new(), HashSet::new());
        for entry in OPS {
            for case in (entry.cases)() {
                let dtypes = dtypes(&case, rank);
                if seen.insert((case.op.name(), case.op.signature().to_string(), dtypes.clone())) {
                    entries.push(op_entry(rank, entry.name, paragraph(entry.source), &case, dtypes)?);
                }
            }
        }
        Ok(entries)
    })
}

fn op_entry(rank: &Rank, file: &'static str, doc: String, case: &Case, dtypes: String) -> Result<OpEntry> {
    let op = &case.op;
    Ok(OpEntry {
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

/// Returns the first paragraph of the doc of a file or row, on one line.
fn paragraph(source: &str) -> String {
    let lines = source.lines().map_while(|l| l.strip_prefix("//! ").or_else(|| l.strip_prefix("/// ")));
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
struct DTypeTrial(DType, Vec<DType>, Vec<DType>);

/// Returns text such as `T, i64 -> T`, found by asking for the output dtypes of each float dtype.
fn dtypes(case: &Case, rank: &Rank) -> String {
    let num_outputs = Context::of(rank).signature(case.op.signature()).num_outputs();
    // All arguments with one dtype; or all but the first with its accumulator.
    let of = |float_dtype: DType, others: DType| {
        let float = |i: usize| if i == 0 { float_dtype } else { others };
        let given = case.inputs.iter().enumerate();
        let given: Vec<DType> =
            given.map(|(i, x)| Some(dtype(x)).filter(|d| !d.is_float()).unwrap_or(float(i))).collect();
        let made = case.op.dtypes(&given, num_outputs).ok()?;
        Some(DTypeTrial(float_dtype, given, made[..num_outputs - case.op.num_saved()].to_vec()))
    };
    let all = |others: fn(DType) -> DType| -> Vec<DTypeTrial> {
        DType::FLOATS.iter().filter_map(|&d| of(d, others(d))).collect()
    };
    let (same, wide) = (all(|d| d), all(DType::accumulator));
    let known = if wide.len() > same.len() { wide } else { same };
    let every = known.len() == DType::FLOATS.len();
    let name = |place: &dyn Fn(&DTypeTrial) -> DType| {
        let first = place(&known[0]);
        match known.iter().all(|k| place(k) == first) {
            true => first.name().to_string(),
            false if every && known.iter().all(|k| place(k) == k.0) => "T".to_string(),
            false if every && known.iter().all(|k| place(k) == k.0.accumulator()) => "acc".to_string(),
            false => known.iter().map(|k| place(k).name()).collect::<Vec<_>>().join("/"),
        }
    };
    let Some(DTypeTrial(_, given, made)) = known.first() else { return String::new() };
    let given: Vec<String> = (0..given.len()).map(|i| name(&|k| k.1[i])).collect();
    let made: Vec<String> = (0..made.len()).map(|i| name(&|k| k.2[i])).collect();
    format!("{} -> {}", given.join(", "), made.join(", "))
}

/// Counted by the null back end, on unsharded arguments.
fn flops_per_index(rank: &Rank, case: &Case) -> Result<f64> {
    let whole = |input: &Input| Layout::invariant(rank.mesh(), dtype(input), input.shape());
    let layouts: Vec<Layout> = case.inputs.iter().map(whole).collect();
    let args: Vec<Tensor> = layouts.iter().map(|l| Tensor::zeros(rank, l)).collect::<Result<_>>()?;
    let before = rank.backend().cost().flops;
    let outputs = op::apply(&*case.op, &args.iter().collect::<Vec<_>>(), Location::caller())?;
    let flops = rank.backend().cost().flops - before;
    let made: Vec<Layout> = outputs.iter().map(|t| t.layout().clone()).collect();
    let tuples = op::iteration_space(&*case.op, rank, &layouts.iter().collect::<Vec<_>>(), &made);
    Ok(flops as f64 / tuples.max(1) as f64)
}

/// The rows that need no redistribution, each argument with each placement; the row of replicas only is omitted.
fn rows(rank: &Rank, case: &Case) -> Vec<String> {
    let axis = Axis(0);
    let mut tuples: Vec<Vec<Placement>> = vec![Vec::new()];
    for input in &case.inputs {
        let dims = (0..input.shape().len()).map(Placement::Shard);
        let placements: Vec<Placement> = dims.chain([Placement::Partial, Placement::Replicate]).collect();
        tuples = tuples.iter().flat_map(|t| placements.iter().map(|s| [&t[..], &[*s]].concat())).collect();
    }
    let mut rows = Vec::new();
    for placements in tuples.iter().filter(|t| t.iter().any(|s| *s != Placement::Replicate)) {
        let distribute = |(input, placement): (&Input, &Placement)| {
            Layout::invariant(rank.mesh(), dtype(input), input.shape()).with_placement(axis, *placement)
        };
        let layouts: Vec<Layout> = case.inputs.iter().zip(placements).map(distribute).collect();
        if let Some(made) = accepted(&case.op, rank, &layouts) {
            let names = |placements: &mut dyn Iterator<Item = Placement>| {
                placements.map(|s| s.to_string()).collect::<Vec<_>>().join(", ")
            };
            let given = names(&mut placements.iter().copied());
            rows.push(format!("{given} -> {}", names(&mut made.iter().map(|l| l.placement(axis)))));
        }
    }
    rows
}

/// The layouts of the visible outputs, if no redistribution is needed.
fn accepted(op: &Rc<dyn Op>, rank: &Rank, layouts: &[Layout]) -> Option<Vec<Layout>> {
    let context = Context::of(rank);
    let given: op::DTypes = layouts.iter().map(Layout::dtype).collect();
    let num_outputs = context.signature(op.signature()).num_outputs();
    let made = op.dtypes(&given, num_outputs).ok()?;
    // Asks the rule itself: a refusal here needs no list of repairs.
    let found = op.infer(context, &layouts.iter().collect::<Vec<_>>(), &made, &[]).ok()?;
    let direct = found.targets.iter().all(Option::is_none);
    direct.then(|| found.outputs[..num_outputs - op.num_saved()].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matmul_entry_matches_hand_written_values() {
        let entries = entries().unwrap();
        let product = entries.iter().find(|f| f.op == "matmul").unwrap();
        assert_eq!((product.file, &*product.signature), ("einsum", "..m k, k n -> ..m n"));
        assert_eq!((product.linear_in.clone(), product.flops_per_index), (vec![vec![0], vec![1]], 2.0));
        assert_eq!(product.dtypes, "T, T -> T");
        let rows: HashSet<&str> = product.rows.iter().map(String::as_str).collect();
        for row in ["@1, @0 -> +", "~, @1 -> @1", "+, ~ -> +", "~, + -> +"] {
            assert!(rows.contains(row), "{rows:?} has no {row}");
        }
        assert!(!rows.contains("+, + -> +"), "a product of two partial sums is not a partial sum");
        assert!(entries.iter().all(|f| !f.doc.is_empty() && !f.dtypes.is_empty()), "{entries:?}");
        assert_eq!(entries.iter().map(|f| f.file).collect::<HashSet<_>>().len(), OPS.len());
    }
}
