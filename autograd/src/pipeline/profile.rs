//! Measured costs: the time of each segment of a program, for cuts and schedules.

use super::action::{Action, Schedule};
use super::cut::min_max_partition;
use super::run::{PipelineInputs, Runner};
use super::schedule::check_stages;
use super::simulate::PassTimes;
use super::stage::Stages;
use crate::program::Program;
use shardgrad_dist::{Axis, Error, Kind, Rank, Result};
use shardgrad_tensor::training_step::control::world_sum;
use std::ops::Range;
use std::panic::Location;

/// The number of measurements of each segment.
const REPEATS: usize = 3;

/// The time of each segment of a program on one microbatch. A segment is a layer, or an op where there are too few
/// layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The records of each segment, in order.
    pub segments: Vec<Range<usize>>,
    /// Seconds of the passes of each segment.
    pub times: Vec<PassTimes>,
    /// Seconds of a transfer between two pipeline ranks.
    pub transfer: f64,
}

impl Profile {
    /// Measures each segment on one pipeline rank, so that parameters are needed for one segment at a time; values
    /// between segments are placeholders. A collective call: all ranks call it together and get the same numbers, means
    /// over the ranks that measured. `num_stages` is the largest number of stages to be cut. On the null back end,
    /// which takes no time and has no peers, a unit of volume counts as a nanosecond of each pass, as for
    /// [`Cut::Balanced`](super::Cut::Balanced).
    ///
    /// # Errors
    /// `Kind::Config` if the program cannot be cut into that many stages; the errors of ops.
    pub fn measure(
        (rank, axis): (&Rank, Axis),
        program: &Program,
        num_stages: usize,
        feed: &PipelineInputs<'_>,
    ) -> Result<Profile> {
        let starts = program.cut_points(num_stages)?;
        let stages = Stages::new(program.clone(), &starts);
        if rank.is_dry_run() {
            return Ok(estimate_from_volume(rank, &stages));
        }
        let n = stages.stages().len();
        let backward = Action::Backward { stage: 0, microbatch: 0 };
        let num_pipeline_ranks = rank.world().mesh().size(axis);
        let schedule = Schedule {
            name: "profile".to_string(),
            num_microbatches: 1,
            stage_ranks: vec![0; n],
            ranks: vec![vec![backward]; num_pipeline_ranks],
        };
        let runner = Runner { rank, axis, stages: &stages, schedule: &schedule };
        let here = rank.world().coordinate(axis);
        let mut own = vec![0.0; 3 * n + 1];
        for segment in (0..n).filter(|segment| segment % num_pipeline_ranks == here) {
            let PassTimes { forward, input, weight } = runner.measure(feed, segment, REPEATS)?;
            own[3 * segment..3 * segment + 3].copy_from_slice(&[forward, input, weight]);
        }
        // A single pipeline rank transfers nothing.
        own[3 * n] = if num_pipeline_ranks > 1 { runner.measure_transfer(n / 2, REPEATS)? } else { 0.0 };
        let sums = world_sum(rank, &own, Location::caller())?;
        let measured_by = (rank.world().mesh().num_ranks() / num_pipeline_ranks) as f64;
        let times = sums[..3 * n].chunks(3).map(|t| PassTimes {
            forward: t[0] / measured_by,
            input: t[1] / measured_by,
            weight: t[2] / measured_by,
        });
        let segments = stages.stages().iter().map(|stage| stage.range.clone()).collect();
        Ok(Profile { segments, times: times.collect(), transfer: sums[3 * n] / measured_by })
    }

    /// The first record of each stage after the first, so that the slowest stage is as fast as possible.
    ///
    /// # Errors
    /// `Kind::Config` for more stages than segments, and for no stage.
    pub fn cut(&self, num_stages: usize) -> Result<Vec<usize>> {
        check_stages(num_stages)?;
        if self.segments.len() < num_stages {
            let text = format!("{} segments cannot be cut into {num_stages} stages", self.segments.len());
            return Err(Error::new(Kind::Config, text).detail("help", "use a smaller pipeline axis"));
        }
        let nanoseconds = |t: &PassTimes| ((t.forward + t.input + t.weight) * 1e9) as usize;
        let costs: Vec<usize> = self.times.iter().map(nanoseconds).collect();
        let cut_points: Vec<usize> = (1..self.segments.len()).collect();
        let cuts = min_max_partition(&costs, &cut_points, num_stages);
        Ok(cuts.into_iter().map(|segment| self.segments[segment].start).collect())
    }

    /// The times of the stages that begin with these records. A segment that is cut counts in proportion to its
    /// records.
    #[must_use]
    pub fn stage_times(&self, starts: &[usize]) -> Vec<PassTimes> {
        let end = self.segments.last().map_or(0, |segment| segment.end);
        let borders: Vec<usize> = [0].into_iter().chain(starts.iter().copied()).chain([end]).collect();
        let stage = |w: &[usize]| {
            let mut sum = PassTimes { forward: 0.0, input: 0.0, weight: 0.0 };
            for (segment, times) in self.segments.iter().zip(&self.times) {
                let inside = segment.end.min(w[1]).saturating_sub(segment.start.max(w[0]));
                let part = inside as f64 / segment.len().max(1) as f64;
                sum.forward += part * times.forward;
                sum.input += part * times.input;
                sum.weight += part * times.weight;
            }
            sum
        };
        borders.windows(2).map(stage).collect()
    }
}

/// Segments with times in proportion to their volume; transfers take no time.
fn estimate_from_volume(rank: &Rank, stages: &Stages) -> Profile {
    let segments: Vec<Range<usize>> = stages.stages().iter().map(|stage| stage.range.clone()).collect();
    let time = |segment: &Range<usize>| {
        let volume: usize = segment.clone().map(|at| stages.program().volume(rank, at)).sum();
        let each = volume as f64 * 1e-9;
        PassTimes { forward: each, input: each, weight: each }
    };
    Profile { times: segments.iter().map(time).collect(), segments, transfer: 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_cut_balances_measured_times() {
        let each = |t: f64| PassTimes { forward: t, input: t, weight: 0.5 * t };
        let profile = Profile {
            segments: vec![0..4, 4..6, 6..10, 10..12],
            times: vec![each(1e-3), each(1e-3), each(1e-3), each(6e-3)],
            transfer: 0.0,
        };
        // Equal numbers of segments, or of records, would put some of the first three with the last.
        assert_eq!(profile.cut(2).unwrap(), [10]);
        assert_eq!(profile.cut(4).unwrap(), [4, 6, 10]);
        assert!(profile.cut(0).unwrap_err().message().contains("needs at least one stage"));
        assert!(profile.cut(5).unwrap_err().message().contains("4 segments cannot be cut into 5 stages"));
        let times = profile.stage_times(&[5, 10]);
        let forward: Vec<f64> = times.iter().map(|t| (t.forward * 1e6).round()).collect();
        assert_eq!(forward, [1500.0, 1500.0, 6000.0]);
    }
}
