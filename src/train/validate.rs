//! Evaluation: the mean loss over a list of windows, on any mesh.

use super::{batch, loss_divisor};
use crate::data::Sampler;
use shardgrad::prelude::*;
use shardgrad::tensor::control::world_sum;
use std::ops::Range;
use std::panic::Location;

/// The result of an evaluation, equal on all ranks.
#[derive(Debug)]
pub(crate) enum Evaluation {
    /// The mean loss.
    Loss(f64),
    /// A rank was asked to stop or could not read its rows; with the error, on the rank that has it.
    Abandoned(Option<Error>),
}

/// Returns the mean loss over all targets of all windows of a sequential sampler, in batches of `rows_max` windows. `part` computes the local part
/// of the loss of a batch. Collective: all ranks return the same number, or abandon the evaluation before the same batch, because a rank was
/// asked to `stop` or could not read.
///
/// # Errors
/// Errors of `part` and of collectives.
#[track_caller]
pub(crate) fn mean_loss(
    rank: &Rank,
    plan: &Plan,
    windows: &Sampler,
    rows_max: usize,
    stop: impl Fn() -> bool,
    part: impl Fn(&[Tensor]) -> Result<f64>,
) -> Result<Evaluation> {
    let site = Location::caller();
    let num_windows = windows.num_windows();
    let whole = loss_divisor(windows, 0..num_windows, 1);
    let mut sum = 0.0;
    for first in (0..num_windows).step_by(rows_max) {
        let rows = rows_max.min((num_windows - first) as usize);
        let read = |own: Range<usize>| windows.batch(first + own.start as u64..first + own.end as u64);
        let piece = whole.clone().and_then(|whole| {
            let loss_divisor = whole.map(|loss_divisor| loss_divisor * rows as f64);
            batch(rank, plan, [rows, windows.seq()], loss_divisor, read)
        });
        let over = f64::from(u8::from(stop() || piece.is_err()));
        if world_sum(rank, &[over], site)?[0] > 0.0 {
            return Ok(Evaluation::Abandoned(piece.err()));
        }
        sum += part(&piece?)? * rows as f64;
    }
    Ok(Evaluation::Loss(world_sum(rank, &[sum], site)?[0] / num_windows as f64))
}
