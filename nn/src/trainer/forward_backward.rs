//! Forward and backward of all microbatches of a step: one after another, or by the schedule of a pipeline.

use super::Trainer;
use super::row_leaves::{GradientSums, RowLeaves, sum_uses};
use crate::loss::{LossForm, MicrobatchLosses, StepLosses};
use crate::module::Module;
use crate::optim::LossScale;
use crate::pipelined_model::{PipelinedModel, StepInputs};
use shardgrad_autograd::pipeline::{Action, TimedAction};
use shardgrad_autograd::{Gradients, Noise, Var};
use shardgrad_tensor::execution::flag_guard::FlagGuard;
use shardgrad_tensor::training_step::canonical_sum::SumTree;
use shardgrad_tensor::{PackCacheGuard, Result, Tensor};
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
        let _sum_tree = self.set_sum_tree();
        self.model.with_pass_values(|| match (&self.pipelined, &self.leaves) {
            (Some((pipelined, form)), leaves) => self.pipelined_pass(pipelined, form, leaves.as_ref()),
            (None, Some(leaves)) => self.leaf_pass(leaves),
            (None, None) => self.plain_pass(|microbatch| self.load_microbatch(microbatch)),
        })
    }

    /// Runs the schedule of a pipeline, of which each microbatch is a leaf if sums do not depend on the mesh.
    fn pipelined_pass(
        &self,
        pipelined: &PipelinedModel,
        form: &LossForm,
        leaves: Option<&RowLeaves>,
    ) -> Result<PassOutputs> {
        let load = |microbatch: usize| self.load_microbatch(microbatch);
        let noise = |microbatch: usize| self.noise(microbatch);
        let (form, loss_scale) = (form.clone(), self.loss_scale.map(LossScale::factor));
        let microbatches = leaves.map_or(self.config.microbatches, RowLeaves::num_leaves);
        let factor = form.gradient_factor(microbatches, loss_scale);
        let forward = |arguments: &[Var]| Ok(self.loss_vars(arguments));
        let step = StepInputs { read: &load, noise: &noise, gradient_factor: factor, forward: &forward };
        let outputs = pipelined.train_step(&self.model, &step, leaves.map(RowLeaves::tree))?;
        *self.passes.borrow_mut() = outputs.passes;
        let losses =
            StepLosses { form, outputs: outputs.results, microbatches, loss_scale, is_divided: false };
        let (losses, gradients) = match leaves {
            None => (losses, outputs.gradients),
            Some(leaves) => {
                let losses = leaves.sum_losses(self.rank(), losses, self.site)?;
                let uses = leaves.sum_gradients(&self.model, outputs.leaf_sums, self.site)?;
                (losses, pipelined.sum_uses(&self.model, uses, &forward)?)
            }
        };
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
            let forward_end = Instant::now();
            if microbatch + 1 == count {
                tape.expect_gradients();
            }
            // The line of the loss is unknown, and this line is not the caller's.
            losses.backward(loss).map_err(|e| e.replace_site(self.site))?;
            self.note_passes(microbatch, start, forward_end);
        }
        let (losses, gradients, depends_on_step) =
            (losses.finish()?, tape.gradients(), tape.noise_was_read());
        Ok(PassOutputs { losses, gradients, depends_on_step, is_captured: false })
    }

    /// Returns the loss and auxiliary outputs of a recorded forward pass.
    pub(super) fn loss_vars(&self, arguments: &[Var]) -> Vec<Var> {
        (self.loss_fn)(&self.model, arguments).into_vars().1
    }

    /// Runs forward and backward of this rank's leaves, one pass for each, and joins losses and gradients of all leaves in the order
    /// of their tree.
    fn leaf_pass(&self, leaves: &RowLeaves) -> Result<PassOutputs> {
        let mut losses = MicrobatchLosses::new(leaves.num_leaves())
            .with_passes(leaves.num_passes())
            .with_count_max(self.rows(0).len())
            .undivided();
        if let Some(loss_scale) = self.loss_scale {
            losses = losses.loss_scale(loss_scale.factor());
        }
        self.passes.borrow_mut().clear();
        let mut sums = GradientSums::default();
        // Each pass has a tape of its own, and reads the weights again.
        let params = self.model.params().iter().filter(|_| leaves.num_passes() > 1);
        let _prepacked: Vec<PackCacheGuard> =
            params.map(|param| param.pass_tensor().cache_packed()).collect();
        for pass in 0..leaves.num_passes() {
            let start = Instant::now();
            let tape = self.model.tape();
            tape.set_noise(Some(self.noise(pass)));
            let arguments = self.load_microbatch(pass)?;
            let arguments: Vec<Var> = arguments.into_iter().map(|t| tape.constant(t)).collect();
            let loss = (self.loss_fn)(&self.model, &arguments);
            let forward_end = Instant::now();
            losses.backward(loss).map_err(|e| e.replace_site(self.site))?;
            leaves.add_gradients(&mut sums, pass, tape.gradients())?;
            self.note_passes(pass, start, forward_end);
        }
        let losses = leaves.sum_losses(self.rank(), losses.finish()?, self.site)?;
        let gradients = sum_uses(leaves.sum_gradients(&self.model, sums, self.site)?)?;
        Ok(PassOutputs { losses, gradients, depends_on_step: true, is_captured: false })
    }

    /// Makes the sums of all ops canonical until the guard is dropped, if the bits of sums must not depend on the mesh.
    pub(super) fn set_sum_tree(&self) -> Option<FlagGuard<'_, Option<SumTree>>> {
        self.leaves.as_ref().map(|leaves| leaves.set_sum_tree(self.rank()))
    }

    /// Records the times of forward and backward pass of a microbatch, the backward pass until now.
    fn note_passes(&self, microbatch: usize, start: Instant, forward_end: Instant) {
        let (stage, end) = (0, Instant::now());
        self.passes.borrow_mut().extend([
            TimedAction { action: Action::Forward { stage, microbatch }, start, end: forward_end },
            TimedAction { action: Action::Backward { stage, microbatch }, start: forward_end, end },
        ]);
    }

    /// Loads the arguments of the loss for a microbatch of this step.
    pub(super) fn load_microbatch(&self, microbatch: usize) -> Result<Vec<Tensor>> {
        (self.load_batch)(self.rank(), self.step, self.rows(microbatch))
    }

    /// Returns the random-number state of a microbatch of this step.
    fn noise(&self, microbatch: usize) -> Noise {
        let first_row = self.rows(microbatch).start as u64;
        Noise { seed: self.config.seed, step: self.step, first_row }
    }

    fn rows(&self, microbatch: usize) -> Range<usize> {
        if let Some(leaves) = &self.leaves {
            return leaves.rows(microbatch);
        }
        let rows = self.config.rows / self.config.microbatches;
        microbatch * rows..(microbatch + 1) * rows
    }
}
