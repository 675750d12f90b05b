//! The closed-form schedules: pure functions from the numbers of ranks and microbatches to action lists.

use super::action::{Action, Schedule};
use shardgrad_dist::{Error, Kind, Result};

impl Schedule {
    /// GPipe: all forward passes, then all backward passes. Huang et al., arXiv 1811.06965.
    ///
    /// # Errors
    /// `Kind::Config` without ranks or microbatches.
    #[doc(alias = "GPipe")]
    #[doc(alias = "fill-drain")]
    pub fn gpipe(num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        one_stage_per_rank("gpipe", num_ranks, num_microbatches, |stage| {
            let forward = (0..num_microbatches).map(move |microbatch| Action::Forward { stage, microbatch });
            let backward =
                (0..num_microbatches).map(move |microbatch| Action::Backward { stage, microbatch });
            forward.chain(backward).collect()
        })
    }

    /// 1F1B: a warm-up of as few forward passes as the later stages need, then forward and backward passes in turn, so
    /// that stage s of p holds at most p - s microbatches. Narayanan et al., arXiv 2104.04473, section 2.2.
    ///
    /// # Errors
    /// As [`Schedule::gpipe`].
    #[doc(alias = "1F1B")]
    #[doc(alias = "PipeDream-Flush")]
    pub fn one_f_one_b(num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        one_stage_per_rank("1f1b", num_ranks, num_microbatches, |stage| {
            let backward = |microbatch| vec![Action::Backward { stage, microbatch }];
            alternating(stage, num_ranks - stage - 1, num_microbatches, backward)
        })
    }

    /// ZB-H1: the order of [`Schedule::one_f_one_b`] with split backward passes. The weight gradients of stage s come s
    /// passes late, to fill the bubble, with no more memory. Qi et al., arXiv 2401.10241.
    ///
    /// # Errors
    /// As [`Schedule::gpipe`].
    #[doc(alias = "zero bubble")]
    #[doc(alias = "ZB-H1")]
    pub fn zb_h1(num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        one_stage_per_rank("zb-h1", num_ranks, num_microbatches, |stage| {
            split_backward(stage, num_ranks - stage - 1, stage, num_microbatches)
        })
    }

    /// ZB-H2: as [`Schedule::zb_h1`] with up to twice the warm-up passes and up to twice the memory, so that a rank
    /// waits only for its first pass. Qi et al., arXiv 2401.10241.
    ///
    /// # Errors
    /// As [`Schedule::gpipe`].
    #[doc(alias = "zero bubble")]
    #[doc(alias = "ZB-H2")]
    pub fn zb_h2(num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        one_stage_per_rank("zb-h2", num_ranks, num_microbatches, |stage| {
            split_backward(stage, 2 * (num_ranks - stage) - 2, 2 * stage, num_microbatches)
        })
    }

    /// Interleaved 1F1B: each rank has `num_chunks` stages (model chunks), every p-th one, so that a rank starts
    /// sooner: a smaller bubble for more transfers. Narayanan et al., arXiv 2104.04473, section 2.2.
    ///
    /// # Errors
    /// `Kind::Config` without ranks, stages or microbatches, and if the number of microbatches is not a multiple of the
    /// ranks.
    #[doc(alias = "interleaved 1F1B")]
    #[doc(alias = "virtual pipeline")]
    #[doc(alias = "looped")]
    pub fn interleaved(num_ranks: usize, num_microbatches: usize, num_chunks: usize) -> Result<Schedule> {
        let (p, m, v) = (num_ranks, num_microbatches, num_chunks);
        let none = |what: &str, help: &str| {
            let text = format!("an interleaved schedule needs {what}");
            Err(Error::new(Kind::Config, text).detail("help", help.to_string()))
        };
        if p == 0 {
            return none("at least one rank", "give the size of the pipeline axis");
        }
        if v == 0 {
            return none("at least one stage per rank", "use 2 stages per rank, or 1 for the order of 1f1b");
        }
        if m == 0 {
            return none("at least one microbatch", "use as many microbatches as ranks, or a multiple");
        }
        if !m.is_multiple_of(p) {
            let near = m.div_ceil(p) * p;
            let text = format!(
                "interleaved-{v}: the number of microbatches ({m}) is not a multiple of the number of ranks ({p})"
            );
            return Err(Error::new(Kind::Config, text).detail("help", format!("use {near} microbatches")));
        }
        // The k-th pass of a rank: p microbatches in its first stage, the same in its second, and so on.
        let turn = |k: usize| (k % (p * v) / p, k / (p * v) * p + k % p);
        let list = |rank: usize| {
            let ahead = ((p - rank - 1) * 2 + (v - 1) * p).min(m * v);
            let forward = |k: usize| {
                let (chunk, microbatch) = turn(k);
                Action::Forward { stage: chunk * p + rank, microbatch }
            };
            let backward = |k: usize| {
                let (chunk, microbatch) = turn(k);
                Action::Backward { stage: (v - 1 - chunk) * p + rank, microbatch }
            };
            let mut list: Vec<Action> = (0..ahead).map(forward).collect();
            for k in 0..m * v {
                list.extend(Some(k + ahead).filter(|k| *k < m * v).map(forward));
                list.push(backward(k));
            }
            list
        };
        Ok(Schedule {
            name: format!("interleaved-{v}"),
            num_microbatches,
            stage_ranks: (0..p * v).map(|stage| stage % p).collect(),
            ranks: (0..p).map(list).collect(),
        })
    }

