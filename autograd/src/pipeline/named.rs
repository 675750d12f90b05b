//! Schedules by name.

use super::action::Schedule;
use shardgrad_dist::{Error, Kind, Result};

/// The schedules that have a name; `interleaved` takes a number of stages a rank, as in `interleaved-3` (2 without one).
/// `zb-v` and `v-half` are [V-shaped](Schedule::v_shaped), with the memory of 1F1B and little more than half of it.
pub const NAMES: [&str; 7] = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half"];

impl Schedule {
    /// A schedule by its name: one of [`NAMES`].
    ///
    /// # Errors
    /// `Kind::Config` for another name, no rank or microbatch, and for a number of microbatches that it does not take.
    pub fn named(name: &str, num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        if num_ranks == 0 || num_microbatches == 0 {
            return Err(Error::new(Kind::Config, "a schedule has at least one rank and one microbatch"));
        }
        match name {
            "gpipe" => Ok(Schedule::gpipe(num_ranks, num_microbatches)),
            "1f1b" => Ok(Schedule::one_f_one_b(num_ranks, num_microbatches)),
            "zb-h1" => Ok(Schedule::zb_h1(num_ranks, num_microbatches)),
            "zb-h2" => Ok(Schedule::zb_h2(num_ranks, num_microbatches)),
            "zb-v" => Schedule::v_shaped(name, num_ranks, num_microbatches, 2 * num_ranks),
            "v-half" => Schedule::v_shaped(name, num_ranks, num_microbatches, num_ranks + 2),
            _ => match chunks(name) {
                Some(chunks) => Schedule::interleaved(num_ranks, num_microbatches, chunks),
                None => Err(Error::new(Kind::Config, format!("there is no schedule `{name}`"))
                    .detail("help", format!("use one of {}", NAMES.join(", ")))),
            },
        }
    }
}

/// How many stages a rank has in an interleaved schedule of this name.
fn chunks(name: &str) -> Option<usize> {
    match name.strip_prefix("interleaved")? {
        "" => Some(2),
        rest => rest.strip_prefix('-')?.parse().ok().filter(|n| *n > 0),
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
}
