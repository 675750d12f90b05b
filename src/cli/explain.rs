//! `explain`: layouts, collectives, memory and FLOPs of one training step on a mesh, from a dry run.

mod plan_diff;
mod ring_balance;

use plan_diff::PlanDiff;
use ring_balance::RingBalance;

use super::args::{CHECK_EVERY, ExplainArgs, check_experts, check_tokens};
use crate::data::{Batch, TokenOrder};
use crate::train::{RunFlags, batch};
use serde_json::json;
use shardgrad::dist::{Phase, Record, check_issue_order};
use shardgrad::kernels::Cost;
use shardgrad::nn::{
    Deterministic, GatheringReason, LanguageModel, ModelConfig, Precision, StageGathering, Trainer,
    TrainerConfig,
};
use shardgrad::prelude::*;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// Note printed when the stages or the schedule of a run depend on measured times.
const ESTIMATED: &str = "stages and schedule are estimates: pass times are taken from FLOPs and bytes; a run measures them and writes \
                         its schedule to schedule.txt";

/// Note printed when rows are exchanged between experts, so that bytes depend on the routing.
const BALANCED: &str =
    "bytes and memory of exchanged experts assume balanced routing: equally many tokens for each expert";

/// The most ranks of which each is run dry to prove one issue order. More pass unproved: the proof takes a dry step of every rank.
const PROVED_RANKS_MAX: usize = 64;

/// The characters of a line that lists the gradients of a bucket.
const MEMBERS_CHARS_MAX: usize = 110;

/// The configuration of a training step for a dry run.
#[derive(Clone, Copy)]
pub(super) struct StepSpec<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) plan: &'a Plan,
    /// Sequences in the global batch, and tokens in each.
    pub(super) batch: usize,
    pub(super) seq: usize,
    pub(super) token_order: TokenOrder,
    pub(super) microbatches: usize,
    pub(super) precision: Precision,
    /// Which changes of the run leave its bits as they are.
    pub(super) deterministic: Deterministic,
    /// The memory that a rank is assumed to have ([`TrainerConfig::rank_memory_bytes`]).
    pub(super) rank_memory_bytes: Option<u64>,
}

impl<'a> StepSpec<'a> {
    /// The same step under another plan.
    fn with_plan(self, plan: &'a Plan, mesh: &Mesh) -> StepSpec<'a> {
        StepSpec { plan, token_order: TokenOrder::of_training(self.config, plan, mesh), ..self }
    }

    /// Builds a trainer for the step on one rank of a mesh, without memory and arithmetic, and returns what `f` computes from it. With
    /// a memory limit (0: none) prepacked operands are dropped when they do not fit.
    pub(super) fn dry_run<T>(
        &self,
        mesh: &Mesh,
        rank: usize,
        limit: u64,
        f: impl FnOnce(&Rank, &mut Trainer<'_, LanguageModel>) -> Result<T>,
    ) -> Result<T> {
        let StepSpec { config, plan, seq, token_order, microbatches, precision, .. } = *self;
        let limit = usize::try_from(limit).unwrap_or(0);
        World::new(mesh.clone()).memory_limit(limit).dry_run(rank, |rank| {
            let blank = |own: Range<usize>| vec![0; own.len() * seq];
            let read = |rank: &Rank, _: u64, rows: Range<usize>| {
                let read = |own: Range<usize>| {
                    let mut rows =
                        Batch { inputs: blank(own.clone()), targets: blank(own), extra: Vec::new() };
                    token_order.apply(&mut rows, seq);
                    Ok(rows)
                };
                batch(rank, plan, [rows.len(), seq], read)
            };
            let settings = TrainerConfig {
                microbatches,
                dtype: precision.dtype,
                param_dtype: Some(precision.param_dtype),
                copies_checked_every: 0,
                deterministic: self.deterministic,
                rank_memory_bytes: self.rank_memory_bytes,
                ..TrainerConfig::new(self.batch)
            };
            let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
            let module = LanguageModel::new(config);
            let mut trainer = Trainer::new(rank, module, plan, AdamW::new(1e-3), settings, read, loss)?;
            f(rank, &mut trainer)
        })
    }

    /// Proves on the traces of all ranks, up to [`PROVED_RANKS_MAX`], that the collectives of a step have one issue order.
    pub(super) fn check_issue_order(&self, mesh: &Mesh) -> Result<()> {
        if !(2..=PROVED_RANKS_MAX).contains(&mesh.num_ranks()) {
            return Ok(());
        }
        let trace = |rank: usize| {
            self.dry_run(mesh, rank, 1, |rank, trainer| {
                trainer.step_with(RunFlags::default().to_control())?;
                Ok(rank.trace().take())
            })
        };
        let traces: Vec<Vec<Record>> = (0..mesh.num_ranks()).map(trace).collect::<Result<_>>()?;
        check_issue_order(mesh, &traces)
    }
}

/// Peak memory of a rank in training, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeakMemory {
    /// Buffers of the allocator.
    pub(super) buffers: u64,
    /// Messages to other pipeline stages that are not received yet.
    pub(super) in_flight: u64,
    /// Host memory besides: the largest tensor, gathered for a save.
    pub(super) host: u64,
    /// The packed gradients and the sum of the largest bucket, included in the buffers: blocks larger than the gaps that freed tensors
    /// leave.
    pub(super) bucket: u64,
}

impl PeakMemory {
    /// Returns the sum.
    pub(super) fn total(&self) -> u64 {
        self.buffers.saturating_add(self.in_flight).saturating_add(self.host)
    }

