//! Verification of a checkpoint without a model: whether a run can resume from it.

use super::run_state::RunState;
use crate::checkpoint::check_same_save;
use crate::checkpoint::file_names::OPTIMIZER_FILE;
use crate::checkpoint::tensors::safetensors_file::TensorFile;
use crate::checkpoint::tensors::weights::Weights;
use shardgrad_tensor::Result;
use std::path::Path;

/// The files of a checkpoint, open for reading.
#[derive(Debug)]
pub struct Checkpoint {
    /// Step, loss scale and notes of the run.
    pub state: RunState,
    /// Hyperparameters of the optimizer, as [`Optimizer::describe`](crate::Optimizer::describe) returns them.
    pub optimizer: String,
    /// Number of applied optimizer steps.
    pub num_steps: u64,
    /// The weights.
    pub weights: Weights,
    /// File of the optimizer state.
    pub optimizer_file: TensorFile,
}

impl Checkpoint {
    /// Opens the files of a checkpoint and checks that they are of one save; reads no tensor.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the file that is missing, cannot be read, or is of another save; `Kind::Io` if the
    /// system refuses.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        let (state, record, weights_digest) = RunState::read_all(dir)?;
        let optimizer_file = TensorFile::open_within(dir, OPTIMIZER_FILE)?;
        let weights = Weights::open(dir)?;
        check_same_save((optimizer_file.path(), &optimizer_file.save_id()), state.step, record.digest)?;
        check_same_save((weights.path(), &weights.save_id()), state.step, weights_digest)?;
        let (optimizer, num_steps) = (record.settings, record.num_steps);
        Ok(Checkpoint { state, optimizer, num_steps, weights, optimizer_file })
    }

    /// Reads all tensors and compares them with their checksums; a tensor without a checksum passes.
    ///
    /// # Errors
    /// As [`TensorFile::verify`], for the first damaged tensor.
    pub fn verify(&self) -> Result<()> {
        self.optimizer_file.verify_share(0, 1)?;
        self.weights.verify_share(0, 1)
    }

    /// Number of tensors without a checksum.
    #[must_use]
    pub fn num_without_checksum(&self) -> usize {
        self.optimizer_file.num_without_checksum() + self.weights.num_without_checksum()
    }
}
