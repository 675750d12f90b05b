//! Schedules that are searched: the order of passes that is shortest under a bound of memory.

use super::action::{Action, Schedule};
use super::simulate::Times;
use shardgrad_dist::{Error, Kind, Result};

/// What a search is for.
#[derive(Clone, Debug, PartialEq)]
pub struct Search {
    /// The place of each stage, each of which hands its values to the next.
    pub place: Vec<usize>,
    /// The number of microbatches.
    pub num_microbatches: usize,
    /// How many passes a rank may hold between their forward pass and the end of their backward pass, over its stages.
    pub live_max: usize,
    /// Times of each stage's passes.
    pub times: Vec<Times>,
    /// Time from the end of a pass to the arrival of what it made on another rank.
    pub transfer: f64,
}

/// The kinds of passes between which a rank chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Forward,
    Input,
}

/// One order of preference: a later stage of a rank before an earlier one, or not, and forward before backward, or not.
type Preference = [(Pass, bool); 4];

/// The state of one trial.
struct Trial<'a> {
    search: &'a Search,
    num_ranks: usize,
    /// Per stage and microbatch, when the pass ended.
    forward: Vec<Vec<f64>>,
    input: Vec<Vec<f64>>,
    free: Vec<f64>,
    live: Vec<usize>,
    /// Halves that are owed, in the order in which they became so.
    owed: Vec<Vec<(usize, usize)>>,
    lists: Vec<Vec<Action>>,
    /// The stages of each rank.
    own: Vec<Vec<usize>>,
    /// What each rank would do next, where nothing has changed since it was asked.
    asked: Vec<Option<Choice>>,
}

/// A pass and when it would start, if there is one.
type Choice = Option<(f64, Action)>;

/// Beyond so many passes only the first orders of preference are tried.
const PASSES_MANY: usize = 20_000;

impl Search {
    /// Tries up to 48 ways to choose greedily among the passes that can start first, the gradients of parameters filling the
    /// time in between, and gives the shortest.
    ///
    /// # Errors
    /// `Kind::Config` if no order stays within the bound of memory.
    pub fn run(&self, name: &str) -> Result<Schedule> {
        let num_ranks = self.place.iter().max().map_or(0, |most| most + 1);
        let links: Vec<(usize, usize)> = (1..self.place.len()).map(|s| (s - 1, s)).collect();
        let mut best: Option<(f64, Schedule)> = None;
        let many = 3 * self.place.len() * self.num_microbatches > PASSES_MANY;
        for preference in preferences().into_iter().take(if many { 2 } else { 24 }) {
            for room in [0, 1] {
                let Some(ranks) = self.trial(num_ranks, preference, room) else { continue };
                let (name, place) = (name.to_string(), self.place.clone());
                let schedule = Schedule { name, num_microbatches: self.num_microbatches, place, ranks };
                let span = schedule.simulate(&links, &self.times, self.transfer).longest_span();
                if best.as_ref().is_none_or(|(least, _)| span < *least) {
                    best = Some((span, schedule));
                }
            }
        }
        best.map(|(_, schedule)| schedule).ok_or_else(|| {
            let text =
                format!("no order of {} stages holds at most {} passes", self.place.len(), self.live_max);
            Error::new(Kind::Config, text).detail("help", "allow more memory")
        })
    }

    fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.place.len()).filter(|stage| self.place[*stage] == rank).collect()
    }

    /// The lists of one preference; `room` passes are kept free for what a first stage leads to.
    fn trial(&self, num_ranks: usize, preference: Preference, room: usize) -> Option<Vec<Vec<Action>>> {
        let none = || vec![Vec::with_capacity(self.num_microbatches); self.place.len()];
        let mut trial = Trial {
            search: self,
            num_ranks,
            forward: none(),
            input: none(),
            free: vec![0.0; num_ranks],
            live: vec![0; num_ranks],
            owed: vec![Vec::new(); num_ranks],
            lists: vec![Vec::new(); num_ranks],
            own: (0..num_ranks).map(|rank| self.stages_of(rank)).collect(),
            asked: vec![None; num_ranks],
        };
        let passes = 3 * self.place.len() * self.num_microbatches;
        (0..passes).try_for_each(|_| trial.take_one(preference, room))?;
        Some(trial.lists)
    }
}

