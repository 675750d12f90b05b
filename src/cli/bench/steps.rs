//! Training steps of a GPT on tokens that follow a rule, to be measured.

use super::line::{Bench, Work, check};
use shardgrad::kernels::BackendProvider;
use shardgrad::nn::{LanguageModel, ModelConfig};
use shardgrad::prelude::*;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Steps before those that are measured; their losses are compared.
const STEPS_BEFORE: usize = 2;
/// Steps that are measured; the median counts.
const STEPS: usize = 5;

/// What is trained.
#[derive(Clone, Debug)]
pub(super) struct Training {
    pub(super) config: ModelConfig,
    pub(super) rows: usize,
    pub(super) seq: usize,
    pub(super) microbatches: usize,
    pub(super) mesh: String,
    /// Threads of a rank; `None` shares the cores.
    pub(super) threads: Option<usize>,
    /// In which floats is computed and stored.
    pub(super) precision: Precision,
    /// Whether blocks are computed again in the backward.
    pub(super) recompute: bool,
    /// Where; `None` is the processor.
    pub(super) machine: Option<Arc<dyn BackendProvider>>,
    /// Whether steps are captured; it is an error then if they cannot be.
    pub(super) capture: bool,
}

/// What was found.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// The first losses.
    pub(super) losses: Vec<f64>,
    /// Seconds of a step.
    pub(super) seconds: f64,
    /// Floating-point operations of a step, on all ranks.
    pub(super) flops: f64,
    /// The most bytes of tensors, on all ranks.
    pub(super) peak_bytes: usize,
}

impl Training {
    /// A model on one rank and all cores, in f32.
    pub(super) fn new(config: impl Into<ModelConfig>, rows: usize, seq: usize) -> Training {
        let (config, mesh, precision) = (config.into(), String::new(), Precision::of(DType::F32));
        let (microbatches, threads, recompute, machine, capture) = (1, None, false, None, false);
        Training { config, rows, seq, microbatches, mesh, threads, precision, recompute, machine, capture }
    }

    /// Trains for a few steps.
    pub(super) fn run(&self) -> Result<Found> {
        let mut world = World::new(Mesh::parse(&self.mesh)?);
        if let Some(threads) = self.threads {
            world = world.threads(threads);
        }
        if let Some(machine) = &self.machine {
            world = world.on(machine.clone());
        }
        let ranks = world.launch(|rank| self.steps(rank))?;
        let peak_bytes = ranks.iter().map(|r| r.peak_bytes).sum();
        let flops = ranks.iter().map(|r| r.flops).sum();
        Ok(Found { flops, peak_bytes, ..ranks.into_iter().next().expect("a world has a rank") })
    }

    /// Checks the first losses against those of one rank, and tells the rate.
    pub(super) fn tell(&self, bench: &Bench, group: &str, case: &str, one: &[f64]) -> Result<Found> {
        let found = self.run()?;
        check("the loss of a training step", &found.losses, one, 1e-5)?;
        let work = Work::Tokens((self.rows * self.seq) as f64, found.flops);
        bench.tell_with(group, (case, &self.mesh), found.seconds, work, Some(found.peak_bytes));
        Ok(found)
    }

    fn steps(&self, rank: &Rank) -> Result<Found> {
        let config = &self.config;
        let plan = LanguageModel::plan(config);
        let Precision { dtype, param_dtype } = self.precision;
        let plain = Settings::new(self.rows);
        let (microbatches, param_dtype) = (self.microbatches, Some(param_dtype));
        let settings = Settings { microbatches, dtype, param_dtype, capture: self.capture, ..plain };
        let read = |rank: &Rank, step: u64, rows: Range<usize>| {
            let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), self.seq])?;
            let tokens = |ahead: usize| {
                let ids: Vec<i64> = rows
                    .clone()
                    .flat_map(|row| (0..self.seq).map(move |at| (row, at + ahead)))
                    .map(|(row, at)| ((at * at + 7 * row + step as usize) % config.vocab_size()) as i64)
                    .collect();
                Tensor::from_global(rank, &layout, &ids)
            };
            Ok(vec![tokens(0)?, tokens(1)?])
        };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_of(x);
        let optim = AdamW::new(1e-3).weight_decay(0.1);
        let model = LanguageModel::new(config).recompute(self.recompute);
        let mut trainer = Trainer::new(rank, model, &plan, optim, settings, read, loss)?;
        let mut losses = Vec::new();
        for _ in 0..STEPS_BEFORE {
            losses.push(trainer.step(&[])?.loss);
        }
        if let Some(why) = trainer.not_captured() {
            return Err(Error::new(why.kind(), format!("steps are not captured: {}", why.message())));
        }
        let before = rank.backend().cost().flops;
        let mut seconds = Vec::new();
        for _ in 0..STEPS {
            let started = Instant::now();
            trainer.step(&[])?;
            seconds.push(started.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        let flops = (rank.backend().cost().flops - before) as f64 / STEPS as f64;
        let peak_bytes = rank.backend().memory().peak_bytes;
        Ok(Found { losses, seconds: seconds[STEPS / 2], flops, peak_bytes })
    }
}
