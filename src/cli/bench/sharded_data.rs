//! Sharded-data benchmark: memory, bytes and time of ZeRO 1, 2, 3, FSDP and hybrid sharding, alone and with pipelines and tensor
//! parallelism. Printed as the Markdown table of `docs/sharded-data.md`.

use super::measurement::{Bench, check};
use super::training::synthetic_batch;
use serde_json::json;
use shardgrad::dist::Record;
use shardgrad::nn::{Gpt2Config, LanguageModel};
use shardgrad::prelude::*;
use std::ops::Range;
use std::time::Instant;

/// Vocabulary, positions, width, blocks and heads of the model.
const MODEL: [usize; 5] = [512, 64, 256, 8, 4];
const ROWS: usize = 16;
const SEQ: usize = 64;
const MICROBATCHES: usize = 4;
/// Timed steps; the median counts.
const STEPS: usize = 3;
/// Largest relative difference of a loss in bf16 from that of one rank.
const TOLERANCE: f64 = 2e-3;

/// Where a stage of ZeRO shards parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharding {
    None,
    /// A stage over `dp`.
    Zero(usize),
    /// Stage 3 over `fsdp`.
    Fsdp,
}

/// A combination of styles.
#[derive(Clone, Debug)]
struct Combination {
    mesh: &'static str,
    sharding: Sharding,
    /// Stage 3 on a pipeline: gathered by microbatch, and not once per step.
    by_microbatch: bool,
}

/// What a step costs a rank.
#[derive(Clone, Copy, Debug, Default)]
struct RankCost {
    /// Bytes of stored parameters.
    stored: usize,
    /// Bytes and calls of the gathers of parameters, and of the reductions of gradients.
    gathered: (u64, usize),
    reduced: (u64, usize),
    /// Bytes of parameters, gradients and optimizer state by formula.
    formula: usize,
    /// Peak bytes, counted by the allocator.
    peak: usize,
}

