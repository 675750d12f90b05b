//! Schedules that are searched: the order of passes that is shortest for given times under a bound of memory.

use super::action::{Action, Schedule};
use super::schedule::{check_counts, check_stages};
use super::simulate::Times;
use super::trial::{Pass, Policy, Search};
use super::vee::{self, Orders};
use shardgrad_dist::{Error, Kind, Result};

/// Beyond so many passes only orders are tried, and no preferences.
const PASSES_MANY: usize = 50_000;

impl Search {
    /// Tries the named schedules that put stages in these places; their orders, with the gradients of parameters where these
    /// times leave room; and, for fewer passes, 48 ways to choose greedily among the passes that can start first. Gives the one
    /// that ends first; among those, the one that holds least. It is never slower than a named schedule of the
    /// same places and bound.
    ///
    /// # Errors
    /// `Kind::Config` if no order stays within the bound of memory, without stages or microbatches, and if there are not as many
    /// times as stages.
    pub fn run(&self, name: &str) -> Result<Schedule> {
        check_stages(self.place.len())?;
        check_counts(self.num_ranks(), self.num_microbatches)?;
        if self.times.len() != self.place.len() {
            let text = format!("{} stages and the times of {}", self.place.len(), self.times.len());
            return Err(Error::new(Kind::Config, text).detail("help", "give the times of each stage"));
        }
        let links: Vec<(usize, usize)> = (1..self.place.len()).map(|s| (s - 1, s)).collect();
        let mut best: Option<((f64, usize), Schedule)> = None;
        for schedule in self.candidates(name) {
            let Some(held) = schedule.held() else { continue };
            if held > self.live_max {
                continue;
            }
            let rank = (schedule.simulate(&links, &self.times, self.transfer).makespan(), held);
            if best.as_ref().is_none_or(|(least, _)| rank < *least) {
                best = Some((rank, schedule));
            }
        }
        best.map(|(_, schedule)| Schedule { name: name.to_string(), ..schedule }).ok_or_else(|| {
            let text =
                format!("no order of {} stages holds at most {} passes", self.place.len(), self.live_max);
            Error::new(Kind::Config, text).detail("help", "allow more memory")
        })
    }

