//! Evaluation: the mean loss over a list of windows, on any mesh.

use super::batch;
use crate::data::Sampler;
use shardgrad::nn::PartialLoss;
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
    part: impl Fn(&[Tensor]) -> Result<PartialLoss>,
) -> Result<Evaluation> {
    let parts = |batches: &[Vec<Tensor>]| batches.iter().map(|batch| part(batch)).collect();
    mean_loss_by_groups(rank, plan, windows, [rows_max, 1], stop, parts)
}

/// Returns the mean loss over all targets of all windows of a sequential sampler, in batches of `rows_max` windows; the result has the
/// same bits for any `group_max`. Where windows have unequal numbers of targets, the loss is a sum with a count. `parts` computes the local part of the loss of each batch of a group: up to `group_max` batches of
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
    parts: impl Fn(&[Vec<Tensor>]) -> Result<Vec<PartialLoss>>,
) -> Result<Evaluation> {
    let site = Location::caller();
    let num_windows = windows.num_windows();
    // The sum over windows of their means, or the sum over targets and their number.
    let (mut first, mut sum, mut count) = (0, 0.0, None);
    while first < num_windows {
        let rows = rows_max.min((num_windows - first) as usize);
        let end = first + rows as u64 * ((num_windows - first) / rows as u64).min(group_max as u64);
        let read_batch = |first: u64| {
            let read = |own: Range<usize>| windows.batch(first + own.start as u64..first + own.end as u64);
            batch(rank, plan, [rows, windows.seq()], read)
        };
        let group: Result<Vec<Vec<Tensor>>> = (first..end).step_by(rows).map(read_batch).collect();
        let over = f64::from(u8::from(stop() || group.is_err()));
        if world_sum(rank, &[over], site)?[0] > 0.0 {
            return Ok(Evaluation::Abandoned(group.err()));
        }
        for part in parts(&group?)? {
            match part.count {
                None => sum += part.sum * rows as f64,
                Some(own) => (sum, count) = (sum + part.sum, Some(count.unwrap_or(0.0) + own)),
            }
        }
        first = end;
    }
    let own = [Some(sum), count];
    let sums = world_sum(rank, &own.into_iter().flatten().collect::<Vec<f64>>(), site)?;
    // Without any target the sum is 0.
    let divisor = sums.get(1).map_or(num_windows as f64, |count| if *count == 0.0 { 1.0 } else { *count });
    Ok(Evaluation::Loss(sums[0] / divisor))
}