impl Trial<'_> {
    /// Takes the pass that can start first anywhere; `None` if there is none.
    fn take_one(&mut self, preference: Preference, room: usize) -> Option<()> {
        let mut first: Option<(f64, usize, Action)> = None;
        for rank in 0..self.num_ranks {
            let choice = match self.asked[rank] {
                Some(choice) => choice,
                None => self.choice(rank, preference, room),
            };
            self.asked[rank] = Some(choice);
            if let Some((start, action)) = choice
                && first.is_none_or(|(least, ..)| start < least)
            {
                first = Some((start, rank, action));
            }
        }
        let (start, rank, action) = first?;
        let times = |stage: usize| self.search.times[stage];
        match action {
            Action::Forward { stage, .. } => {
                self.free[rank] = start + times(stage).forward;
                self.forward[stage].push(self.free[rank]);
                self.live[rank] += 1;
            }
            Action::InputGradient { stage, microbatch } => {
                self.free[rank] = start + times(stage).input;
                self.input[stage].push(self.free[rank]);
                self.owed[rank].push((stage, microbatch));
            }
            Action::WeightGradient { stage, .. } => {
                self.free[rank] = start + times(stage).weight;
                self.owed[rank].remove(0);
                self.live[rank] -= 1;
            }
            _ => {}
        }
        self.lists[rank].push(action);
        self.asked[rank] = None;
        if let Action::Forward { stage, .. } | Action::InputGradient { stage, .. } = action {
            for near in stage.saturating_sub(1)..(stage + 2).min(self.search.place.len()) {
                self.asked[self.search.place[near]] = None;
            }
        }
        Some(())
    }

    /// What a rank would do next, and when: a pass that is ready when the rank is free, in order of preference; a half that
    /// is owed; else the pass that is ready first.
    fn choice(&self, rank: usize, preference: Preference, room: usize) -> Option<(f64, Action)> {
        let free = self.free[rank];
        let mut soonest: Option<(f64, Action)> = None;
        for (pass, later) in preference {
            for (at, &stage) in self.own[rank].iter().enumerate() {
                if (at > 0) != later {
                    continue;
                }
                let Some((ready, action)) = self.next(rank, stage, pass, if at == 0 { room } else { 0 })
                else {
                    continue;
                };
                if ready <= free {
                    return Some((free, action));
                }
                if soonest.is_none_or(|(least, _)| ready < least) {
                    soonest = Some((ready, action));
                }
            }
        }
        match self.owed[rank].first() {
            Some(&(stage, microbatch)) => Some((free, Action::WeightGradient { stage, microbatch })),
            None => soonest,
        }
    }

    /// The next pass of a kind in a stage, and when what it needs is there.
    fn next(&self, rank: usize, stage: usize, pass: Pass, room: usize) -> Option<(f64, Action)> {
        let search = self.search;
        let arrival = |ends: &[Vec<f64>], other: usize, microbatch: usize| {
            let apart = if search.place[other] == rank { 0.0 } else { search.transfer };
            ends[other].get(microbatch).map(|end| end + apart)
        };
        match pass {
            Pass::Forward => {
                let microbatch = self.forward[stage].len();
                let fits = microbatch < search.num_microbatches && self.live[rank] + room < search.live_max;
                let ready = match stage.checked_sub(1).filter(|_| fits) {
                    Some(before) => arrival(&self.forward, before, microbatch)?,
                    None if fits => 0.0,
                    None => return None,
                };
                Some((ready, Action::Forward { stage, microbatch }))
            }
            Pass::Input => {
                let microbatch = self.input[stage].len();
                let own = *self.forward[stage].get(microbatch)?;
                let ready = match stage + 1 < search.place.len() {
                    true => arrival(&self.input, stage + 1, microbatch)?.max(own),
                    false => own,
                };
                Some((ready, Action::InputGradient { stage, microbatch }))
            }
        }
    }
}

/// All orders of the four choices.
fn preferences() -> Vec<Preference> {
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
    /// Two stages a rank in the shape of a V: rank i has stage i and stage 2p - 1 - i, so that the last stage meets the first,
    /// and each rank holds as much as any other. The order is searched for even passes, holding at most `live_max` of the
    /// 2m passes of a rank: 2p is the memory of 1F1B. After Qi et al., arXiv 2405.15362, whose orders are made by hand.
    ///
    /// # Errors
    /// `Kind::Config` if no order is found.
    pub fn v_shaped(
        name: &str,
        num_ranks: usize,
        num_microbatches: usize,
        live_max: usize,
    ) -> Result<Schedule> {
        let place: Vec<usize> = (0..num_ranks).chain((0..num_ranks).rev()).collect();
        let even = Times { forward: 1.0, input: 1.0, weight: 1.0 };
        let times = vec![even; place.len()];
        Search { place, num_microbatches, live_max, times, transfer: 0.0 }.run(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn searched_orders_hold_and_keep_to_their_memory() {
        for p in [1, 2, 3, 4, 8] {
            for m in [1, 3, 2 * p, 3 * p + 1] {
                for live_max in [p + 2, 2 * p + 1] {
                    let schedule = Schedule::v_shaped("v", p, m, live_max).unwrap();
                    let links: Vec<(usize, usize)> = (1..2 * p).map(|s| (s - 1, s)).collect();
                    let verified = schedule.with_transfers(&links).verify(&links).unwrap();
                    assert!(verified.peak_live.iter().all(|n| *n <= live_max), "{p} {m}: {verified:?}");
                }
            }
        }
        assert!(Schedule::v_shaped("v", 4, 8, 1).unwrap_err().message().contains("holds at most 1 passes"));
    }

    #[test]
    fn a_v_waits_less_than_1f1b_for_the_same_memory() {
        for p in [2, 3, 4, 8] {
            let m = 3 * p;
            let links: Vec<(usize, usize)> = (1..2 * p).map(|s| (s - 1, s)).collect();
            let half = Times { forward: 0.5, input: 0.5, weight: 0.5 };
            let bubble = |live_max| {
                let schedule = Schedule::v_shaped("v", p, m, live_max).unwrap();
                schedule.simulate(&links, &vec![half; 2 * p], 0.0).bubble()
            };
            let plain = (p as f64 - 1.0) / (m as f64 + p as f64 - 1.0);
            assert!(bubble(2 * p) < 0.3 * plain, "{p}: {} of {plain}", bubble(2 * p));
            assert!(bubble(p + 2) < 0.75 * plain, "{p}: {} of {plain}", bubble(p + 2));
        }
    }
}
