//! Measured costs: how long the pieces of a program take, and what follows for cuts and schedules.

use super::action::{Action, Schedule};
use super::cut::smallest_maximum;
use super::run::{Feed, Runner};
use super::schedule::check_stages;
use super::simulate::Times;
use super::stage::Stages;
use crate::program::Program;
use shardgrad_dist::{Axis, Error, Kind, Rank, Result};
use shardgrad_tensor::control::world_sum;
use std::ops::Range;
use std::panic::Location;

/// How often each piece is measured.
const REPEATS: usize = 3;

/// How long the pieces of a program take on one microbatch: the layers, or the ops where there are too few layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The records of each piece, in order.
    pub pieces: Vec<Range<usize>>,
    /// Seconds of its passes.
    pub times: Vec<Times>,
    /// Seconds of a transfer between two places.
    pub transfer: f64,
}

impl Profile {
    /// Measures every piece, on one place of the axis each, so that parameters are needed for one piece at a time; values
    /// that pieces hand on are made up. All ranks call this together and get the same numbers: means over
    /// the ranks that measured. `num_stages` is the largest number of stages that is to be cut. On the null back end, where
    /// nothing takes time and nobody is heard, a nanosecond of each pass stands for each unit of volume, by which
    /// [`Cut::Balanced`](super::Cut::Balanced) cuts.
    ///
    /// # Errors
    /// `Kind::Config` if the program cannot be cut into as many stages; what ops report.
    pub fn measure(
        (rank, axis): (&Rank, Axis),
        program: &Program,
        num_stages: usize,
        feed: &Feed<'_>,
    ) -> Result<Profile> {
        let starts = program.places(num_stages)?;
        let stages = Stages::new(program.clone(), &starts);
        if rank.is_dry() {
            return Ok(estimated(rank, &stages));
        }
        let n = stages.stages().len();
        let backward = Action::Backward { stage: 0, microbatch: 0 };
        let num_places = rank.world().mesh().size(axis);
        let schedule = Schedule {
            name: "profile".to_string(),
            num_microbatches: 1,
            place: vec![0; n],
            ranks: vec![vec![backward]; num_places],
        };
        let runner = Runner { rank, axis, stages: &stages, schedule: &schedule };
        let here = rank.world().coordinate(axis);
        let mut own = vec![0.0; 3 * n + 1];
        for piece in (0..n).filter(|piece| piece % num_places == here) {
            let Times { forward, input, weight } = runner.measure(feed, piece, REPEATS)?;
            own[3 * piece..3 * piece + 3].copy_from_slice(&[forward, input, weight]);
        }
        // A place alone hands nothing on.
        own[3 * n] = if num_places > 1 { runner.measure_transfer(n / 2, REPEATS)? } else { 0.0 };
        let sums = world_sum(rank, &own, Location::caller())?;
        let measured_by = (rank.world().mesh().num_ranks() / num_places) as f64;
        let times = sums[..3 * n].chunks(3).map(|t| Times {
            forward: t[0] / measured_by,
            input: t[1] / measured_by,
            weight: t[2] / measured_by,
        });
        let pieces = stages.stages().iter().map(|stage| stage.range.clone()).collect();
        Ok(Profile { pieces, times: times.collect(), transfer: sums[3 * n] / measured_by })
    }

    /// Where to cut, so that the stage that takes longest takes as little time as can be.
    ///
    /// # Errors
    /// `Kind::Config` for more stages than pieces, and for none.
    pub fn cut(&self, num_stages: usize) -> Result<Vec<usize>> {
        check_stages(num_stages)?;
        if self.pieces.len() < num_stages {
            let text = format!("{} pieces cannot be cut into {num_stages} stages", self.pieces.len());
            return Err(Error::new(Kind::Config, text).detail("help", "use a smaller pipeline axis"));
        }
        let nanoseconds = |t: &Times| ((t.forward + t.input + t.weight) * 1e9) as usize;
        let costs: Vec<usize> = self.times.iter().map(nanoseconds).collect();
        let places: Vec<usize> = (1..self.pieces.len()).collect();
        let cuts = smallest_maximum(&costs, &places, num_stages);
        Ok(cuts.into_iter().map(|piece| self.pieces[piece].start).collect())
    }

    /// Times of the stages that begin with these records. A piece that is cut through counts by its records.
    #[must_use]
    pub fn stage_times(&self, starts: &[usize]) -> Vec<Times> {
        let end = self.pieces.last().map_or(0, |piece| piece.end);
        let borders: Vec<usize> = [0].into_iter().chain(starts.iter().copied()).chain([end]).collect();
        let stage = |w: &[usize]| {
            let mut sum = Times { forward: 0.0, input: 0.0, weight: 0.0 };
            for (piece, times) in self.pieces.iter().zip(&self.times) {
                let inside = piece.end.min(w[1]).saturating_sub(piece.start.max(w[0]));
                let part = inside as f64 / piece.len().max(1) as f64;
                sum.forward += part * times.forward;
                sum.input += part * times.input;
                sum.weight += part * times.weight;
            }
            sum
        };
        borders.windows(2).map(stage).collect()
    }
}

/// Pieces whose passes take as long as they have volume; transfers take no time.
fn estimated(rank: &Rank, stages: &Stages) -> Profile {
    let pieces: Vec<Range<usize>> = stages.stages().iter().map(|stage| stage.range.clone()).collect();
    let time = |piece: &Range<usize>| {
        let volume: usize = piece.clone().map(|at| stages.program().volume(rank, at)).sum();
        let each = volume as f64 * 1e-9;
        Times { forward: each, input: each, weight: each }
    };
    Profile { times: pieces.iter().map(time).collect(), pieces, transfer: 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_balanced_by_what_was_measured() {
        let each = |t: f64| Times { forward: t, input: t, weight: 0.5 * t };
        let profile = Profile {
            pieces: vec![0..4, 4..6, 6..10, 10..12],
            times: vec![each(1e-3), each(1e-3), each(1e-3), each(6e-3)],
            transfer: 0.0,
        };
        // Equal numbers of pieces, or of records, would put a part of the first three beside the last.
        assert_eq!(profile.cut(2).unwrap(), [10]);
        assert_eq!(profile.cut(4).unwrap(), [4, 6, 10]);
        assert!(profile.cut(0).unwrap_err().message().contains("has no stage"));
        assert!(profile.cut(5).unwrap_err().message().contains("4 pieces cannot be cut into 5 stages"));
        let times = profile.stage_times(&[5, 10]);
        let forward: Vec<f64> = times.iter().map(|t| (t.forward * 1e6).round()).collect();
        assert_eq!(forward, [1500.0, 1500.0, 6000.0]);
    }
}