    fn candidates<'a>(&'a self, name: &'a str) -> Box<dyn Iterator<Item = Schedule> + 'a> {
        let (p, m) = (self.num_ranks(), self.num_microbatches);
        let (named, orders): (Vec<Schedule>, Vec<Orders>) = if self.place == vee::place(p) {
            let named = [
                Schedule::zb_v(p, m),
                Schedule::v_half(p, m),
                Schedule::v_min(p, m),
                Schedule::dualpipe_v(p, m),
            ];
            (
                named.into_iter().flatten().collect(),
                vec![vee::zb_v_orders(p, m), vee::v_half_orders(p, m), vee::v_min_orders(p, m)],
            )
        } else if self.place.iter().copied().eq(0..p) {
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
        let many = 3 * self.place.len() * m > PASSES_MANY && !named.is_empty();
        let ordered = orders.into_iter().filter_map(move |o| self.trial(name, Policy::Order(&o)));
        let preferences = preferences().into_iter().take(if many { 0 } else { 24 });
        let greedy = preferences.flat_map(|p| [Policy::Preference(p, 0), Policy::Preference(p, 1)]);
        let greedy = greedy.filter_map(move |policy| self.trial(name, policy));
        Box::new(named.into_iter().chain(ordered).chain(greedy))
    }

    /// On each rank forward passes ahead, `steepness` for each later rank, as many as the bound allows; then gradients of
    /// inputs and forward passes in turn.
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
fn preferences() -> Vec<[(Pass, bool); 4]> {
    let choices = [(Pass::Forward, true), (Pass::Forward, false), (Pass::Input, true), (Pass::Input, false)];
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
    /// The shortest order that is found for ranks whose passes take `times` (over all stages of a rank), with one stage on each
    /// or with two in the shape of a V, where a rank holds at most `held_max` microbatches.
    ///
    /// # Errors
    /// `Kind::Config` if no order is found, and without ranks or microbatches.
    pub fn searched(
        (num_ranks, num_microbatches): (usize, usize),
        held_max: usize,
        times: Times,
        transfer: f64,
    ) -> Result<Schedule> {
        let Times { forward, input, weight } = times;
        let half = Times { forward: forward / 2.0, input: input / 2.0, weight: weight / 2.0 };
        let search = |place: Vec<usize>, each: Times, live_max: usize| {
            let times = vec![each; place.len()];
            let search = Search { place, num_microbatches, live_max, times, transfer };
            search.run("searched").map(|schedule| (search, schedule))
        };
        let chain = search((0..num_ranks).collect(), times, held_max);
        let vee = search(vee::place(num_ranks), half, 2 * held_max);
        let of_both = [chain?, vee?];
        let shorter = of_both.into_iter().min_by(|a, b| a.0.span(&a.1).total_cmp(&b.0.span(&b.1)));
        Ok(shorter.expect("there are two").1)
    }

    /// How many passes a rank holds at most, by the lists alone; `None` if a list takes back more than it has.
    fn held(&self) -> Option<usize> {
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

impl Search {
    /// When the last pass of a schedule ends by the times of this search.
    #[must_use]
    pub fn span(&self, schedule: &Schedule) -> f64 {
        let links: Vec<(usize, usize)> = (1..self.place.len()).map(|s| (s - 1, s)).collect();
        schedule.simulate(&links, &self.times, self.transfer).makespan()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_searched_holds_keeps_to_its_memory_and_is_not_slower_than_what_is_named() {
        let uneven = |stage: usize| Times {
            forward: 1.0 + 0.3 * (stage % 3) as f64,
            input: 1.2 - 0.2 * (stage % 2) as f64,
            weight: 0.4 + 0.1 * (stage % 4) as f64,
        };
        for p in [1, 2, 3, 4, 8] {
            for m in [1, 3, 2 * p, 3 * p + 1] {
                for (place, live_max) in [
                    ((0..p).collect::<Vec<usize>>(), p),
                    ((0..p).collect(), p.div_ceil(2)),
                    (vee::place(p), 2 * p),
                    (vee::place(p), p + 2),
                ] {
                    let n = place.len();
                    let times: Vec<Times> = (0..n).map(uneven).collect();
                    let search = Search { place, num_microbatches: m, live_max, times, transfer: 0.1 };
                    let schedule = search.run("searched").unwrap();
                    let links: Vec<(usize, usize)> = (1..n).map(|s| (s - 1, s)).collect();
                    let peaks = schedule.with_transfers(&links).verify(&links).unwrap().peak_live;
                    assert!(peaks.iter().all(|n| *n <= live_max), "{p} {m}: {peaks:?}");
                    for name in ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"] {
                        let other = Schedule::named(name, p, m).unwrap();
                        if other.place == search.place && other.held().unwrap() <= live_max {
                            assert!(search.span(&schedule) <= search.span(&other), "{name} {p} {m}");
                        }
                    }
                }
            }
        }
        let place = vee::place(4);
        let times = vec![uneven(0); 8];
        let tight = Search { place, num_microbatches: 8, live_max: 1, times, transfer: 0.0 };
        assert!(tight.run("v").unwrap_err().message().contains("holds at most 1 passes"));
    }

    #[test]
    fn an_uneven_pipeline_gains_by_the_search() {
        // Without input gradients on the first stage, with another load on the last: what is made for even stages leaves gaps.
        let search = |live_max: usize, last: f64, weight: f64| {
            let mut times = vec![Times { forward: 1.0, input: 1.0, weight }; 4];
            times[0].input = 0.0;
            times[3] = Times { forward: last, input: last, weight: weight * last };
            Search { place: vec![0, 1, 2, 3], num_microbatches: 8, live_max, times, transfer: 0.5 }
        };
        let span = |search: &Search, name: &str| search.span(&Schedule::named(name, 4, 8).unwrap());
        // With five microbatches a rank it is as fast as ZB-H2 with seven, ...
        let five = search(5, 1.2, 0.8);
        let found = five.span(&five.run("searched").unwrap());
        assert!(found < 0.95 * span(&five, "zb-h1") && found < 1.001 * span(&five, "zb-h2"), "{found}");
        // ... with six faster.
        let six = search(6, 0.5, 0.5);
        let found = six.span(&six.run("searched").unwrap());
        assert!(found < 0.85 * span(&six, "zb-h1") && found < 0.98 * span(&six, "zb-h2"), "{found}");
    }
}
