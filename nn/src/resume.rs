//! Checkpoints: folders from which a run goes on, with the same bits on the same mesh, and on any other to rounding.
//!
//! A checkpoint is a model folder in the dtype in which weights are stored, with two more files. `optimizer.safetensors` has what
//! the optimizer keeps, whole and bit for bit, by the names that weights have: `exp_avg.NAME` and `exp_avg_sq.NAME` of
//! [`AdamW`](crate::AdamW), `momentum_buffer.NAME` of [`Sgd`](crate::Sgd), and `step.NAME`, i64 `[]`, the steps of each parameter.
//! `trainer_state.json` is the [`RunState`], with the digests that these files have in their headers, by which files of two
//! saves are told apart. The folder has another name until all of it is on the disk, so that what has the name of a checkpoint is
//! one.
//!
//! ```no_run
//! # use shardgrad_nn::{AdamW, Linear, Model, Optimizer, resume, resume::RunState};
//! # use std::path::Path;
//! # fn example(model: &Model<Linear>, mut optim: AdamW) -> shardgrad_tensor::Result<()> {
//! let state = RunState { step: optim.num_steps(), ..RunState::default() };
//! resume::save_weights(Path::new("checkpoint-100"), model, &optim, &state)?;
//! let state = resume::load_weights(Path::new("checkpoint-100"), model, &mut optim)?;
//! # drop(state);
//! # Ok(())
//! # }
//! ```
//!
//! What a program draws by itself, and where it is in its data, is its own to note ([`RunState::notes`]); a
//! [`Trainer`](crate::Trainer) draws and reads by the number of the step.

mod verify;

pub use crate::hf::{Checkpoints, OPTIMIZER_FILE, RunState, STATE_FILE};
pub use verify::Checkpoint;

use crate::cast::Cast;
use crate::checkpoint::{PATIENCE, bring, load_weights as fill_weights, tell};
use crate::hf::{
    Companion, Save, TensorFile, TensorInfo, TensorWriter, Told, Weights, WholeFolder, check_space,
};
use crate::model::Family;
use crate::module::Module;
use crate::optim::{Kept, Optimizer};
use crate::param::Param;
use crate::placed::Model;
use shardgrad_tensor::control::world_sum;
use shardgrad_tensor::{DType, Error, Kind, Rank, Result, Tensor};
use std::panic::Location;
use std::path::{Path, PathBuf};

/// What the steps of a parameter are called.
const STEPS: &str = "step";

