//! V-shaped schedules: rank i has stages i and 2p - 1 - i, so that the first rank has the first and the last stage, and
//! all ranks hold equally much.
//!
//! The order of forward passes and input gradients has a closed form; weight gradients fill the gaps, for passes of
//! equal length. The formulas below count passes of one stage, of which a rank has 6m; in 1F1B a rank waits for 6 (p -
//! 1) of them. After Qi et al., arXiv 2401.10241 (ZB-V) and arXiv 2405.15362 (V-Half, V-Min).

use super::action::{Action, Schedule};
use super::list_scheduling::{Policy, ScheduleSearch};
use super::schedule::check_counts;
use super::simulate::PassTimes;
use shardgrad_dist::Result;

/// The next pass of a rank: forward (F) or input gradient (I), in its first (0) or second (1) stage.
#[derive(Clone, Copy)]
enum Next {
    F0,
    F1,
    I0,
    I1,
}

use Next::{F0, F1, I0, I1};

/// The order of forward passes and input gradients on each rank.
pub(super) type Orders = Vec<Vec<Action>>;

impl Schedule {
    /// ZB-V: the memory of 1F1B (2p passes on each rank), and no rank waits between its first and last pass with at
    /// least 2p microbatches (p - 1 passes otherwise).
    ///
    /// # Errors
    /// As [`Schedule::gpipe`].
    #[doc(alias = "zero bubble")]
    #[doc(alias = "ZB-V")]
    pub fn zb_v(num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        check_counts(num_ranks, num_microbatches)?;
        let orders = zb_v_orders(num_ranks, num_microbatches);
        Ok(fill_weight_gradients("zb-v", num_ranks, num_microbatches, &orders, 2 * num_ranks))
    }

    /// V-Half: about half the memory of 1F1B (p + 2 passes); a rank waits for at most 3 (p - 1) passes, half as long as
    /// in 1F1B.
    ///
    /// # Errors
    /// As [`Schedule::gpipe`].
    pub fn v_half(num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        check_counts(num_ranks, num_microbatches)?;
        let orders = v_half_orders(num_ranks, num_microbatches);
        Ok(fill_weight_gradients("v-half", num_ranks, num_microbatches, &orders, num_ranks + 2))
    }

    /// V-Min: about a third of the memory of 1F1B (2p / 3 + 2 passes, rounded up); a rank waits for at most 4 (p - 1)
    /// passes, two thirds as long as in 1F1B.
    ///
    /// # Errors
    /// As [`Schedule::gpipe`].
    pub fn v_min(num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        check_counts(num_ranks, num_microbatches)?;
        let orders = v_min_orders(num_ranks, num_microbatches);
        Ok(fill_weight_gradients(
            "v-min",
            num_ranks,
            num_microbatches,
            &orders,
            (2 * num_ranks).div_ceil(3) + 2,
        ))
    }
}

/// The pipeline rank of each stage of a V.
pub(super) fn stage_ranks(num_ranks: usize) -> Vec<usize> {
    (0..num_ranks).chain((0..num_ranks).rev()).collect()
}

/// Fills the gaps of an order with weight gradients, for passes of equal length.
fn fill_weight_gradients(
    name: &str,
    p: usize,
    num_microbatches: usize,
    orders: &Orders,
    live_max: usize,
) -> Schedule {
    let times = vec![PassTimes { forward: 1.0, input: 1.0, weight: 1.0 }; 2 * p];
    let search =
        ScheduleSearch { stage_ranks: stage_ranks(p), num_microbatches, live_max, times, transfer: 0.0 };
    search.list_schedule(name, Policy::Order(orders)).expect("an order of even passes comes to its end")
}

/// As many forward passes as fit before the first gradients arrive; then the second stage alone until gradients of the
/// first one arrive; then both in turn.
pub(super) fn zb_v_orders(p: usize, num_microbatches: usize) -> Orders {
    // The order for more microbatches, without the surplus ones, is also valid.
    let m = num_microbatches.max(2 * p);
    let order = |rank: usize| {
        let (below, above) = (p - 1 - rank, rank + 1);
        let turns: [(usize, &[Next]); 7] = [
            (2 * below, &[F0]),
            (above, &[F0, F1]),
            (below, &[I1, F1]),
            (m + above - 2 * p, &[I1, F0, I0, F1]),
            (below, &[I1, I0, F1]),
            (above, &[I1, I0]),
            (below, &[I0]),
        ];
        let mut done = [0; 4];
        let mut order = Vec::with_capacity(4 * m);
        for (times, turn) in turns {
            for next in (0..times).flat_map(|_| turn) {
                let microbatch = done[*next as usize];
                done[*next as usize] += 1;
                order.extend((microbatch < num_microbatches).then(|| action(p, rank, *next, microbatch)));
            }
        }
        order
    };
    (0..p).map(order).collect()
}

