//! State of a trainer for checkpoints: step and loss scale, model and optimizer; and its weights after a failure.

use super::Trainer;
use super::row_leaves::RowLeaves;
use crate::checkpoint::{self, CanonicalSums, RunState, WeightSnapshot};
use crate::model::HfModel;
use crate::module::Module;
use crate::optim::Optimizer;
use crate::sharded_model::Model;
use shardgrad_tensor::{Error, Kind, Result, StateHash};
use std::path::Path;

impl<'t, M: Module> Trainer<'t, M> {
    /// Returns the run state for a checkpoint ([`checkpoint::save`]), with no notes; [`Trainer::set_state`] takes it
    /// back.
    #[doc(alias = "state_dict")]
    #[must_use]
    pub fn state(&self) -> RunState {
        let canonical_sums = self.leaves.as_ref().map(RowLeaves::canonical_sums);
        RunState { step: self.step, loss_scale: self.loss_scale, canonical_sums, ..RunState::default() }
    }

    /// Returns the model, and the optimizer to be loaded from a checkpoint ([`checkpoint::load_weights`]) or from
    /// another trainer ([`Optimizer::param_state`], [`Optimizer::load_state`]); then call [`Trainer::set_state`].
    /// Every rank does this with its own part of the state.
    #[must_use]
    pub fn model_and_optim_mut(&mut self) -> (&Model<M>, &mut (dyn Optimizer + 't)) {
        (&self.model, &mut *self.optim)
    }

    /// Sets the step, which selects data and learning rate, and, with f16, the loss scale if the state has one. Every
    /// rank calls this with an equal state.
    #[doc(alias = "load_state_dict")]
    pub fn set_state(&mut self, state: &RunState) {
        self.step = state.step;
        self.first_step = state.step;
        self.loss_scale = self.loss_scale.map(|own| state.loss_scale.unwrap_or(own));
    }

    /// Returns the hash of weights and optimizer state ([`state_hash()`](crate::state_hash())): after equal steps the same on every mesh on
    /// which the weights are equal bit for bit. A collective call: every rank calls it together.
    ///
    /// # Errors
    /// As [`state_hash()`](crate::state_hash()).
    #[track_caller]
    pub fn state_hash(&self) -> Result<StateHash> {
        crate::state_hash(&self.model, &*self.optim)
    }

    /// Returns a snapshot of this rank's weights after the last complete step, for use after the world has failed.
    /// Call it on each rank: if all snapshots are of one step, [`WeightSnapshot::model`] rebuilds the model in
    /// another world. Nothing is communicated.
    ///
    /// # Errors
    /// `Kind::Unsupported` if an update had begun and not finished: the weights then belong to no step. Errors of the
    /// device.
    pub fn rescue(&self) -> Result<WeightSnapshot> {
        if self.update_in_progress {
            let text = format!(
                "the update of step {} had begun and did not finish: the weights belong to no step",
                self.step + 1
            );
            return Err(Error::new(Kind::Unsupported, text).detail("rank", self.rank().describe()));
        }
        WeightSnapshot::from_model(&self.model, self.step)
    }
}

impl<M: HfModel> Trainer<'_, M> {
    /// Resumes from a checkpoint of a language model: loads weights, optimizer state, step and loss scale. Construct
    /// the trainer with the configuration of the saved run: the checkpoint does not carry it. Each rank reads for
    /// itself.
    ///
    /// # Errors
    /// As [`checkpoint::load`]; `Kind::Config` for a checkpoint of other canonical sums than those of this trainer
    /// ([`TrainerConfig::deterministic`](super::TrainerConfig::deterministic)).
    #[doc(alias = "load_checkpoint")]
    pub fn resume(&mut self, dir: &Path) -> Result<RunState> {
        self.check_canonical_sums(dir)?;
        let state = checkpoint::load(dir, &self.model, &mut *self.optim)?;
        self.set_state(&state);
        Ok(state)
    }

    /// Refuses to continue a run with sums in another order.
    fn check_canonical_sums(&self, dir: &Path) -> Result<()> {
        checkpoint::Checkpoints::recover(dir)?;
        let (own, saved) = (self.state().canonical_sums, RunState::read(dir)?.canonical_sums);
        if own == saved {
            return Ok(());
        }
        let text = |sums: Option<CanonicalSums>| match sums {
            Some(CanonicalSums { version, batch_leaves, sum_leaves }) => {
                format!(
                    "canonical over {batch_leaves} leaves of the batch and {sum_leaves} of other sums (version {version})"
                )
            }
            None => "in the order of the mesh".to_string(),
        };
        let why = format!("sums are {}, those of {} were {}", text(own), dir.display(), text(saved));
        let help = "resume with the same --deterministic, --batch-leaves and --sum-leaves (TrainerConfig::deterministic)";
        Err(Error::new(Kind::Config, why).detail("help", help))
    }
}
