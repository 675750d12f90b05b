//! Saving and loading the weights of models as Hugging Face folders: saved from any mesh, loaded on any other.

mod gather;

pub(crate) use gather::{broadcast_result, gather_to_rank_zero};

use crate::cast_rule::{CastCounts, CastRule, is_exact};
use crate::hf::weights::Weights;
use crate::hf::{SidecarFile, WeightsWriter};
use crate::load_filter::LoadFilter;
use crate::model::HfModel;
use crate::module::Module;
use crate::module::name::matches;
use crate::module::param::{Param, StageOwners};
use crate::module::precision::check_dtype;
use crate::sharded_model::Model;
use shardgrad_tensor::training_step::consistency::{SharedTensor, check_replicas, check_shared_replicas};
use shardgrad_tensor::training_step::control::world_sum;
use shardgrad_tensor::training_step::grad_norm::local_sum_squares;
use shardgrad_tensor::{DType, Error, Kind, Result, Tensor, Value};
use std::collections::HashSet;
use std::fs;
use std::panic::Location;
use std::path::Path;
use std::time::Duration;

/// Default for the largest size of a file of weights, in bytes.
pub const FILE_BYTES_MAX: u64 = 5_000_000_000;
/// How long ranks wait while rank 0 writes: a disk may stall for long, and giving up would lose the trained weights.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

impl<M: HfModel> Model<M> {
    /// [`Model::save_in_files`] with files of at most [`FILE_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// As [`Model::save_in_files`].
    #[doc(alias = "save_pretrained")]
    #[track_caller]
    pub fn save(&self, dir: &Path) -> Result<()> {
        self.save_in_files(dir, FILE_BYTES_MAX)
    }

    /// Writes `config.json` and `model.safetensors` into a folder, which is created if missing. If the weights have
    /// more than `bytes_max` bytes, writes several files and `model.safetensors.index.json`. Weights keep their
    /// stored dtype. As [`Model::save_as`].
    ///
    /// # Errors
    /// As [`Model::save_as`].
    #[doc(alias = "max_shard_size")]
    #[track_caller]
    pub fn save_in_files(&self, dir: &Path, bytes_max: u64) -> Result<()> {
        self.save_as(dir, bytes_max, self.precision().param_dtype)
    }

    /// [`Model::save_in_files`] with weights rounded to a float dtype. Tensors are gathered one by one, so every rank
    /// calls this together. Rank 0 writes, and the files are complete when any rank returns.
    ///
    /// [`WeightsWriter::finish`] replaces the model that the folder held before: that model is unchanged until all of
    /// the new one is on the disk, whatever fails. Files that do not belong to a model stay. Ranks wait for the disk
    /// of rank 0 longer than for anything else ([`Rank::with_timeout`](shardgrad_tensor::Rank::with_timeout)).
    ///
    /// # Errors
    /// As [`Model::save_weights`]; `Kind::Checkpoint`, before anything is written, for a model that `config.json`
    /// cannot describe completely (windows of several sizes).
    #[track_caller]
    pub fn save_as(&self, dir: &Path, bytes_max: u64, dtype: DType) -> Result<()> {
        self.save_with_sidecars(dir, bytes_max, dtype, &[])
    }

