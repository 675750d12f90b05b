//! Models in Hugging Face folders: saved from any mesh, loaded on any other.

mod gather;

pub(crate) use gather::{bring, tell};

use crate::cast::{Cast, Casts, is_exact};
use crate::hf::folder::Weights;
use crate::hf::{Companion, WeightsWriter};
use crate::model::Family;
use crate::module::Module;
use crate::name::matches;
use crate::param::{Home, Param};
use crate::placed::Model;
use crate::precision::check_dtype;
use shardgrad_tensor::agreement::{Shared, check_copies, check_shared};
use shardgrad_tensor::control::{local_sum_squares_once, world_sum};
use shardgrad_tensor::{DType, Error, Kind, Result, Tensor, Value};
use std::collections::HashSet;
use std::fs;
use std::panic::Location;
use std::path::Path;
use std::time::Duration;

/// The most bytes of a file of weights, unless a caller says otherwise.
pub const FILE_BYTES_MAX: u64 = 5_000_000_000;
/// How long ranks wait for the one that writes: a disk may stall for long, and all that was trained hangs on it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

impl<M: Family> Model<M> {
    /// [`Model::save_in_files`] of at most [`FILE_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// As [`Model::save_in_files`].
    #[track_caller]
    pub fn save(&self, dir: &Path) -> Result<()> {
        self.save_in_files(dir, FILE_BYTES_MAX)
    }

    /// Writes `config.json` and `model.safetensors` into a folder, made if there is none; or, where the weights have more
    /// than `bytes_max` bytes, several files and `model.safetensors.index.json`. Weights keep the dtype in which they are
    /// stored. As [`Model::save_as`].
    ///
    /// # Errors
    /// As [`Model::save_as`].
    #[track_caller]
    pub fn save_in_files(&self, dir: &Path, bytes_max: u64) -> Result<()> {
        self.save_as(dir, bytes_max, self.precision().param_dtype)
    }

    /// [`Model::save_in_files`] with weights rounded to a float dtype. Tensors are gathered one by one, so every rank calls
    /// this together; the first rank writes, and the files are whole when any rank returns.
    ///
    /// A model that the folder held before is replaced by [`WeightsWriter::finish`]: until all of the new one is on the disk
    /// it stays as it was, whatever fails. Files that have nothing to do with saving stay. Ranks wait for the disk of the
    /// first one longer than for anything else ([`Rank::patiently`](shardgrad_tensor::Rank::patiently)).
    ///
    /// # Errors
    /// As [`Model::save_weights`]; `Kind::Checkpoint`, before anything is written, for a model of which `config.json` cannot say
    /// all (windows of several sizes).
    #[track_caller]
    pub fn save_as(&self, dir: &Path, bytes_max: u64, dtype: DType) -> Result<()> {
        self.save_beside(dir, bytes_max, dtype, &[])
    }

