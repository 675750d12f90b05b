//! Loading the weights of models from Hugging Face folders, on any mesh.

use super::cast_rule::{CastCounts, CastRule, is_exact};
use super::load_filter::LoadFilter;
use crate::checkpoint::hf::HfModel;
use crate::checkpoint::tensors::safetensors_header::TensorInfo;
use crate::checkpoint::tensors::weights::Weights;
use crate::module::Module;
use crate::module::name::matches;
use crate::module::param::Param;
use crate::sharded_model::Model;
use shardgrad_tensor::{Error, Kind, Layout, Rank, Result, Tensor};
use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

impl<M: HfModel> Model<M> {
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
    /// Loads the parameters from a folder of weights under the names of the parameters, saved on any mesh, with exact
    /// casts only. Each rank reads for itself; nothing is communicated.
    ///
    /// # Errors
    /// As [`Weights::open`] and [`Model::load_weights_as`].
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

    /// Loads the parameters from files. A parameter is the tensor with the name that `name_in_file` returns,
    /// or with its own name. Ignores tensors that match a pattern of `ignored_on_load`. Returns the dtype conversions of
    /// all weights, on all ranks and stages.
    ///
    /// # Errors
    /// `Kind::Checkpoint` listing the mismatches, before any parameter has changed; errors of reading.
    #[doc(alias = "load_state_dict")]
    pub fn load_weights_as(
        &self,
        weights: &Weights,
        cast: CastRule,
        name_in_file: &dyn Fn(&str) -> String,
        ignored_on_load: &[&str],
    ) -> Result<CastCounts> {
        let names = |name: &str| vec![name_in_file(name), name.to_string()];
        load_into(self, weights, cast, &names, ignored_on_load, &LoadFilter::new())
    }
}

/// Reads this rank's shard of a tensor with a layout; `read_part` reads a box of a tensor by name, shape and ranges.
pub(super) fn read_shard(
    rank: &Rank,
    info: &TensorInfo,
    layout: &Layout,
    read_part: impl FnOnce(&str, &[usize], &[Range<usize>]) -> Result<Vec<u8>>,
) -> Result<Tensor> {
    let ranges: Vec<_> = (0..layout.ndim()).map(|d| layout.range(d, rank.coordinates())).collect();
    let bytes = read_part(&info.name, &layout.shape(), &ranges)?;
    Tensor::from_local_bytes(rank, layout, info.dtype, &bytes)
}

/// [`Model::load_weights_as`], where a parameter is the first of several names that the files contain.
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
        let layout = param.tensor_in_file_order().layout().clone();
        let read_part = |name: &str, shape: &[usize], ranges: &[_]| weights.read_part(name, shape, ranges);
        param.set_from_file_order(read_shard(model.rank(), tensor, &layout, read_part)?)?;
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
