//! Training-step benchmark of a language model on synthetic tokens.

use super::measurement::{Bench, Work, check};
use shardgrad::kernels::BackendProvider;
use shardgrad::nn::Gpt2Config;
use shardgrad::nn::{LanguageModel, ModelConfig};
use shardgrad::prelude::*;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Warmup steps, whose losses are checked.
const STEPS_BEFORE: usize = 2;
/// Timed steps; the median counts.
const STEPS: usize = 5;

/// A training configuration.
#[derive(Clone, Debug)]
pub(super) struct Training {
    pub(super) config: ModelConfig,
    pub(super) rows: usize,
    pub(super) seq: usize,
    pub(super) microbatches: usize,
    pub(super) mesh: String,
    /// Threads per rank; `None` divides the cores.
    pub(super) threads: Option<usize>,
    /// Compute and parameter dtypes.
    pub(super) precision: Precision,
    /// Whether blocks are recomputed in the backward pass (activation checkpointing).
    pub(super) recompute: bool,
    /// The device; `None` is the CPU.
    pub(super) machine: Option<Arc<dyn BackendProvider>>,
    /// Whether steps are captured as a graph; then it is an error if they cannot be.
    pub(super) capture: bool,
}

/// The result of a training benchmark.
#[derive(Clone, Debug)]
pub(super) struct TrainingResult {
    /// The losses of the warmup steps.
    pub(super) losses: Vec<f64>,
    /// Median seconds per step.
    pub(super) seconds: f64,
    /// FLOPs per step, over all ranks.
    pub(super) flops: f64,
    /// Peak bytes of tensors, summed over ranks.
    pub(super) peak_bytes: usize,
}

impl Training {
    /// Returns a configuration on one rank and all cores, in f32.
    pub(super) fn new(config: impl Into<ModelConfig>, rows: usize, seq: usize) -> Training {
        let (config, mesh, precision) = (config.into(), String::new(), Precision::of(DType::F32));
        let (microbatches, threads, recompute, machine, capture) = (1, None, false, None, false);
        Training { config, rows, seq, microbatches, mesh, threads, precision, recompute, machine, capture }
    }

    /// Trains for a few steps.
    pub(super) fn run(&self) -> Result<TrainingResult> {
        let mut world = World::new(Mesh::parse(&self.mesh)?);
        if let Some(threads) = self.threads {
            world = world.threads(threads);
        }
        if let Some(machine) = &self.machine {
            world = world.on_device(machine.clone());
        }
        let ranks = world.launch(|rank| self.steps(rank))?;
        let peak_bytes = ranks.iter().map(|r| r.peak_bytes).sum();
        let flops = ranks.iter().map(|r| r.flops).sum();
        Ok(TrainingResult { flops, peak_bytes, ..ranks.into_iter().next().expect("a world has a rank") })
    }

    /// Runs the benchmark, checks the losses against those of one rank, and reports the throughput.
    pub(super) fn report(
        &self,
        bench: &Bench,
        group: &str,
        case: &str,
        one: &[f64],
    ) -> Result<TrainingResult> {
        let found = self.run()?;
        check("the loss of a training step", &found.losses, one, 1e-5)?;
        let work = Work::Tokens((self.rows * self.seq) as f64, found.flops);
        bench.report_with_memory(group, (case, &self.mesh), found.seconds, work, Some(found.peak_bytes));
        Ok(found)
    }

    fn steps(&self, rank: &Rank) -> Result<TrainingResult> {
        let config = &self.config;
        let plan = LanguageModel::plan(config);
        let Precision { dtype, param_dtype } = self.precision;
        let plain = TrainerConfig::new(self.rows);
        let (microbatches, param_dtype) = (self.microbatches, Some(param_dtype));
        let settings = TrainerConfig { microbatches, dtype, param_dtype, capture: self.capture, ..plain };
        let read = |rank: &Rank, step: u64, rows: Range<usize>| {
            synthetic_batch(rank, &plan, [config.vocab_size(), self.seq], step, rows)
        };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
        let optim = AdamW::new(1e-3).weight_decay(0.1);
        let model = LanguageModel::new(config).recompute(self.recompute);
        let mut trainer = Trainer::new(rank, model, &plan, optim, settings, read, loss)?;
        let mut losses = Vec::new();
        for _ in 0..STEPS_BEFORE {
            losses.push(trainer.step()?.loss);
        }
        if let Some(why) = trainer.capture_refusal() {
            return Err(Error::new(
                why.kind(),
                format!("steps cannot be captured as a graph: {}", why.message()),
            ));
        }
        let before = rank.backend().cost().flops;
        let mut seconds = Vec::new();
        for _ in 0..STEPS {
            let started = Instant::now();
            trainer.step()?;
            seconds.push(started.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        let flops = (rank.backend().cost().flops - before) as f64 / STEPS as f64;
        let peak_bytes = rank.backend().memory().peak_bytes;
        Ok(TrainingResult { losses, seconds: seconds[STEPS / 2], flops, peak_bytes })
    }
}

/// Returns rows of tokens that follow a rule, and the tokens after them.
pub(super) fn synthetic_batch(
    rank: &Rank,
    plan: &Plan,
    [vocab, seq]: [usize; 2],
    step: u64,
    rows: Range<usize>,
) -> Result<Vec<Tensor>> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), seq])?;
    let tokens = |offset: usize| {
        let ids: Vec<i64> = rows
            .clone()
            .flat_map(|row| (0..seq).map(move |at| (row, at + offset)))
            .map(|(row, at)| ((at * at + 7 * row + step as usize) % vocab) as i64)
            .collect();
        Tensor::from_global(rank, &layout, &ids)
    };
    Ok(vec![tokens(0)?, tokens(1)?])
}

/// Preset, rows and sequence length of the quick benchmark.
const SMALL: (&str, usize, usize) = ("tiny", 8, 64);
/// Presets that are compared with other frameworks.
const LARGE: [(&str, usize, usize); 3] = [("s", 8, 128), ("m", 8, 256), ("l", 2, 256)];

/// Runs the benchmark of the preset tiny.
pub(super) fn run_tiny(bench: &Bench) -> Result<()> {
    on_meshes(bench, SMALL, &["dp=2", "tp=2", "dp=2,tp=2"])
}

/// Runs the benchmark of the larger presets.
pub(super) fn run_presets(bench: &Bench) -> Result<()> {
    LARGE.into_iter().try_for_each(|preset| on_meshes(bench, preset, &["dp=2", "tp=2"]))
}

/// Checks that losses match one rank on each mesh, then measures.
fn on_meshes(bench: &Bench, (name, rows, seq): (&str, usize, usize), meshes: &[&str]) -> Result<()> {
    let config =
        Gpt2Config::preset(name).ok_or_else(|| Error::new(Kind::Config, format!("no preset `{name}`")))?;
    let case = format!("{name} f32, {rows} x {seq} tokens");
    let one = Training::new(config.clone(), rows, seq);
    // With initial weights all tokens are about equally likely.
    let uniform = (config.vocab_size as f64).ln();
    let losses = one.run()?.losses;
    check("the first loss", &losses[..1], &[uniform], 0.05)?;
    one.report(bench, "train_step", &case, &losses)?;
    for mesh in meshes {
        let split = Training { mesh: (*mesh).to_string(), ..one.clone() };
        split.report(bench, "train_step", &case, &losses)?;
    }
    Ok(())
}
