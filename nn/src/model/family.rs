//! What all families of language models have in common: a config, and names in files.

use crate::hf::ModelConfig;
use crate::module::Module;

/// A language model that lives in Hugging Face folders.
pub trait Family: Module {
    /// Its shape, as `config.json` tells it.
    fn describe(&self) -> ModelConfig;

    /// The name in files of the parameter of a dotted name.
    fn name_in_files(&self, name: &str) -> String;

    /// Patterns of tensors that files may hold for nothing.
    fn passed_over(&self) -> &'static [&'static str];
}
