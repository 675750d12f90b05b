//! `explain`: what one training step of a model would hold, move and compute on a mesh. Nothing is computed.

use super::args::{CHECK_EVERY, ExplainArgs, check_experts, check_tokens};
use crate::data::Batch;
use crate::train::{ControlFlags, batch};
use serde_json::json;
use shardgrad::dist::{Phase, Record};
use shardgrad::kernels::Cost;
use shardgrad::nn::{LanguageModel, ModelConfig, Precision, Settings, Trainer};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// What is said where a run would measure times.
const ESTIMATED: &str = "stages and order of passes are an estimate: passes take as long as their ops have volume; a run measures \
                         them, and keeps its lists in schedule.txt";

/// A training step that nobody takes.
pub(super) struct Outline<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) plan: &'a Plan,
    /// Sequences in the global batch, and tokens in each.
    pub(super) batch: usize,
    pub(super) seq: usize,
    pub(super) microbatches: usize,
    pub(super) precision: Precision,
}

impl Outline<'_> {
    /// What is told of a trainer for the step on one rank of a mesh, without memory and arithmetic. Prepacked operands of the rank
    /// give way to a limit of its memory (0: none).
    pub(super) fn limited<T>(
        &self,
        mesh: &Mesh,
        rank: usize,
        limit: u64,
        told: impl FnOnce(&Rank, &mut Trainer<'_, LanguageModel>) -> Result<T>,
    ) -> Result<T> {
        let Outline { config, plan, seq, microbatches, precision, .. } = *self;
        let limit = usize::try_from(limit).unwrap_or(0);
        World::new(mesh.clone()).memory_limit(limit).dry_run(rank, |rank| {
            let blank = |own: Range<usize>| vec![0; own.len() * seq];
            let read = |rank: &Rank, _: u64, rows: Range<usize>| {
                let read = |own: Range<usize>| {
                    Ok(Batch { inputs: blank(own.clone()), targets: blank(own), more: Vec::new() })
                };
                let share = matches!(config, ModelConfig::Bert(_)).then_some(1.0);
                batch(rank, plan, [rows.len(), seq], share, read)
            };
            let settings = Settings {
                microbatches,
                dtype: precision.dtype,
                param_dtype: Some(precision.param_dtype),
                ..Settings::new(self.batch)
            };
            let loss = |model: &LanguageModel, x: &[Var]| model.loss_of(x);
            let module = LanguageModel::new(config);
            let mut trainer = Trainer::new(rank, module, plan, AdamW::new(1e-3), settings, read, loss)?;
            told(rank, &mut trainer)
        })
    }
}

/// The most bytes that a rank holds in a training.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peak {
    /// In buffers.
    pub(super) buffers: u64,
    /// In messages to other stages that are not received yet.
    pub(super) in_flight: u64,
    /// Beside them on the host: the bytes of a whole tensor that is saved.
    pub(super) host: u64,
}

impl Peak {
    /// All of them together.
    pub(super) fn all(&self) -> u64 {
        self.buffers.saturating_add(self.in_flight).saturating_add(self.host)
    }

    /// Takes two steps: the first makes what the optimizer keeps, when activations are gone; later ones hold both. Then gathers each
    /// parameter as a save does.
    pub(super) fn of(rank: &Rank, trainer: &mut Trainer<'_, LanguageModel>) -> Result<Peak> {
        trainer.step(&ControlFlags::default().to_numbers())?;
        trainer.step(&ControlFlags::default().to_numbers())?;
        let mut host = 0;
        for param in trainer.model().params().iter().filter(|param| param.is_here()) {
            let part = param.tensor();
            let whole = Layout::invariant(part.layout().mesh(), part.dtype(), &part.shape());
            host = host.max((whole.numel() * whole.dtype().size()) as u64);
            part.to_layout_at(&whole, Location::caller())?;
        }
        let buffers = rank.backend().memory().peak_bytes as u64;
        Ok(Peak { buffers, in_flight: in_flight_bytes(rank), host })
    }
}

/// Messages to other stages of a pipeline that wait to be received: their memory is the sender's. At most as many as there are stages
/// in the usual schedules.
fn in_flight_bytes(rank: &Rank) -> u64 {
    let sends = rank.trace().take().into_iter().filter(|record| record.op == "send");
    let num_stages = rank.mesh().axis("pp").map_or(0, |pp| rank.mesh().size(pp)) as u64;
    sends.map(|record| record.bytes).max().unwrap_or(0) * num_stages
}