/// Runs all combinations and prints their table, or one JSON object for each.
pub(super) fn run(bench: &Bench) -> Result<()> {
    let alone = Combination { mesh: "", sharding: Sharding::None, by_microbatch: false };
    let (losses, one, seconds) = alone.run()?;
    if !bench.json {
        let [_, _, width, blocks, _] = MODEL;
        println!(
            "GPT-2 of {blocks} blocks, width {width}, bf16 with f32 state, {ROWS} x {SEQ} tokens in {MICROBATCHES} microbatches, blocks recomputed, per rank\n"
        );
        println!(
            "| mesh | ZeRO | gathered | stored | gathers | reductions | states by formula | peak | seconds |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
    }
    alone.report(bench, one, seconds);
    for combination in combinations() {
        let (found, cost, seconds) = combination.run()?;
        check(&format!("the losses on {}", combination.mesh), &found, &losses, TOLERANCE)?;
        combination.report(bench, cost, seconds);
    }
    Ok(())
}

/// Returns all combinations in the order of the table.
fn combinations() -> Vec<Combination> {
    use Sharding::{Fsdp, None, Zero};
    let stages = [None, Zero(1), Zero(2), Zero(3)];
    let with_stages = |mesh| stages.map(|sharding| (mesh, sharding));
    let data = with_stages("dp=4").into_iter().chain([("fsdp=4", Fsdp), ("dp=2,fsdp=2", Fsdp)]);
    let pipelines = with_stages("pp=2,dp=2").into_iter();
    let pipelines = pipelines.chain([("pp=2,fsdp=2", Fsdp), ("pp=2,dp=2,fsdp=2", Fsdp)]);
    let tensor = with_stages("dp=2,tp=2").into_iter();
    let tensor = tensor.chain([("fsdp=2,tp=2", Fsdp), ("dp=2,fsdp=2,tp=2", Fsdp)]);
    let all = with_stages("pp=2,dp=2,tp=2").into_iter().chain([("pp=2,fsdp=2,tp=2", Fsdp)]);
    let forms = |(mesh, sharding): (&'static str, Sharding)| {
        let has_forms = mesh.contains("pp") && matches!(sharding, Zero(3) | Fsdp);
        let forms: &[bool] = if has_forms { &[false, true] } else { &[false] };
        forms.iter().map(move |by_microbatch| Combination { mesh, sharding, by_microbatch: *by_microbatch })
    };
    data.chain(pipelines).chain(tensor).chain(all).flat_map(forms).collect()
}

impl Combination {
    /// Trains for a few steps: the losses, the cost of the rank with the highest peak, and the median seconds of a step.
    fn run(&self) -> Result<(Vec<f64>, RankCost, f64)> {
        let ranks = World::new(Mesh::parse(self.mesh)?).threads(1).launch(|rank| self.steps(rank))?;
        let (losses, _, seconds) = ranks[0].clone();
        let cost = ranks.into_iter().map(|(_, cost, _)| cost).max_by_key(|cost| cost.peak);
        Ok((losses, cost.unwrap_or_default(), seconds))
    }

    fn plan(&self) -> Plan {
        let plan = match self.sharding {
            Sharding::Zero(stage) => Plan::gpt2().and(Plan::zero(stage, "dp")),
            Sharding::None | Sharding::Fsdp => Plan::gpt2(),
        };
        plan.gathered_bytes_max(if self.by_microbatch { 0 } else { usize::MAX })
    }

    fn steps(&self, rank: &Rank) -> Result<(Vec<f64>, RankCost, f64)> {
        let [vocab, positions, width, blocks, heads] = MODEL;
        let config = Gpt2Config::new(vocab, positions, width, blocks, heads);
        let plan = self.plan();
        let precision = Precision::mixed(DType::BF16);
        let settings = TrainerConfig {
            microbatches: MICROBATCHES,
            dtype: precision.dtype,
            param_dtype: Some(precision.param_dtype),
            copies_checked_every: 0,
            ..TrainerConfig::new(ROWS)
        };
        let read = |rank: &Rank, step: u64, rows: Range<usize>| {
            synthetic_batch(rank, &plan, [vocab, SEQ], step, rows)
        };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
        let model = LanguageModel::new(&config.into()).recompute(true);
        let mut trainer = Trainer::new(rank, model, &plan, AdamW::new(1e-3), settings, read, loss)?;
        let mut losses = vec![trainer.step()?.loss];
        rank.trace().enable();
        losses.push(trainer.step()?.loss);
        rank.trace().disable();
        let records = rank.trace().take();
        let mut seconds = Vec::with_capacity(STEPS);
        for _ in 0..STEPS {
            let started = Instant::now();
            trainer.step()?;
            seconds.push(started.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        let peak = rank.backend().memory().peak_bytes;
        let cost = RankCost { peak, ..self.cost(&trainer, &records) };
        Ok((losses, cost, seconds[STEPS / 2]))
    }

    /// Returns the bytes that a rank stores and moves, and those of its states by formula.
    fn cost(&self, trainer: &Trainer<'_, LanguageModel>, records: &[Record]) -> RankCost {
        let model = trainer.model();
        let local =
            |layout: &Layout| layout.local_shape(model.rank().coordinates()).iter().product::<usize>();
        let params: Vec<(String, usize, usize)> = model
            .params()
            .iter()
            .filter(|param| param.is_local())
            .map(|p| (p.name(), local(&p.layout()), local(&p.compute_layout().unwrap_or_else(|| p.layout()))))
            .collect();
        let stored: usize = params.iter().map(|(_, stored, _)| stored).sum();
        let computed: usize = params.iter().map(|(_, _, computed)| computed).sum();
        let group_of = |names: &[String]| {
            let of_group = params.iter().filter(|(name, ..)| names.contains(name));
            of_group.map(|(_, _, computed)| computed).sum::<usize>()
        };
        let largest_group = model.gather_groups().iter().map(|(_, names)| group_of(names)).max().unwrap_or(0);
        let frees = trainer.pipeline_schedule().is_none() || trainer.gathers_by_microbatch();
        // Stored parameters and two moments in f32, gradients in f32, parameters as computed in bf16.
        let formula = match self.sharding {
            Sharding::None => 18 * stored,
            Sharding::Zero(1) => 6 * computed + 12 * stored,
            Sharding::Zero(3) | Sharding::Fsdp if frees => 16 * stored + 2 * 2 * largest_group,
            Sharding::Zero(_) | Sharding::Fsdp => 2 * computed + 16 * stored,
        };
        // Tensor parallelism all-reduces activations over its own axis. The trace names axes of the world's mesh.
        let world = model.rank().world();
        let axes: Vec<_> = ["dp", "fsdp"].iter().filter_map(|name| world.mesh().axis(name)).collect();
        let total = |ops: &[&str]| {
            let moves = |r: &&Record| {
                r.numel() > SMALL && ops.contains(&r.op) && r.axes.iter().all(|axis| axes.contains(&axis))
            };
            let moved: Vec<u64> = records.iter().filter(moves).map(|r| r.bytes).collect();
            (moved.iter().sum(), moved.len())
        };
        let (gathered, reduced) = (total(&["all_gather"]), total(&["all_reduce", "reduce_scatter"]));
        RankCost { stored: 4 * stored, gathered, reduced, formula, peak: 0 }
    }

    fn report(&self, bench: &Bench, cost: RankCost, seconds: f64) {
        let RankCost { stored, gathered, reduced, formula, peak } = cost;
        let stage = match self.sharding {
            Sharding::None => "none".to_string(),
            Sharding::Zero(stage) => stage.to_string(),
            Sharding::Fsdp => "3".to_string(),
        };
        let form = match (self.sharding, self.by_microbatch, self.mesh.contains("pp")) {
            (Sharding::None, ..) => "-",
            (Sharding::Zero(3) | Sharding::Fsdp, true, _)
            | (Sharding::Zero(3) | Sharding::Fsdp, _, false) => "by microbatch",
            _ => "once",
        };
        let mesh = if self.mesh.is_empty() { "one rank" } else { self.mesh };
        if bench.json {
            println!(
                "{}",
                json!({"group": "sharded-data", "mesh": mesh, "zero": stage, "form": form, "stored_bytes": stored,
                "gathered_bytes": gathered.0, "gathers": gathered.1, "reduced_bytes": reduced.0,
                "reductions": reduced.1, "formula_bytes": formula, "peak_bytes": peak, "seconds": seconds})
            );
            return;
        }
        let mib = |bytes: usize| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let moved = |(bytes, calls): (u64, usize)| format!("{} ({calls})", mib(bytes as usize));
        println!(
            "| `{mesh}` | {stage} | {form} | {} | {} | {} | {} | {} | {seconds:.2} |",
            mib(stored),
            moved(gathered),
            moved(reduced),
            mib(formula),
            mib(peak)
        );
    }
}

/// Elements up to which a collective moves no parameters: sums of losses and norms.
const SMALL: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combinations_are_all_different_and_have_both_forms_on_pipelines() {
        let all = combinations();
        let names: Vec<String> = all.iter().map(|c| format!("{c:?}")).collect();
        assert!(names.iter().enumerate().all(|(i, name)| !names[..i].contains(name)));
        let by_microbatch = all.iter().filter(|c| c.by_microbatch);
        assert_eq!(by_microbatch.filter(|c| c.mesh.contains("pp")).count(), 5);
        assert!(all.iter().all(|c| Mesh::parse(c.mesh).unwrap().num_ranks() <= 8));
    }
}
