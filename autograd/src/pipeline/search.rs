//! Searched schedules: the shortest order of passes that is found for given times and a memory bound.

use super::action::{Action, Schedule};
use super::list_scheduling::{PassKind, Policy, ScheduleSearch};
use super::schedule::{check_counts, check_stages};
use super::simulate::PassTimes;
use super::v_shaped::{self, Orders};
use shardgrad_dist::{Error, Kind, Result};

/// With more passes than this, the search tries only fixed orders and no greedy preferences.
const GREEDY_PASSES_MAX: usize = 50_000;

impl ScheduleSearch {
    /// Searches for the schedule that ends first, and among equals the one that holds the fewest live passes. The
    /// candidates are: the named schedules with these stages on these ranks; their orders of passes, with weight
    /// gradients where the given times leave room; and, up to 50,000 passes, 48 greedy list schedules. The result is
    /// never slower than a named schedule with the same stages and bound.
    ///
    /// # Errors
    /// `Kind::Config` if no order stays within the memory bound, without stages or microbatches, and if the number of
    /// times is not the number of stages.
    pub fn run(&self, name: &str) -> Result<Schedule> {
        check_stages(self.stage_ranks.len())?;
        check_counts(self.num_ranks(), self.num_microbatches)?;
        if self.times.len() != self.stage_ranks.len() {
            let text = format!(
                "the schedule has {} stages, times are given for {}",
                self.stage_ranks.len(),
                self.times.len()
            );
            return Err(Error::new(Kind::Config, text).detail("help", "give the times of each stage"));
        }
        let links: Vec<(usize, usize)> = (1..self.stage_ranks.len()).map(|s| (s - 1, s)).collect();
        let mut best: Option<((f64, usize), Schedule)> = None;
        for schedule in self.candidates(name) {
            let Some(held) = schedule.peak_live() else { continue };
            if held > self.live_max {
                continue;
            }
            let rank = (schedule.simulate(&links, &self.times, self.transfer).makespan(), held);
            if best.as_ref().is_none_or(|(least, _)| rank < *least) {
                best = Some((rank, schedule));
            }
        }
        best.map(|(_, schedule)| Schedule { name: name.to_string(), ..schedule }).ok_or_else(|| {
            let text = format!(
                "no order of {} stages keeps within {} live passes",
                self.stage_ranks.len(),
                self.live_max
            );
            Error::new(Kind::Config, text).detail("help", "raise the bound: searched-N with a larger N")
        })
    }

    fn candidates<'a>(&'a self, name: &'a str) -> Box<dyn Iterator<Item = Schedule> + 'a> {
        let (p, m) = (self.num_ranks(), self.num_microbatches);
        let (named, orders): (Vec<Schedule>, Vec<Orders>) = if self.stage_ranks == v_shaped::stage_ranks(p) {
            let named = [
                Schedule::zb_v(p, m),
                Schedule::v_half(p, m),
                Schedule::v_min(p, m),
                Schedule::dualpipe_v(p, m),
            ];
            (
                named.into_iter().flatten().collect(),
                vec![
                    v_shaped::zb_v_orders(p, m),
                    v_shaped::v_half_orders(p, m),
                    v_shaped::v_min_orders(p, m),
                ],
            )
        } else if self.stage_ranks.iter().copied().eq(0..p) {
            let named = [
                Schedule::one_f_one_b(p, m),
                Schedule::zb_h1(p, m),
                Schedule::zb_h2(p, m),
                Schedule::gpipe(p, m),
            ];
            (
                named.into_iter().flatten().collect(),
                (0..4).map(|steepness| self.alternating(p, steepness)).collect(),
            )
        } else {
            (Vec::new(), Vec::new())
        };
        let many = 3 * self.stage_ranks.len() * m > GREEDY_PASSES_MAX && !named.is_empty();
        let ordered = orders.into_iter().filter_map(move |o| self.list_schedule(name, Policy::Order(&o)));
        let preferences = preferences().into_iter().take(if many { 0 } else { 24 });
        let greedy = preferences.flat_map(|p| [Policy::Preference(p, 0), Policy::Preference(p, 1)]);
        let greedy = greedy.filter_map(move |policy| self.list_schedule(name, policy));
        Box::new(named.into_iter().chain(ordered).chain(greedy))
    }

    /// 1F1B orders with a warm-up of `steepness` forward passes for each later rank, up to the bound; then input
    /// gradients and forward passes in turn.
    fn alternating(&self, p: usize, steepness: usize) -> Orders {
        let order = |stage: usize| {
            let m = self.num_microbatches;
            let ahead = (steepness * (p - 1 - stage)).min(self.live_max.saturating_sub(1)).min(m);
            let forward = |microbatch| Action::Forward { stage, microbatch };
            let mut order: Vec<Action> = (0..ahead).map(forward).collect();
            for microbatch in 0..m {
                order.extend(Some(microbatch + ahead).filter(|next| *next < m).map(forward));
                order.push(Action::InputGradient { stage, microbatch });
            }
            order
        };
        (0..p).map(order).collect()
    }
}

/// All orders of the four choices.
fn preferences() -> Vec<[(PassKind, bool); 4]> {
    let choices = [
        (PassKind::Forward, true),
        (PassKind::Forward, false),
        (PassKind::Input, true),
        (PassKind::Input, false),
    ];
    let mut all = Vec::with_capacity(24);
    for a in 0..4 {
        for b in (0..4).filter(|b| *b != a) {
            for c in (0..4).filter(|c| ![a, b].contains(c)) {
                all.push([a, b, c, 6 - a - b - c].map(|i| choices[i]));
            }
        }
    }
    all
}