/// Values take two passes per rank on the way down and one on the way up; gradients likewise.
pub(super) fn v_half_orders(p: usize, num_microbatches: usize) -> Orders {
    let turns = if p.is_multiple_of(2) { [4, 2, 4] } else { [1, 2, 1] };
    blocks(p, num_microbatches, [2, 1, 2, 1], turns)
}

/// Values and gradients go from rank to rank without delay.
pub(super) fn v_min_orders(p: usize, num_microbatches: usize) -> Orders {
    let turns = if p.is_multiple_of(3) { [3, 1, 3] } else { [1, 1, 1] };
    blocks(p, num_microbatches, [1, 1, 1, 1], turns)
}

/// One block of passes, repeated every six: `delays` from rank to rank on the way down and up, for values and then for
/// gradients; `turns` between these four ways. With these delays no two passes of a rank fall on one time.
fn blocks(p: usize, num_microbatches: usize, delays: [usize; 4], turns: [usize; 3]) -> Orders {
    let [down, up, back_down, back_up] = delays;
    let up_from = down * (p - 1) + turns[0];
    let back_down_from = up_from + up * (p - 1) + turns[1];
    let back_up_from = back_down_from + back_down * (p - 1) + turns[2];
    let order = |rank: usize| {
        let below = p - 1 - rank;
        let block = [
            (down * rank, F0),
            (up_from + up * below, F1),
            (back_down_from + back_down * rank, I1),
            (back_up_from + back_up * below, I0),
        ];
        let repeated = |m: usize| block.map(|(time, next)| (time + 6 * m, action(p, rank, next, m)));
        let mut line: Vec<(usize, Action)> = (0..num_microbatches).flat_map(repeated).collect();
        line.sort_by_key(|(time, _)| *time);
        line.into_iter().map(|(_, action)| action).collect()
    };
    (0..p).map(order).collect()
}

fn action(p: usize, rank: usize, next: Next, microbatch: usize) -> Action {
    match next {
        F0 => Action::Forward { stage: rank, microbatch },
        F1 => Action::Forward { stage: 2 * p - 1 - rank, microbatch },
        I0 => Action::InputGradient { stage: rank, microbatch },
        I1 => Action::InputGradient { stage: 2 * p - 1 - rank, microbatch },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The longest wait of a rank between its first and last pass, in passes, and the largest number of live passes.
    fn measures(schedule: &Schedule) -> (f64, usize) {
        let n = schedule.num_stages();
        let links: Vec<(usize, usize)> = (1..n).map(|s| (s - 1, s)).collect();
        let verified = schedule.with_transfers(&links).verify(&links).unwrap();
        let even = vec![PassTimes { forward: 1.0, input: 1.0, weight: 1.0 }; n];
        let timeline = schedule.simulate(&links, &even, 0.0);
        let waits = timeline.longest_span() - 6.0 * schedule.num_microbatches as f64;
        (waits, verified.peak_live.into_iter().max().unwrap())
    }

    #[test]
    fn zb_v_matches_closed_forms() {
        for p in 1..=16 {
            for m in [2 * p, 2 * p + 1, 3 * p, 4 * p + 1] {
                let (waits, held) = measures(&Schedule::zb_v(p, m).unwrap());
                assert!(waits == 0.0 && held == 2 * p, "{p} {m}: {waits} {held}");
            }
            for m in [1, p.div_ceil(2), p, 2 * p - 1] {
                let (waits, held) = measures(&Schedule::zb_v(p, m).unwrap());
                assert!(waits <= 6.0 * (p as f64 - 1.0) && held <= 2 * p, "{p} {m}: {waits} {held}");
            }
        }
    }

    #[test]
    fn v_half_and_v_min_match_closed_forms() {
        for p in 1..=24 {
            let far = p as f64 - 1.0;
            for m in [2 * p, 3 * p + 1, 5 * p] {
                let (waits, held) = measures(&Schedule::v_half(p, m).unwrap());
                assert!(waits == (3.0 * far - 2.0).max(if p == 2 { 2.0 } else { 0.0 }), "{p} {m}: {waits}");
                assert!(held <= p + 2, "{p} {m}: {held}");
                let (waits, held) = measures(&Schedule::v_min(p, m).unwrap());
                assert!(waits == (4.0 * far - 1.0).max(0.0), "{p} {m}: {waits}");
                assert!(held <= (2 * p).div_ceil(3) + 2, "{p} {m}: {held}");
            }
            for m in [1, p.div_ceil(2), p] {
                measures(&Schedule::v_half(p, m).unwrap());
                measures(&Schedule::v_min(p, m).unwrap());
            }
        }
    }
}
