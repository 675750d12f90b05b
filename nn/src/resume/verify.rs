//! Verification of a checkpoint without a model: whether a run can resume from it.

use super::check_save;
use crate::hf::{OPTIMIZER_FILE, RunState, TensorFile, Weights};
use shardgrad_tensor::Result;
use std::path::Path;

/// The files of a checkpoint, open for reading.
#[derive(Debug)]
pub struct Checkpoint {
    /// Where the run stood.
    pub state: RunState,
    /// The settings of the optimizer, as it describes them.
    pub optimizer: String,
    /// How many steps the optimizer took.
    pub num_steps: u64,
    /// The weights.
    pub weights: Weights,
    /// The file of the optimizer's state.
    pub optimizer_file: TensorFile,
}

impl Checkpoint {
    /// Opens the files of a checkpoint and checks that they are of one save; no tensor is read.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the file that is missing, cannot be read, or is of another save; `Kind::Io` if the system
    /// refuses.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        let (state, told, weights_digest) = RunState::read_all(dir)?;
        let optimizer_file = TensorFile::open_within(dir, OPTIMIZER_FILE)?;
        let weights = Weights::open(dir)?;
        check_save((optimizer_file.path(), &optimizer_file.save()), state.step, told.digest)?;
        check_save((weights.path(), &weights.save()), state.step, weights_digest)?;
        let (optimizer, num_steps) = (told.settings, told.num_steps);
        Ok(Checkpoint { state, optimizer, num_steps, weights, optimizer_file })
    }

    /// Reads all tensors and compares them with their checksums; a tensor without one passes.
    ///
    /// # Errors
    /// As [`TensorFile::verify`], of the first tensor that is damaged.
    pub fn verify(&self) -> Result<()> {
        self.optimizer_file.verify_share(0, 1)?;
        self.weights.verify_share(0, 1)
    }

    /// How many tensors have no checksum.
    #[must_use]
    pub fn num_without_checksum(&self) -> usize {
        self.optimizer_file.num_without_checksum() + self.weights.num_without_checksum()
    }
}