/// Writes a checkpoint of a language model, with files that go with it ([`Model::save_beside`]); what stood there is replaced if
/// it was one. Tensors are gathered one by one, so every rank calls this together; the first rank writes, and all is on the disk
/// when any rank returns.
///
/// # Errors
/// As [`Model::save_beside`]; `Kind::Io` also if something else than a checkpoint stands there; `Kind::Unsupported` for an optimizer
/// that does not say what it keeps ([`Optimizer::kept_names`]), or keeps what does not lie as its parameter. What stood there is as
/// it was then, on every rank, and all can go on.
#[track_caller]
pub fn save<M: Family>(
    dir: &Path,
    model: &Model<M>,
    optim: &dyn Optimizer,
    state: &RunState,
    companions: &[Companion<'_>],
) -> Result<()> {
    let write = |dir: &Path| model.save_of_step(dir, state.step, companions);
    save_as(dir, (model, &write), optim, state, &|name| model.name_in_files(name))
}

/// [`save`] of a model of any kind, under the names of its parameters and without a config.
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

/// Fills a language model and what its optimizer keeps from a checkpoint, which may be of another mesh. Each rank reads for itself;
/// nothing is communicated. One that lies whole under the name that it had while it was written gets its own
/// ([`Checkpoints::complete`]).
///
/// # Errors
/// `Kind::Checkpoint` naming the file where one is missing, cannot be read, or is not of such a model and optimizer (other tensors,
/// shapes or dtypes), or of the save of which `trainer_state.json` is; as [`Checkpoints::complete`], [`Model::load`] and
/// [`Optimizer::go_on`]. Model and optimizer may be of different steps then.
pub fn load<M: Family>(dir: &Path, model: &Model<M>, optim: &mut dyn Optimizer) -> Result<RunState> {
    let (state, weights) = load_kept(dir, model, optim, &|name| model.name_in_files(name))?;
    model.load_opened(&weights, Cast::Widened)?;
    Ok(state)
}

/// [`load`] of what [`save_weights`] wrote.
///
/// # Errors
/// As [`load`].
pub fn load_weights<M: Module>(dir: &Path, model: &Model<M>, optim: &mut dyn Optimizer) -> Result<RunState> {
    let (state, weights) = load_kept(dir, model, optim, &str::to_string)?;
    fill_weights(model, &weights, Cast::Widened, &str::to_string, &[])?;
    Ok(state)
}

/// Names of tensors in files, from those of parameters.
type Names<'a> = &'a dyn Fn(&str) -> String;
/// What writes the weights of a model into a folder, and gives their digest to the first rank.
type Write<'a> = &'a dyn Fn(&Path) -> Result<Option<String>>;

/// [`save`], where weights are written by a function of the folder.
#[track_caller]
fn save_as<M: Module>(
    dir: &Path,
    (model, write): (&Model<M>, Write<'_>),
    optim: &dyn Optimizer,
    state: &RunState,
    names: Names<'_>,
) -> Result<()> {
    let (site, rank) = (Location::caller(), model.rank());
    let keeps = keeps(optim).map_err(|e| e.at(site))?;
    let held = held(model, optim, keeps, site)?;
    let bytes = num_bytes(model, &held);
    rank.patiently(PATIENCE, || {
        let leads = rank.world().index() == 0;
        let begin = || check_space(dir, bytes).and_then(|()| WholeFolder::create(dir));
        let begun = leads.then(begin).transpose();
        let (folder, begun) = begun.map_or_else(|e| (None, Err(e)), |folder| (folder, Ok(())));
        tell(rank, begun, site)?;
        // Only the first rank writes.
        let at = folder.as_ref().map_or(dir, WholeFolder::inside);
        let weights_digest = write(at)?;
        let file = leads.then(|| (at.join(OPTIMIZER_FILE), state.step));
        let digest = write_kept(file, model, (optim, keeps), (&held, names), site)?;
        let told = || Told {
            settings: optim.describe(),
            keeps: keeps.iter().map(ToString::to_string).collect(),
            num_steps: optim.num_steps(),
            digest,
        };
        let done = folder.map_or(Ok(()), |folder| {
            state.write(folder.inside(), told(), weights_digest)?;
            folder.place()
        });
        tell(rank, done, site)
    })
}

/// The bytes of the tensors of a checkpoint.
fn num_bytes<M: Module>(model: &Model<M>, held: &[Option<Held>]) -> u64 {
    let weights = model.precision().param_dtype.size();
    let of_optimizer =
        |held: &Option<Held>| held.iter().flat_map(|held| &held.dtypes).map(|d| d.size()).sum::<usize>();
    let bytes =
        |(param, held): (&Param, &Option<Held>)| (param.numel() * (weights + of_optimizer(held))) as u64;
    model.params().iter().zip(held).map(bytes).sum()
}

/// What an optimizer keeps of a parameter, by name.
fn keeps(optim: &dyn Optimizer) -> Result<&'static [&'static str]> {
    optim.kept_names().ok_or_else(|| {
        let text = format!("an optimizer that does not say what it keeps: {}", optim.describe());
        Error::new(Kind::Unsupported, text).detail(
            "help",
            "give it `kept_names`, `kept` and `go_on`; a rule that hands steps on hands these on too",
        )
    })
}

/// What is kept of a parameter, as every rank knows it, wherever it lives.
struct Held {
    num_steps: u64,
    dtypes: Vec<DType>,
}

/// What is kept of each parameter, if anything is. Every rank calls this together.
fn held<M: Module>(
    model: &Model<M>,
    optim: &dyn Optimizer,
    keeps: &[&str],
    site: &'static Location<'static>,
) -> Result<Vec<Option<Held>>> {
    let (rank, width) = (model.rank(), 2 + keeps.len());
    let fits = |p: &Param, t: &Tensor| *t.layout() == p.layout().with_dtype(t.dtype());
    let code = |t: &Tensor| DType::ALL.iter().position(|d| *d == t.dtype()).unwrap_or(0) as f64;
    // By the one rank that counts it: whether there is anything (2 for what fits no file), steps, dtypes.
    let word = |p: &Param| -> Vec<f64> {
        let own = (rank.index() == 0 && p.counts_here()).then(|| optim.kept(p)).flatten();
        match own {
            None => vec![0.0; width],
            Some(Kept { num_steps, tensors })
                if tensors.len() == keeps.len() && tensors.iter().all(|t| fits(p, t)) =>
            {
                [1.0, num_steps as f64].into_iter().chain(tensors.iter().map(code)).collect()
            }
            Some(_) => [2.0].into_iter().chain(vec![0.0; width - 1]).collect(),
        }
    };
    let words: Vec<f64> = model.params().iter().flat_map(word).collect();
    let sums = world_sum(rank.world(), &words, site)?;
    let one = |(param, word): (&Param, &[f64])| match word[0] {
        0.0 => Ok(None),
        1.0 => {
            let dtypes = word[2..].iter().map(|code| DType::ALL[*code as usize]).collect();
            Ok(Some(Held { num_steps: word[1] as u64, dtypes }))
        }
        _ => {
            let text = format!(
                "the optimizer keeps {keeps:?}, but of `{}` others, or what does not lie as it",
                param.name()
            );
            Err(Error::new(Kind::Unsupported, text).at(site))
        }
    };
    model.params().iter().zip(sums.chunks(width)).map(one).collect()
}

/// Writes what the optimizer keeps after a step into a file, on the rank that is given one, and gives its digest. Every rank calls
/// this together.
fn write_kept<M: Module>(
    file: Option<(PathBuf, u64)>,
    model: &Model<M>,
    (optim, keeps): (&dyn Optimizer, &[&str]),
    (held, names): (&[Option<Held>], Names<'_>),
    site: &'static Location<'static>,
) -> Result<Option<String>> {
    let rank = model.rank();
    let known: Vec<(&Param, String, &Held)> = model
        .params()
        .iter()
        .zip(held)
        .filter_map(|(param, held)| Some((param, names(&param.name()), held.as_ref()?)))
        .collect();
    let entries = known.iter().flat_map(|(param, name, held)| {
        let kept = keeps.iter().zip(&held.dtypes);
        let kept = kept.map(|(kind, dtype)| (format!("{kind}.{name}"), *dtype, param.shape_in_files()));
        std::iter::once((format!("{STEPS}.{name}"), DType::I64, Vec::new())).chain(kept).collect::<Vec<_>>()
    });
    let entries: Vec<_> = entries.collect();
    let begun = file.map(|(path, step)| TensorWriter::of_step(&path, &entries, step)).transpose();
    let (mut writer, begun) = begun.map_or_else(|e| (None, Err(e)), |writer| (writer, Ok(())));
    tell(rank, begun, site)?;
    let mut written = Ok(());
    // The other ranks gather what is left, whether it can be written or not.
    let mut append = |name: &str, bytes: Option<Vec<u8>>| {
        if let (Some(writer), Some(bytes), true) = (&mut writer, bytes, written.is_ok()) {
            written = writer.append(name, &bytes);
        }
    };
    for (param, name, held) in known {
        append(&format!("{STEPS}.{name}"), Some(held.num_steps.to_le_bytes().to_vec()));
        let own = param.is_here().then(|| optim.kept(param)).flatten();
        for (i, (kind, dtype)) in keeps.iter().zip(&held.dtypes).enumerate() {
            let part = || {
                let tensor = own.as_ref().map(|kept| kept.tensors[i].clone());
                tensor.map(|tensor| param.in_file_order(tensor)).ok_or_else(|| unlike(param))
            };
            append(&format!("{kind}.{name}"), bring(rank, param, *dtype, part, site)?);
        }
    }
    let written = written.and_then(|()| writer.map_or(Ok(None), TensorWriter::finish_telling));
    let (digest, written) = written.map_or_else(|e| (None, Err(e)), |digest| (digest, Ok(())));
    tell(rank, written, site)?;
    Ok(digest)
}

/// For a rank that keeps nothing of a parameter of which another keeps something.
fn unlike(param: &Param) -> Error {
    Error::new(
        Kind::Diverged,
        format!("nothing is kept of `{}`, of which other ranks keep something", param.name()),
    )
}

/// Hands an optimizer what a checkpoint has of it, and gives the rest of the state and the weights.
fn load_kept<M: Module>(
    dir: &Path,
    model: &Model<M>,
    optim: &mut dyn Optimizer,
    names: Names<'_>,
) -> Result<(RunState, Weights)> {
    let keeps = keeps(optim)?;
    Checkpoints::complete(dir)?;
    let (state, told, weights_digest) = RunState::read_all(dir)?;
    if !told.keeps.iter().eq(keeps) {
        let text = format!("{} keeps {:?}, the optimizer of the run {keeps:?}", dir.display(), told.keeps);
        let error = Error::new(Kind::Checkpoint, text).detail("checkpoint", told.settings);
        return Err(error.detail("run", optim.describe()).detail("help", "go on with the same optimizer"));
    }
    let file = TensorFile::open_within(dir, OPTIMIZER_FILE)?;
    let mut kept = Vec::new();
    let mut count = 0;
    for param in model.params() {
        let name = names(&param.name());
        if file.get(&format!("{STEPS}.{name}")).is_none() {
            continue;
        }
        let found: Vec<&TensorInfo> = keeps
            .iter()
            .map(|kind| fitting(&file, &format!("{kind}.{name}"), param))
            .collect::<Result<_>>()?;
        count += 1 + found.len();
        if param.is_here() {
            kept.push((param.clone(), read_kept(&file, (param, &name), &found, model.rank())?));
        }
    }
    if count != file.tensors().len() {
        let (path, strange) = (file.path().display(), file.tensors().len().abs_diff(count));
        let text = format!("{path}: {strange} tensor(s) are of no parameter of the model");
        return Err(Error::new(Kind::Checkpoint, text));
    }
    let world = model.rank().world();
    file.verify_share(world.index(), world.mesh().num_ranks())?;
    let weights = Weights::open(dir)?;
    check_save((file.path(), &file.save()), state.step, told.digest)?;
    check_save((weights.path(), &weights.save()), state.step, weights_digest)?;
    optim.go_on(told.num_steps, kept).map_err(|e| e.detail("checkpoint", dir.display().to_string()))?;
    Ok((state, weights))
}

/// Refuses files of another save than the state beside them. A state without a digest is of a release that wrote none.
fn check_save((path, save): (&Path, &Save), step: u64, digest: Option<String>) -> Result<()> {
    if digest.is_none() || save.digest == digest {
        return Ok(());
    }
    let (path, own) = (path.display(), step.to_string());
    let text = match &save.step {
        Some(other) if *other != own => {
            format!("{path} is of step {other}, {STATE_FILE} beside it of step {own}")
        }
        _ => format!("{path} is not of the save of step {own} of which {STATE_FILE} beside it is"),
    };
    let help = "files of several checkpoints were mixed: copy one again as a whole, or go on from another";
    Err(Error::new(Kind::Checkpoint, text).detail("help", help))
}

/// A tensor of the file, if it is as large as a parameter.
fn fitting<'a>(file: &'a TensorFile, name: &str, param: &Param) -> Result<&'a TensorInfo> {
    let why = match file.get(name) {
        None => format!("there is no tensor `{name}`"),
        Some(found) if found.shape != param.shape_in_files() => {
            format!("`{name}` is {:?}, the model has {:?}", found.shape, param.shape_in_files())
        }
        Some(found) => return Ok(found),
    };
    Err(Error::new(Kind::Checkpoint, format!("{}: {why}", file.path().display())))
}

