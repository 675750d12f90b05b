//! `HfModel`: what every model family provides to be loaded from and saved to Hugging Face folders.

use crate::hf::ModelConfig;
use crate::module::Module;
use crate::module::name::unwrapped;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Value, unwind};

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

/// Rejects ids that are not `[b, t]` with at least one token, or that, after `read` cached tokens, exceed the positions of the
/// model.
#[track_caller]
pub(super) fn check_ids(ids: &Var, read: usize, positions: usize) {
    let shape = ids.shape();
    if shape.len() != 2 || shape[1] == 0 || read + shape[1] > positions {
        let after = if read == 0 { String::new() } else { format!(" after {read} cached tokens") };
        let shape = shape.as_slice();
        let text = format!("ids of shape {shape:?}{after} do not fit a model of {positions} positions");
        Error::new(Kind::Shape, text)
            .detail("help", "give ids [batch, tokens] with at least one token; cached and new tokens must not exceed the positions")
            .at(std::panic::Location::caller())
            .raise();
    }
}

/// Applies all blocks to x. With `recompute` (activation checkpointing), only the input of each block is saved for the backward
/// pass, which computes the block again.
pub(super) fn run_blocks<B>(blocks: &[B], x: Var, recompute: bool, forward: impl Fn(&B, &Var) -> Var) -> Var {
    blocks.iter().fold(x, |x, block| {
        if !recompute {
            return forward(block, &x);
        }
        let tape = x.tape().clone();
        unwind(tape.checkpoint(&[x], |x| Ok(vec![forward(block, &x[0])]))).swap_remove(0)
    })
}