    /// [`Model::save_as`] with files that go with the model, such as those of its tokenizer: they change with it as one, and a
    /// reader never finds this model with the files of another ([`WeightsWriter::beside`]). What the first rank is given counts.
    ///
    /// # Errors
    /// As [`Model::save_as`] and [`WeightsWriter::beside`].
    #[track_caller]
    pub fn save_beside(
        &self,
        dir: &Path,
        bytes_max: u64,
        dtype: DType,
        companions: &[Companion<'_>],
    ) -> Result<()> {
        check_dtype(dtype)?;
        let config = self.describe().with_dtype(dtype).faithful_json()?;
        let what = Folder { config: Some(&config), companions, bytes_max, step: None };
        write(self, dir, &what, dtype, &|name| self.name_in_files(name)).map(drop)
    }

    /// [`Model::save_beside`] of weights as they are stored, in files that tell their digest and the step of the run after which they
    /// are saved. Gives the digest to the first rank.
    #[track_caller]
    pub(crate) fn save_of_step(
        &self,
        dir: &Path,
        step: u64,
        companions: &[Companion<'_>],
    ) -> Result<Option<String>> {
        let dtype = self.precision().param_dtype;
        let config = self.describe().with_dtype(dtype).faithful_json()?;
        let what = Folder { config: Some(&config), companions, bytes_max: FILE_BYTES_MAX, step: Some(step) };
        write(self, dir, &what, dtype, &|name| self.name_in_files(name))
    }

    /// [`Model::load_as`] where weights may be widened, but not rounded.
    ///
    /// # Errors
    /// As [`Model::load_as`].
    pub fn load(&self, dir: &Path) -> Result<Casts> {
        self.load_as(dir, Cast::Widened)
    }

    /// Fills the parameters from a folder whose config fits this model. Names may be those of this
    /// model, or those of older files, instead of those in files. Each rank reads for itself; nothing is communicated. Gives what became of weights
    /// whose dtype is not that of their parameter.
    ///
    /// # Errors
    /// `Kind::Checkpoint` listing tensors that are missing, of another shape, of a dtype that `cast` does not let become the
    /// parameter's, or unknown, at most twenty of each; parameters are untouched then. Where a tensor has not the checksum that
    /// its file tells, or a file becomes shorter while it is read (`Kind::Checkpoint`), or the system refuses (`Kind::Io`), some
    /// of them are filled already. A tensor of which each rank reads a part is verified by one rank: the error of its damage is
    /// that rank's alone.
    pub fn load_as(&self, dir: &Path, cast: Cast) -> Result<Casts> {
        self.load_opened(&Weights::open(dir)?, cast)
    }

    /// [`Model::load_as`] of a folder that is open.
    pub(crate) fn load_opened(&self, weights: &Weights, cast: Cast) -> Result<Casts> {
        let names = |name: &str| {
            let (usual, older) = (self.name_in_files(name), self.older_name_in_files(name));
            [usual, name.to_string()].into_iter().chain(older).collect()
        };
        fill(self, weights, cast, &names, self.passed_over())
    }
}

impl<M: Module> Model<M> {
    /// Writes the weights of a model of any kind into a folder, as they are stored, under the names of its parameters; there is no
    /// config. Every rank calls this together. As [`save_weights`], in files of at most [`FILE_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// As [`save_weights`].
    #[track_caller]
    pub fn save_weights(&self, dir: &Path) -> Result<()> {
        save_weights(self, dir, FILE_BYTES_MAX, self.precision().param_dtype, &str::to_string)
    }

    /// [`Model::save_weights`] into files that tell their digest and the step of the run after which they are saved. Gives the
    /// digest to the first rank.
    #[track_caller]
    pub(crate) fn save_weights_of_step(&self, dir: &Path, step: u64) -> Result<Option<String>> {
        let what = Folder { config: None, companions: &[], bytes_max: FILE_BYTES_MAX, step: Some(step) };
        write(self, dir, &what, self.precision().param_dtype, &str::to_string)
    }

    /// Fills the parameters from a folder of weights under their names, saved on any mesh. Weights may be widened, but not
    /// rounded. Each rank reads for itself; nothing is communicated.
    ///
    /// # Errors
    /// As [`Weights::open`] and [`load_weights`].
    pub fn load_weights(&self, dir: &Path) -> Result<Casts> {
        load_weights(self, &Weights::open(dir)?, Cast::Widened, &str::to_string, &[])
    }

    /// The names of the parameters that hold a number that is not finite, the same on every rank. Squares are added up where
    /// the parameters are, and looked at one by one where their sum is not finite. One small collective; every rank calls
    /// this together.
    ///
    /// # Errors
    /// What the kernels and the collective report.
    #[track_caller]
    pub fn not_finite(&self) -> Result<Vec<String>> {
        let here: Vec<Tensor> = self.params().iter().filter(|p| p.is_here()).map(Param::tensor).collect();
        let suspect = !local_sum_squares_once(self.rank(), &here)?.is_finite();
        let is_odd = |x: &f64| !x.is_finite();
        let found = |p: &Param| Ok(suspect && p.tensor().to_local_f64()?.iter().any(is_odd));
        names_of(self, found, Location::caller())
    }

    /// The names of the parameters that hold NaN, the same on every rank. Every rank calls this together.
    ///
    /// # Errors
    /// What the device and the collective report.
    #[track_caller]
    pub(crate) fn nan_params(&self) -> Result<Vec<String>> {
        let found = |p: &Param| Ok(p.tensor().to_local_f64()?.iter().any(|x| x.is_nan()));
        names_of(self, found, Location::caller())
    }
}

/// The names of the parameters of which any rank that holds them finds something, the same on every rank.
fn names_of<M: Module>(
    model: &Model<M>,
    found: impl Fn(&Param) -> Result<bool>,
    site: &'static Location<'static>,
) -> Result<Vec<String>> {
    let word = |p: &Param| Ok(f64::from(u8::from(p.is_here() && found(p)?)));
    let word: Vec<f64> = model.params().iter().map(word).collect::<Result<_>>()?;
    let sums = world_sum(model.rank(), &word, site)?;
    Ok(model.params().iter().zip(sums).filter(|(_, sum)| *sum > 0.0).map(|(p, _)| p.name()).collect())
}

/// Refuses a dtype in which a finite number of a parameter is infinite: the loss of it would be told by nobody.
fn check_rounding<M: Module>(model: &Model<M>, dtype: DType, site: &'static Location<'static>) -> Result<()> {
    let overflows = |p: &Param| {
        let stored = p.tensor();
        let rounded = stored.cast(dtype);
        if local_sum_squares_once(model.rank(), [&rounded])?.is_finite() {
            return Ok(false);
        }
        let (stored, rounded) = (stored.to_local_f64()?, rounded.to_local_f64()?);
        Ok(stored.iter().zip(&rounded).any(|(x, y)| x.is_finite() && !y.is_finite()))
    };
    if is_exact(model.precision().param_dtype, dtype) {
        return Ok(());
    }
    let names = names_of(model, overflows, site)?;
    let Some(first) = names.first() else { return Ok(()) };
    let text = format!(
        "{} of {} tensors hold numbers that are infinite in {dtype}, `{first}` first",
        names.len(),
        model.params().len()
    );
    let help = match (model.precision().param_dtype, dtype) {
        (DType::F32, DType::F16) => {
            "save in bf16, which is as wide as f32, or as they are stored (--save-dtype on the command line)"
        }
        _ => "save as they are stored (--save-dtype on the command line)",
    };
    Err(Error::new(Kind::NotFinite, text).detail("help", help).at(site))
}

/// Compares the copies of all parameters of this rank's stage, bit for bit, and those of parameters that several stages hold
/// between these. Every rank calls this together.
///
/// # Errors
/// `Kind::Diverged` on every rank, naming parameters and ranks; what the collective reports.
pub fn check_parameters<M: Module>(model: &Model<M>, site: &'static Location<'static>) -> Result<()> {
    let tensors: Vec<(String, Tensor)> =
        model.params().iter().filter(|p| p.is_here()).map(|p| (p.name(), p.tensor())).collect();
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (&**name, tensor)).collect();
    check_copies(model.rank(), &tensors, site)?;
    let homes = model.params().iter().filter_map(|p| Some((p, p.home().filter(|h| h.places.len() > 1)?)));
    let homes: Vec<(String, &Param, Home)> = homes.map(|(p, home)| (p.name(), p, home)).collect();
    let Some(axis) = homes.first().map(|(.., home)| home.axis) else { return Ok(()) };
    let shared = homes.iter().map(|(name, param, home)| Shared {
        name,
        layout: param.layout(),
        places: home.places.clone(),
        copy: param.is_here().then(|| param.tensor()),
    });
    check_shared(model.rank(), axis, &shared.collect::<Vec<_>>(), site)
}

/// Writes the parameters of a model, rounded to a dtype, into safetensors files of a folder, made if there is none, in the
/// order of traversal, under the names that `name_in_file` gives. Every rank calls this together; the first rank writes.
/// Nothing is written if copies of a parameter differ.
///
/// # Errors
/// `Kind::Diverged` as [`check_parameters`]; `Kind::NotFinite` naming a tensor of which a finite number is infinite in
/// `dtype`, before anything is written; `Kind::Io` if the system refuses the first rank, or as [`WeightsWriter::create`];
/// `Kind::Checkpoint` for names that no file can hold: these on every rank, which can go on and save elsewhere; what the
/// collectives report.
#[track_caller]
pub fn save_weights<M: Module>(
    model: &Model<M>,
    dir: &Path,
    bytes_max: u64,
    dtype: DType,
    name_in_file: &dyn Fn(&str) -> String,
) -> Result<()> {
    let what = Folder { config: None, companions: &[], bytes_max, step: None };
    write(model, dir, &what, dtype, name_in_file).map(drop)
}

/// What a folder is to hold beside weights, and in files of what size these are.
struct Folder<'a> {
    /// The text of a config, if there is one.
    config: Option<&'a str>,
    companions: &'a [Companion<'a>],
    bytes_max: u64,
    /// The step of the run after which it is saved, where files are to tell.
    step: Option<u64>,
}