/// One rank's view of a step.
struct Step {
    rank: usize,
    /// Those that live on this rank, with their bytes here.
    parameters: Vec<(String, Layout, u64)>,
    /// What is left at each place of the model in the forward pass of a microbatch, in order.
    activations: Vec<(String, Layout)>,
    records: Vec<Record>,
    /// What a run calls before its first step, and now and then, to compare its ranks.
    checks: Vec<Record>,
    cost: Cost,
    peak_bytes: u64,
}

/// Runs the command.
pub(crate) fn run(args: &ExplainArgs) -> Result<()> {
    let config = args.model.config()?;
    let mesh = args.mesh()?.clone();
    check_experts(&mesh, &config)?;
    let precision = args.stored.precision(args.dtype);
    let faults = args.pipeline.faults(&mesh, args.batch).into_iter().chain(args.stored.fault(args.dtype));
    if let Some(fault) = faults.into_iter().next() {
        return Err(Error::new(Kind::Config, fault));
    }
    let seq = args.seq(&config)?;
    check_tokens(args.batch, seq)?;
    let plan = args.pipeline.plan(LanguageModel::plan(&config));
    let microbatches = args.pipeline.microbatches(&mesh, args.batch);
    let outline = Outline { config: &config, plan: &plan, batch: args.batch, seq, microbatches, precision };
    // Under the least limit prepacked operands give way: their sizes depend on the processor, and what is told here does not.
    let told = |rank: usize| outline.limited(&mesh, rank, 1, account);
    let steps: Vec<Step> = largest_ranks(&mesh).into_iter().map(told).collect::<Result<_>>()?;
    if args.json {
        steps.iter().for_each(|step| print_json(&mesh, step));
        return Ok(());
    }
    let pieces = if microbatches > 1 { format!(", {microbatches} microbatches") } else { String::new() };
    let name = args.model.name();
    println!("one step of {name} on {mesh}, batch {} x {seq}, {precision}{pieces}", args.batch);
    println!("bytes are those that one rank must hold or move");
    if args.pipeline.measures() {
        println!("{ESTIMATED}");
    }
    for (stage, step) in steps.iter().enumerate() {
        if steps.len() > 1 {
            print!("\nstage {stage} of {}, ", steps.len());
        } else {
            println!();
        }
        print!("{}", text(&mesh, step));
    }
    Ok(())
}

/// What a step of a trainer holds, moves and computes on a rank of a dry run.
fn account(rank: &Rank, trainer: &mut Trainer<'_, LanguageModel>) -> Result<Step> {
    let bytes = |layout: &Layout| {
        let here = layout.local_shape(trainer.rank().coordinates());
        (here.iter().product::<usize>() * layout.dtype().size()) as u64
    };
    let here = trainer.model().params().iter().filter(|p| p.is_here());
    let parameters = here.map(|p| (p.name(), p.layout(), bytes(&p.layout()))).collect();
    let activations = last_of_each(trainer.outline()?);
    rank.trace().take();
    trainer.check_alike()?;
    let checks = rank.trace().take();
    let before = rank.backend().cost();
    trainer.step(&ControlFlags::default().to_numbers())?;
    let (records, after) = (rank.trace().take(), rank.backend().cost());
    let cost = Cost { flops: after.flops - before.flops, bytes: after.bytes - before.bytes };
    // The first step makes what the optimizer keeps, when activations are gone; later ones hold both.
    trainer.step(&ControlFlags::default().to_numbers())?;
    let peak_bytes = rank.backend().memory().peak_bytes as u64;
    Ok(Step { rank: rank.index(), parameters, activations, records, checks, cost, peak_bytes })
}

/// Of ops at one place that follow each other, the last.
fn last_of_each(ops: Vec<(Rc<str>, Layout)>) -> Vec<(String, Layout)> {
    let mut places: Vec<(String, Layout)> = Vec::new();
    for (path, layout) in ops {
        match places.last_mut() {
            Some((known, last)) if **known == *path => *last = layout,
            _ => places.push((path.to_string(), layout)),
        }
    }
    places
}

