//! Schedules: pure functions from numbers of stages and microbatches to action lists.

use super::action::{Action, Schedule};
use shardgrad_dist::{Error, Kind, Result};

/// The schedules that have a name on the command line.
pub const NAMES: [&str; 2] = ["gpipe", "1f1b"];

impl Schedule {
    /// A schedule by its name: one of [`NAMES`].
    ///
    /// # Errors
    /// `Kind::Config` for another name, or no stage or microbatch.
    pub fn named(name: &str, num_stages: usize, num_microbatches: usize) -> Result<Schedule> {
        if num_stages == 0 || num_microbatches == 0 {
            return Err(Error::new(Kind::Config, "a schedule has at least one stage and one microbatch"));
        }
        match name {
            "gpipe" => Ok(Schedule::gpipe(num_stages, num_microbatches)),
            "1f1b" => Ok(Schedule::one_f_one_b(num_stages, num_microbatches)),
            _ => Err(Error::new(Kind::Config, format!("there is no schedule `{name}`"))
                .detail("help", format!("use one of {}", NAMES.join(", ")))),
        }
    }

    /// All forward passes, then all backward passes. Huang et al., arXiv 1811.06965.
    #[must_use]
    pub fn gpipe(num_stages: usize, num_microbatches: usize) -> Schedule {
        one_stage_a_rank("gpipe", num_stages, num_microbatches, |stage| {
            let forward = (0..num_microbatches).map(move |microbatch| Action::Forward { stage, microbatch });
            let backward =
                (0..num_microbatches).map(move |microbatch| Action::Backward { stage, microbatch });
            forward.chain(backward).collect()
        })
    }

    /// As few forward passes as the later stages need to start, then forward and backward in turn, so that stage s of p
    /// holds at most p - s microbatches. Narayanan et al., arXiv 2104.04473, section 2.2.
    #[must_use]
    pub fn one_f_one_b(num_stages: usize, num_microbatches: usize) -> Schedule {
        one_stage_a_rank("1f1b", num_stages, num_microbatches, |stage| {
            let ahead = (num_stages - stage).min(num_microbatches);
            let mut list: Vec<Action> =
                (0..ahead).map(|microbatch| Action::Forward { stage, microbatch }).collect();
            for microbatch in 0..num_microbatches {
                list.push(Action::Backward { stage, microbatch });
                if microbatch + ahead < num_microbatches {
                    list.push(Action::Forward { stage, microbatch: microbatch + ahead });
                }
            }
            list
        })
    }

    /// Forward passes only: what validation runs.
    #[must_use]
    pub fn forward_only(num_stages: usize, num_microbatches: usize) -> Schedule {
        one_stage_a_rank("forward", num_stages, num_microbatches, |stage| {
            (0..num_microbatches).map(|microbatch| Action::Forward { stage, microbatch }).collect()
        })
    }
}

fn one_stage_a_rank(
    name: &str,
    num_stages: usize,
    num_microbatches: usize,
    list: impl Fn(usize) -> Vec<Action>,
) -> Schedule {
    Schedule {
        name: name.to_string(),
        num_microbatches,
        place: (0..num_stages).collect(),
        ranks: (0..num_stages).map(list).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(schedule: &Schedule) -> Vec<String> {
        schedule.to_string().lines().map(str::to_string).collect()
    }

    #[test]
    fn lists_by_hand() {
        assert_eq!(lines(&Schedule::gpipe(2, 2)), ["0: F0.0 F0.1 B0.0 B0.1", "1: F1.0 F1.1 B1.0 B1.1"]);
        assert_eq!(
            lines(&Schedule::one_f_one_b(3, 4)),
            [
                "0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
                "1: F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
                "2: F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
            ]
        );
        assert_eq!(
            lines(&Schedule::one_f_one_b(2, 1).with_transfers(&[(0, 1)])),
            ["0: F0.0 S0>1.0 R1>0.0 B0.0", "1: R0>1.0 F1.0 B1.0 S1>0.0"]
        );
        assert!(Schedule::named("zigzag", 2, 2).unwrap_err().to_string().contains("gpipe, 1f1b"));
        assert!(Schedule::named("gpipe", 2, 0).is_err());
    }
}