impl Schedule {
    /// The shortest schedule found for passes of the given times (summed over the stages of a rank), with one stage per
    /// rank or two in a V, where a rank holds at most `in_flight_max` microbatches.
    ///
    /// # Errors
    /// `Kind::Config` if no order is found, and without ranks or microbatches.
    pub fn searched(
        (num_ranks, num_microbatches): (usize, usize),
        in_flight_max: usize,
        times: PassTimes,
        transfer: f64,
    ) -> Result<Schedule> {
        let PassTimes { forward, input, weight } = times;
        let half = PassTimes { forward: forward / 2.0, input: input / 2.0, weight: weight / 2.0 };
        let search = |stage_ranks: Vec<usize>, each: PassTimes, live_max: usize| {
            let times = vec![each; stage_ranks.len()];
            let search = ScheduleSearch { stage_ranks, num_microbatches, live_max, times, transfer };
            search.run("searched").map(|schedule| (search, schedule))
        };
        let chain = search((0..num_ranks).collect(), times, in_flight_max);
        let v_shaped = search(v_shaped::stage_ranks(num_ranks), half, 2 * in_flight_max);
        let of_both = [chain?, v_shaped?];
        let shorter = of_both.into_iter().min_by(|a, b| a.0.span(&a.1).total_cmp(&b.0.span(&b.1)));
        Ok(shorter.expect("there are two").1)
    }

    /// The largest number of live passes of a rank, from the lists alone; `None` if a list has more backward than
    /// forward passes.
    fn peak_live(&self) -> Option<usize> {
        let most = |list: &Vec<Action>| {
            let mut live: usize = 0;
            let mut most = 0;
            for action in list {
                match action {
                    Action::Forward { .. } => live += 1,
                    Action::Backward { .. } | Action::WeightGradient { .. } => live = live.checked_sub(1)?,
                    _ => {}
                }
                most = most.max(live);
            }
            Some(most)
        };
        self.ranks.iter().map(most).try_fold(0, |all, most| Some(all.max(most?)))
    }
}

impl ScheduleSearch {
    /// The end of the last pass of a schedule, with the times of this search.
    #[doc(alias = "makespan")]
    #[must_use]
    pub fn span(&self, schedule: &Schedule) -> f64 {
        let links: Vec<(usize, usize)> = (1..self.stage_ranks.len()).map(|s| (s - 1, s)).collect();
        schedule.simulate(&links, &self.times, self.transfer).makespan()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_verifies_keeps_its_bound_and_beats_named_schedules() {
        let uneven = |stage: usize| PassTimes {
            forward: 1.0 + 0.3 * (stage % 3) as f64,
            input: 1.2 - 0.2 * (stage % 2) as f64,
            weight: 0.4 + 0.1 * (stage % 4) as f64,
        };
        for p in [1, 2, 3, 4, 8] {
            for m in [1, 3, 2 * p, 3 * p + 1] {
                for (stage_ranks, live_max) in [
                    ((0..p).collect::<Vec<usize>>(), p),
                    ((0..p).collect(), p.div_ceil(2)),
                    (v_shaped::stage_ranks(p), 2 * p),
                    (v_shaped::stage_ranks(p), p + 2),
                ] {
                    let n = stage_ranks.len();
                    let times: Vec<PassTimes> = (0..n).map(uneven).collect();
                    let search =
                        ScheduleSearch { stage_ranks, num_microbatches: m, live_max, times, transfer: 0.1 };
                    let schedule = search.run("searched").unwrap();
                    let links: Vec<(usize, usize)> = (1..n).map(|s| (s - 1, s)).collect();
                    let peaks = schedule.with_transfers(&links).verify(&links).unwrap().peak_live;
                    assert!(peaks.iter().all(|n| *n <= live_max), "{p} {m}: {peaks:?}");
                    for name in ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"] {
                        let other = Schedule::named(name, p, m).unwrap();
                        if other.stage_ranks == search.stage_ranks && other.peak_live().unwrap() <= live_max {
                            assert!(search.span(&schedule) <= search.span(&other), "{name} {p} {m}");
                        }
                    }
                }
            }
        }
        let stage_ranks = v_shaped::stage_ranks(4);
        let times = vec![uneven(0); 8];
        let tight = ScheduleSearch { stage_ranks, num_microbatches: 8, live_max: 1, times, transfer: 0.0 };
        assert!(tight.run("v").unwrap_err().message().contains("keeps within 1 live passes"));
    }

    #[test]
    fn search_is_faster_for_uneven_stages() {
        // No input gradients on the first stage, and another load on the last: a schedule for even stages leaves gaps.
        let search = |live_max: usize, last: f64, weight: f64| {
            let mut times = vec![PassTimes { forward: 1.0, input: 1.0, weight }; 4];
            times[0].input = 0.0;
            times[3] = PassTimes { forward: last, input: last, weight: weight * last };
            ScheduleSearch {
                stage_ranks: vec![0, 1, 2, 3],
                num_microbatches: 8,
                live_max,
                times,
                transfer: 0.5,
            }
        };
        let span = |search: &ScheduleSearch, name: &str| search.span(&Schedule::named(name, 4, 8).unwrap());
        // With five microbatches per rank it is as fast as ZB-H2 with seven,
        let five = search(5, 1.2, 0.8);
        let found = five.span(&five.run("searched").unwrap());
        assert!(found < 0.95 * span(&five, "zb-h1") && found < 1.001 * span(&five, "zb-h2"), "{found}");
        // and with six it is faster.
        let six = search(6, 0.5, 0.5);
        let found = six.span(&six.run("searched").unwrap());
        assert!(found < 0.85 * span(&six, "zb-h1") && found < 0.98 * span(&six, "zb-h2"), "{found}");
    }
}
