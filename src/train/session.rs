//! One rank's side of a training run: a model, its optimizer, and a step.

use super::{Recipe, batch, share};
use crate::data::Sampler;
use shardgrad::nn::LanguageModel;
use shardgrad::prelude::*;
use shardgrad::tensor::control::first_not_finite;
use std::ops::Range;

/// What one step left behind; the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepReport {
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    pub(crate) lr: f64,
    /// Whether some rank was asked to stop.
    pub(crate) stop: bool,
}

/// A model in training on one rank.
pub(crate) struct Session<'a> {
    pub(crate) rank: &'a Rank,
    pub(crate) recipe: &'a Recipe,
    pub(crate) plan: &'a Plan,
    pub(crate) model: Model<LanguageModel>,
    pub(crate) optim: AdamW,
    pub(crate) sampler: &'a Sampler,
}

impl Session<'_> {
    /// Forward, backward and update on the rows of step `step` (counted from 0).
    ///
    /// # Errors
    /// `Kind::NotFinite` on every rank, before the update, if the loss or a gradient is not finite.
    pub(crate) fn step(&mut self, step: usize, stop: bool) -> Result<StepReport> {
        let tape = self.model.tape();
        let mut loss_share = 0.0;
        for round in 0..self.recipe.microbatches {
            let loss = self.loss(&tape, step, round)?;
            loss_share += share(loss.tensor())?;
            loss.backward()?;
        }
        let lr = self.recipe.schedule.lr(step);
        let args = StepArgs { lr, clip: self.recipe.clip, control: &[loss_share, f64::from(u8::from(stop))] };
        let report = self.optim.step(&self.model, tape.gradients(), args)?;
        let (loss, stop) = (report.control[0], report.control[1] > 0.0);
        if !report.applied {
            return Err(self.explain_not_finite(step, loss, report.grad_norm));
        }
        Ok(StepReport { loss, grad_norm: report.grad_norm, lr, stop })
    }

    /// The share of round `round` in the mean loss of the global batch.
    fn loss(&self, tape: &Tape, step: usize, round: usize) -> Result<Var> {
        let Recipe { batch: global, seq, microbatches, seed, .. } = *self.recipe;
        let rows = global / microbatches;
        let first_row = (round * rows) as u64;
        tape.set_noise(Some(Noise { seed, step: step as u64, first_row }));
        let first = Sampler::step(step as u64, global as u64).start + first_row;
        let read = |own: Range<usize>| self.sampler.batch(first + own.start as u64..first + own.end as u64);
        let (ids, targets) = batch(self.rank, self.plan, [rows, seq], read)?;
        let loss = self.model.loss(&tape.constant(ids), &tape.constant(targets));
        Ok(if microbatches == 1 { loss } else { loss.scale(1.0 / microbatches as f64) })
    }

    /// Replays the step with every op watched, to name the one that made the first number that is not finite.
    fn explain_not_finite(&self, step: usize, loss: f64, grad_norm: f64) -> Error {
        let found = first_not_finite(self.rank, || {
            let tape = self.model.tape();
            for round in 0..self.recipe.microbatches {
                self.loss(&tape, step, round)?.backward()?;
            }
            let _ = tape.gradients();
            Ok(())
        });
        let text = format!(
            "step {}: the loss is {loss} and the gradient norm {grad_norm}; the step was not taken",
            step + 1
        );
        let error = Error::new(Kind::NotFinite, text);
        match found {
            Ok(Some(lines)) => lines.into_iter().fold(error, |e, (label, text)| e.detail(label, text)),
            Ok(None) => error
                .detail("first", "no op made it: the gradients are finite, but their squares add up to more than f64 holds")
                .detail("help", "a smaller learning rate is the usual cure"),
            Err(cause) => error.detail("replay", cause.message()),
        }
    }
}
