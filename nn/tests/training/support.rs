//! A tiny GPT-2 whose sizes no axis divides, and the results of one step of it on a mesh.

use approx::relative_eq;
use shardgrad_autograd::{Gradients, Noise, Tape, Var};
use shardgrad_nn::optim::grad_norm;
use shardgrad_nn::{Gpt2, Gpt2Config, Model, Module, Plan};
use shardgrad_tensor::{DType, Layout, Mesh, Rank, Result, Tensor, World};
pub(crate) use shardgrad_testing::max_difference;
use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) const ROWS: usize = 4;
pub(crate) const SEQ: usize = 6;
pub(crate) const VOCAB: usize = 11;

/// Meshes whose results are compared with those of one rank. Axes of size 3 divide neither the width nor the
/// vocabulary nor the rows of the batch.
pub(crate) const MESHES: [&str; 6] = ["tp=2", "dp=2", "dp=2,tp=2", "tp=3", "dp=3", "tp=2,dp=2"];

/// Three heads of 5 channels, 11 tokens, 2 blocks.
pub(crate) fn config() -> Gpt2Config {
    Gpt2Config { initializer_range: 0.3, ..Gpt2Config::new(VOCAB, 8, 15, 2, 3) }
}

pub(crate) fn run<T: Send>(mesh: &str, f: impl Fn(&Rank) -> Result<T> + Sync) -> Vec<T> {
    World::run(Mesh::parse(mesh).unwrap(), f).unwrap_or_else(|e| panic!("{mesh}: {e}"))
}

/// Token `t` of row `row`; targets are the tokens shifted by one.
fn token(row: usize, t: usize) -> i64 {
    ((row * 7 + t * 5 + row * t * 3 + t * t) % VOCAB) as i64
}

/// Rows `rows` of the batch, `SEQ` tokens from `first` on, laid out as the plan says.
pub(crate) fn batch(rank: &Rank, plan: &Plan, rows: Range<usize>, first: usize) -> Result<Tensor> {
    let layout: Layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), SEQ])?;
    let all: Vec<i64> = rows.flat_map(|r| (first..first + SEQ).map(move |t| token(r, t))).collect();
    Tensor::from_global(rank, &layout, &all)
}

/// Rows of the batch from token `first` on, and their targets: what a trainer reads for a language model.
pub(crate) fn tokens_and_targets(
    rank: &Rank,
    plan: &Plan,
    rows: Range<usize>,
    first: usize,
) -> Result<Vec<Tensor>> {
    Ok(vec![batch(rank, plan, rows.clone(), first)?, batch(rank, plan, rows, first + 1)?])
}

/// Model, plan and batch of a test.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) config: Gpt2Config,
    pub(crate) plan: Plan,
    /// Microbatches.
    pub(crate) microbatches: usize,
    pub(crate) recompute: bool,
    pub(crate) noise: bool,
}

impl Setup {
    pub(crate) fn new() -> Setup {
        Setup { config: config(), plan: Plan::gpt2(), microbatches: 1, recompute: false, noise: false }
    }

    pub(crate) fn model(&self, rank: &Rank) -> Result<Model<Gpt2>> {
        let module = Gpt2::new(&self.config).recompute(self.recompute);
        Model::with_dtype(rank, module, &self.plan, 5, DType::F64)
    }

    /// Forward and backward of all microbatches: loss, and bytes saved for backward in a microbatch.
    pub(crate) fn backward(&self, model: &Model<Gpt2>, tape: &Tape) -> Result<(f64, usize)> {
        let (mut sum, mut saved_bytes) = (0.0, 0);
        let rows = ROWS / self.microbatches;
        for microbatch in 0..self.microbatches {
            let range = microbatch * rows..(microbatch + 1) * rows;
            let first_row = range.start as u64;
            tape.set_noise(self.noise.then_some(Noise { seed: 3, step: 7, first_row }));
            let ids = tape.constant(batch(model.rank(), &self.plan, range.clone(), 0)?);
            let targets = tape.constant(batch(model.rank(), &self.plan, range, 1)?);
            let loss =
                shardgrad_tensor::Value::scale(&model.loss(&ids, &targets), 1.0 / self.microbatches as f64);
            sum += loss.item()?;
            saved_bytes = tape.saved_bytes();
            loss.backward()?;
        }
        Ok((sum, saved_bytes))
    }