/// [`save_weights`], with what goes with them. Gives the digest of the files, if they tell it, to the first rank.
#[track_caller]
fn write<M: Module>(
    model: &Model<M>,
    dir: &Path,
    what: &Folder<'_>,
    dtype: DType,
    name_in_file: &dyn Fn(&str) -> String,
) -> Result<Option<String>> {
    let site = Location::caller();
    check_parameters(model, site)?;
    check_rounding(model, dtype, site)?;
    let entry = |p: &Param| (name_in_file(&p.name()), dtype, p.shape_in_files());
    let entries: Vec<_> = model.params().iter().map(entry).collect();
    let writes = model.rank().world().index() == 0;
    let begin = || {
        fs::create_dir_all(dir)
            .map_err(|e| Error::new(Kind::Io, format!("cannot make the folder {}: {e}", dir.display())))?;
        let writer = match what.step {
            Some(step) => WeightsWriter::of_step(dir, what.config, &entries, what.bytes_max, step),
            None => WeightsWriter::create(dir, what.config, &entries, what.bytes_max),
        };
        writer?.beside(what.companions)
    };
    let rank = model.rank();
    rank.patiently(PATIENCE, || {
        // What is refused at once is told before anything is gathered.
        let begun = writes.then(begin).transpose();
        let (mut writer, begun) = begun.map_or_else(|e| (None, Err(e)), |writer| (writer, Ok(())));
        tell(rank, begun, site)?;
        let mut written = Ok(());
        for (param, (name, ..)) in model.params().iter().zip(&entries) {
            let bytes = bring(rank, param, dtype, || Ok(param.as_in_files().cast(dtype)), site)?;
            // The other ranks gather what is left, whether it can be written or not.
            if let (Some(writer), Some(bytes), true) = (&mut writer, bytes, written.is_ok()) {
                written = writer.append(name, &bytes);
            }
        }
        let finished = written.and_then(|()| writer.map_or(Ok(None), WeightsWriter::finish_telling));
        let (digest, finished) = finished.map_or_else(|e| (None, Err(e)), |digest| (digest, Ok(())));
        // Nobody goes on to read before the file is whole.
        tell(rank, finished, site)?;
        Ok(digest)
    })
}

