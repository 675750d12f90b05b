//! The mean loss over a list of windows, on any mesh.

use super::batch;
use crate::data::Sampler;
use shardgrad::prelude::*;
use shardgrad::tensor::control::world_sum;
use std::ops::Range;
use std::panic::Location;

/// Mean next-token loss over all tokens of all windows of a sampler whose order is sequential, `rows_max` windows at a
/// time, which `part` takes as inputs and targets on the mesh of `rank`: it gives a rank's part of their mean loss. Every
/// rank calls this together and gets the same number.
///
/// # Errors
/// What `part` and the collectives report.
#[track_caller]
pub(crate) fn mean_loss(
    rank: &Rank,
    plan: &Plan,
    windows: &Sampler,
    rows_max: usize,
    part: impl Fn(&[Tensor]) -> Result<f64>,
) -> Result<f64> {
    let site = Location::caller();
    let num_windows = windows.num_windows();
    let mut sum = 0.0;
    for first in (0..num_windows).step_by(rows_max) {
        let rows = rows_max.min((num_windows - first) as usize);
        let read = |own: Range<usize>| windows.batch(first + own.start as u64..first + own.end as u64);
        sum += part(&batch(rank, plan, [rows, windows.seq()], read)?)? * rows as f64;
    }
    Ok(world_sum(rank, &[sum], site)?[0] / num_windows as f64)
}