    /// [`Model::save_as`] with sidecar files, such as those of the tokenizer. They are replaced together with the
    /// model: a reader never finds this model with the files of another ([`WeightsWriter::with_sidecars`]). The
    /// sidecars of rank 0 count.
    ///
    /// # Errors
    /// As [`Model::save_as`] and [`WeightsWriter::with_sidecars`].
    #[track_caller]
    pub fn save_with_sidecars(
        &self,
        dir: &Path,
        bytes_max: u64,
        dtype: DType,
        companions: &[SidecarFile<'_>],
    ) -> Result<()> {
        check_dtype(dtype)?;
        let config = self.model_config().with_dtype(dtype).lossless_json()?;
        let contents = FolderContents { config: Some(&config), companions, bytes_max, step: None };
        write_folder(self, dir, &contents, dtype, &|name| self.file_name(name)).map(drop)
    }

    /// [`Model::save_with_sidecars`] in the stored dtype; the files contain their digest and the step of the run.
    /// Returns the digest on rank 0.
    #[track_caller]
    pub(crate) fn save_of_step(
        &self,
        dir: &Path,
        step: u64,
        companions: &[SidecarFile<'_>],
    ) -> Result<Option<String>> {
        let dtype = self.precision().param_dtype;
        let config = self.model_config().with_dtype(dtype).lossless_json()?;
        let contents =
            FolderContents { config: Some(&config), companions, bytes_max: FILE_BYTES_MAX, step: Some(step) };
        write_folder(self, dir, &contents, dtype, &|name| self.file_name(name))
    }

    /// [`Model::load_as`] with exact casts only.
    ///
    /// # Errors
    /// As [`Model::load_as`].
    #[doc(alias = "from_pretrained")]
    pub fn load(&self, dir: &Path) -> Result<CastCounts> {
        self.load_as(dir, CastRule::Widen)
    }

    /// Loads the parameters from a model folder whose config fits this model. Tensors may have the names of Hugging
    /// Face, the names of older files, or the parameter names of this model. Each rank reads for itself; nothing is
    /// communicated. Returns the dtype conversions of the weights.
    ///
    /// # Errors
    /// `Kind::Checkpoint` listing at most twenty each of the tensors that are missing, have another shape, have a
    /// dtype that `cast` does not allow, or are unknown; no parameter has changed then. Some parameters have changed
    /// if a tensor does not match its checksum or a file shrinks while it is read (`Kind::Checkpoint`), or if the
    /// system refuses (`Kind::Io`). A tensor of which each rank reads only a part is verified by one rank, which
    /// alone returns the error.
    pub fn load_as(&self, dir: &Path, cast: CastRule) -> Result<CastCounts> {
        self.load_filtered(dir, cast, &LoadFilter::new())
    }

    /// [`Model::load_as`] except for the parameters that a filter names, such as the adapters of an adapted model.
    ///
    /// # Errors
    /// As [`Model::load_as`]; `Kind::Config` if a pattern of the filter matches nothing.
    pub fn load_filtered(&self, dir: &Path, cast: CastRule, filter: &LoadFilter) -> Result<CastCounts> {
        self.load_opened_filtered(&Weights::open(dir)?, cast, filter)
    }

    /// [`Model::load_as`] from open files.
    pub(crate) fn load_opened(&self, weights: &Weights, cast: CastRule) -> Result<CastCounts> {
        self.load_opened_filtered(weights, cast, &LoadFilter::new())
    }

    fn load_opened_filtered(
        &self,
        weights: &Weights,
        cast: CastRule,
        filter: &LoadFilter,
    ) -> Result<CastCounts> {
        let names = |name: &str| {
            let (usual, older) = (self.file_name(name), self.legacy_hf_name(name));
            [usual, name.to_string()].into_iter().chain(older).collect()
        };
        load_into(self, weights, cast, &names, self.ignored_on_load(), filter)
    }
}

impl<M: Module> Model<M> {
    /// Writes the weights of a model of any kind into a folder, in their stored dtype, under the names of the
    /// parameters, without a `config.json`. Every rank calls this together. As [`save_weights`], in files of at most
    /// [`FILE_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// As [`save_weights`].
    #[track_caller]
    pub fn save_weights(&self, dir: &Path) -> Result<()> {
        save_weights(self, dir, FILE_BYTES_MAX, self.precision().param_dtype, &str::to_string)
    }

    /// [`Model::save_weights`] into files that contain their digest and the step of the run. Returns the digest on
    /// rank 0.
    #[track_caller]
    pub(crate) fn save_weights_of_step(&self, dir: &Path, step: u64) -> Result<Option<String>> {
        let contents =
            FolderContents { config: None, companions: &[], bytes_max: FILE_BYTES_MAX, step: Some(step) };
        write_folder(self, dir, &contents, self.precision().param_dtype, &str::to_string)
    }

    /// Loads the parameters from a folder of weights under the names of the parameters, saved on any mesh, with exact
    /// casts only. Each rank reads for itself; nothing is communicated.
    ///
    /// # Errors
    /// As [`Weights::open`] and [`load_weights`].
    pub fn load_weights(&self, dir: &Path) -> Result<CastCounts> {
        self.load_weights_filtered(dir, &LoadFilter::new())
    }

    /// [`Model::load_weights`] except for the parameters that a filter names.
    ///
    /// # Errors
    /// As [`Model::load_weights`]; `Kind::Config` if a pattern of the filter matches nothing.
    pub fn load_weights_filtered(&self, dir: &Path, filter: &LoadFilter) -> Result<CastCounts> {
        let names = |name: &str| vec![name.to_string()];
        load_into(self, &Weights::open(dir)?, CastRule::Widen, &names, &[], filter)
    }

    /// Returns the names of the parameters that contain NaN or infinity, equal on every rank. Costs one small
    /// collective; every rank calls this together. Each rank sums the squares of its parameters, and inspects single
    /// parameters only if the sum is not finite.
    ///
    /// # Errors
    /// Errors of the kernels and the collective.
    #[track_caller]
    pub fn non_finite_params(&self) -> Result<Vec<String>> {
        let here: Vec<Tensor> = self.params().iter().filter(|p| p.is_local()).map(Param::tensor).collect();
        let has_non_finite = !local_sum_squares(self.rank(), &here)?.is_finite();
        let is_not_finite = |x: &f64| !x.is_finite();
        let found = |p: &Param| Ok(has_non_finite && p.tensor().to_local_f64()?.iter().any(is_not_finite));
        params_where(self, found, Location::caller())
    }

    /// Returns the names of the parameters that contain NaN, equal on every rank. Every rank calls this together.
    ///
    /// # Errors
    /// Errors of the device and the collective.
    #[track_caller]
    pub(crate) fn nan_params(&self) -> Result<Vec<String>> {
        let found = |p: &Param| Ok(p.tensor().to_local_f64()?.iter().any(|x| x.is_nan()));
        params_where(self, found, Location::caller())
    }
}

/// Returns the names of the parameters for which `found` is true on any rank that stores them; equal on every rank.
fn params_where<M: Module>(
    model: &Model<M>,
    found: impl Fn(&Param) -> Result<bool>,
    site: &'static Location<'static>,
) -> Result<Vec<String>> {
    let flags = |p: &Param| Ok(f64::from(u8::from(p.is_local() && found(p)?)));
    let flags: Vec<f64> = model.params().iter().map(flags).collect::<Result<_>>()?;
    let sums = world_sum(model.rank(), &flags, site)?;
    Ok(model.params().iter().zip(sums).filter(|(_, sum)| *sum > 0.0).map(|(p, _)| p.name()).collect())
}

/// Refuses a dtype in which a finite number of a parameter becomes infinite: the loss of that number would go
/// unnoticed.
fn check_rounding<M: Module>(model: &Model<M>, dtype: DType, site: &'static Location<'static>) -> Result<()> {
    let overflows = |p: &Param| {
        let stored = p.tensor();
        let rounded = stored.cast(dtype);
        if local_sum_squares(model.rank(), [&rounded])?.is_finite() {
            return Ok(false);
        }
        let (stored, rounded) = (stored.to_local_f64()?, rounded.to_local_f64()?);
        Ok(stored.iter().zip(&rounded).any(|(x, y)| x.is_finite() && !y.is_finite()))
    };
    if is_exact(model.precision().param_dtype, dtype) {
        return Ok(());
    }
    let names = params_where(model, overflows, site)?;
    let Some(first) = names.first() else { return Ok(()) };
    let text = format!(
        "{} of {} tensors contain numbers that overflow {dtype}, beginning with `{first}`",
        names.len(),
        model.params().len()
    );
    let help = match (model.precision().param_dtype, dtype) {
        (DType::F32, DType::F16) => {
            "save in bf16, which has the range of f32, or in the stored dtype (--save-dtype on the command line)"
        }
        _ => "save in the stored dtype (--save-dtype on the command line)",
    };
    Err(Error::new(Kind::NotFinite, text).detail("help", help).at(site))
}

/// Compares the copies of all parameters of this rank's stage, bit for bit, and, between stages, those of parameters
/// that several stages hold. Every rank calls this together.
///
/// # Errors
/// `Kind::Diverged` on every rank, naming parameters and ranks; errors of the collective.
pub fn check_parameters<M: Module>(model: &Model<M>, site: &'static Location<'static>) -> Result<()> {
    let tensors: Vec<(String, Tensor)> =
        model.params().iter().filter(|p| p.is_local()).map(|p| (p.name(), p.tensor())).collect();
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (&**name, tensor)).collect();
    check_replicas(model.rank(), &tensors, site)?;
    let tied = model.params().iter().filter_map(|p| Some((p, p.owners().filter(|h| h.ranks.len() > 1)?)));
    let tied: Vec<(String, &Param, StageOwners)> = tied.map(|(p, owners)| (p.name(), p, owners)).collect();
    let Some(axis) = tied.first().map(|(.., owners)| owners.axis) else { return Ok(()) };
    let shared = tied.iter().map(|(name, param, owners)| SharedTensor {
        name,
        layout: param.layout(),
        positions: owners.ranks.clone(),
        replica: param.is_local().then(|| param.tensor()),
    });
    check_shared_replicas(model.rank(), axis, &shared.collect::<Vec<_>>(), site)
}

/// Writes the parameters of a model, rounded to a dtype, into safetensors files of a folder, which is created if
/// missing, in the order of traversal, under the names that `name_in_file` returns. Every rank calls this together;
/// rank 0 writes. Nothing is written if copies of a parameter differ.
///
/// # Errors
/// `Kind::Diverged` as [`check_parameters`]. Before anything is written: `Kind::NotFinite` naming a tensor of which a
/// finite number becomes infinite in `dtype`. `Kind::Io` if the system refuses rank 0, or as
/// [`WeightsWriter::create`], and `Kind::Checkpoint` for names that no file can contain: every rank returns these
/// two, and may continue and save elsewhere. Errors of the collectives.
#[doc(alias = "save_file")]
#[doc(alias = "state_dict")]
#[track_caller]
pub fn save_weights<M: Module>(
    model: &Model<M>,
    dir: &Path,
    bytes_max: u64,
    dtype: DType,
    name_in_file: &dyn Fn(&str) -> String,
) -> Result<()> {
    let contents = FolderContents { config: None, companions: &[], bytes_max, step: None };
    write_folder(model, dir, &contents, dtype, name_in_file).map(drop)
}

/// Contents of a model folder besides the weights, and the size of its files.
struct FolderContents<'a> {
    /// Text of `config.json`, if there is one.
    config: Option<&'a str>,
    companions: &'a [SidecarFile<'a>],
    bytes_max: u64,
    /// Step of the run, for files that contain it.
    step: Option<u64>,
}

