//! Steps that the models share: checking ids, and applying all blocks.

use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Resharding, Value, unwind};

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

/// The last token of `[b, t, d]`: `[b, 1, d]`. Taken after the last norm, where sequence parallelism gathers the tokens; those that are
/// still sharded, by context parallelism, are gathered here.
#[track_caller]
pub(super) fn last_token(x: &Var) -> Var {
    let t = x.shape()[1];
    x.whole_along(1).slice(1, t - 1..t)
}
