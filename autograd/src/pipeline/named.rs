//! Schedules by name.

use super::action::{PASSES_MAX, Schedule};
use super::schedule::check_counts;
use super::simulate::PassTimes;
use shardgrad_dist::{Error, Kind, Result};

/// The named schedules. `interleaved` takes a number of stages per rank, as in `interleaved-3` (default 2); `searched`
/// takes a number of microbatches that a rank may hold, as in `searched-6` (default: as many as 1F1B).
#[doc(alias = "1F1B")]
#[doc(alias = "GPipe")]
#[doc(alias = "zero bubble")]
#[doc(alias = "ZB-V")]
#[doc(alias = "DualPipe")]
pub const NAMES: [&str; 10] =
    ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v", "searched"];

/// The largest number of stages per rank.
const CHUNKS_MAX: usize = 1024;

impl Schedule {
    /// A schedule by its name, one of [`NAMES`]. `searched` searches for passes of equal length.
    ///
    /// # Errors
    /// `Kind::Config` for another name, no rank or microbatch, an unsuitable number of microbatches, more than 1024
    /// stages per rank, and lists of more than 2^21 forward passes.
    pub fn named(name: &str, num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        let even = PassTimes { forward: 1.0, input: 1.0, weight: 1.0 };
        Schedule::named_for(name, (num_ranks, num_microbatches), even, 0.0)
    }

    /// As [`Schedule::named`], with given times of a rank's passes and of transfers for a searched schedule.
    ///
    /// # Errors
    /// As [`Schedule::named`].
    pub fn named_for(
        name: &str,
        (num_ranks, num_microbatches): (usize, usize),
        times: PassTimes,
        transfer: f64,
    ) -> Result<Schedule> {
        check_counts(num_ranks, num_microbatches)?;
        check_size(name, num_ranks, num_microbatches)?;
        match name {
            "gpipe" => Schedule::gpipe(num_ranks, num_microbatches),
            "1f1b" => Schedule::one_f_one_b(num_ranks, num_microbatches),
            "zb-h1" => Schedule::zb_h1(num_ranks, num_microbatches),
            "zb-h2" => Schedule::zb_h2(num_ranks, num_microbatches),
            "zb-v" => Schedule::zb_v(num_ranks, num_microbatches),
            "v-half" => Schedule::v_half(num_ranks, num_microbatches),
            "v-min" => Schedule::v_min(num_ranks, num_microbatches),
            "dualpipe-v" => Schedule::dualpipe_v(num_ranks, num_microbatches),
            _ => match (in_flight_max(name, num_ranks), counted(name, "interleaved")) {
                (Some(in_flight_max), _) => {
                    // A larger bound changes nothing: no rank holds more passes.
                    let in_flight_max = in_flight_max.min(PASSES_MAX);
                    Schedule::searched((num_ranks, num_microbatches), in_flight_max, times, transfer)
                }
                (None, Some(chunks)) => {
                    Schedule::interleaved(num_ranks, num_microbatches, chunks.unwrap_or(2))
                }
                (None, None) => Err(Error::new(Kind::Config, format!("unknown schedule `{name}`"))
                    .detail("help", format!("use one of {}", NAMES.join(", ")))),
            },
        }
    }
}

/// Refuses lists that are too long.
fn check_size(name: &str, num_ranks: usize, num_microbatches: usize) -> Result<()> {
    let chunks = counted(name, "interleaved").map_or(1, |count| count.unwrap_or(2));
    if chunks > CHUNKS_MAX {
        let why = format!("`{name}`: a pipeline rank has at most {CHUNKS_MAX} stages");
        return Err(Error::new(Kind::Config, why)
            .detail("help", "use a smaller number of stages per rank, such as interleaved-2"));
    }
    let passes = num_ranks.checked_mul(num_microbatches).and_then(|n| n.checked_mul(chunks));
    if passes.is_some_and(|n| n <= PASSES_MAX) {
        return Ok(());
    }
    let why = format!(
        "{num_ranks} ranks and {num_microbatches} microbatches of `{name}` are too many: lists have at most {PASSES_MAX} \
         forward passes"
    );
    Err(Error::new(Kind::Config, why).detail("help", "use fewer ranks or microbatches"))
}

/// The number of microbatches that a rank may hold in a searched schedule of this name; `None` for other names.
#[must_use]
pub fn in_flight_max(name: &str, num_ranks: usize) -> Option<usize> {
    counted(name, "searched").map(|count| count.unwrap_or(num_ranks))
}

