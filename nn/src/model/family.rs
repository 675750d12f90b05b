//! What all families of language models have in common: a config, names in files, a way through their blocks.

use crate::hf::ModelConfig;
use crate::module::Module;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Value, unwind};

/// A language model that lives in Hugging Face folders.
pub trait Family: Module {
    /// Its shape, as `config.json` tells it.
    fn describe(&self) -> ModelConfig;

    /// The name in files of the parameter of a dotted name.
    fn name_in_files(&self, name: &str) -> String;

    /// The name that older files have for the parameter of a dotted name, where it is another one.
    fn older_name_in_files(&self, _name: &str) -> Option<String> {
        None
    }

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

/// x through all blocks. With `recompute`, the inputs of each are kept for the backward pass and the rest is computed again
/// there.
pub(super) fn through<B>(blocks: &[B], x: Var, recompute: bool, forward: impl Fn(&B, &Var) -> Var) -> Var {
    blocks.iter().fold(x, |x, block| {
        if !recompute {
            return forward(block, &x);
        }
        let tape = x.tape().clone();
        unwind(tape.checkpoint(&[x], |x| Ok(vec![forward(block, &x[0])]))).swap_remove(0)
    })
}
