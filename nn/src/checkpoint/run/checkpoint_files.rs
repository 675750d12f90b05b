//! The files of a checkpoint: opened, checked to be of one save, and verified without a model.

use super::run_state::RunState;
use crate::checkpoint::file_names::{OPTIMIZER_FILE, STATE_FILE};
use crate::checkpoint::tensors::safetensors_file::{SaveId, TensorFile};
use crate::checkpoint::tensors::weights::Weights;
use crate::optim::Optimizer;
use shardgrad_tensor::{Error, Kind, Result};
use std::path::{Path, PathBuf};

/// The files of a checkpoint, open for reading.
#[derive(Debug)]
pub struct Checkpoint {
    /// Step, loss scale and notes of the run.
    pub state: RunState,
    /// Hyperparameters of the optimizer, as [`Optimizer::describe`] returns them.
    pub optimizer: String,
    /// Number of applied optimizer steps.
    pub num_steps: u64,
    /// The weights.
    pub weights: Weights,
    /// File of the optimizer state.
    pub optimizer_file: TensorFile,
    dir: PathBuf,
    /// Names of the state tensors of a parameter.
    state_names: Vec<String>,
    /// Digests that the state file has of the files of weights and of the optimizer file.
    weights_digest: Option<String>,
    optimizer_digest: Option<String>,
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
        let (state, record, weights_digest) = RunState::read_all(dir)?;
        let optimizer_file = TensorFile::open_within(dir, OPTIMIZER_FILE)?;
        Ok(Checkpoint {
            state,
            optimizer: record.settings,
            num_steps: record.num_steps,
            weights: Weights::open(dir)?,
            optimizer_file,
            dir: dir.to_path_buf(),
            state_names: record.state_names,
            weights_digest,
            optimizer_digest: record.digest,
        })
    }

    /// Refuses files of another save than the state file. A state file without digests, of a release that had none,
    /// passes.
    pub(crate) fn check_same_save(&self) -> Result<()> {
        let Checkpoint { optimizer_file: file, weights, .. } = self;
        self.check_save_id(file.path(), &file.save_id(), self.optimizer_digest.as_ref())?;
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
        if self.state_names.iter().eq(state_names) {
            return Ok(());
        }
        let text = format!(
            "{} has the optimizer state {:?}, the optimizer of this run needs {state_names:?}",
            self.dir.display(),
            self.state_names
        );
        Err(Error::new(Kind::Checkpoint, text)
            .detail("checkpoint", &self.optimizer)
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

    /// Number of tensors without a checksum.
    #[must_use]
    pub fn num_without_checksum(&self) -> usize {
        self.optimizer_file.num_without_checksum() + self.weights.num_without_checksum()
    }
}
