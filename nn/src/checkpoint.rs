//! Training checkpoints: folders from which a run resumes, with the same bits on the same mesh, and up to rounding on
//! any other.
//!
//! A checkpoint is a model folder in the dtype of the stored weights, with two more files:
//!
//! - `optimizer.safetensors` has the optimizer state, as global tensors, bit for bit, named after the weights:
//!   `exp_avg.NAME` and `exp_avg_sq.NAME` of [`AdamW`](crate::AdamW), `momentum_buffer.NAME` of [`Sgd`](crate::Sgd),
//!   and `step.NAME`, i64 `[]`, the number of updates of each parameter.
//! - `trainer_state.json` has the [`RunState`], and the digests that the other files have in their headers, which
//!   tell files of different saves apart.
//!
//! A save writes the folder under a temporary name and renames the folder when all files are on the disk, so that a
//! folder with the name of a checkpoint is complete.
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

mod verify;

pub use crate::hf::{Checkpoints, OPTIMIZER_FILE, RunState, STATE_FILE};
pub use verify::Checkpoint;

use crate::cast_rule::CastRule;
use crate::hf::{
    AtomicFolder, OptimizerRecord, SaveId, SidecarFile, TensorFile, TensorInfo, TensorWriter, Weights,
    check_space,
};
use crate::model::HfModel;
use crate::model_io::{WRITE_TIMEOUT, broadcast_result, gather_to_rank_zero, load_weights as fill_weights};
use crate::module::Module;
use crate::module::param::Param;
use crate::optim::{Optimizer, OptimizerState};
use crate::sharded_model::Model;
use shardgrad_tensor::training_step::control::world_sum;
use shardgrad_tensor::{DType, Error, Kind, Rank, Result, Tensor};
use std::panic::Location;
use std::path::{Path, PathBuf};

/// Prefix of the names of update counts.
const STEPS: &str = "step";

/// Saves a checkpoint of a language model, with sidecar files ([`Model::save_with_sidecars`]); replaces a checkpoint
/// at `dir`. Tensors are gathered one by one, so every rank calls this together. Rank 0 writes, and all files are on
/// the disk when any rank returns.
///
/// # Errors
/// As [`Model::save_with_sidecars`]; `Kind::Io` also if `dir` is anything but a checkpoint or an empty folder;
/// `Kind::Unsupported` for an optimizer without [`Optimizer::state_names`], or whose state has another layout than
/// its parameter. The old checkpoint is unchanged then, every rank returns the error, and training can continue.
#[doc(alias = "state_dict")]
#[doc(alias = "torch.distributed.checkpoint")]
#[doc(alias = "save_checkpoint")]
#[track_caller]
pub fn save<M: HfModel>(
    dir: &Path,
    model: &Model<M>,
    optim: &dyn Optimizer,
    state: &RunState,
    companions: &[SidecarFile<'_>],
) -> Result<()> {
    let write = |dir: &Path| model.save_of_step(dir, state.step, companions);
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
/// [`Model::load`] and [`Optimizer::load_state`]. Model and optimizer may be of different steps then.
#[doc(alias = "load_state_dict")]
#[doc(alias = "load_checkpoint")]
pub fn load<M: HfModel>(dir: &Path, model: &Model<M>, optim: &mut dyn Optimizer) -> Result<RunState> {
    let (state, weights) = load_optimizer(dir, model, optim, &|name| model.file_name(name))?;
    model.load_opened(&weights, CastRule::Widen)?;
    Ok(state)
}

/// [`load`] for a checkpoint that [`save_weights`] wrote.
///
/// # Errors
/// As [`load`].
pub fn load_weights<M: Module>(dir: &Path, model: &Model<M>, optim: &mut dyn Optimizer) -> Result<RunState> {
    let (state, weights) = load_optimizer(dir, model, optim, &str::to_string)?;
    fill_weights(model, &weights, CastRule::Widen, &str::to_string, &[])?;
    Ok(state)
}

/// Maps parameter names to tensor names in files.
type Names<'a> = &'a dyn Fn(&str) -> String;
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
    let state_names = required_state_names(optim).map_err(|e| e.at(site))?;
    let specs = collect_specs(model, optim, state_names, site)?;
    let bytes = num_bytes(model, &specs);
    rank.with_timeout(WRITE_TIMEOUT, || {
        let is_rank_zero = rank.world().index() == 0;
        let begin = || check_space(dir, bytes).and_then(|()| AtomicFolder::create(dir));
        let created = is_rank_zero.then(begin).transpose();
        let (folder, created) = created.map_or_else(|e| (None, Err(e)), |folder| (folder, Ok(())));
        broadcast_result(rank, created, site)?;
        // Only rank 0 has a folder.
        let at = folder.as_ref().map_or(dir, AtomicFolder::temporary_path);
        let weights_digest = write(at)?;
        let file = is_rank_zero.then(|| (at.join(OPTIMIZER_FILE), state.step));
        let digest = write_optimizer(file, model, (optim, state_names), (&specs, names), site)?;
        let record = || OptimizerRecord {
            settings: optim.describe(),
            state_names: state_names.iter().map(ToString::to_string).collect(),
            num_steps: optim.num_steps(),
            digest,
        };
        let done = folder.map_or(Ok(()), |folder| {
            state.write(folder.temporary_path(), record(), weights_digest)?;
            folder.commit()
        });
        broadcast_result(rank, done, site)
    })
}

/// Number of bytes of all tensors of a checkpoint.
fn num_bytes<M: Module>(model: &Model<M>, specs: &[Option<StateSpec>]) -> u64 {
    let weights = model.precision().param_dtype.size();
    let of_optimizer =
        |spec: &Option<StateSpec>| spec.iter().flat_map(|spec| &spec.dtypes).map(|d| d.size()).sum::<usize>();
    let bytes =
        |(param, spec): (&Param, &Option<StateSpec>)| (param.numel() * (weights + of_optimizer(spec))) as u64;
    model.params().iter().zip(specs).map(bytes).sum()
}

/// Returns the names of the optimizer's state tensors, or refuses an optimizer that cannot be saved.
fn required_state_names(optim: &dyn Optimizer) -> Result<&'static [&'static str]> {
    optim.state_names().ok_or_else(|| {
        let text = format!("this optimizer does not implement `state_names`: {}", optim.describe());
        Error::new(Kind::Unsupported, text).detail(
            "help",
            "implement `state_names`, `param_state` and `load_state`; an optimizer that forwards steps must forward these too",
        )
    })
}

