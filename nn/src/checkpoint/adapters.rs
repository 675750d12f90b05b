//! Saving and loading the adapters of a model in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

use crate::checkpoint::atomic::atomic_file::write_text;
use crate::checkpoint::hf::HfModel;
use crate::checkpoint::sharded::gather::{GatheringWriter, WRITE_TIMEOUT, WriterFunctions, on_rank_zero};
use crate::checkpoint::{TensorFile, TensorWriter, check_parameters, read_text};
use crate::module::param::Param;
use crate::module::{ModuleLeaf, visit_leaves, visit_modules};
use crate::sharded_model::Model;
use serde_json::{Map, Value as Json, json};
use shardgrad_tensor::{Error, Kind, Layout, Result, Tensor};
use std::collections::BTreeSet;
use std::fs;
use std::panic::Location;
use std::path::Path;

/// The config of adapters, written last: a folder without it holds no adapters.
pub const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
/// The weights of adapters.
pub const ADAPTER_WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// The largest config that is read, in bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// The fields of the config that change what an adapter computes.
const COMPARED_FIELDS: [&str; 3] = ["peft_type", "r", "lora_alpha"];

/// The adapters of a model, as PEFT describes them.
struct AdapterSet {
    /// The fields of `adapter_config.json` that all adapters share.
    config: Map<String, Json>,
    /// Each parameter of an adapter, with its name in files.
    params: Vec<(String, Param)>,
}

