//! Evaluation: the mean loss over a list of windows, on any mesh.

use super::{batch, loss_divisor};
use crate::data::Sampler;
use shardgrad::prelude::*;
use shardgrad::tensor::training_step::control::world_sum;
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

/// [`mean_loss_by_groups`] of one batch at a time, of which `part` computes the local part of the loss.
///
/// # Errors
/// As [`mean_loss_by_groups`].
#[track_caller]
pub(crate) fn mean_loss(
    rank: &Rank,
    plan: &Plan,
    windows: &Sampler,
    rows_max: usize,
    stop: impl Fn() -> bool,
    part: impl Fn(&[Tensor]) -> Result<f64>,
) -> Result<Evaluation> {
    let parts = |batches: &[Vec<Tensor>]| batches.iter().map(|batch| part(batch)).collect();
    mean_loss_by_groups(rank, plan, windows, [rows_max, 1], stop, parts)
}

/// Returns the mean loss over all targets of all windows of a sequential sampler, in batches of `rows_max` windows; the result has the
/// same bits for any `group_max`. `parts` computes the local part of the loss of each batch of a group: up to `group_max` batches of
/// equally many windows, the microbatches of a pipeline. Collective: all ranks return the same number, or abandon the evaluation before
/// the same group, because a rank was asked to `stop` or could not read.
///
/// # Errors
/// Errors of `parts` and of collectives.
#[track_caller]
pub(crate) fn mean_loss_by_groups(
    rank: &Rank,
    plan: &Plan,
    windows: &Sampler,
    [rows_max, group_max]: [usize; 2],
    stop: impl Fn() -> bool,
    parts: impl Fn(&[Vec<Tensor>]) -> Result<Vec<f64>>,
) -> Result<Evaluation> {
    let site = Location::caller();
    let num_windows = windows.num_windows();
    let whole = loss_divisor(windows, 0..num_windows, 1);
    let (mut first, mut sum) = (0, 0.0);
    while first < num_windows {
        let rows = rows_max.min((num_windows - first) as usize);
        let end = first + rows as u64 * ((num_windows - first) / rows as u64).min(group_max as u64);
        let read_batch = |first: u64| {
            let read = |own: Range<usize>| windows.batch(first + own.start as u64..first + own.end as u64);
            let loss_divisor = whole.clone()?.map(|loss_divisor| loss_divisor * rows as f64);
            batch(rank, plan, [rows, windows.seq()], loss_divisor, read)
        };
        let group: Result<Vec<Vec<Tensor>>> = (first..end).step_by(rows).map(read_batch).collect();
        let over = f64::from(u8::from(stop() || group.is_err()));
        if world_sum(rank, &[over], site)?[0] > 0.0 {
            return Ok(Evaluation::Abandoned(group.err()));
        }
        for part in parts(&group?)? {
            sum += part * rows as f64;
        }
        first = end;
    }
    Ok(Evaluation::Loss(world_sum(rank, &[sum], site)?[0] / num_windows as f64))
}
