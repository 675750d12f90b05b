//! A run that goes on from a checkpoint.

use super::Trainer;
use crate::model::Family;
use crate::module::Module;
use crate::optim::Optimizer;
use crate::placed::Model;
use crate::resume::{self, RunState};
use shardgrad_tensor::Result;
use std::path::Path;

impl<'t, M: Module> Trainer<'t, M> {
    /// Where the run stands, for a checkpoint ([`resume::save`]), with no notes as yet.
    #[must_use]
    pub fn state(&self) -> RunState {
        RunState { step: self.step, loss_scale: self.loss_scale, ..RunState::default() }
    }

    /// The model, and the optimizer to go on with what a checkpoint has of it ([`resume::load_weights`]); with
    /// [`Trainer::set_state`].
    #[must_use]
    pub fn parts_mut(&mut self) -> (&Model<M>, &mut (dyn Optimizer + 't)) {
        (&self.model, &mut *self.optim)
    }

    /// Goes on with the step and, where both have one, the loss scale of a state. Every rank does so alike.
    pub fn set_state(&mut self, state: &RunState) {
        self.step = state.step;
        self.loss_scale = self.loss_scale.map(|own| state.loss_scale.unwrap_or(own));
    }
}

impl<M: Family> Trainer<'_, M> {
    /// Goes on from a checkpoint of a language model: its weights, what its optimizer keeps, its step and loss scale. The
    /// trainer is made as that of the run was: with other settings it goes on with those. Each rank reads for itself.
    ///
    /// # Errors
    /// As [`resume::load`].
    pub fn resume(&mut self, dir: &Path) -> Result<RunState> {
        let state = resume::load(dir, &self.model, &mut *self.optim)?;
        self.set_state(&state);
        Ok(state)
    }
}