/// [`save_weights`], with the other files of the folder. Returns the digest of the files on rank 0, if they contain
/// one.
#[track_caller]
fn write_folder<M: Module>(
    model: &Model<M>,
    dir: &Path,
    contents: &FolderContents<'_>,
    dtype: DType,
    name_in_file: &dyn Fn(&str) -> String,
) -> Result<Option<String>> {
    let site = Location::caller();
    check_parameters(model, site)?;
    check_rounding(model, dtype, site)?;
    let entry = |p: &Param| (name_in_file(&p.name()), dtype, p.file_shape());
    let entries: Vec<_> = model.params().iter().map(entry).collect();
    let is_rank_zero = model.rank().world().index() == 0;
    let begin = || {
        fs::create_dir_all(dir)
            .map_err(|e| Error::new(Kind::Io, format!("cannot make the folder {}: {e}", dir.display())))?;
        let writer = match contents.step {
            Some(step) => WeightsWriter::with_step(dir, contents.config, &entries, contents.bytes_max, step),
            None => WeightsWriter::create(dir, contents.config, &entries, contents.bytes_max),
        };
        writer?.with_sidecars(contents.companions)
    };
    let rank = model.rank();
    rank.with_timeout(WRITE_TIMEOUT, || {
        // Report early refusals before gathering anything.
        let created = is_rank_zero.then(begin).transpose();
        let (mut writer, created) = created.map_or_else(|e| (None, Err(e)), |writer| (writer, Ok(())));
        broadcast_result(rank, created, site)?;
        let mut written = Ok(());
        for (param, (name, ..)) in model.params().iter().zip(&entries) {
            let bytes = gather_to_rank_zero(
                rank,
                param,
                dtype,
                || Ok(param.tensor_in_file_order().cast(dtype)),
                site,
            )?;
            // After a failed write the remaining tensors are gathered all the same, so that all ranks stay in step.
            if let (Some(writer), Some(bytes), true) = (&mut writer, bytes, written.is_ok()) {
                written = writer.append(name, &bytes);
            }
        }
        let finished = written.and_then(|()| writer.map_or(Ok(None), WeightsWriter::finish_with_digest));
        let (digest, finished) = finished.map_or_else(|e| (None, Err(e)), |digest| (digest, Ok(())));
        // No rank returns, and reads, before the files are complete.
        broadcast_result(rank, finished, site)?;
        Ok(digest)
    })
}