    /// Forward passes only, for inference: a rank runs all microbatches of its first stage, then those of its next.
    /// `stage_ranks` gives the pipeline rank of each stage.
    ///
    /// # Errors
    /// `Kind::Config` without ranks, stages or microbatches, and for a rank that does not exist.
    pub fn forward_only(
        stage_ranks: &[usize],
        num_ranks: usize,
        num_microbatches: usize,
    ) -> Result<Schedule> {
        check_stages(stage_ranks.len())?;
        check_counts(num_ranks, num_microbatches)?;
        if let Some(lost) = stage_ranks.iter().find(|rank| **rank >= num_ranks) {
            let text = format!("a stage is on rank {lost}, but there are {num_ranks} ranks");
            return Err(
                Error::new(Kind::Config, text).detail("help", "give each stage a rank, counted from 0")
            );
        }
        let here = |rank: usize| {
            let stages = (0..stage_ranks.len()).filter(move |stage| stage_ranks[*stage] == rank);
            let passes = move |stage| {
                (0..num_microbatches).map(move |microbatch| Action::Forward { stage, microbatch })
            };
            stages.flat_map(passes).collect()
        };
        Ok(Schedule {
            name: "forward".to_string(),
            num_microbatches,
            stage_ranks: stage_ranks.to_vec(),
            ranks: (0..num_ranks).map(here).collect(),
        })
    }
}

/// Refuses schedules without ranks or microbatches.
pub(super) fn check_counts(num_ranks: usize, num_microbatches: usize) -> Result<()> {
    if num_ranks > 0 && num_microbatches > 0 {
        return Ok(());
    }
    let text = "a schedule needs at least one rank and one microbatch";
    let there = format!("{num_ranks} ranks, {num_microbatches} microbatches");
    Err(Error::new(Kind::Config, text).detail("asked for", there))
}

/// Refuses schedules without stages.
pub(super) fn check_stages(num_stages: usize) -> Result<()> {
    if num_stages > 0 {
        return Ok(());
    }
    Err(Error::new(Kind::Config, "a schedule needs at least one stage")
        .detail("help", "give each rank at least one stage"))
}

/// `ahead` warm-up forward passes, then in turn one forward pass and the actions `backward` of the next microbatch.
fn alternating(
    stage: usize,
    ahead: usize,
    num_microbatches: usize,
    backward: impl Fn(usize) -> Vec<Action>,
) -> Vec<Action> {
    let ahead = ahead.min(num_microbatches);
    let mut list: Vec<Action> = (0..ahead).map(|microbatch| Action::Forward { stage, microbatch }).collect();
    for done in 0..num_microbatches {
        if done + ahead < num_microbatches {
            list.push(Action::Forward { stage, microbatch: done + ahead });
        }
        list.extend(backward(done));
    }
    list
}

/// As [`alternating`], with split backward passes: weight gradients come `late` microbatches after input gradients.
fn split_backward(stage: usize, ahead: usize, late: usize, num_microbatches: usize) -> Vec<Action> {
    let mut list = alternating(stage, ahead, num_microbatches, |microbatch| {
        let weights = microbatch.checked_sub(late);
        let second = weights.map(|microbatch| Action::WeightGradient { stage, microbatch });
        [Action::InputGradient { stage, microbatch }].into_iter().chain(second).collect()
    });
    let left = num_microbatches.saturating_sub(late)..num_microbatches;
    list.extend(left.map(|microbatch| Action::WeightGradient { stage, microbatch }));
    list
}

fn one_stage_per_rank(
    name: &str,
    num_ranks: usize,
    num_microbatches: usize,
    list: impl Fn(usize) -> Vec<Action>,
) -> Result<Schedule> {
    check_counts(num_ranks, num_microbatches)?;
    Ok(Schedule {
        name: name.to_string(),
        num_microbatches,
        stage_ranks: (0..num_ranks).collect(),
        ranks: (0..num_ranks).map(list).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(schedule: &Schedule) -> Vec<String> {
        schedule.to_string().lines().map(str::to_string).collect()
    }

    #[test]
    fn schedules_match_hand_written_lists() {
        assert_eq!(
            lines(&Schedule::gpipe(2, 2).unwrap()),
            ["0: F0.0 F0.1 B0.0 B0.1", "1: F1.0 F1.1 B1.0 B1.1"]
        );
        assert_eq!(
            lines(&Schedule::one_f_one_b(3, 4).unwrap()),
            [
                "0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
                "1: F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
                "2: F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
            ]
        );
        assert_eq!(
            lines(&Schedule::one_f_one_b(2, 1).unwrap().with_transfers(&[(0, 1)])),
            ["0: F0.0 S0>1.0 R1>0.0 B0.0 G0", "1: R0>1.0 F1.0 B1.0 S1>0.0 G1"]
        );
        assert_eq!(
            lines(&Schedule::zb_h1(2, 3).unwrap()),
            [
                "0: F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
                "1: F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2"
            ]
        );
        assert_eq!(
            lines(&Schedule::zb_h2(2, 3).unwrap())[0],
            "0: F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2"
        );
        assert_eq!(
            lines(&Schedule::interleaved(2, 2, 2).unwrap()),
            ["0: F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1", "1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"]
        );
    }

    #[test]
    fn invalid_interleaved_counts_are_refused() {
        for (of, what, help) in [
            ([0, 4, 2], "needs at least one rank", "size of the pipeline axis"),
            ([2, 4, 0], "needs at least one stage per rank", "use 2 stages per rank"),
            ([2, 0, 2], "needs at least one microbatch", "as many microbatches as ranks"),
            (
                [2, 5, 2],
                "the number of microbatches (5) is not a multiple of the number of ranks (2)",
                "use 6 microbatches",
            ),
        ] {
            let error = Schedule::interleaved(of[0], of[1], of[2]).unwrap_err();
            assert!(error.message().contains(what), "{error}");
            assert!(error.details().iter().any(|(_, text)| text.contains(help)), "{error}");
        }
    }
}