/// The count at the end of a name (`word-3`), `usize::MAX` if it is larger than that; `Some(None)` for the bare word,
/// `None` for other names.
fn counted(name: &str, word: &str) -> Option<Option<usize>> {
    match name.strip_prefix(word)? {
        "" => Some(None),
        rest => {
            let digits = rest.strip_prefix('-')?;
            let is_count = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            is_count.then(|| digits.parse().unwrap_or(usize::MAX)).filter(|n| *n > 0).map(Some)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::list_scheduling::ScheduleSearch;
    use super::*;

    #[test]
    fn unknown_and_invalid_names_are_refused() {
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
            assert!(error.message().contains("unknown schedule"), "{error}");
        }
        for name in NAMES {
            assert!(Schedule::named(name, 4, 8).is_ok(), "{name}");
        }
    }

    /// By all constructors and names.
    #[test]
    fn schedules_without_ranks_stages_or_microbatches_are_refused() {
        let even = PassTimes { forward: 1.0, input: 1.0, weight: 1.0 };
        for (p, m) in [(0, 0), (0, 4), (2, 0)] {
            let mut made = vec![
                Schedule::gpipe(p, m),
                Schedule::one_f_one_b(p, m),
                Schedule::zb_h1(p, m),
                Schedule::zb_h2(p, m),
                Schedule::zb_v(p, m),
                Schedule::v_half(p, m),
                Schedule::v_min(p, m),
                Schedule::dualpipe_v(p, m),
                Schedule::interleaved(p, m, 2),
                Schedule::searched((p, m), 4, even, 0.0),
            ];
            made.extend(NAMES.map(|name| Schedule::named(name, p, m)));
            assert!(made.into_iter().all(|made| made.unwrap_err().kind() == Kind::Config), "{p} {m}");
        }
        let search = |stage_ranks: Vec<usize>, num_microbatches: usize, num_times: usize| {
            let times = vec![even; num_times];
            ScheduleSearch { stage_ranks, num_microbatches, live_max: 4, times, transfer: 0.0 }
                .run("searched")
        };
        let other = [
            Schedule::interleaved(2, 4, 0),
            Schedule::forward_only(&[], 1, 1),
            Schedule::forward_only(&[], 0, 1),
            Schedule::forward_only(&[0], 0, 1),
            Schedule::forward_only(&[0], 1, 0),
            Schedule::forward_only(&[0, 2], 2, 1),
            search(vec![], 4, 0),
            search(vec![0, 1], 0, 2),
            search(vec![0, 1], 4, 1),
        ];
        assert!(other.into_iter().all(|made| made.unwrap_err().kind() == Kind::Config));
    }

    #[test]
    fn too_long_schedules_are_refused() {
        let error_text = |name: &str, ranks, microbatches| {
            let error = Schedule::named(name, ranks, microbatches).unwrap_err();
            assert_eq!(error.kind(), Kind::Config);
            error.message().to_string()
        };
        for many in ["1025", "18446744073709551615", "99999999999999999999"] {
            let name = format!("interleaved-{many}");
            assert_eq!(error_text(&name, 4, 8), format!("`{name}`: a pipeline rank has at most 1024 stages"));
        }
        for (name, ranks, microbatches) in [
            ("1f1b", 1 << 31, 8),
            ("zb-v", 4, 1 << 31),
            ("searched", usize::MAX, 2),
            ("interleaved-1024", 64, 64),
        ] {
            let text = error_text(name, ranks, microbatches);
            assert!(text.ends_with("are too many: lists have at most 2097152 forward passes"), "{text}");
        }
        for name in ["searched-18446744073709551615", "interleaved-1024"] {
            assert!(Schedule::named(name, 2, 4).is_ok(), "{name}");
        }
    }

    #[test]
    fn searched_schedule_keeps_the_bound_in_its_name() {
        for (name, in_flight_max) in [("searched", 4), ("searched-3", 3), ("searched-8", 8)] {
            let schedule = Schedule::named(name, 4, 12).unwrap();
            let links: Vec<(usize, usize)> = (1..schedule.num_stages()).map(|s| (s - 1, s)).collect();
            let peaks = schedule.with_transfers(&links).verify(&links).unwrap().peak_live;
            let stages = schedule.num_stages() / 4;
            assert!(peaks.iter().all(|n| *n <= in_flight_max * stages), "{name}: {peaks:?}");
        }
        assert!(Schedule::named("searched-x", 4, 8).unwrap_err().message().contains("unknown schedule"));
    }

    /// `bench pipeline` measures the time (under a second for 64 ranks and 512 microbatches, on an idle machine); this
    /// test makes and verifies all of them, without a time limit.
    #[test]
    fn named_schedules_verify_for_64_ranks_and_512_microbatches() {
        for name in NAMES {
            let schedule = Schedule::named(name, 64, 512).unwrap();
            let links: Vec<(usize, usize)> = (1..schedule.num_stages()).map(|s| (s - 1, s)).collect();
            let peaks = schedule.with_transfers(&links).verify(&links).unwrap().peak_live;
            assert_eq!(peaks.len(), 64, "{name}");
        }
    }
}
