//! Saving the weights of models as Hugging Face folders, from any mesh.

use super::cast_rule::is_exact;
use super::gather::{GatheringWriter, WRITE_TIMEOUT};
use super::param_checks::{check_parameters, params_where};
use crate::checkpoint::atomic::sidecar::SidecarFile;
use crate::checkpoint::hf::HfModel;
use crate::checkpoint::tensors::weights_writer::WeightsWriter;
use crate::module::Module;
use crate::module::param::Param;
use crate::module::precision::check_dtype;
use crate::sharded_model::Model;
use shardgrad_tensor::training_step::grad_norm::local_sum_squares;
use shardgrad_tensor::{DType, Error, Kind, Result, Value};
use std::fs;
use std::panic::Location;
use std::path::Path;

/// Default for the largest size of a file of weights, in bytes.
pub const FILE_BYTES_MAX: u64 = 5_000_000_000;

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
        sidecars: &[SidecarFile<'_>],
    ) -> Result<()> {
        check_dtype(dtype)?;
        self.save_folder(dir, bytes_max, dtype, (sidecars, None)).map(drop)
    }

    /// [`Model::save_with_sidecars`]; with the step of a run, the files contain it and their digest, which rank 0 returns.
    #[track_caller]
    pub(crate) fn save_folder(
        &self,
        dir: &Path,
        bytes_max: u64,
        dtype: DType,
        (sidecars, step): (&[SidecarFile<'_>], Option<u64>),
    ) -> Result<Option<String>> {
        let config = self.model_config().with_dtype(dtype).lossless_json()?;
        let contents = FolderContents { config: Some(&config), sidecars, bytes_max, step };
        write_folder(self, dir, &contents, dtype, &|name| self.file_name(name))
    }
}

impl<M: Module> Model<M> {
    /// Writes the weights of a model of any kind into a folder, in their stored dtype, under the names of the
    /// parameters, without a `config.json`. Every rank calls this together. As
    /// [`Model::save_weights_as`], in files of at most
    /// [`FILE_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// As [`Model::save_weights_as`].
    #[track_caller]
    pub fn save_weights(&self, dir: &Path) -> Result<()> {
        self.save_weights_as(dir, FILE_BYTES_MAX, self.precision().param_dtype, &str::to_string)
    }

    /// Writes the parameters, rounded to a dtype, into safetensors files of a folder, which is created if
    /// missing, in the order of traversal, under the names that `name_in_file` returns. Every rank calls this together;
    /// rank 0 writes. Nothing is written if copies of a parameter differ.
    ///
    /// # Errors
    /// `Kind::Diverged` naming parameters and ranks if copies differ. Before anything is written: `Kind::NotFinite` naming a tensor of which a
    /// finite number becomes infinite in `dtype`. `Kind::Io` if the system refuses rank 0, or as
    /// [`WeightsWriter::create`], and `Kind::Checkpoint` for names that no file can contain: every rank returns these
    /// two, and may continue and save elsewhere. Errors of the collectives.
    #[doc(alias = "save_file")]
    #[doc(alias = "state_dict")]
    #[track_caller]
    pub fn save_weights_as(
        &self,
        dir: &Path,
        bytes_max: u64,
        dtype: DType,
        name_in_file: &dyn Fn(&str) -> String,
    ) -> Result<()> {
        let contents = FolderContents { config: None, sidecars: &[], bytes_max, step: None };
        write_folder(self, dir, &contents, dtype, name_in_file).map(drop)
    }

    /// [`Model::save_weights`] into files that contain their digest and the step of the run. Returns the digest on
    /// rank 0.
    #[track_caller]
    pub(crate) fn save_weights_of_step(&self, dir: &Path, step: u64) -> Result<Option<String>> {
        let contents =
            FolderContents { config: None, sidecars: &[], bytes_max: FILE_BYTES_MAX, step: Some(step) };
        write_folder(self, dir, &contents, self.precision().param_dtype, &str::to_string)
    }
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

/// Contents of a model folder besides the weights, and the size of its files.
struct FolderContents<'a> {
    /// Text of `config.json`, if there is one.
    config: Option<&'a str>,
    sidecars: &'a [SidecarFile<'a>],
    bytes_max: u64,
    /// Step of the run, for files that contain it.
    step: Option<u64>,
}

/// [`Model::save_weights_as`], with the other files of the folder. Returns the digest of the files on rank 0, if they contain
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
    let open = || {
        fs::create_dir_all(dir)
            .map_err(|e| Error::new(Kind::Io, format!("cannot make the folder {}: {e}", dir.display())))?;
        WeightsWriter::begin(dir, contents.config, &entries, contents.bytes_max, contents.step)?
            .with_sidecars(contents.sidecars)
    };
    let rank = model.rank();
    rank.with_timeout(WRITE_TIMEOUT, || {
        let mut writer = GatheringWriter::create(
            rank,
            site,
            open,
            (WeightsWriter::append, WeightsWriter::finish_with_digest),
        )?;
        for (param, (name, ..)) in model.params().iter().zip(&entries) {
            writer.gather(name, param, dtype, || Ok(param.tensor_in_file_order().cast(dtype)))?;
        }
        writer.finish()
    })
}