/// Size of the optimizer state of a parameter, known on every rank, wherever the parameter is stored.
struct StateSpec {
    num_steps: u64,
    dtypes: Vec<DType>,
}

/// Code of a parameter without optimizer state.
const NO_STATE: f64 = 0.0;
/// Code of a parameter with optimizer state.
const HAS_STATE: f64 = 1.0;
/// Code of a parameter whose optimizer state fits no file.
const INVALID_STATE: f64 = 2.0;

/// Collects the size of the optimizer state of each parameter that has any. Every rank calls this together.
fn collect_specs<M: Module>(
    model: &Model<M>,
    optim: &dyn Optimizer,
    state_names: &[&str],
    site: &'static Location<'static>,
) -> Result<Vec<Option<StateSpec>>> {
    let (rank, width) = (model.rank(), 2 + state_names.len());
    let has_param_layout = |p: &Param, t: &Tensor| *t.layout() == p.layout().with_dtype(t.dtype());
    let dtype_code = |t: &Tensor| DType::ALL.iter().position(|d| *d == t.dtype()).unwrap_or(0) as f64;
    // Numbers of one parameter: a code for its state, the number of updates, and codes of dtypes. One rank fills them in.
    let encode = |p: &Param| -> Vec<f64> {
        let own = (rank.index() == 0 && p.is_primary_owner()).then(|| optim.param_state(p)).flatten();
        match own {
            None => vec![NO_STATE; width],
            Some(OptimizerState { num_steps, tensors })
                if tensors.len() == state_names.len() && tensors.iter().all(|t| has_param_layout(p, t)) =>
            {
                [HAS_STATE, num_steps as f64].into_iter().chain(tensors.iter().map(dtype_code)).collect()
            }
            Some(_) => [INVALID_STATE].into_iter().chain(vec![0.0; width - 1]).collect(),
        }
    };
    let codes: Vec<f64> = model.params().iter().flat_map(encode).collect();
    let sums = world_sum(rank.world(), &codes, site)?;
    let decode = |(param, codes): (&Param, &[f64])| match codes[0] {
        NO_STATE => Ok(None),
        HAS_STATE => {
            let dtypes = codes[2..].iter().map(|code| DType::ALL[*code as usize]).collect();
            Ok(Some(StateSpec { num_steps: codes[1] as u64, dtypes }))
        }
        _ => {
            let text = format!(
                "the optimizer state of `{}` does not match its state_names {state_names:?}, or has another layout than the parameter",
                param.name()
            );
            Err(Error::new(Kind::Unsupported, text).at(site))
        }
    };
    model.params().iter().zip(sums.chunks(width)).map(decode).collect()
}

