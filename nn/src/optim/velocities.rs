//! Velocities (momentum buffers) of parameters: the state of SGD and of Muon.

use super::optimizer::{OptimizerState, check_hyperparameters_requested, wrong_num_tensors};
use crate::module::param::Param;
use shardgrad_autograd::Key;
use shardgrad_tensor::training_step::optimizer_step::Velocity;
use shardgrad_tensor::{Result, Tensor};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// The number of applied steps, and a velocity for each parameter that an update was tried for.
#[derive(Clone, Debug, Default)]
pub(super) struct Velocities {
    num_steps: u64,
    of: BTreeMap<Key, Velocity>,
}

impl Velocities {
    /// The name of a velocity in a checkpoint.
    pub(super) const NAME: &'static str = "momentum_buffer";

    /// Returns the number of applied steps.
    pub(super) fn num_steps(&self) -> u64 {
        self.num_steps
    }

    /// Counts an applied step.
    pub(super) fn count_step(&mut self) {
        self.num_steps += 1;
    }

    /// Returns the velocity of a parameter as a tensor.
    pub(super) fn tensor(&self, param: &Param) -> Option<Tensor> {
        Some(self.of.get(&param.key())?.tensor(param.tensor().rank()))
    }

    /// Returns the state of a parameter for checkpoints.
    pub(super) fn state(&self, param: &Param) -> Option<OptimizerState> {
        Some(OptimizerState { num_steps: self.num_steps, tensors: vec![self.tensor(param)?] })
    }

    /// Returns the velocity of a parameter, zeros if it is new.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub(super) fn get_or_zeros(&mut self, param: &Param) -> Result<&mut Velocity> {
        match self.of.entry(param.key()) {
            Entry::Occupied(velocity) => Ok(velocity.into_mut()),
            Entry::Vacant(new) => Ok(new.insert(Velocity::zeros(param.tensor().rank(), &param.layout())?)),
        }
    }

    /// Returns all velocities, after refusing parameters of an update that have none.
    ///
    /// # Errors
    /// `Kind::Config` naming the parameter.
    pub(super) fn of_update(&mut self, params: &[(&Param, Tensor)]) -> Result<&mut BTreeMap<Key, Velocity>> {
        check_hyperparameters_requested(params, |param| self.of.contains_key(&param.key()))?;
        Ok(&mut self.of)
    }

    /// Sets the state after `num_steps` steps: the velocity of each parameter that has one.
    ///
    /// # Errors
    /// `Kind::Layout` naming a parameter whose velocity has another layout.
    pub(super) fn restore<'a>(
        &mut self,
        num_steps: u64,
        velocities: impl IntoIterator<Item = (&'a Param, Tensor)>,
    ) -> Result<()> {
        let restored = velocities.into_iter().map(|(param, v)| {
            let velocity = Velocity::from_tensor(&param.layout(), &v);
            velocity.map(|v| (param.key(), v)).map_err(|e| e.detail("parameter", param.name()))
        });
        self.of = restored.collect::<Result<_>>()?;
        self.num_steps = num_steps;
        Ok(())
    }

    /// [`Velocities::restore`] from the states of a checkpoint.
    ///
    /// # Errors
    /// As [`Velocities::restore`]; `Kind::Config` for a state of another number of tensors.
    pub(super) fn load(&mut self, num_steps: u64, states: &[(Param, OptimizerState)]) -> Result<()> {
        let velocity = |(param, state): &(Param, OptimizerState)| match &state.tensors[..] {
            [velocity] => Ok((param.clone(), velocity.clone())),
            other => Err(wrong_num_tensors(param, other.len(), 1)),
        };
        let velocities: Vec<(Param, Tensor)> = states.iter().map(velocity).collect::<Result<_>>()?;
        self.restore(num_steps, velocities.iter().map(|(param, velocity)| (param, velocity.clone())))
    }
}