    /// Results on a mesh; all ranks must agree on them to the last bit.
    pub(crate) fn outcome(&self, mesh: &str) -> Outcome {
        let outcomes = run(mesh, |rank| {
            let model = self.model(rank)?;
            let tape = model.tape();
            let (loss, saved_bytes) = self.backward(&model, &tape)?;
            Outcome::of_gradients(&model, &tape, loss, saved_bytes)
        });
        Outcome::of_ranks(outcomes, mesh)
    }
}

/// Global results of a step, equal on every rank.
pub(crate) struct Outcome {
    pub(crate) loss: f64,
    pub(crate) norm: f64,
    pub(crate) gradients: BTreeMap<String, Vec<f64>>,
    pub(crate) saved_bytes: usize,
}

impl Outcome {
    /// The results of a loss, after its backward pass.
    pub(crate) fn of_loss<M: Module>(model: &Model<M>, tape: &Tape, loss: &Var) -> Result<Outcome> {
        let (saved_bytes, value) = (tape.saved_bytes(), loss.item()?);
        loss.backward()?;
        Outcome::of_gradients(model, tape, value, saved_bytes)
    }

    /// The results after the backward passes of a step.
    pub(crate) fn of_gradients<M: Module>(
        model: &Model<M>,
        tape: &Tape,
        loss: f64,
        saved_bytes: usize,
    ) -> Result<Outcome> {
        let gradients = tape.gradients();
        let norm = grad_norm(model.rank(), model.params(), &gradients)?;
        Ok(Outcome { loss, norm, gradients: values(model, &gradients)?, saved_bytes })
    }

    /// The results of the first rank. Panics unless all ranks agree to the last bit.
    pub(crate) fn of_ranks(mut ranks: Vec<Outcome>, what: &str) -> Outcome {
        let first = ranks.swap_remove(0);
        for other in ranks {
            assert!(other.loss == first.loss && other.norm == first.norm, "{what}: ranks disagree");
            assert!(other.gradients == first.gradients, "{what}: ranks disagree on gradients");
        }
        first
    }

    /// Panics unless everything agrees up to the rounding of f64.
    pub(crate) fn assert_near(&self, other: &Outcome, what: &str) {
        self.assert_within(1e-10, other, what);
    }

    /// Panics unless loss and norm agree within an absolute or relative tolerance, and gradients within the absolute one.
    pub(crate) fn assert_within(&self, tolerance: f64, other: &Outcome, what: &str) {
        let near = |a: f64, b: f64| relative_eq!(a, b, epsilon = tolerance, max_relative = tolerance);
        assert!(near(self.loss, other.loss), "{what}: loss {} and {}", self.loss, other.loss);
        assert!(near(self.norm, other.norm), "{what}: norm {} and {}", self.norm, other.norm);
        assert_eq!(
            self.gradients.keys().collect::<Vec<_>>(),
            other.gradients.keys().collect::<Vec<_>>(),
            "{what}: other parameters have gradients"
        );
        for (name, gradient) in &self.gradients {
            let others = &other.gradients[name];
            let worst = max_difference(gradient, others);
            assert!(worst < tolerance, "{what}: {name} differs by {worst:e}");
        }
    }
}

pub(crate) fn near(a: f64, b: f64) -> bool {
    relative_eq!(a, b, epsilon = 1e-10, max_relative = 1e-10)
}

#[test]
fn nan_is_near_nothing() {
    let nan = f64::NAN;
    assert!(!near(nan, nan) && !near(0.0, nan) && !near(nan, 0.0));
}

/// Gradients by name, gathered.
pub(crate) fn values<M: Module>(
    model: &Model<M>,
    gradients: &Gradients,
) -> Result<BTreeMap<String, Vec<f64>>> {
    let mut values = BTreeMap::new();
    for param in model.params() {
        if let Some(gradient) = gradients.get(&param.key()) {
            assert_eq!(
                gradient.layout(),
                param.tensor().layout(),
                "a gradient has the layout of its parameter"
            );
            values.insert(param.name(), gradient.to_f64()?);
        }
    }
    Ok(values)
}
