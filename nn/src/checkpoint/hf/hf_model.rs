//! `HfModel`: what every model family provides to be loaded from and saved to Hugging Face folders.

use super::model_config::ModelConfig;
use crate::module::Module;
use crate::module::name::unwrapped;

/// A model that can be loaded from and saved to Hugging Face folders.
#[doc(alias = "PreTrainedModel")]
#[doc(alias = "from_pretrained")]
pub trait HfModel: Module {
    /// The config of the model, as in `config.json`.
    fn model_config(&self) -> ModelConfig;

    /// Returns the name in files of the parameter with a dotted name.
    fn hf_name(&self, name: &str) -> String;

    /// Returns the name in files of the parameter with a dotted name; a layer in a wrapper has the name of the layer alone
    /// ([`unwrapped`]).
    fn file_name(&self, name: &str) -> String {
        self.hf_name(unwrapped(name).as_deref().unwrap_or(name))
    }

    /// Returns the name in older files of the parameter with a dotted name, where it differs.
    fn legacy_hf_name(&self, _name: &str) -> Option<String> {
        None
    }

    /// Patterns of tensors in files that loading ignores.
    #[doc(alias = "_keys_to_ignore_on_load_unexpected")]
    fn ignored_on_load(&self) -> &'static [&'static str];
}
