//! Forward and backward of all microbatches of a step: one after another, or by the schedule of a pipeline.

use super::Trainer;
use crate::loss::{MicrobatchLosses, StepLosses};
use crate::module::Module;
use crate::optim::LossScale;
use shardgrad_autograd::pipeline::{Action, TimedAction};
use shardgrad_autograd::{Gradients, Noise, Var};
use shardgrad_tensor::{Result, Tensor};
use std::ops::Range;
use std::time::Instant;

/// Results of forward and backward of all microbatches.
#[derive(Clone)]
pub(super) struct PassOutputs {
    /// Losses, counts and auxiliary outputs of this rank.
    pub(super) losses: StepLosses,
    /// Gradients of the step times the loss scale, and of a sum times its count.
    pub(super) gradients: Gradients,
    /// Whether the results depend on the step other than by arguments and parameters: random numbers were drawn.
    pub(super) depends_on_step: bool,
    /// Whether the results are those of a graph that is yet to be replayed.
    pub(super) is_captured: bool,
}

impl<M: Module> Trainer<'_, M> {
    /// Runs forward and backward of all microbatches, or captures them as a graph, which [`Trainer::step`] replays.
    pub(super) fn forward_backward(&mut self) -> Result<PassOutputs> {
        if self.model.hooks().current() != 0 {
            // A graph calls no hooks.
            self.capture.clear();
            return self.uncaptured_pass();
        }
        match self.config.capture && self.capture.is_enabled() {
            true => self.captured_pass(),
            false => self.uncaptured_pass(),
        }
    }

    /// Runs forward and backward of all microbatches.
    pub(super) fn uncaptured_pass(&self) -> Result<PassOutputs> {
        let load = |microbatch: usize| self.load_microbatch(microbatch);
        let Some((pipelined, form)) = &self.pipelined else { return self.plain_pass(load) };
        let noise = |microbatch: usize| self.noise(microbatch);
        let (form, loss_scale) = (form.clone(), self.loss_scale.map(LossScale::factor));
        let factor = form.gradient_factor(self.config.microbatches, loss_scale);
        let forward = |arguments: &[Var]| Ok(self.loss_vars(arguments));
        let outputs = pipelined.train_step(&self.model, &load, &noise, factor, &forward)?;
        *self.passes.borrow_mut() = outputs.passes;
        let losses = StepLosses { form, outputs: outputs.results, loss_scale, is_divided: false };
        let gradients = outputs.gradients;
        Ok(PassOutputs { losses, gradients, depends_on_step: true, is_captured: false })
    }

    /// Runs forward and backward of all microbatches without reading from the device.
    pub(super) fn plain_pass(&self, arguments: impl Fn(usize) -> Result<Vec<Tensor>>) -> Result<PassOutputs> {
        let count = self.config.microbatches;
        let tape = self.model.tape().for_rounds(count);
        let mut losses = MicrobatchLosses::new(count).with_count_max(self.config.rows / count);
        if let Some(loss_scale) = self.loss_scale {
            losses = losses.loss_scale(loss_scale.factor());
        }
        self.passes.borrow_mut().clear();
        for microbatch in 0..count {
            let start = Instant::now();
            tape.set_noise(Some(self.noise(microbatch)));
            let arguments: Vec<Var> = arguments(microbatch)?.into_iter().map(|t| tape.constant(t)).collect();
            let loss = (self.loss_fn)(&self.model, &arguments);
            let (forward_end, stage) = (Instant::now(), 0);
            if microbatch + 1 == count {
                tape.expect_gradients();
            }
            // The line of the loss is unknown, and this line is not the caller's.
            losses.backward(loss).map_err(|e| e.replace_site(self.site))?;
            self.passes.borrow_mut().extend([
                TimedAction { action: Action::Forward { stage, microbatch }, start, end: forward_end },
                TimedAction {
                    action: Action::Backward { stage, microbatch },
                    start: forward_end,
                    end: Instant::now(),
                },
            ]);
        }
        let (losses, gradients, depends_on_step) =
            (losses.finish()?, tape.gradients(), tape.noise_was_read());
        Ok(PassOutputs { losses, gradients, depends_on_step, is_captured: false })
    }

    /// Returns the loss and auxiliary outputs of a recorded forward pass.
    pub(super) fn loss_vars(&self, arguments: &[Var]) -> Vec<Var> {
        (self.loss_fn)(&self.model, arguments).into_vars().1
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