/// Fills the parameters of a model from files. A parameter is the tensor of the name that `name_in_file` gives, or of its own
/// name; tensors that match a pattern of `passed_over` may be there for nothing. Gives what became of weights whose dtype is
/// not that of their parameter, on all ranks and stages.
///
/// # Errors
/// `Kind::Checkpoint` listing what does not fit, before any parameter is changed; what reading reports.
pub fn load_weights<M: Module>(
    model: &Model<M>,
    weights: &Weights,
    cast: Cast,
    name_in_file: &dyn Fn(&str) -> String,
    passed_over: &[&str],
) -> Result<Casts> {
    fill(model, weights, cast, &|name| vec![name_in_file(name), name.to_string()], passed_over)
}

/// [`load_weights`] of the first of several names that the files hold.
fn fill<M: Module>(
    model: &Model<M>,
    weights: &Weights,
    cast: Cast,
    names_in_file: &dyn Fn(&str) -> Vec<String>,
    passed_over: &[&str],
) -> Result<Casts> {
    let (mut misfits, mut casts) = (Misfits::default(), Casts::default());
    let mut found = Vec::with_capacity(model.params().len());
    let mut used = HashSet::new();
    for param in model.params() {
        let candidates = names_in_file(&param.name());
        let Some(tensor) = candidates.iter().find_map(|n| weights.get(n)) else {
            misfits.missing.push(candidates[0].clone());
            continue;
        };
        used.insert(tensor.name.as_str());
        if tensor.shape != param.shape_in_files() || !tensor.dtype.is_float() {
            let (name, wanted) = (&tensor.name, param.shape_in_files());
            misfits
                .other
                .push(format!("{name} is {}{:?}, the model has {wanted:?}", tensor.dtype, tensor.shape));
        } else {
            let dtype = param.layout().dtype();
            if cast == Cast::Widened && !is_exact(tensor.dtype, dtype) {
                misfits.narrower.push(format!("{} is {}, the parameter {dtype}", tensor.name, tensor.dtype));
            }
            casts.add(tensor.dtype, dtype);
        }
        found.push((param, tensor));
    }
    let is_part = |name: &str| weights.stack_around(name).is_some_and(|stack| used.contains(stack));
    let known =
        |name: &str| used.contains(name) || is_part(name) || passed_over.iter().any(|p| matches(p, name));
    misfits.unknown.extend(weights.tensors().map(|t| t.name.clone()).filter(|name| !known(name)));
    misfits.check(weights.path())?;
    for (param, tensor) in found.into_iter().filter(|(param, _)| param.is_here()) {
        // Only what this rank holds is read.
        let layout = param.as_in_files().layout().clone();
        let ranges: Vec<_> =
            (0..layout.ndim()).map(|d| layout.range(d, model.rank().coordinates())).collect();
        let bytes = weights.read_part(&tensor.name, &layout.shape(), &ranges)?;
        param.set_from_files(Tensor::from_own_bytes(model.rank(), &layout, tensor.dtype, &bytes)?)?;
    }
    // Tensors of which no rank reads more than its shard are verified too, each by one rank.
    let world = model.rank().world();
    weights.verify_share(world.index(), world.mesh().num_ranks())?;
    Ok(casts)
}

