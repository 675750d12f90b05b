//! Training checkpoints: folders from which a run resumes, with the same bits on the same mesh, and up to rounding on
//! any other.
//!
//! A checkpoint is a model folder in the dtype of the stored weights, with two more files:
//!
//! - `optimizer.safetensors` has the optimizer state, as global tensors, bit for bit, named after the weights:
//!   `exp_avg.NAME` and `exp_avg_sq.NAME` of [`AdamW`](crate::AdamW), `momentum_buffer.NAME` of [`Sgd`](crate::Sgd) and
//!   [`Muon`](crate::Muon), `ema.NAME` of [`Ema`](crate::Ema), and `step.NAME`, i64 `[]`, the number of updates of each
//!   parameter. Several optimizers ([`Optimizers`](crate::Optimizers)) have the tensors of each for its parameters.
//! - `trainer_state.json` has the [`RunState`], and the digests that the other files have in their headers, which
//!   tell files of different saves apart.
//!
//! # States of a save
//!
//! A save replaces the old files by new ones, which it writes under temporary names (`*.tmp-PID`). Wherever it is killed,
//! a reader finds the old files, the new ones, or an error, and never a mixture:
//!
//! ```text
//!  state                              a reader finds    after a kill in this state
//!  ---------------------------------------------------------------------------------------------------
//!  old                                old
//!   |  write: files, then sync them
//!   v
//!  old, new under temporary names     old               the next run or save removes the new
//!   |  unname: the old cannot be read
//!   v
//!  new under temporary names          an error          checkpoint: `Checkpoints::recover` names the new
//!   |  name: rename, sync the folder                    model: the files are kept until the next save
//!   v
//!  new, rest of the old               new               the next run or save removes the rest
//!   |  remove: the old
//!   v
//!  new                                new
//! ```
//!
//! | step | checkpoint (`atomic/atomic_folder.rs`) | model folder (`atomic/commit.rs`) |
//! |---|---|---|
//! | write | in a folder `checkpoint-STEP.tmp-PID`; `trainer_state.json` last, which marks a complete folder | files `NAME.tmp-PID` in the model folder, which is locked |
//! | unname | renames the old folder to `checkpoint-STEP.old.tmp-PID` | removes the index or the only file of weights; not needed if that file alone changes what is read |
//! | name | renames the new folder | renames config, sidecar files and weights; the index or the only file last |
//! | remove | removes the old folder | removes files of weights that earlier saves left |
//!
//! If files of different saves are copied into one folder, their digests differ from those in `trainer_state.json` or in
//! the index, and loading refuses them.
//!
//! # Parts
//!
//! | module | contents |
//! |---|---|
//! | `file_names` | names of the files |
//! | `atomic` | temporary names, lock, sync, rename, removal of what killed saves left |
//! | `tensors` | safetensors files, checksums, partial reads, index and shards |
//! | [`hf`] | model families in the Hugging Face layout: configs and names of tensors |
//! | `run` | run state, the files of a checkpoint, the checkpoints of a run |
//! | `sharded` | saving and loading models that are sharded over ranks |
//!
//! # Example
//!
//! ```no_run
//! # use shardgrad_nn::{AdamW, Linear, Model, Optimizer, checkpoint, checkpoint::RunState};
//! # use std::path::Path;
//! # fn example(model: &Model<Linear>, mut optim: AdamW) -> shardgrad_tensor::Result<()> {
//! let state = RunState { step: optim.num_steps(), ..RunState::default() };
//! checkpoint::save_weights(Path::new("checkpoint-100"), model, &optim, &state)?;
//! let state = checkpoint::load_weights(Path::new("checkpoint-100"), model, &mut optim)?;
//! # drop(state);
//! # Ok(())
//! # }
//! ```
//!
//! A program records its own random state and data position in [`RunState::notes`]; a [`Trainer`](crate::Trainer)
//! needs neither, because it draws and reads by the number of the step.

mod file_names;
mod atomic;
mod tensors;
pub mod hf;
mod run;
mod sharded;
pub mod adapters;

