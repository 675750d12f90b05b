//! Optimizer state in files: global tensors, named after the weights.

use super::gather::{GatheringWriter, WriterFunctions};
use super::load::read_shard;
use crate::checkpoint::run::checkpoint_files::Checkpoint;
use crate::checkpoint::run::run_state::OptimizerRecord;
use crate::checkpoint::tensors::safetensors_file::{TensorFile, TensorWriter};
use crate::checkpoint::tensors::safetensors_header::{TensorInfo, TensorSpec};
use crate::module::Module;
use crate::module::param::Param;
use crate::optim::{Optimizer, OptimizerState};
use crate::sharded_model::Model;
use shardgrad_tensor::training_step::control::world_sum;
use shardgrad_tensor::{DType, Error, Kind, Rank, Result, Tensor};
use std::panic::Location;
use std::path::Path;

/// Prefix of the names of update counts.
const STEPS: &str = "step";

/// Maps parameter names to tensor names in files.
pub(crate) type Names<'a> = &'a dyn Fn(&str) -> String;

/// Names of the state tensors of a parameter.
pub(crate) type StateNames = Vec<&'static str>;

/// Returns the names of the optimizer's state tensors of each parameter, or refuses an optimizer that does not state them.
pub(crate) fn required_state_names(optim: &dyn Optimizer, params: &[Param]) -> Result<Vec<StateNames>> {
    let names = params.iter().map(|param| optim.state_names(param));
    names.collect::<Option<_>>().ok_or_else(|| {
        let text = format!("this optimizer does not implement `state_names`: {}", optim.describe());
        Error::new(Kind::Unsupported, text).detail(
            "help",
            "implement `state_names`, `param_state` and `load_state`; an optimizer that forwards steps must forward these too",
        )
    })
}

/// Returns all names of state tensors, each once, in the order of the parameters.
fn distinct(names: &[StateNames]) -> StateNames {
    let mut distinct = StateNames::new();
    for name in names.iter().flatten() {
        if !distinct.contains(name) {
            distinct.push(name);
        }
    }
    distinct
}

/// Size of the optimizer state of a parameter, known on every rank, wherever the parameter is stored.
struct StateSpec {
    num_steps: u64,
    dtypes: Vec<DType>,
}

/// Sizes of the optimizer state of all parameters, in their order; `None` for a parameter without state.
pub(crate) struct StateSpecs {
    /// Names of the state tensors of each parameter.
    state_names: Vec<StateNames>,
    specs: Vec<Option<StateSpec>>,
}

/// Code of a parameter without optimizer state.
const NO_STATE: f64 = 0.0;
/// Code of a parameter with optimizer state.
const HAS_STATE: f64 = 1.0;
/// Code of a parameter whose optimizer state fits no file.
const INVALID_STATE: f64 = 2.0;

impl StateSpecs {
    /// Collects the sizes. Every rank calls this together.
    ///
    /// # Errors
    /// `Kind::Unsupported` for an optimizer that cannot be saved, or whose state fits no file.
    pub(crate) fn collect<M: Module>(
        model: &Model<M>,
        optim: &dyn Optimizer,
        site: &'static Location<'static>,
    ) -> Result<StateSpecs> {
        let state_names = required_state_names(optim, model.params()).map_err(|e| e.at(site))?;
        let rank = model.rank();
        let has_param_layout = |p: &Param, t: &Tensor| *t.layout() == p.layout().with_dtype(t.dtype());
        let dtype_code = |t: &Tensor| DType::ALL.iter().position(|d| *d == t.dtype()).unwrap_or(0) as f64;
        // Numbers of one parameter: a code for its state, the number of updates, and codes of dtypes. One rank fills them in.
        let encode = |(p, names): (&Param, &StateNames)| -> Vec<f64> {
            let width = 2 + names.len();
            let own = (rank.index() == 0 && p.is_primary_owner()).then(|| optim.param_state(p)).flatten();
            match own {
                None => vec![NO_STATE; width],
                Some(OptimizerState { num_steps, tensors })
                    if tensors.len() == names.len() && tensors.iter().all(|t| has_param_layout(p, t)) =>
                {
                    [HAS_STATE, num_steps as f64].into_iter().chain(tensors.iter().map(dtype_code)).collect()
                }
                Some(_) => [INVALID_STATE].into_iter().chain(vec![0.0; width - 1]).collect(),
            }
        };
        let params = || model.params().iter().zip(&state_names);
        let codes: Vec<f64> = params().flat_map(encode).collect();
        let sums = world_sum(rank.world(), &codes, site)?;
        let decode = |(param, names, codes): (&Param, &StateNames, &[f64])| match codes[0] {
            NO_STATE => Ok(None),
            HAS_STATE => {
                let dtypes = codes[2..].iter().map(|code| DType::ALL[*code as usize]).collect();
                Ok(Some(StateSpec { num_steps: codes[1] as u64, dtypes }))
            }
            _ => {
                let text = format!(
                    "the optimizer state of `{}` does not match its state_names {names:?}, or has another layout than the parameter",
                    param.name()
                );
                Err(Error::new(Kind::Unsupported, text).at(site))
            }
        };
        let mut rest = &sums[..];
        let own_codes = |(param, names): (_, &'_ StateNames)| {
            let (own, others) = rest.split_at(2 + names.len());
            rest = others;
            (param, own)
        };
        let codes: Vec<(&Param, &[f64])> = params().map(own_codes).collect();
        let specs = codes.into_iter().zip(&state_names);
        let specs = specs.map(|((p, codes), names)| decode((p, names, codes))).collect::<Result<_>>()?;
        Ok(StateSpecs { state_names, specs })
    }

