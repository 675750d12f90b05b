//! The mean loss over a list of windows, on any mesh.

use super::batch;
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

/// Mean next-token loss over all tokens of all windows of a sampler whose order is sequential, `rows_max` windows at a
/// time, which `part` takes as inputs and targets on the mesh of `rank`: it gives a rank's part of their mean loss. Every
/// rank calls this together and gets the same number, or gives up at the same place: before each piece they agree on
/// whether one has been told to `stop`, or could not read.
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
    let mut sum = 0.0;
    for first in (0..num_windows).step_by(rows_max) {
        let rows = rows_max.min((num_windows - first) as usize);
        let read = |own: Range<usize>| windows.batch(first + own.start as u64..first + own.end as u64);
        let piece = batch(rank, plan, [rows, windows.seq()], read);
        let over = f64::from(u8::from(stop() || piece.is_err()));
        if world_sum(rank, &[over], site)?[0] > 0.0 {
            return Ok(Measured::Abandoned(piece.err()));
        }
        sum += part(&piece?)? * rows as f64;
    }
    Ok(Measured::Loss(world_sum(rank, &[sum], site)?[0] / num_windows as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Order, Split};
    use shardgrad::nn::Plan;
    use std::cell::Cell;
    use std::sync::Arc;

    fn measured(mesh: &str, stop: impl Fn(usize, usize) -> bool + Sync) -> Vec<(String, usize)> {
        let corpus = Arc::new(crate::data::Corpus::new("t".into(), vec![1; 33]));
        let windows = Sampler::of_text(corpus, Split::All, 4, Order::InFileOrder).unwrap();
        let plan = Plan::tensor("tp");
        let one = |rank: &Rank| {
            let (asked, parts) = (Cell::new(0), Cell::new(0));
            let stop = || {
                asked.set(asked.get() + 1);
                stop(rank.index(), asked.get())
            };
            let part = |_: &[Tensor]| {
                parts.set(parts.get() + 1);
                Ok(1.0)
            };
            let measured = mean_loss(rank, &plan, &windows, 2, stop, part)?;
            Ok((format!("{measured:?}"), parts.get()))
        };
        World::run(Mesh::parse(mesh).unwrap(), one).unwrap()
    }

    #[test]
    fn a_rank_that_is_told_to_stop_stops_all_at_the_same_place() {
        assert_eq!(measured("", |_, _| false), [("Loss(1.0)".to_string(), 4)]);
        let given_up = ("Abandoned(None)".to_string(), 2);
        for mesh in ["", "tp=2"] {
            let last = Mesh::parse(mesh).unwrap().num_ranks() - 1;
            let ranks = measured(mesh, |rank, asked| rank == last && asked == 3);
            assert!(ranks.len() == last + 1 && ranks.iter().all(|rank| *rank == given_up), "{ranks:?}");
        }
    }
}
