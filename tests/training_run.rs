//! A training run of a small language model, whose losses and gradient norms must be the same on every mesh: bit for bit with canonical
//! sums, to rounding otherwise.

use approx::relative_eq;
use shardgrad::nn::{Deterministic, Gpt2Config, LanguageModel, LrScheduler, ModelConfig, StateHash};
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
    /// The rows of the batch.
    pub(crate) rows: usize,
    pub(crate) deterministic: Deterministic,
}

/// Losses and gradient norms ([`Run::losses`]), and the hash of the last weights and optimizer state.
pub(crate) type Bits = (Vec<f64>, StateHash);

impl Run {
    /// A run on six rows whose sums follow the mesh.
    pub(crate) fn new(steps: usize) -> Run {
        let (config, plan) = (gpt2(0.0).into(), Plan::gpt2());
        let (recompute, deterministic) = (false, Deterministic::Run);
        Run { config, plan, steps, microbatches: 1, recompute, dtype: DType::F64, rows: ROWS, deterministic }
    }

    /// The same run with canonical sums: over a number of leaves of rows, which ranks and microbatches share, and over 12 leaves of every
    /// other dim, for axes of 2, 3, 4 and 6 ranks.
    pub(crate) fn in_leaves(self, batch_leaves: usize) -> Run {
        Run { deterministic: Deterministic::Mesh { batch_leaves, sum_leaves: 12 }, ..self }
    }

    pub(crate) fn trainer(&self, rank: &Rank) -> Result<Trainer<'_, LanguageModel>> {
        let model = LanguageModel::new(&self.config).recompute(self.recompute);
        let settings = TrainerConfig {
            microbatches: self.microbatches,
            seed: 5,
            dtype: self.dtype,
            lr_scheduler: Some(LrScheduler::constant(3e-3)),
            clip: Some(1.0),
            deterministic: self.deterministic,
            ..TrainerConfig::new(self.rows)
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
        self.bits(mesh).0
    }

    /// Returns [`Run::losses`] with the hash of the last state, which all ranks agree on.
    pub(crate) fn bits(&self, mesh: &str) -> Bits {
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
            Ok((out, trainer.state_hash()?))
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

/// Compares the numbers and the last state of one rank with those of a mesh, bit for bit.
pub(crate) fn same_bits(one: &Bits, many: &Bits, what: &str) {
    assert_eq!(one.0.len(), many.0.len());
    for (i, (a, b)) in one.0.iter().zip(&many.0).enumerate() {
        assert!(a.to_bits() == b.to_bits(), "{what}, number {i}: {b}, on one rank {a}");
    }
    assert!(one.1 == many.1, "{what}: other weights or optimizer state than on one rank");
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

#[test]
#[should_panic(expected = "dp=2, number 1: 2.0000000000000004, on one rank 2")]
fn same_bits_refuses_one_unit_in_the_last_place() {
    let hash = Run::new(0).bits("").1;
    same_bits(&(vec![1.0, 2.0], hash), &(vec![1.0, 2f64.next_up()], hash), "dp=2");
}