    /// Measures the peak of two steps and a save. The first step creates the optimizer state after activations are freed; from the second
    /// step on both exist at once. Then each parameter is gathered, as a save does.
    pub(super) fn measure(rank: &Rank, trainer: &mut Trainer<'_, LanguageModel>) -> Result<PeakMemory> {
        trainer.step_with(RunFlags::default().to_control())?;
        trainer.step_with(RunFlags::default().to_control())?;
        let mut host = 0;
        for param in trainer.model().params().iter().filter(|param| param.is_local()) {
            let part = param.tensor();
            let whole = Layout::invariant(part.layout().mesh(), part.dtype(), &part.shape());
            host = host.max((whole.numel() * whole.dtype().size()) as u64);
            part.to_layout_at(&whole, Location::caller())?;
        }
        let (buffers, records) = (rank.backend().memory().peak_bytes as u64, rank.trace().take());
        let (in_flight, bucket) = (in_flight_bytes(rank, &records), bucket_bytes(&records));
        Ok(PeakMemory { buffers, in_flight, host, bucket })
    }
}

/// Estimates the bytes of sent messages that are not received yet, which count for the sender: one per stage in the usual schedules.
fn in_flight_bytes(rank: &Rank, records: &[Record]) -> u64 {
    let sends = records.iter().filter(|record| record.op == "send");
    let num_stages = rank.mesh().axis("pp").map_or(0, |pp| rank.mesh().size(pp)) as u64;
    sends.map(|record| record.bytes).max().unwrap_or(0) * num_stages
}

/// The bytes of the packed gradients and of the sums of the two largest buckets: one fills while the other is reduced.
fn bucket_bytes(records: &[Record]) -> u64 {
    let buckets = records.iter().filter(|record| record.op != "all_gather" && record.members().count() > 1);
    let mut bytes: Vec<u64> =
        buckets.map(|record| 2 * (record.numel() * record.dtype.size()) as u64).collect();
    bytes.sort_unstable_by(|a, b| b.cmp(a));
    bytes.iter().take(2).sum()
}

/// How the parameters of a rank are gathered from shards (ZeRO).
struct Gathering {
    stage: usize,
    axis: String,
    /// The modules whose parameters each microbatch gathers together. Empty if a step gathers once.
    groups: Vec<String>,
    /// In stage 3 on a pipeline: how its ranks gather, and why.
    by_stage: Option<StageGathering>,
    /// Whether sums are canonical: then a step gathers and reduces once in every stage.
    is_canonical: bool,
}

impl Gathering {
    /// Returns how the trainer of a plan gathers parameters; `None` if they are stored whole.
    fn of(plan: &Plan, trainer: &Trainer<'_, LanguageModel>) -> Option<Gathering> {
        let (model, is_pipelined) = (trainer.model(), trainer.pipeline_schedule().is_some());
        // Canonical passes run on a mesh without the axis.
        let (stage, axis) = plan.zero_on(model.rank().mesh())?;
        let is_canonical = trainer.config().deterministic != Deterministic::Run;
        let local = |names: &Vec<String>| -> Vec<Layout> {
            let params = model.params().iter().filter(|p| p.is_local() && names.contains(&p.name()));
            params.filter_map(Param::compute_layout).collect()
        };
        let groups: Vec<(String, Vec<Layout>)> =
            model.gather_groups().iter().map(|(module, names)| (module.to_string(), local(names))).collect();
        let is_gathered = |(_, layouts): &(String, Vec<Layout>)| {
            !layouts.is_empty() && !is_canonical && (!is_pipelined || trainer.gathers_by_microbatch())
        };
        let modules = groups.into_iter().filter(is_gathered).map(|(module, _)| module).collect();
        let own_rank = model.rank().world().mesh().axis("pp").map(|pp| model.rank().world().coordinate(pp));
        let is_own = |gathering: &&StageGathering| Some(gathering.pipeline_rank) == own_rank;
        let by_stage = trainer.stage_gatherings().iter().find(is_own).copied().filter(|_| !is_canonical);
        Some(Gathering { stage, axis: axis.to_string(), groups: modules, by_stage, is_canonical })
    }