/// Writes the optimizer state after a step into a file, on the rank that receives a path; returns the digest of the
/// file there. Every rank calls this together.
fn write_optimizer<M: Module>(
    file: Option<(PathBuf, u64)>,
    model: &Model<M>,
    (optim, state_names): (&dyn Optimizer, &[&str]),
    (specs, names): (&[Option<StateSpec>], Names<'_>),
    site: &'static Location<'static>,
) -> Result<Option<String>> {
    let rank = model.rank();
    let with_state: Vec<(&Param, String, &StateSpec)> = model
        .params()
        .iter()
        .zip(specs)
        .filter_map(|(param, spec)| Some((param, names(&param.name()), spec.as_ref()?)))
        .collect();
    let entries = with_state.iter().flat_map(|(param, name, spec)| {
        let states = state_names.iter().zip(&spec.dtypes);
        let states = states.map(|(kind, dtype)| (format!("{kind}.{name}"), *dtype, param.file_shape()));
        std::iter::once((format!("{STEPS}.{name}"), DType::I64, Vec::new())).chain(states).collect::<Vec<_>>()
    });
    let entries: Vec<_> = entries.collect();
    let created = file.map(|(path, step)| TensorWriter::with_step(&path, &entries, step)).transpose();
    let (mut writer, created) = created.map_or_else(|e| (None, Err(e)), |writer| (writer, Ok(())));
    broadcast_result(rank, created, site)?;
    let mut written = Ok(());
    // After a failed write the remaining tensors are gathered all the same, so that all ranks stay in step.
    let mut append = |name: &str, bytes: Option<Vec<u8>>| {
        if let (Some(writer), Some(bytes), true) = (&mut writer, bytes, written.is_ok()) {
            written = writer.append(name, &bytes);
        }
    };
    for (param, name, spec) in with_state {
        append(&format!("{STEPS}.{name}"), Some(spec.num_steps.to_le_bytes().to_vec()));
        let own = param.is_local().then(|| optim.param_state(param)).flatten();
        for (i, (kind, dtype)) in state_names.iter().zip(&spec.dtypes).enumerate() {
            let part = || {
                let tensor = own.as_ref().map(|state| state.tensors[i].clone());
                tensor.map(|tensor| param.permute_to_file_order(tensor)).ok_or_else(|| missing_state(param))
            };
            append(&format!("{kind}.{name}"), gather_to_rank_zero(rank, param, *dtype, part, site)?);
        }
    }
    let written = written.and_then(|()| writer.map_or(Ok(None), TensorWriter::finish_with_digest));
    let (digest, written) = written.map_or_else(|e| (None, Err(e)), |digest| (digest, Ok(())));
    broadcast_result(rank, written, site)?;
    Ok(digest)
}

/// Error for a rank without optimizer state of a parameter for which other ranks have state.
fn missing_state(param: &Param) -> Error {
    Error::new(
        Kind::Diverged,
        format!("this rank has no optimizer state of `{}`, other ranks have", param.name()),
    )
}

/// Loads the optimizer state of a checkpoint. Returns the run state and the open weights.
fn load_optimizer<M: Module>(
    dir: &Path,
    model: &Model<M>,
    optim: &mut dyn Optimizer,
    names: Names<'_>,
) -> Result<(RunState, Weights)> {
    let state_names = required_state_names(optim)?;
    Checkpoints::recover(dir)?;
    let (state, record, weights_digest) = RunState::read_all(dir)?;
    if !record.state_names.iter().eq(state_names) {
        let text = format!(
            "{} has the optimizer state {:?}, the optimizer of this run needs {state_names:?}",
            dir.display(),
            record.state_names
        );
        let error = Error::new(Kind::Checkpoint, text).detail("checkpoint", record.settings);
        return Err(error
            .detail("run", optim.describe())
            .detail("help", "resume with the optimizer of the checkpoint"));
    }
    let file = TensorFile::open_within(dir, OPTIMIZER_FILE)?;
    let mut states = Vec::new();
    let mut count = 0;
    for param in model.params() {
        let name = names(&param.name());
        if file.get(&format!("{STEPS}.{name}")).is_none() {
            continue;
        }
        let found: Vec<&TensorInfo> = state_names
            .iter()
            .map(|kind| find_matching(&file, &format!("{kind}.{name}"), param))
            .collect::<Result<_>>()?;
        count += 1 + found.len();
        if param.is_local() {
            states.push((param.clone(), read_param_state(&file, (param, &name), &found, model.rank())?));
        }
    }
    if count != file.tensors().len() {
        let (path, strange) = (file.path().display(), file.tensors().len().abs_diff(count));
        let text = format!("{path}: {strange} tensor(s) belong to no parameter of the model");
        return Err(Error::new(Kind::Checkpoint, text));
    }
    let world = model.rank().world();
    file.verify_share(world.index(), world.mesh().num_ranks())?;
    let weights = Weights::open(dir)?;
    check_same_save((file.path(), &file.save_id()), state.step, record.digest)?;
    check_same_save((weights.path(), &weights.save_id()), state.step, weights_digest)?;
    optim
        .load_state(record.num_steps, states)
        .map_err(|e| e.detail("checkpoint", dir.display().to_string()))?;
    Ok((state, weights))
}

/// Refuses files of another save than `trainer_state.json`. A state without a digest was written by a release that
/// had none, and passes.
fn check_same_save((path, save): (&Path, &SaveId), step: u64, digest: Option<String>) -> Result<()> {
    if digest.is_none() || save.digest == digest {
        return Ok(());
    }
    let (path, own) = (path.display(), step.to_string());
    let text = match &save.step {
        Some(other) if *other != own => {
            format!("{path} is of step {other}, but {STATE_FILE} beside it is of step {own}")
        }
        _ => format!("{path} is of another save than {STATE_FILE} beside it, which is of step {own}"),
    };
    let help = "the folder mixes files of several checkpoints: copy one checkpoint again completely, or resume from another";
    Err(Error::new(Kind::Checkpoint, text).detail("help", help))
}

/// Returns a tensor of the file if its shape is that of the parameter.
fn find_matching<'a>(file: &'a TensorFile, name: &str, param: &Param) -> Result<&'a TensorInfo> {
    let why = match file.get(name) {
        None => format!("there is no tensor `{name}`"),
        Some(found) if found.shape != param.file_shape() => {
            format!("`{name}` is {:?}, the model has {:?}", found.shape, param.file_shape())
        }
        Some(found) => return Ok(found),
    };
    Err(Error::new(Kind::Checkpoint, format!("{}: {why}", file.path().display())))
}

