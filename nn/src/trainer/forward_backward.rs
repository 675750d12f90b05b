//! Forward and backward of all microbatches of a step: one after another, or by the schedule of a pipeline.

use super::Trainer;
use crate::module::Module;
use shardgrad_autograd::pipeline::{Action, TimedAction};
use shardgrad_autograd::{Gradients, Noise, Var};
use shardgrad_tensor::{Error, Kind, Result, Tensor, Value};
use std::ops::Range;
use std::time::Instant;

/// Results of forward and backward of all microbatches.
#[derive(Clone)]
pub(super) struct PassOutputs {
    /// Scalars whose sum over all ranks, divided by `loss_divisor`, is the loss.
    pub(super) losses: Vec<Tensor>,
    pub(super) loss_divisor: usize,
    /// Gradients of the step times the loss scale.
    pub(super) gradients: Gradients,
    /// Whether the results depend on the step other than by arguments and parameters: random numbers were drawn.
    pub(super) depends_on_step: bool,
    /// Whether the results are those of a graph that is yet to be replayed.
    pub(super) is_captured: bool,
}

impl<M: Module> Trainer<'_, M> {
    /// Runs forward and backward of all microbatches, or captures them as a graph, which [`Trainer::step`] replays.
    pub(super) fn forward_backward(&mut self) -> Result<PassOutputs> {
        match self.config.capture && self.capture.is_enabled() {
            true => self.captured_pass(),
            false => self.uncaptured_pass(),
        }
    }

    /// Runs forward and backward of all microbatches.
    pub(super) fn uncaptured_pass(&self) -> Result<PassOutputs> {
        let load = |microbatch: usize| self.load_microbatch(microbatch);
        let Some(pipelined) = &self.pipelined else { return self.plain_pass(load) };
        let noise = |microbatch: usize| self.noise(microbatch);
        let outputs = pipelined.train_step(&self.model, &load, &noise, self.loss_factor())?;
        *self.passes.borrow_mut() = outputs.passes;
        let losses = outputs.results.into_iter().flatten().flatten().collect();
        let (loss_divisor, gradients) = (self.config.microbatches, outputs.gradients);
        Ok(PassOutputs { losses, loss_divisor, gradients, depends_on_step: true, is_captured: false })
    }

    /// Runs forward and backward of all microbatches without reading from the device.
    pub(super) fn plain_pass(&self, arguments: impl Fn(usize) -> Result<Vec<Tensor>>) -> Result<PassOutputs> {
        let count = self.config.microbatches;
        let tape = self.model.tape().for_rounds(count);
        let mut losses = Vec::with_capacity(count);
        self.passes.borrow_mut().clear();
        for microbatch in 0..count {
            let start = Instant::now();
            tape.set_noise(Some(self.noise(microbatch)));
            let arguments: Vec<Var> = arguments(microbatch)?.into_iter().map(|t| tape.constant(t)).collect();
            let loss =
                check_loss_dtype((self.loss_fn)(&self.model, &arguments)).map_err(|e| e.at(self.site))?;
            let loss = if count == 1 { loss } else { loss.scale(1.0 / count as f64) };
            losses.push(loss.tensor().clone());
            let (forward_end, stage) = (Instant::now(), 0);
            if microbatch + 1 == count {
                tape.expect_gradients();
            }
            // The line of the loss is unknown, and this line is not the caller's.
            loss.backward_scaled(self.loss_factor()).map_err(|e| e.replace_site(self.site))?;
            self.passes.borrow_mut().extend([
                TimedAction { action: Action::Forward { stage, microbatch }, start, end: forward_end },
                TimedAction {
                    action: Action::Backward { stage, microbatch },
                    start: forward_end,
                    end: Instant::now(),
                },
            ]);
        }
        let (gradients, depends_on_step) = (tape.gradients(), tape.noise_was_read());
        Ok(PassOutputs { losses, loss_divisor: 1, gradients, depends_on_step, is_captured: false })
    }

    /// Loads the arguments of the loss for a microbatch of this step.
    pub(super) fn load_microbatch(&self, microbatch: usize) -> Result<Vec<Tensor>> {
        (self.load_batch)(self.model.rank(), self.step, self.rows(microbatch))
    }

    /// Returns the random-number state of a microbatch of this step.
    fn noise(&self, microbatch: usize) -> Noise {
        let first_row = self.rows(microbatch).start as u64;
        Noise { seed: self.config.seed, step: self.step, first_row }
    }

    fn rows(&self, microbatch: usize) -> Range<usize> {
        let rows = self.config.rows / self.config.microbatches;
        microbatch * rows..(microbatch + 1) * rows
    }
}

/// Refuses a loss of 16 bits: its mean has three digits, and whether the scaled loss overflows would depend on the
/// number of microbatches by which the loss is divided first, and so on the mesh.
pub(super) fn check_loss_dtype(loss: Var) -> Result<Var> {
    let dtype = loss.dtype();
    if dtype == dtype.accumulator() {
        return Ok(loss);
    }
    let sums = dtype.accumulator();
    let text = format!(
        "the loss has dtype {dtype}: too few digits for a mean, and too small a range for loss scaling"
    );
    let help = format!("cast before the mean: x.cast(DType::{}).mean()", sums.name().to_uppercase());
    Err(Error::new(Kind::DType, text).detail("help", help))
}