impl<M: HfModel> Model<M> {
    /// Writes the adapters of the model ([`Module::adapt`](crate::Module::adapt)) into a folder, which is created if missing, in the
    /// format of PEFT and in their stored dtype. Every rank calls this together; rank 0 writes, and the files are complete when any
    /// rank returns.
    ///
    /// # Errors
    /// `Kind::Config` for a model without adapters; `Kind::Unsupported` for adapters that PEFT does not know, or of several ranks or
    /// factors; `Kind::Diverged` if copies of a parameter differ; `Kind::Io` if the system refuses.
    #[doc(alias = "save_pretrained")]
    #[track_caller]
    pub fn save_adapters(&self, dir: &Path) -> Result<()> {
        let site = Location::caller();
        let adapters = self.adapters().map_err(|e| e.at(site))?;
        check_parameters(self, site)?;
        let (rank, dtype) = (self.rank(), self.precision().param_dtype);
        let specs: Vec<_> =
            adapters.params.iter().map(|(name, p)| (name.clone(), dtype, p.file_shape())).collect();
        let config = dir.join(ADAPTER_CONFIG_FILE);
        let begin = || {
            fs::create_dir_all(dir).map_err(|e| io_error(dir, &e))?;
            // A reader finds the old adapters, the new ones, or none, but no old config with new weights.
            match fs::remove_file(&config) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io_error(&config, &e)),
                _ => TensorWriter::create(&dir.join(ADAPTER_WEIGHTS_FILE), &specs),
            }
        };
        rank.with_timeout(WRITE_TIMEOUT, || {
            let functions: WriterFunctions<TensorWriter> =
                (TensorWriter::append, |writer| writer.finish().map(|()| None));
            let mut writer = GatheringWriter::create(rank, site, begin, functions)?;
            for (name, param) in &adapters.params {
                writer.gather(name, param, dtype, || Ok(param.tensor_in_file_order()))?;
            }
            writer.finish()?;
            let text = format!("{:#}\n", Json::Object(adapters.config));
            on_rank_zero(rank, site, || write_text(&config, &text)).map(drop)
        })
    }

    /// Loads the adapters of the model from a folder in the format of PEFT, for the same layers, rank and alpha. Each rank reads for
    /// itself; nothing is communicated.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if the folder describes other adapters, or lacks a tensor, or has others; no parameter has changed then.
    /// `Kind::Io` if the system refuses.
    #[doc(alias = "PeftModel.from_pretrained")]
    #[track_caller]
    pub fn load_adapters(&self, dir: &Path) -> Result<()> {
        let adapters = self.adapters().map_err(|e| e.at(Location::caller()))?;
        let unlike = |text: String| Error::new(Kind::Checkpoint, format!("{}: {text}", dir.display()));
        let text = read_text(dir, ADAPTER_CONFIG_FILE, CONFIG_BYTES_MAX)?;
        let config: Json =
            serde_json::from_str(&text).map_err(|e| unlike(format!("{ADAPTER_CONFIG_FILE}: {e}")))?;
        for field in COMPARED_FIELDS {
            // An adapter of a user may lack a field.
            let (own, found) = (adapters.config.get(field).unwrap_or(&Json::Null), &config[field]);
            if own != found && own.as_f64().zip(found.as_f64()).is_none_or(|(a, b)| a != b) {
                return Err(unlike(format!("`{field}` of the adapters is {found}, the model has {own}"))
                    .detail("help", "adapt the model as the config says"));
            }
        }
        let file = TensorFile::open(&dir.join(ADAPTER_WEIGHTS_FILE))?;
        let known: BTreeSet<&str> = adapters.params.iter().map(|(name, _)| name.as_str()).collect();
        if let Some(other) = file.tensors().iter().find(|t| !known.contains(t.name.as_str())) {
            return Err(unlike(format!("tensor `{}` belongs to no adapter of the model", other.name))
                .detail("help", "adapt the layers that `target_modules` of the config names"));
        }
        for (name, param) in &adapters.params {
            let (found, wanted) = (file.find(name)?, param.file_shape());
            if found.shape != wanted || !found.dtype.is_float() {
                let text = format!("{name} is {}{:?}, the model has {wanted:?}", found.dtype, found.shape);
                return Err(unlike(text));
            }
            file.verify(name)?;
        }
        for (name, param) in adapters.params.iter().filter(|(_, param)| param.is_local()) {
            let layout = param.tensor_in_file_order().layout().clone();
            let whole = Layout::invariant(layout.mesh(), layout.dtype(), &layout.shape());
            let bytes = file.read(name)?;
            let tensor = Tensor::from_local_bytes(self.rank(), &whole, file.find(name)?.dtype, &bytes)?;
            param.set_from_file_order(tensor.to_layout_at(&layout, Location::caller())?)?;
        }
        Ok(())
    }

    /// The adapters of the model.
    fn adapters(&self) -> Result<AdapterSet> {
        let (mut adapted, mut others, mut configs) = (Vec::new(), Vec::new(), Vec::new());
        let mut params = Vec::new();
        visit_modules(&**self, &mut |path, module| {
            let Some(layer) = module.adaptable() else { return };
            let layer_name = self.file_name(&format!("{path}.weight"));
            let layer_name = layer_name.strip_suffix(".weight").unwrap_or(&layer_name).to_string();
            let Some(adapter) = layer.adapter_slot().get() else {
                others.push(layer_name);
                return;
            };
            configs.push(adapter.peft_config());
            visit_leaves(layer.adapter_slot(), &mut |part, leaf| {
                if let ModuleLeaf::Param(param) = leaf {
                    params.push((format!("base_model.model.{layer_name}.{part}"), param.clone()));
                }
            });
            adapted.push(layer_name);
        });
        let Some(first) = configs.first() else {
            return Err(Error::new(Kind::Config, "the model has no adapters")
                .detail("help", "install adapters with Module::adapt before Model::new"));
        };
        let Some(fields) = first.clone().filter(|_| configs.iter().all(|config| config == first)) else {
            let text = "the adapters of the model cannot be described by one config of PEFT";
            let help =
                "give all adapters one kind, rank, alpha and dropout, or save them with Model::save_weights";
            return Err(Error::new(Kind::Unsupported, text).detail("help", help));
        };
        let mut config: Map<String, Json> =
            fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        config.insert("target_modules".into(), json!(target_modules(&adapted, &others)));
        config.insert("task_type".into(), json!("CAUSAL_LM"));
        config.insert("base_model_name_or_path".into(), Json::Null);
        config.insert("inference_mode".into(), json!(true));
        Ok(AdapterSet { config, params })
    }
}

/// The adapted layers as PEFT names them: the last part of the path where all layers of that name are adapted, else the path.
fn target_modules(adapted: &[String], others: &[String]) -> BTreeSet<String> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or(path).to_string();
    let mixed: BTreeSet<String> = others.iter().map(|path| last(path)).collect();
    let name = |path: &String| if mixed.contains(&last(path)) { path.clone() } else { last(path) };
    adapted.iter().map(name).collect()
}

fn io_error(path: &Path, error: &std::io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot write {}: {error}", path.display()))
        .detail("help", "check that the folder is writable and has space")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_modules_are_short_where_all_layers_of_a_name_are_adapted() {
        let names = |all: &[&str]| all.iter().map(|name| (*name).to_string()).collect::<Vec<_>>();
        let adapted = names(&["m.0.q_proj", "m.1.q_proj", "m.0.up"]);
        let found = target_modules(&adapted, &names(&["m.1.up", "m.0.down"]));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["m.0.up", "q_proj"]);
    }
}
