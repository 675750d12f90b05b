//! `explain`: what one training step of a model would hold, move and compute on a mesh. Nothing is computed.

use super::args::{ExplainArgs, check_axes};
use crate::data::Batch;
use crate::train::batch;
use serde_json::json;
use shardgrad::dist::{Phase, Record};
use shardgrad::kernels::Cost;
use shardgrad::nn::LanguageModel;
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// One rank's view of a step.
struct Step {
    parameters: Vec<(String, Layout)>,
    records: Vec<Record>,
    cost: Cost,
    saved_bytes: usize,
}

/// Runs the command.
pub(crate) fn run(args: &ExplainArgs) -> Result<()> {
    let config = args.model.config()?;
    let mesh = args.mesh.clone();
    check_axes(&mesh)?;
    let shape = [args.batch, args.seq.unwrap_or(config.positions().min(1024))];
    let plan = LanguageModel::plan(&config);
    let step = World::new(mesh.clone()).dry_run(0, |rank| {
        let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 0, args.dtype)?;
        let parameters = model.params().iter().map(|p| (p.name(), p.tensor().layout().clone())).collect();
        let tape = model.tape();
        let blank = |own: std::ops::Range<usize>| vec![0; own.len() * shape[1]];
        let read =
            |own: std::ops::Range<usize>| Ok(Batch { inputs: blank(own.clone()), targets: blank(own) });
        let (ids, targets) = batch(rank, &plan, shape, read)?;
        let loss = model.loss(&tape.constant(ids), &tape.constant(targets));
        let saved_bytes = tape.saved_bytes();
        loss.backward()?;
        AdamW::new(1e-3).step(
            &model,
            tape.gradients(),
            StepArgs { lr: 1e-3, clip: None, control: &[0.0, 0.0] },
        )?;
        Ok(Step { parameters, records: rank.trace().take(), cost: rank.backend().cost(), saved_bytes })
    })?;
    let title = format!(
        "one step of {} on {mesh}, batch {} x {}, {}",
        args.model.name(),
        shape[0],
        shape[1],
        args.dtype
    );
    if args.json {
        print_json(&mesh, &step)
    } else {
        print!("{}", text(&title, &mesh, &step))
    }
    Ok(())
}

fn print_json(mesh: &Mesh, step: &Step) {
    for (name, layout) in &step.parameters {
        println!("{}", json!({"kind": "parameter", "name": name, "layout": layout.to_string()}));
    }
    for r in &step.records {
        let line = format!("{}:{}", r.site.file(), r.site.line());
        println!(
            "{}",
            json!({"kind": "collective", "op": r.op, "axes": mesh.names(r.axes), "phase": phase(r.phase),
            "path": r.path, "dtype": r.dtype.name(), "numel": r.numel(), "bytes": r.bytes, "line": line})
        );
    }
    println!(
        "{}",
        json!({"kind": "total", "flops": step.cost.flops, "memory_bytes": step.cost.bytes,
        "saved_bytes": step.saved_bytes})
    );
}

fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Control => "control",
    }
}

/// The table for people.
fn text(title: &str, mesh: &Mesh, step: &Step) -> String {
    let mut out = format!("{title}\nseen from rank 0; bytes are those that it must move\n\nparameters\n");
    let here = mesh.coordinate(0);
    let mut bytes = 0;
    for (name, layout) in &step.parameters {
        let local: usize = layout.local_shape(&here).iter().product::<usize>() * layout.dtype().size();
        bytes += local;
        let _ = writeln!(out, "  {name:<28} {:<32} {:>10}", layout.to_string(), size(local as u64));
    }
    let _ = writeln!(out, "  {:<28} {:<32} {:>10}\n", "total", "", size(bytes as u64));
    out.push_str("collectives\n");
    if step.records.is_empty() {
        out.push_str("  none: every value stays where it is\n");
    }
    for r in &step.records {
        let _ = writeln!(
            out,
            "  {:<8} {:<28} {:<14} {:<6} {:>12} {:>10}  {}:{}",
            phase(r.phase),
            r.path,
            r.op,
            mesh.names(r.axes),
            format!("{}[{}]", r.dtype, r.numel()),
            size(r.bytes),
            r.site.file(),
            r.site.line()
        );
    }
    out.push_str("\ntotals\n");
    let mut totals: BTreeMap<(String, &str, &str), (u64, u64)> = BTreeMap::new();
    for r in &step.records {
        let total = totals.entry((mesh.names(r.axes), phase(r.phase), r.op)).or_default();
        *total = (total.0 + 1, total.1 + r.bytes);
    }
    for ((axes, phase, op), (count, bytes)) in totals {
        let _ = writeln!(out, "  {axes:<6} {phase:<8} {op:<14} {count:>4} calls {:>10}", size(bytes));
    }
    let gflop = step.cost.flops as f64 / 1e9;
    let _ = writeln!(out, "  compute {gflop:.2} GFLOP, memory traffic at least {}", size(step.cost.bytes));
    let _ = writeln!(out, "  kept for the backward pass {}", size(step.saved_bytes as u64));
    out
}

/// Bytes in the largest unit that leaves at least one digit before the point.
fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.1} GiB", bytes as f64 / 1_073_741_824.0),
    }
}
