//! What all families of language models have in common: a config, and names in files.

use crate::hf::ModelConfig;
use crate::module::Module;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Value};

/// A language model that lives in Hugging Face folders.
pub trait Family: Module {
    /// Its shape, as `config.json` tells it.
    fn describe(&self) -> ModelConfig;

    /// The name in files of the parameter of a dotted name.
    fn name_in_files(&self, name: &str) -> String;

    /// Patterns of tensors that files may hold for nothing.
    fn passed_over(&self) -> &'static [&'static str];
}

/// Refuses ids that are not `[b, t]` with one token at least, or that reach beyond the positions of a model when `read`
/// were read before.
#[track_caller]
pub(super) fn check_ids(ids: &Var, read: usize, positions: usize) {
    let shape = ids.shape();
    if shape.len() != 2 || shape[1] == 0 || read + shape[1] > positions {
        let after = if read == 0 { String::new() } else { format!(" after {read} others") };
        let shape = shape.as_slice();
        let text = format!("ids of shape {shape:?}{after} for a model of at most {positions} positions");
        Error::new(Kind::Shape, text)
            .detail("help", "give [batch, tokens]; shorten the rows")
            .at(std::panic::Location::caller())
            .raise();
    }
}
