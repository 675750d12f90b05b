//! The mean loss over a list of windows, on any mesh.

use super::{batch, share};
use crate::data::Sampler;
use shardgrad::prelude::*;
use shardgrad::tensor::control::world_sum;
use std::ops::Range;
use std::panic::Location;

/// What a measurement came to, on every rank alike.
#[derive(Debug)]
pub(crate) enum Measured {
    /// The mean loss.
    Loss(f64),
    /// It was given up, since some rank was told to stop or could not read its rows; with the reason, on a rank that could
    /// not.
    Abandoned(Option<Error>),
}

/// Mean loss over all targets of all windows of a sampler whose order is sequential, `rows_max` windows at a time, which
/// `part` takes as [`batch`] gives them, on the mesh of `rank`: it gives a rank's part of their loss. Every rank calls this
/// together and gets the same number, or gives up at the same place: before each piece they agree on whether one has been
/// told to `stop`, or could not read.
///
/// # Errors
/// What `part` and the collectives report.
#[track_caller]
pub(crate) fn mean_loss(
    rank: &Rank,
    plan: &Plan,
    windows: &Sampler,
    rows_max: usize,
    stop: impl Fn() -> bool,
    part: impl Fn(&[Tensor]) -> Result<f64>,
) -> Result<Measured> {
    let site = Location::caller();
    let num_windows = windows.num_windows();
    let whole = share(windows, 0..num_windows, 1);
    let mut sum = 0.0;
    for first in (0..num_windows).step_by(rows_max) {
        let rows = rows_max.min((num_windows - first) as usize);
        let read = |own: Range<usize>| windows.batch(first + own.start as u64..first + own.end as u64);
        let piece = whole.clone().and_then(|whole| {
            let share = whole.map(|share| share * rows as f64);
            batch(rank, plan, [rows, windows.seq()], share, read)
        });
        let over = f64::from(u8::from(stop() || piece.is_err()));
        if world_sum(rank, &[over], site)?[0] > 0.0 {
            return Ok(Measured::Abandoned(piece.err()));
        }
        sum += part(&piece?)? * rows as f64;
    }
    Ok(Measured::Loss(world_sum(rank, &[sum], site)?[0] / num_windows as f64))
}
