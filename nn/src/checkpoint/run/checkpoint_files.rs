//! The files of a checkpoint: opened, checked to be of one save, and verified without a model.

use super::run_state::{OptimizerRecord, RunState};
use crate::checkpoint::file_names::{OPTIMIZER_FILE, STATE_FILE};
use crate::checkpoint::tensors::safetensors_file::{SaveId, TensorFile};
use crate::checkpoint::tensors::weights::Weights;
use crate::optim::Optimizer;
use shardgrad_tensor::{Error, Kind, Result};
use std::path::Path;

/// The files of a checkpoint, open for reading.
#[derive(Debug)]
pub struct Checkpoint {
    /// Step, loss scale and notes of the run.
    pub state: RunState,
    /// The weights.
    pub weights: Weights,
    /// File of the optimizer state.
    pub optimizer_file: TensorFile,
    optimizer: OptimizerRecord,
    /// Digest that the state file has of the files of weights.
    weights_digest: Option<String>,
}

impl Checkpoint {
    /// Opens the files of a checkpoint and checks that they are of one save; reads no tensor.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the file that is missing, cannot be read, or is of another save; `Kind::Io` if the
    /// system refuses.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        let files = Checkpoint::open_files(dir)?;
        files.check_same_save()?;
        Ok(files)
    }

    /// [`Checkpoint::open`] without the check that the files are of one save.
    pub(crate) fn open_files(dir: &Path) -> Result<Checkpoint> {
        let (state, optimizer, weights_digest) = RunState::read_all(dir)?;
        let optimizer_file = TensorFile::open_within(dir, OPTIMIZER_FILE)?;
        Ok(Checkpoint { state, weights: Weights::open(dir)?, optimizer_file, optimizer, weights_digest })
    }

    /// Hyperparameters of the optimizer, as [`Optimizer::describe`] returns them.
    #[must_use]
    pub fn optimizer(&self) -> &str {
        &self.optimizer.settings
    }

    /// Number of applied optimizer steps.
    #[must_use]
    pub fn num_steps(&self) -> u64 {
        self.optimizer.num_steps
    }

    /// Refuses files of another save than the state file. A state file without digests, of a release that had none,
    /// passes.
    pub(crate) fn check_same_save(&self) -> Result<()> {
        let Checkpoint { optimizer_file: file, weights, .. } = self;
        self.check_save_id(file.path(), &file.save_id(), self.optimizer.digest.as_ref())?;
        self.check_save_id(weights.path(), &weights.save_id(), self.weights_digest.as_ref())
    }

    fn check_save_id(&self, path: &Path, save: &SaveId, digest: Option<&String>) -> Result<()> {
        if digest.is_none() || save.digest.as_ref() == digest {
            return Ok(());
        }
        let (path, own) = (path.display(), self.state.step.to_string());
        let text = match &save.step {
            Some(other) if *other != own => {
                format!("{path} is of step {other}, but {STATE_FILE} in the same folder is of step {own}")
            }
            _ => format!(
                "{path} is of another save than {STATE_FILE} in the same folder, which is of step {own}"
            ),
        };
        let help = "the folder mixes files of several checkpoints: copy one checkpoint again completely, or resume from another";
        Err(Error::new(Kind::Checkpoint, text).detail("help", help))
    }

    /// Refuses an optimizer whose state tensors have other names than those of the checkpoint.
    pub(crate) fn check_optimizer(&self, optim: &dyn Optimizer, state_names: &[&str]) -> Result<()> {
        let (found, dir) = (&self.optimizer.state_names, self.optimizer_file.path().parent());
        if found.iter().eq(state_names) {
            return Ok(());
        }
        let dir = dir.unwrap_or(Path::new("")).display();
        let text = format!(
            "{dir} has the optimizer state {found:?}, the optimizer of this run needs {state_names:?}"
        );
        Err(Error::new(Kind::Checkpoint, text)
            .detail("checkpoint", self.optimizer())
            .detail("run", optim.describe())
            .detail("help", "resume with the optimizer of the checkpoint"))
    }

    /// Reads all tensors and compares them with their checksums; a tensor without a checksum passes.
    ///
    /// # Errors
    /// As [`TensorFile::verify`], for the first damaged tensor.
    pub fn verify(&self) -> Result<()> {
        self.optimizer_file.verify_share(0, 1)?;
        self.weights.verify_share(0, 1)
    }
}