/// Reads this rank's part of the optimizer state of a parameter.
fn read_param_state(
    file: &TensorFile,
    (param, name): (&Param, &str),
    found: &[&TensorInfo],
    rank: &Rank,
) -> Result<OptimizerState> {
    let step = format!("{STEPS}.{name}");
    let is_count = file.get(&step).is_some_and(|info| info.dtype == DType::I64 && info.shape.is_empty());
    let bytes = file.read(&step)?.try_into().ok().filter(|_| is_count);
    let count = bytes.and_then(|bytes| u64::try_from(i64::from_le_bytes(bytes)).ok()).ok_or_else(|| {
        Error::new(Kind::Checkpoint, format!("{}: `{step}` is no count, i64 []", file.path().display()))
    })?;
    let part = |info: &&TensorInfo| {
        let layout = param.tensor_in_file_order().layout().with_dtype(info.dtype);
        let ranges: Vec<_> = (0..layout.ndim()).map(|d| layout.range(d, rank.coordinates())).collect();
        let bytes = file.read_part(&info.name, &layout.shape(), &ranges)?;
        param.permute_from_file_order(Tensor::from_local_bytes(rank, &layout, info.dtype, &bytes)?)
    };
    Ok(OptimizerState { num_steps: count, tensors: found.iter().map(part).collect::<Result<_>>()? })
}
