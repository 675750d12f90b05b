//! The mean loss over a list of windows, on any mesh.

use super::{share, tokens};
use shardgrad::nn::model::Gpt2;
use shardgrad::prelude::*;
use shardgrad::tensor::control::world_sum;
use std::panic::Location;

/// Mean next-token loss over all tokens of `num_windows` windows of `seq + 1` tokens, `batch` windows at a time.
/// Every rank calls this together and gets the same number.
///
/// # Errors
/// What the model and the collectives report.
#[track_caller]
pub(crate) fn mean_loss(
    model: &Model<Gpt2>,
    plan: &Plan,
    [num_windows, batch, seq]: [usize; 3],
    window: impl Fn(usize) -> Vec<i64>,
) -> Result<f64> {
    let (rank, site) = (model.rank(), Location::caller());
    let mut sum = 0.0;
    for first in (0..num_windows).step_by(batch) {
        let rows = batch.min(num_windows - first);
        let tape = model.inference();
        let ids = tokens(rank, plan, [rows, seq], |r| window(first + r)[..seq].to_vec())?;
        let targets = tokens(rank, plan, [rows, seq], |r| window(first + r)[1..].to_vec())?;
        let loss = model.loss(&tape.constant(ids), &tape.constant(targets));
        sum += share(loss.tensor())? * rows as f64;
    }
    Ok(world_sum(rank, &[sum], site)?[0] / num_windows as f64)
}