/// What does not fit between files and model.
#[derive(Default)]
struct Misfits {
    missing: Vec<String>,
    other: Vec<String>,
    /// Of a dtype that would have to be rounded.
    narrower: Vec<String>,
    unknown: Vec<String>,
}

/// No more tensors than these are named of one kind.
const NAMED_MAX: usize = 20;
/// Nor than these of those that would have to be rounded: mostly it is all of them.
const NARROWER_MAX: usize = 3;

impl Misfits {
    fn check(mut self, path: &Path) -> Result<()> {
        let narrower = self.narrower.len();
        let count = self.missing.len() + self.other.len() + narrower + self.unknown.len();
        if count == 0 {
            return Ok(());
        }
        let text = format!("{}: {count} tensor(s) do not fit the model", path.display());
        let mut error = Error::new(Kind::Checkpoint, text);
        let lists = [&mut self.missing, &mut self.other, &mut self.unknown].map(|list| (list, NAMED_MAX));
        for (list, most) in lists.into_iter().chain([(&mut self.narrower, NARROWER_MAX)]) {
            let more = list.len().saturating_sub(most);
            list.truncate(most);
            list.extend((more > 0).then(|| format!("and {more} more")));
        }
        let kinds = [
            ("missing", self.missing),
            ("unlike", self.other),
            ("narrower", self.narrower),
            ("unknown", self.unknown),
        ];
        let tell = |e: Error, (label, names): (&'static str, Vec<String>)| match names.len() {
            0 => e,
            _ => e.detail(label, names.join(", ")),
        };
        error = kinds.into_iter().fold(error, tell);
        if count > narrower {
            error = error.detail("help", "check config.json; it must describe these weights");
        }
        if narrower > 0 {
            let help = "take the dtype of the file, or have weights rounded (Cast::Rounded; --cast on the command line)";
            error = error.detail("help", help);
        }
        Err(error)
    }
}