pub use atomic::commit::check_replaceable;
#[cfg(test)]
pub(crate) use atomic::disk::scratch;
pub use atomic::disk::{open_within, read_text};
pub use atomic::sidecar::SidecarFile;
pub use file_names::{CONFIG_FILE, INDEX_FILE, OPTIMIZER_FILE, STATE_FILE, WEIGHTS_FILE};
pub use run::checkpoint_files::Checkpoint;
pub use run::checkpoints::Checkpoints;
pub use run::run_state::{CanonicalSums, RunState};
pub use sharded::cast_rule::{CastCounts, CastRule};
pub use sharded::load_filter::LoadFilter;
pub(crate) use sharded::optimizer_state::required_state_names;
pub(crate) use sharded::param_checks::check_parameters;
pub use sharded::save::FILE_BYTES_MAX;
pub use sharded::weight_snapshot::WeightSnapshot;
pub use tensors::digest::Digest;
pub use tensors::safetensors_file::{TensorFile, TensorWriter};
pub use tensors::safetensors_header::{self, TensorInfo, TensorSpec};
pub use tensors::weights::Weights;
pub use tensors::weights_writer::WeightsWriter;

use crate::module::Module;
use crate::module::param::{Param, check_no_averages};
use crate::optim::{Optimizer, OptimizerState};
use crate::sharded_model::Model;
use atomic::atomic_folder::AtomicFolder;
use atomic::disk::check_space;
use hf::HfModel;
use sharded::gather::{WRITE_TIMEOUT, on_rank_zero};
use sharded::optimizer_state::{Names, StateSpecs, read_states};
use shardgrad_tensor::Result;
use shardgrad_tensor::training_step::control::world_sum;
use std::panic::Location;
use std::path::Path;