/// Loads the parameters of a model from files. A parameter is the tensor with the name that `name_in_file` returns,
/// or with its own name. Ignores tensors that match a pattern of `ignored_on_load`. Returns the dtype conversions of
/// all weights, on all ranks and stages.
///
/// # Errors
/// `Kind::Checkpoint` listing the mismatches, before any parameter has changed; errors of reading.
#[doc(alias = "load_state_dict")]
pub fn load_weights<M: Module>(
    model: &Model<M>,
    weights: &Weights,
    cast: CastRule,
    name_in_file: &dyn Fn(&str) -> String,
    ignored_on_load: &[&str],
) -> Result<CastCounts> {
    let names = |name: &str| vec![name_in_file(name), name.to_string()];
    load_into(model, weights, cast, &names, ignored_on_load, &LoadFilter::new())
}

/// [`load_weights`], where a parameter is the first of several names that the files contain.
fn load_into<M: Module>(
    model: &Model<M>,
    weights: &Weights,
    cast: CastRule,
    names_in_file: &dyn Fn(&str) -> Vec<String>,
    ignored_on_load: &[&str],
    filter: &LoadFilter,
) -> Result<CastCounts> {
    let params: Vec<String> = model.params().iter().map(Param::name).collect();
    let tensors: Vec<&str> = weights.tensors().map(|t| t.name.as_str()).collect();
    filter.check_all_patterns_matched(&params.iter().map(String::as_str).collect::<Vec<_>>(), &tensors)?;
    let (mut mismatches, mut casts) = (Mismatches::default(), CastCounts::default());
    let mut found = Vec::with_capacity(model.params().len());
    let mut used = HashSet::new();
    for param in model.params() {
        let candidates = names_in_file(&param.name());
        let Some(tensor) = candidates.iter().find_map(|n| weights.get(n)) else {
            if !filter.accepts_missing(&param.name()) && !filter.leaves_out(&param.name()) {
                mismatches.missing.push(candidates[0].clone());
            }
            continue;
        };
        used.insert(tensor.name.as_str());
        if filter.leaves_out(&param.name()) {
            continue;
        }
        if tensor.shape != param.file_shape() || !tensor.dtype.is_float() {
            let (name, wanted) = (&tensor.name, param.file_shape());
            mismatches
                .other
                .push(format!("{name} is {}{:?}, the model has {wanted:?}", tensor.dtype, tensor.shape));
        } else {
            let dtype = param.layout().dtype();
            if cast == CastRule::Widen && !is_exact(tensor.dtype, dtype) {
                mismatches
                    .narrower
                    .push(format!("{} is {}, the parameter {dtype}", tensor.name, tensor.dtype));
            }
            casts.add(tensor.dtype, dtype);
        }
        found.push((param, tensor));
    }
    let is_part = |name: &str| weights.stack_containing(name).is_some_and(|stack| used.contains(stack));
    let known = |name: &str| {
        used.contains(name)
            || is_part(name)
            || filter.leaves_out(name)
            || ignored_on_load.iter().any(|p| matches(p, name))
    };
    mismatches.unknown.extend(weights.tensors().map(|t| t.name.clone()).filter(|name| !known(name)));
    mismatches.check(weights.path())?;
    for (param, tensor) in found.into_iter().filter(|(param, _)| param.is_local()) {
        // Read this rank's shard only.
        let layout = param.tensor_in_file_order().layout().clone();
        let ranges: Vec<_> =
            (0..layout.ndim()).map(|d| layout.range(d, model.rank().coordinates())).collect();
        let bytes = weights.read_part(&tensor.name, &layout.shape(), &ranges)?;
        param.set_from_file_order(Tensor::from_local_bytes(model.rank(), &layout, tensor.dtype, &bytes)?)?;
    }
    // Tensors of which each rank reads only its shard are verified too, each by one rank.
    let world = model.rank().world();
    weights.verify_share(world.index(), world.mesh().num_ranks())?;
    Ok(casts)
}

/// Mismatches between files and model.
#[derive(Default)]
struct Mismatches {
    missing: Vec<String>,
    other: Vec<String>,
    /// Tensors whose cast would round.
    narrower: Vec<String>,
    unknown: Vec<String>,
}

/// Largest number of tensors that an error names of each kind.
const NAMED_MAX: usize = 20;
/// Largest number of tensors that an error names if the cast would round: usually it is all of them.
const NARROWER_MAX: usize = 3;

impl Mismatches {
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
        let add_detail = |e: Error, (label, names): (&'static str, Vec<String>)| match names.len() {
            0 => e,
            _ => e.detail(label, names.join(", ")),
        };
        error = kinds.into_iter().fold(error, add_detail);
        if count > narrower {
            error = error.detail("help", "check config.json: it must describe these weights");
        }
        if narrower > 0 {
            let help =
                "use the dtype of the file, or allow rounding (CastRule::Round; --cast on the command line)";
            error = error.detail("help", help);
        }
        Err(error)
    }
}