/// The last rank of each stage of a pipeline, or of the mesh: of uneven shares the last is the largest.
pub(super) fn largest_ranks(mesh: &Mesh) -> Vec<usize> {
    let at = |stage: Option<usize>| {
        let place = |a| stage.filter(|_| mesh.axis("pp") == Some(a)).unwrap_or(mesh.size(a) - 1);
        let here: Vec<usize> = mesh.axes().map(place).collect();
        mesh.rank_at(&here)
    };
    match mesh.axis("pp") {
        None => vec![at(None)],
        Some(pp) => (0..mesh.size(pp)).map(|stage| at(Some(stage))).collect(),
    }
}

fn print_json(mesh: &Mesh, step: &Step) {
    let rank = step.rank;
    for (name, layout, bytes) in &step.parameters {
        let layout = layout.to_string();
        println!(
            "{}",
            json!({"kind": "parameter", "rank": rank, "name": name, "layout": layout, "bytes": bytes})
        );
    }
    for (path, layout) in &step.activations {
        let layout = layout.to_string();
        println!("{}", json!({"kind": "activation", "rank": rank, "path": path, "layout": layout}));
    }
    let kinds = [("collective", &step.records), ("check", &step.checks)];
    for (kind, r) in kinds.into_iter().flat_map(|(kind, records)| records.iter().map(move |r| (kind, r))) {
        let line = format!("{}:{}", r.site.file(), r.site.line());
        println!(
            "{}",
            json!({"kind": kind, "rank": rank, "op": r.op, "axes": mesh.names(r.axes),
            "phase": phase(r.phase), "path": r.path, "dtype": r.dtype.name(), "numel": r.numel(),
            "bytes": r.bytes, "line": line})
        );
    }
    println!(
        "{}",
        json!({"kind": "total", "rank": rank, "flops": step.cost.flops, "memory_bytes": step.cost.bytes,
        "peak_bytes": step.peak_bytes})
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
fn text(mesh: &Mesh, step: &Step) -> String {
    let mut out = format!("seen from rank {}\n\nparameters\n", mesh.describe(step.rank));
    let width = step.parameters.iter().map(|(name, ..)| name.len()).max().unwrap_or(0);
    for (name, layout, bytes) in &step.parameters {
        let _ = writeln!(out, "  {name:<width$} {:<32} {:>10}", layout.to_string(), size(*bytes));
    }
    let total = step.parameters.iter().map(|(_, _, bytes)| bytes).sum();
    let _ = writeln!(out, "  {:<width$} {:<32} {:>10}\n", "total", "", size(total));
    out.push_str("activations of a microbatch\n");
    let width = step.activations.iter().map(|(path, _)| path.len()).max().unwrap_or(0);
    for (path, layout) in &step.activations {
        let _ = writeln!(out, "  {path:<width$} {layout}");
    }
    out.push_str("\ncollectives\n");
    if step.records.is_empty() {
        out.push_str("  none: every value stays where it is\n");
    }
    list(&mut out, mesh, &step.records);
    if !step.checks.is_empty() {
        let _ = writeln!(
            out,
            "\nchecks of `train` that ranks are alike, before the first step and every {CHECK_EVERY} steps \
             (--check-every); not in the totals"
        );
        list(&mut out, mesh, &step.checks);
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
    let _ = writeln!(out, "  memory in use at the peak {}", size(step.peak_bytes));
    out
}

/// A line for each kind of call.
fn list(out: &mut String, mesh: &Mesh, records: &[Record]) {
    let wide = records.iter().map(|r| r.path.len()).max().unwrap_or(0);
    for (times, r) in repeated(records) {
        let times = if times > 1 { format!("{times} x") } else { String::new() };
        let _ = writeln!(
            out,
            "  {:<8} {:<wide$} {times:>5} {:<14} {:<6} {:>12} {:>10}  {}:{}",
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
}

/// Records in the order of their first of a kind, with the number of that kind: microbatches repeat themselves.
fn repeated(records: &[Record]) -> Vec<(usize, &Record)> {
    let mut kinds: Vec<(usize, &Record)> = Vec::new();
    for record in records {
        let like = |r: &Record| Record { seq: record.seq, ..r.clone() } == *record;
        match kinds.iter_mut().find(|(_, known)| like(known)) {
            Some((times, _)) => *times += 1,
            None => kinds.push((1, record)),
        }
    }
    kinds
}

/// Bytes in the largest unit that leaves at least one digit before the point.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        1_073_741_824..1_099_511_627_776 => format!("{:.1} GiB", bytes as f64 / 1_073_741_824.0),
        _ => format!("{:.1} TiB", bytes as f64 / 1_099_511_627_776.0),
    }
}
