//! A training run of a small language model, whose losses and gradient norms must be the same on every mesh.

use approx::relative_eq;
use shardgrad::nn::{Gpt2Config, LanguageModel, LrScheduler, ModelConfig};
use shardgrad::prelude::*;
use shardgrad::tensor::training_step::control::world_sum;
use std::ops::Range;
use std::panic::Location;

pub(crate) const ROWS: usize = 6;
pub(crate) const SEQ: usize = 8;

/// Returns the config of a GPT-2 with four blocks and dropout everywhere.
pub(crate) fn gpt2(dropout: f64) -> Gpt2Config {
    Gpt2Config::new(19, SEQ, 12, 4, 3).with_dropout(dropout)
}

/// Returns the tokens of some rows, sharded as the plan says; the targets are the tokens one position later.
pub(crate) fn tokens(
    rank: &Rank,
    plan: &Plan,
    step: u64,
    rows: Range<usize>,
    shift: usize,
) -> Result<Tensor> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), SEQ])?;
    let token = |r: usize, t: usize| ((r * 5 + (t + shift) * (t + shift) + step as usize * 3) % 19) as i64;
    let all: Vec<i64> = rows.flat_map(|r| (0..SEQ).map(move |t| token(r, t))).collect();
    Tensor::from_global(rank, &layout, &all)
}

/// A training configuration.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) config: ModelConfig,
    pub(crate) plan: Plan,
    pub(crate) steps: usize,
    pub(crate) microbatches: usize,
    pub(crate) recompute: bool,
    pub(crate) dtype: DType,
}

impl Run {
    pub(crate) fn new(steps: usize) -> Run {
        let (config, plan) = (gpt2(0.0).into(), Plan::gpt2());
        Run { config, plan, steps, microbatches: 1, recompute: false, dtype: DType::F64 }
    }

    pub(crate) fn trainer(&self, rank: &Rank) -> Result<Trainer<'_, LanguageModel>> {
        let model = LanguageModel::new(&self.config).recompute(self.recompute);
        let settings = TrainerConfig {
            microbatches: self.microbatches,
            seed: 5,
            dtype: self.dtype,
            lr_scheduler: Some(LrScheduler::constant(3e-3)),
            clip: Some(1.0),
            ..TrainerConfig::new(ROWS)
        };
        let read = |rank: &Rank, step, rows: Range<usize>| {
            Ok(vec![
                tokens(rank, &self.plan, step, rows.clone(), 0)?,
                tokens(rank, &self.plan, step, rows, 1)?,
            ])
        };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss(&x[0], &x[1]);
        Trainer::new(rank, model, &self.plan, AdamW::new(0.0).weight_decay(0.1), settings, read, loss)
    }

    /// Returns losses, gradient norms, and a loss without dropout after the last step; equal on all ranks.
    pub(crate) fn losses(&self, mesh: &str) -> Vec<f64> {
        let ranks = World::new(Mesh::parse(mesh).unwrap()).threads(1).launch(|rank| {
            let mut trainer = self.trainer(rank)?;
            let mut out = Vec::new();
            for _ in 0..self.steps {
                let report = trainer.step()?;
                out.extend([report.loss, report.grad_norm]);
            }
            let here = trainer.rank().clone();
            // Evaluated with another number of rows.
            let arguments =
                [tokens(&here, &self.plan, 99, 0..5, 0)?, tokens(&here, &self.plan, 99, 0..5, 1)?];
            out.extend(world_sum(rank, &[trainer.partial_loss(&arguments)?.sum], Location::caller())?);
            Ok(out)
        });
        let ranks = ranks.unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert!(ranks.iter().all(|r| *r == ranks[0]), "{mesh}: ranks disagree");
        ranks.into_iter().next().expect("a world has a rank")
    }
}

/// Compares the numbers of one rank with those of a mesh, relatively.
pub(crate) fn same(one: &[f64], many: &[f64], bound: f64, what: &str) {
    assert_eq!(one.len(), many.len());
    for (i, (a, b)) in one.iter().zip(many).enumerate() {
        assert!(
            relative_eq!(a, b, max_relative = bound, epsilon = 0.0),
            "{what}, number {i}: {b}, on one rank {a}"
        );
    }
}

#[test]
#[should_panic(expected = "tp=2, number 1: NaN, on one rank 2")]
fn same_refuses_nan() {
    same(&[1.0, 2.0], &[1.0 + 1e-10, f64::NAN], 1e-9, "tp=2");
}

#[test]
#[should_panic(expected = "dp=2, number 0: 1.00000001, on one rank 1")]
fn same_refuses_a_small_difference() {
    same(&[1.0], &[1.00000001], 1e-9, "dp=2");
}