    /// Describes when parameters are gathered and gradients reduced.
    fn text(&self) -> String {
        let Gathering { stage, axis, groups, by_stage, is_canonical } = self;
        let gathered = match (groups.len(), by_stage) {
            (0, None) => "gathered once per step and kept".to_string(),
            (0, Some(stage)) => format!("gathered once per step and kept: {}", text_of_stage(stage)),
            (count, stage) => {
                let when = stage.as_ref().map_or_else(String::new, |stage| {
                    format!("by each microbatch, since all take {}, ", text_of_stage(stage))
                });
                format!(
                    "gathered {when}in {count} groups, one group ahead, freed after use and gathered again for the backward pass: {}",
                    groups.join(", ")
                )
            }
        };
        let reduced = if *stage == 1 || *is_canonical { "once per step" } else { "in each backward pass" };
        format!(
            "sharded data\n  stage {stage} of ZeRO over {axis}\n  parameters: {gathered}\n  gradients: reduced {reduced}\n"
        )
    }
}

/// Returns the bytes of the gathered parameters of a pipeline rank, and what decides how often it gathers them.
pub(super) fn text_of_stage(stage: &StageGathering) -> String {
    let bytes = format_bytes(stage.gathered_bytes);
    match stage.reason {
        GatheringReason::Bound(_) if stage.by_microbatch => format!("{bytes}, more than gathered_bytes_max"),
        GatheringReason::Bound(_) => format!("{bytes}, as gathered_bytes_max allows"),
        GatheringReason::Memory { needed_bytes, available_bytes: None } => {
            let needed = format_bytes(needed_bytes);
            format!("{bytes}, with which a step needs about {needed}; --memory-limit states what a rank has")
        }
        GatheringReason::Memory { needed_bytes, available_bytes: Some(available) } => {
            let [needed, available] = [needed_bytes, available].map(format_bytes);
            format!("{bytes}, with which a step needs about {needed}; a rank has {available}")
        }
    }
}

/// The step as seen from one rank.
struct StepSummary {
    rank: usize,
    gathering: Option<Gathering>,
    /// The points whose activations the backward pass gathers again.
    regathered: Vec<Rc<str>>,
    /// Name, layout and local bytes of the parameters on this rank.
    parameters: Vec<(String, Layout, u64)>,
    /// Module path and layout of each activation of the forward pass of a microbatch, in order.
    activations: Vec<(String, Layout)>,
    records: Vec<Record>,
    /// Collectives of the consistency check of a run (`--check-every`).
    checks: Vec<Record>,
    cost: Cost,
    peak_bytes: u64,
}

/// Whether the bytes of a collective depend on which experts the router picks.
fn depends_on_routing(record: &Record) -> bool {
    record.op == "all_to_all" && record.path.ends_with("experts.rows")
}

/// Runs the command.
pub(crate) fn run(args: &ExplainArgs) -> Result<()> {
    let config = args.model.config()?;
    let mesh = args.mesh()?.clone();
    check_experts(&mesh, &config)?;
    args.parallelism.check_family(&config)?;
    let precision = args.stored.precision(args.dtype);
    let faults = args.pipeline.faults(&mesh, args.batch).into_iter().chain(args.stored.fault(args.dtype));
    let faults = faults.chain(args.parallelism.fault(&mesh)).chain(args.deterministic.fault());
    if let Some(fault) = faults.into_iter().next() {
        return Err(Error::new(Kind::Config, fault));
    }
    let seq = args.seq(&config)?;
    check_tokens(args.batch, seq)?;
    let family = LanguageModel::plan(&config);
    let plan = args.pipeline.plan(args.parallelism.plan(family.clone()));
    if args.show_plan {
        print!("{plan}");
        return Ok(());
    }
    let microbatches = args.pipeline.microbatches(&mesh, args.batch);
    let (batch, deterministic) = (args.batch, args.deterministic.promise(args.batch));
    let token_order = TokenOrder::of_training(&config, &plan, &mesh);
    let spec = StepSpec {
        config: &config,
        plan: &plan,
        batch,
        seq,
        token_order,
        microbatches,
        precision,
        deterministic,
        rank_memory_bytes: args.memory_limit(),
    };
    if let Some([before, after]) = args.compared_plans() {
        let [before, after] = [before, after].map(|plan| args.pipeline.plan(plan.plan_or(&family)));
        let specs = [&before, &after].map(|plan| spec.with_plan(plan, &mesh));
        specs.iter().try_for_each(|spec| spec.check_issue_order(&mesh))?;
        return diff(args, &mesh, specs.each_ref());
    }
    spec.check_issue_order(&mesh)?;
    // A limit of 1 byte drops prepacked operands: their sizes depend on the CPU, and this output must not.
    let summary_of =
        |rank: usize| spec.dry_run(&mesh, rank, 1, |rank, trainer| summarize(rank, trainer, &plan));
    let steps: Vec<StepSummary> = largest_ranks(&mesh).into_iter().map(summary_of).collect::<Result<_>>()?;
    let extra = extra_of_canonical_sums(&spec, &mesh, &steps)?;
    let ring = RingBalance::of(&spec, &mesh);
    if args.json {
        ring.iter().for_each(|ring| println!("{}", ring.as_json()));
        steps.iter().for_each(|step| print_json(&mesh, step));
        extra.iter().for_each(|diff| println!("{}", diff.as_json("canonical_sums")));
        return Ok(());
    }
    let microbatches_text =
        if microbatches > 1 { format!(", {microbatches} microbatches") } else { String::new() };
    let name = args.model.name();
    println!(
        "one training step of {name} on {mesh}, batch {} x {seq}, {precision}{microbatches_text}",
        args.batch
    );
    println!("bytes are per rank");
    if args.pipeline.uses_measured_times() {
        println!("{ESTIMATED}");
    }
    if steps.iter().flat_map(|step| &step.records).any(depends_on_routing) {
        println!("{BALANCED}");
    }
    if let Some(ring) = &ring {
        println!("{}", ring.text());
    }
    if let Deterministic::Mesh { batch_leaves, sum_leaves } = deterministic {
        println!(
            "the batch is cut into {batch_leaves} leaves, a pass for each, and other summed dims into {sum_leaves}"
        );
    }
    for (stage, step) in steps.iter().enumerate() {
        if steps.len() > 1 {
            print!("\nstage {stage} of {}, ", steps.len());
        } else {
            println!();
        }
        print!("{}", text(&mesh, step));
        if let Some(diff) = extra.get(stage) {
            print!("\nin place of --deterministic run\n{}", diff.totals());
        }
    }
    Ok(())
}

/// Compares steps whose bits do not depend on the mesh with those of the order of the mesh; nothing for other steps.
fn extra_of_canonical_sums(spec: &StepSpec<'_>, mesh: &Mesh, steps: &[StepSummary]) -> Result<Vec<PlanDiff>> {
    if spec.deterministic == Deterministic::Run {
        return Ok(Vec::new());
    }
    let plain = StepSpec { deterministic: Deterministic::Run, ..*spec };
    let compare = |step: &StepSummary| {
        let before =
            plain.dry_run(mesh, step.rank, 1, |rank, trainer| summarize(rank, trainer, plain.plan))?;
        Ok(PlanDiff::between(mesh, [&before, step]))
    };
    steps.iter().map(compare).collect()
}

/// Compares the step under two plans, for each pipeline stage.
fn diff(args: &ExplainArgs, mesh: &Mesh, specs: [&StepSpec<'_>; 2]) -> Result<()> {
    let summary_of = |spec: &StepSpec<'_>, rank: usize| {
        spec.dry_run(mesh, rank, 1, |rank, trainer| summarize(rank, trainer, spec.plan))
    };
    if !args.json {
        let StepSpec { batch, seq, precision, microbatches, .. } = specs[0];
        let name = args.model.name();
        println!(
            "one training step of {name} on {mesh}, batch {batch} x {seq}, {precision}, {microbatches} microbatch(es), under two plans"
        );
        println!("bytes are per rank");
    }
    for rank in largest_ranks(mesh) {
        let [before, after] = [summary_of(specs[0], rank)?, summary_of(specs[1], rank)?];
        let diff = PlanDiff::between(mesh, [&before, &after]);
        match args.json {
            true => diff.print_json(),
            false => print!("\n{}", diff.text(mesh)),
        }
    }
    Ok(())
}

/// Runs a step of a trainer on a rank of a dry run and collects layouts, collectives, cost and peak memory.
fn summarize(rank: &Rank, trainer: &mut Trainer<'_, LanguageModel>, plan: &Plan) -> Result<StepSummary> {
    let (gathering, regathered) = (Gathering::of(plan, trainer), trainer.model().regathered_points());
    let here = trainer.model().params().iter().filter(|p| p.is_local());
    let parameters = here.map(|p| (p.name(), p.layout(), local_bytes(&p.layout(), trainer))).collect();
    let activations = last_layout_per_path(trainer.forward_layouts()?);
    rank.trace().take();
    trainer.check_consistent()?;
    let checks = rank.trace().take();
    let before = rank.backend().cost();
    trainer.step_with(RunFlags::default().to_control())?;
    let (records, after) = (rank.trace().take(), rank.backend().cost());
    let cost = Cost { flops: after.flops - before.flops, bytes: after.bytes - before.bytes };
    // The first step creates the optimizer state after activations are freed; from the second step on both exist at once.
    trainer.step_with(RunFlags::default().to_control())?;
    let peak_bytes = rank.backend().memory().peak_bytes as u64;
    let rank = rank.index();
    Ok(StepSummary {
        rank,
        gathering,
        regathered,
        parameters,
        activations,
        records,
        checks,
        cost,
        peak_bytes,
    })
}

/// Returns the bytes of a layout on the rank of a trainer.
fn local_bytes(layout: &Layout, trainer: &Trainer<'_, LanguageModel>) -> u64 {
    let here = layout.local_shape(trainer.model().rank().coordinates());
    (here.iter().product::<usize>() * layout.dtype().size()) as u64
}

/// Keeps the last layout of consecutive ops with the same module path.
fn last_layout_per_path(ops: Vec<(Rc<str>, Layout)>) -> Vec<(String, Layout)> {
    let mut places: Vec<(String, Layout)> = Vec::new();
    for (path, layout) in ops {
        match places.last_mut() {
            Some((known, last)) if **known == *path => *last = layout,
            _ => places.push((path.to_string(), layout)),
        }
    }
    places
}

/// Returns the rank that holds most of each pipeline stage, or of the mesh: of uneven shards the last is the largest.
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

fn print_json(mesh: &Mesh, step: &StepSummary) {
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
        let members: Vec<&str> = r.members().collect();
        println!(
            "{}",
            json!({"kind": kind, "rank": rank, "op": r.op, "axes": mesh.names(r.axes),
            "phase": phase(r.phase), "path": r.path, "members": members, "dtype": r.dtype.name(),
            "numel": r.numel(), "bytes": r.bytes, "line": line})
        );
    }
    if let Some(Gathering { stage, axis, groups, by_stage, .. }) = &step.gathering {
        let bytes = by_stage.map(|stage| stage.gathered_bytes);
        let (needed, available) = match by_stage.map(|stage| stage.reason) {
            Some(GatheringReason::Memory { needed_bytes, available_bytes }) => {
                (Some(needed_bytes), available_bytes)
            }
            _ => (None, None),
        };
        println!(
            "{}",
            json!({"kind": "sharded_data", "rank": rank, "stage": stage, "axis": axis, "gather_groups": groups,
            "gathered_bytes": bytes, "needed_bytes": needed, "assumed_bytes": available})
        );
    }
    if !step.regathered.is_empty() {
        let points: Vec<&str> = step.regathered.iter().map(|point| &**point).collect();
        println!("{}", json!({"kind": "regathered", "rank": rank, "points": points}));
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

/// Formats the step as text.
fn text(mesh: &Mesh, step: &StepSummary) -> String {
    let mut out = format!("rank {}\n\nparameters\n", mesh.describe(step.rank));
    let width = step.parameters.iter().map(|(name, ..)| name.len()).max().unwrap_or(0);
    for (name, layout, bytes) in &step.parameters {
        let _ = writeln!(out, "  {name:<width$} {:<32} {:>10}", layout.to_string(), format_bytes(*bytes));
    }
    let total = step.parameters.iter().map(|(_, _, bytes)| bytes).sum();
    let _ = writeln!(out, "  {:<width$} {:<32} {:>10}\n", "total", "", format_bytes(total));
    if let Some(gathering) = &step.gathering {
        let _ = writeln!(out, "{}", gathering.text());
    }
    if !step.regathered.is_empty() {
        let _ = writeln!(
            out,
            "sharded activations\n  gathered again for the backward pass, each while the product before is computed: {}\n",
            step.regathered.join(", ")
        );
    }
    out.push_str("activations per microbatch\n");
    let width = step.activations.iter().map(|(path, _)| path.len()).max().unwrap_or(0);
    for (path, layout) in &step.activations {
        let _ = writeln!(out, "  {path:<width$} {layout}");
    }
    out.push_str("\ncollectives\n");
    if step.records.is_empty() {
        out.push_str("  none\n");
    }
    write_records(&mut out, mesh, &step.records);
    if !step.checks.is_empty() {
        let _ = writeln!(
            out,
            "\nconsistency checks of `train`, before the first step and every {CHECK_EVERY} steps (--check-every); \
             not in the totals"
        );
        write_records(&mut out, mesh, &step.checks);
    }
    out.push_str("\ntotals\n");
    let mut totals: BTreeMap<(String, &str, &str), (u64, u64)> = BTreeMap::new();
    for r in &step.records {
        let total = totals.entry((mesh.names(r.axes), phase(r.phase), r.op)).or_default();
        *total = (total.0 + 1, total.1 + r.bytes);
    }
    for ((axes, phase, op), (count, bytes)) in totals {
        let _ = writeln!(out, "  {axes:<6} {phase:<8} {op:<14} {count:>4} calls {:>10}", format_bytes(bytes));
    }
    let gflop = step.cost.flops as f64 / 1e9;
    let _ = writeln!(
        out,
        "  compute {gflop:.2} GFLOP, memory traffic at least {}",
        format_bytes(step.cost.bytes)
    );
    let _ = writeln!(out, "  peak memory {}", format_bytes(step.peak_bytes));
    out
}

/// The name of the value that a collective moves, or the number of parameters or of gradients in a bucket that share it.
fn value_name(record: &Record) -> Cow<'_, str> {
    match record.members().count() {
        1 => record.path.as_str().into(),
        count if record.op == "all_gather" => format!("{count} parameters").into(),
        count => format!("bucket of {count}").into(),
    }
}

/// Writes the names of the values that share a call in lines of a limited width.
fn write_members(out: &mut String, record: &Record) {
    let mut line = String::new();
    let mut members = record.members().peekable();
    while let Some(name) = members.next() {
        line.push_str(name);
        match members.peek() {
            Some(next) if line.len() + next.len() < MEMBERS_CHARS_MAX => line.push_str(", "),
            _ => {
                let _ = writeln!(out, "             {line}");
                line.clear();
            }
        }
    }
}

/// Writes one line per distinct record, with its number of repetitions, and the names of the values that share a call below its line.
fn write_records(out: &mut String, mesh: &Mesh, records: &[Record]) {
    let wide = records.iter().map(|r| value_name(r).len()).max().unwrap_or(0);
    for (times, r) in count_repeats(records) {
        let times = if times > 1 { format!("{times} x") } else { String::new() };
        let _ = writeln!(
            out,
            "  {:<8} {:<wide$} {times:>5} {:<14} {:<6} {:>12} {:>10}  {}:{}",
            phase(r.phase),
            value_name(r),
            r.op,
            mesh.names(r.axes),
            format!("{}[{}]", r.dtype, r.numel()),
            format_bytes(r.bytes),
            r.site.file(),
            r.site.line()
        );
        if r.members().count() > 1 {
            write_members(out, r);
        }
    }
}

/// Merges equal records, in the order of their first occurrence, with their counts: microbatches repeat the same calls.
fn count_repeats(records: &[Record]) -> Vec<(usize, &Record)> {
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

/// Formats bytes in binary units, as in `1.5 MiB`.
pub(super) fn format_bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        1_073_741_824..1_099_511_627_776 => format!("{:.1} GiB", bytes as f64 / 1_073_741_824.0),
        _ => format!("{:.1} TiB", bytes as f64 / 1_099_511_627_776.0),
    }
}