/// Saves a checkpoint of a language model, with sidecar files ([`Model::save_with_sidecars`]); replaces a checkpoint
/// at `dir`. Tensors are gathered one by one, so every rank calls this together. Rank 0 writes, and all files are on
/// the disk when any rank returns.
///
/// # Errors
/// As [`Model::save_with_sidecars`]; `Kind::Io` also if `dir` is anything but a checkpoint or an empty folder;
/// `Kind::Unsupported` for an optimizer without [`Optimizer::state_names`], or whose state has another layout than
/// its parameter; `Kind::Config` while averages are in place of parameters ([`Ema::swap_in`](crate::Ema::swap_in)). The old checkpoint
/// is unchanged then, every rank returns the error, and training can continue.
#[doc(alias = "state_dict")]
#[doc(alias = "torch.distributed.checkpoint")]
#[doc(alias = "save_checkpoint")]
#[track_caller]
pub fn save<M: HfModel>(
    dir: &Path,
    model: &Model<M>,
    optim: &dyn Optimizer,
    state: &RunState,
    sidecars: &[SidecarFile<'_>],
) -> Result<()> {
    let write = |dir: &Path| {
        model.save_folder(dir, FILE_BYTES_MAX, model.precision().param_dtype, (sidecars, Some(state.step)))
    };
    save_as(dir, (model, &write), optim, state, &|name| model.file_name(name))
}

/// [`save`] for a model of any kind: tensors have the names of the parameters, and there is no `config.json`.
///
/// # Errors
/// As [`save`].
#[track_caller]
pub fn save_weights<M: Module>(
    dir: &Path,
    model: &Model<M>,
    optim: &dyn Optimizer,
    state: &RunState,
) -> Result<()> {
    let write = |dir: &Path| model.save_weights_of_step(dir, state.step);
    save_as(dir, (model, &write), optim, state, &str::to_string)
}

/// Loads a checkpoint of a language model, saved on any mesh: weights, optimizer state and run state. Each rank reads
/// for itself; nothing is communicated. First renames a complete checkpoint that a killed save left under its
/// temporary name ([`Checkpoints::recover`]).
///
/// # Errors
/// `Kind::Checkpoint` naming the file that is missing, cannot be read, does not fit model and optimizer (other
/// tensors, shapes or dtypes), or is of another save than `trainer_state.json`; as [`Checkpoints::recover`],
/// [`Model::load`] and [`Optimizer::load_state`]. Model and optimizer may be of different steps then. `Kind::Config`, before anything
/// changes, while averages are in place of parameters.
#[doc(alias = "load_state_dict")]
#[doc(alias = "load_checkpoint")]
pub fn load<M: HfModel>(dir: &Path, model: &Model<M>, optim: &mut dyn Optimizer) -> Result<RunState> {
    load_as(dir, model, optim, &|name| model.file_name(name), |files| {
        model.load_opened(&files.weights, CastRule::Widen)
    })
}

/// [`load`] for a checkpoint that [`save_weights`] wrote.
///
/// # Errors
/// As [`load`].
pub fn load_weights<M: Module>(dir: &Path, model: &Model<M>, optim: &mut dyn Optimizer) -> Result<RunState> {
    load_as(dir, model, optim, &str::to_string, |files| {
        model.load_weights_as(&files.weights, CastRule::Widen, &str::to_string, &[])
    })
}

/// Loads the newest complete checkpoint of [`save_weights`] in the folder of a run, where checkpoints are at
/// [`Checkpoints::path_of`]. Returns its state, or the state of a new run (step 0) if there is none. Rank 0 chooses the checkpoint, so
/// every rank calls this together; then each rank reads for itself.
///
/// # Errors
/// As [`Checkpoints::recover_all`], [`Checkpoints::find`] and [`load_weights`]; errors of the collective.
#[doc(alias = "latest_checkpoint")]
#[track_caller]
pub fn resume<M: Module>(
    run: impl AsRef<Path>,
    model: &Model<M>,
    optim: &mut dyn Optimizer,
) -> Result<RunState> {
    let (run, rank, site) = (run.as_ref(), model.rank(), Location::caller());
    let newest = || {
        Checkpoints::recover_all(run)?;
        Ok(Checkpoints::find(run)?.complete.pop())
    };
    let newest = on_rank_zero(rank, site, newest)?.flatten();
    // Counted from 1, so that 0 states that there is none. Other ranks add nothing.
    let number = newest.map_or(0.0, |(step, _)| step as f64 + 1.0);
    match world_sum(rank, &[number], site)?[0] as u64 {
        0 => Ok(RunState::default()),
        number => load_weights(&Checkpoints::path_of(run, number - 1), model, optim),
    }
}

/// Writes the weights of a model into a folder; returns their digest on rank 0.
type Write<'a> = &'a dyn Fn(&Path) -> Result<Option<String>>;

/// [`save`], where `write` writes the weights.
#[track_caller]
fn save_as<M: Module>(
    dir: &Path,
    (model, write): (&Model<M>, Write<'_>),
    optim: &dyn Optimizer,
    state: &RunState,
    names: Names<'_>,
) -> Result<()> {
    let (site, rank) = (Location::caller(), model.rank());
    check_no_averages(model.params(), "a run that resumes from this checkpoint would train them")
        .map_err(|e| e.at(site))?;
    let specs = StateSpecs::collect(model, optim, site)?;
    let bytes = specs.num_checkpoint_bytes(model);
    rank.with_timeout(WRITE_TIMEOUT, || {
        let create = || check_space(dir, bytes).and_then(|()| AtomicFolder::create(dir));
        let folder = on_rank_zero(rank, site, create)?;
        // Only rank 0 has a folder.
        let at = folder.as_ref().map_or(dir, AtomicFolder::temporary_path);
        let weights_digest = write(at)?;
        let digest = specs.write(&at.join(OPTIMIZER_FILE), state.step, (model, optim), names, site)?;
        let commit = || {
            let Some(folder) = folder else { return Ok(()) };
            state.write(folder.temporary_path(), specs.record(optim, digest), weights_digest)?;
            folder.commit()
        };
        on_rank_zero(rank, site, commit).map(drop)
    })
}

/// Optimizer state that was read from a checkpoint.
type ReadStates = Vec<(Param, OptimizerState)>;

/// Loads a checkpoint; `load_weights` loads its weights. All of it is read and compared with the optimizer before anything
/// changes; the weights change first, because averages of weights without a saved value begin at them.
fn load_as<M: Module>(
    dir: &Path,
    model: &Model<M>,
    optim: &mut dyn Optimizer,
    names: Names<'_>,
    load_weights: impl FnOnce(&Checkpoint) -> Result<CastCounts>,
) -> Result<RunState> {
    check_no_averages(model.params(), "loaded parameters would be lost when the others come back")?;
    let (files, states) = read_optimizer(dir, model, optim, names)?;
    load_weights(&files)?;
    optim
        .load_state(files.num_steps(), states)
        .map_err(|e| e.detail("checkpoint", dir.display().to_string()))?;
    Ok(files.state)
}

/// Opens a checkpoint and reads its optimizer state.
fn read_optimizer<M: Module>(
    dir: &Path,
    model: &Model<M>,
    optim: &dyn Optimizer,
    names: Names<'_>,
) -> Result<(Checkpoint, ReadStates)> {
    Checkpoints::recover(dir)?;
    let files = Checkpoint::open_files(dir)?;
    let states = read_states(&files, model, optim, names)?;
    files.check_same_save()?;
    Ok((files, states))
}