    /// Returns the number of bytes of all tensors of a checkpoint, weights and optimizer state.
    pub(crate) fn num_checkpoint_bytes<M: Module>(&self, model: &Model<M>) -> u64 {
        let weights = model.precision().param_dtype.size();
        let of_optimizer = |spec: &Option<StateSpec>| {
            spec.iter().flat_map(|spec| &spec.dtypes).map(|d| d.size()).sum::<usize>()
        };
        let bytes = |(param, spec): (&Param, &Option<StateSpec>)| {
            (param.numel() * (weights + of_optimizer(spec))) as u64
        };
        model.params().iter().zip(&self.specs).map(bytes).sum()
    }

    /// Returns the record of the optimizer for the state file, with the digest of the optimizer file.
    pub(crate) fn record(&self, optim: &dyn Optimizer, digest: Option<String>) -> OptimizerRecord {
        OptimizerRecord {
            settings: optim.describe(),
            state_names: distinct(&self.state_names).iter().map(ToString::to_string).collect(),
            num_steps: optim.num_steps(),
            digest,
        }
    }

    /// Writes the optimizer state after a step into a file, on rank 0, which returns the digest of the file. Every rank
    /// calls this together.
    pub(crate) fn write<M: Module>(
        &self,
        path: &Path,
        step: u64,
        (model, optim): (&Model<M>, &dyn Optimizer),
        names: Names<'_>,
        site: &'static Location<'static>,
    ) -> Result<Option<String>> {
        let params = model.params().iter().zip(&self.specs).zip(&self.state_names);
        let with_state = params.filter_map(|((param, spec), state_names)| {
            Some((param, names(&param.name()), (spec.as_ref()?, state_names)))
        });
        let with_state: Vec<(&Param, String, (&StateSpec, &StateNames))> = with_state.collect();
        let entries = with_state.iter().flat_map(|(param, name, (spec, state_names))| {
            let states = state_names.iter().zip(&spec.dtypes);
            let states = states.map(|(kind, dtype)| (format!("{kind}.{name}"), *dtype, param.file_shape()));
            let count = (format!("{STEPS}.{name}"), DType::I64, Vec::new());
            std::iter::once(count).chain(states).collect::<Vec<_>>()
        });
        let entries: Vec<TensorSpec> = entries.collect();
        let open = || TensorWriter::with_digest(path, &entries, Some(step));
        let functions: WriterFunctions<TensorWriter> =
            (TensorWriter::append, TensorWriter::finish_with_digest);
        let mut writer = GatheringWriter::create(model.rank(), site, open, functions)?;
        for (param, name, (spec, state_names)) in with_state {
            writer.append(&format!("{STEPS}.{name}"), &spec.num_steps.to_le_bytes());
            let own = param.is_local().then(|| optim.param_state(param)).flatten();
            for (i, (kind, dtype)) in state_names.iter().zip(&spec.dtypes).enumerate() {
                let part = || {
                    let tensor = own.as_ref().map(|state| state.tensors[i].clone());
                    tensor
                        .map(|tensor| param.permute_to_file_order(tensor))
                        .ok_or_else(|| missing_state(param))
                };
                writer.gather(&format!("{kind}.{name}"), param, *dtype, part)?;
            }
        }
        writer.finish()
    }
}

/// Error for a rank without optimizer state of a parameter for which other ranks have state.
fn missing_state(param: &Param) -> Error {
    Error::new(
        Kind::Diverged,
        format!("this rank has no optimizer state of `{}`, other ranks have", param.name()),
    )
}

/// Reads this rank's part of the optimizer state of all parameters, and verifies this rank's share of the checksums.
///
/// # Errors
/// `Kind::Unsupported` for an optimizer that cannot be saved; `Kind::Checkpoint` for another optimizer than that of the
/// checkpoint, and for tensors that do not fit the model; as [`TensorFile::read_part`].
pub(crate) fn read_states<M: Module>(
    files: &Checkpoint,
    model: &Model<M>,
    optim: &dyn Optimizer,
    names: Names<'_>,
) -> Result<Vec<(Param, OptimizerState)>> {
    let state_names = required_state_names(optim, model.params())?;
    files.check_optimizer(optim, &distinct(&state_names))?;
    let file = &files.optimizer_file;
    let mut states = Vec::new();
    let mut count = 0;
    for (param, state_names) in model.params().iter().zip(&state_names) {
        let name = names(&param.name());
        if file.get(&format!("{STEPS}.{name}")).is_none() {
            continue;
        }
        let found: Vec<&TensorInfo> = state_names
            .iter()
            .map(|kind| find_matching(file, &format!("{kind}.{name}"), param))
            .collect::<Result<_>>()?;
        count += 1 + found.len();
        if param.is_local() {
            states.push((param.clone(), read_param_state(file, (param, &name), &found, model.rank())?));
        }
    }
    if count != file.tensors().len() {
        let (path, strange) = (file.path().display(), file.tensors().len().abs_diff(count));
        let text = format!("{path}: {strange} tensor(s) belong to no parameter of the model");
        return Err(Error::new(Kind::Checkpoint, text));
    }
    let world = model.rank().world();
    file.verify_share(world.index(), world.mesh().num_ranks())?;
    Ok(states)
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
        let read_part = |name: &str, shape: &[usize], ranges: &[_]| file.read_part(name, shape, ranges);
        param.permute_from_file_order(read_shard(rank, info, &layout, read_part)?)
    };
    Ok(OptimizerState { num_steps: count, tensors: found.iter().map(part).collect::<Result<_>>()? })
}
