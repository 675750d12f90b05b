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
    /// Where the run stands, for a checkpoint ([`resume::save`]) or to be changed and given back ([`Trainer::set_state`]), with no
    /// notes as yet.
    #[must_use]
    pub fn state(&self) -> RunState {
        RunState { step: self.step, loss_scale: self.loss_scale, ..RunState::default() }
    }

    /// The model, and the optimizer to go on with what a checkpoint ([`resume::load_weights`]) or another trainer
    /// ([`Optimizer::kept`], [`Optimizer::go_on`]) has of it; with [`Trainer::set_state`]. Every rank does so alike, with what it
    /// kept itself.
    #[must_use]
    pub fn parts_mut(&mut self) -> (&Model<M>, &mut (dyn Optimizer + 't)) {
        (&self.model, &mut *self.optim)
    }

    /// Goes on with the step of a state, which says the data and the learning rate, and, where losses are scaled (in f16) and the
    /// state has one, with its loss scale. Every rank does so alike.
    pub fn set_state(&mut self, state: &RunState) {
        self.step = state.step;
        self.first_step = state.step;
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
