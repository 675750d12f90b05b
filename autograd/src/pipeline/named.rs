//! Schedules by name.

use super::action::Schedule;
use super::simulate::Times;
use shardgrad_dist::{Error, Kind, Result};

/// The schedules that have a name. `interleaved` takes a number of stages a rank, as in `interleaved-3` (2 without one);
/// `searched` a number of microbatches that a rank may hold, as in `searched-6` (as many as 1F1B without one).
pub const NAMES: [&str; 10] =
    ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v", "searched"];

impl Schedule {
    /// A schedule by its name: one of [`NAMES`]. What is searched is searched for even passes.
    ///
    /// # Errors
    /// `Kind::Config` for another name, no rank or microbatch, and for a number of microbatches that it does not take.
    pub fn named(name: &str, num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        let even = Times { forward: 1.0, input: 1.0, weight: 1.0 };
        Schedule::named_for(name, (num_ranks, num_microbatches), even, 0.0)
    }

    /// As [`Schedule::named`], where the passes of a rank take other times and transfers take `transfer`, for those that are
    /// searched.
    ///
    /// # Errors
    /// As [`Schedule::named`].
    pub fn named_for(
        name: &str,
        (num_ranks, num_microbatches): (usize, usize),
        times: Times,
        transfer: f64,
    ) -> Result<Schedule> {
        if num_ranks == 0 || num_microbatches == 0 {
            return Err(Error::new(Kind::Config, "a schedule has at least one rank and one microbatch"));
        }
        Ok(match name {
            "gpipe" => Schedule::gpipe(num_ranks, num_microbatches),
            "1f1b" => Schedule::one_f_one_b(num_ranks, num_microbatches),
            "zb-h1" => Schedule::zb_h1(num_ranks, num_microbatches),
            "zb-h2" => Schedule::zb_h2(num_ranks, num_microbatches),
            "zb-v" => Schedule::zb_v(num_ranks, num_microbatches),
            "v-half" => Schedule::v_half(num_ranks, num_microbatches),
            "v-min" => Schedule::v_min(num_ranks, num_microbatches),
            "dualpipe-v" => Schedule::dualpipe_v(num_ranks, num_microbatches),
            _ => match (held_max(name, num_ranks), counted(name, "interleaved")) {
                (Some(held_max), _) => {
                    Schedule::searched((num_ranks, num_microbatches), held_max, times, transfer)?
                }
                (None, Some(chunks)) => {
                    Schedule::interleaved(num_ranks, num_microbatches, chunks.unwrap_or(2))?
                }
                (None, None) => {
                    return Err(Error::new(Kind::Config, format!("there is no schedule `{name}`"))
                        .detail("help", format!("use one of {}", NAMES.join(", "))));
                }
            },
        })
    }
}

/// How many microbatches a rank may hold in a searched schedule of this name; `None` if it is the name of another one.
#[must_use]
pub fn held_max(name: &str, num_ranks: usize) -> Option<usize> {
    counted(name, "searched").map(|count| count.unwrap_or(num_ranks))
}

/// The count behind a word; `None` if the name is not made so.
fn counted(name: &str, word: &str) -> Option<Option<usize>> {
    match name.strip_prefix(word)? {
        "" => Some(None),
        rest => rest.strip_prefix('-')?.parse().ok().filter(|n| *n > 0).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_schedule_is_refused() {
        assert!(Schedule::named("zigzag", 2, 2).unwrap_err().to_string().contains("gpipe, 1f1b"));
        assert!(Schedule::named("gpipe", 2, 0).is_err());
        let error = Schedule::named("interleaved-3", 4, 6).unwrap_err();
        assert!(error.to_string().contains("use 8 microbatches"), "{error}");
        assert!(
            Schedule::named("interleaved-x", 4, 8).is_err()
                && Schedule::named("interleaved-0", 4, 8).is_err()
        );
        for name in ["interleaved-x", "interleaved-0", "interleaved4", "interleavedly", "interleaved-"] {
            let error = Schedule::named(name, 4, 8).unwrap_err();
            assert!(error.message().contains("there is no schedule"), "{error}");
        }
        for name in NAMES {
            assert!(Schedule::named(name, 4, 8).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_searched_schedule_keeps_to_the_memory_that_its_name_says() {
        for (name, held_max) in [("searched", 4), ("searched-3", 3), ("searched-8", 8)] {
            let schedule = Schedule::named(name, 4, 12).unwrap();
            let links: Vec<(usize, usize)> = (1..schedule.num_stages()).map(|s| (s - 1, s)).collect();
            let peaks = schedule.with_transfers(&links).verify(&links).unwrap().peak_live;
            let stages = schedule.num_stages() / 4;
            assert!(peaks.iter().all(|n| *n <= held_max * stages), "{name}: {peaks:?}");
        }
        assert!(Schedule::named("searched-x", 4, 8).unwrap_err().message().contains("there is no schedule"));
    }

    /// 64 ranks and 512 microbatches in under a second each, on a quiet machine, is measured by `bench pipeline`; here all are
    /// made and proved, whatever that takes.
    #[test]
    fn long_lists_are_made_and_proved() {
        for name in NAMES {
            let schedule = Schedule::named(name, 64, 512).unwrap();
            let links: Vec<(usize, usize)> = (1..schedule.num_stages()).map(|s| (s - 1, s)).collect();
            let peaks = schedule.with_transfers(&links).verify(&links).unwrap().peak_live;
            assert_eq!(peaks.len(), 64, "{name}");
        }
    }
}