/// This rank's part of what is kept of a parameter.
fn read_kept(
    file: &TensorFile,
    (param, name): (&Param, &str),
    found: &[&TensorInfo],
    rank: &Rank,
) -> Result<Kept> {
    let step = format!("{STEPS}.{name}");
    let is_count = file.get(&step).is_some_and(|info| info.dtype == DType::I64 && info.shape.is_empty());
    let bytes = file.read(&step)?.try_into().ok().filter(|_| is_count);
    let count = bytes.and_then(|bytes| u64::try_from(i64::from_le_bytes(bytes)).ok()).ok_or_else(|| {
        Error::new(Kind::Checkpoint, format!("{}: `{step}` is no count, i64 []", file.path().display()))
    })?;
    let part = |info: &&TensorInfo| {
        let layout = param.as_in_files().layout().with_dtype(info.dtype);
        let ranges: Vec<_> = (0..layout.ndim()).map(|d| layout.range(d, rank.coordinates())).collect();
        let bytes = file.read_part(&info.name, &layout.shape(), &ranges)?;
        param.out_of_file_order(Tensor::from_own_bytes(rank, &layout, info.dtype, &bytes)?)
    };
    Ok(Kept { num_steps: count, tensors: found.iter().map(part).collect::<Result<_>>()? })
}
