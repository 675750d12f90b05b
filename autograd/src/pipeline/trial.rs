//! Lists that come about as time goes by: of the passes that can start, each rank takes the one that a policy prefers.

use super::action::{Action, Schedule};
use super::simulate::Times;

/// What a schedule is searched for.
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
pub(super) enum Pass {
    Forward,
    Input,
}

/// How a rank chooses. Gradients of parameters fill the time in which it would wait.
#[derive(Clone, Copy, Debug)]
pub(super) enum Policy<'a> {
    /// Kinds of passes of the first stage of a rank, or of its later ones, by preference; of the memory, so much is kept
    /// free for what a first stage leads to.
    Preference([(Pass, bool); 4], usize),
    /// The order of forward passes and gradients of inputs is given for each rank. Owed gradients of parameters come
    /// before a forward pass for which there is no room.
    Order(&'a [Vec<Action>]),
}

/// A pass and when it would start, if there is one.
type Choice = Option<(f64, Action)>;

/// The state of one trial.
struct Trial<'a> {
    search: &'a Search,
    policy: Policy<'a>,
    /// Per stage and microbatch, when the pass ended.
    forward: Vec<Vec<f64>>,
    input: Vec<Vec<f64>>,
    free: Vec<f64>,
    live: Vec<usize>,
    /// Halves that are owed, in the order in which they became so, and how many of them have been paid.
    owed: Vec<Vec<(usize, usize)>>,
    paid: Vec<usize>,
    lists: Vec<Vec<Action>>,
    /// The stages of each rank.
    own: Vec<Vec<usize>>,
    /// What each rank would do next, where nothing has changed since it was asked.
    asked: Vec<Option<Choice>>,
    /// How far each rank is in its order.
    at: Vec<usize>,
}

impl Search {
    /// The number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.place.iter().max().map_or(0, |most| most + 1)
    }

    /// The lists that a policy leads to; `None` if it gets stuck.
    pub(super) fn trial(&self, name: &str, policy: Policy<'_>) -> Option<Schedule> {
        let num_ranks = self.num_ranks();
        let none = || vec![Vec::with_capacity(self.num_microbatches); self.place.len()];
        let mut own = vec![Vec::new(); num_ranks];
        self.place.iter().enumerate().for_each(|(stage, rank)| own[*rank].push(stage));
        let mut trial = Trial {
            search: self,
            policy,
            forward: none(),
            input: none(),
            free: vec![0.0; num_ranks],
            live: vec![0; num_ranks],
            owed: vec![Vec::new(); num_ranks],
            paid: vec![0; num_ranks],
            lists: vec![Vec::new(); num_ranks],
            own,
            asked: vec![None; num_ranks],
            at: vec![0; num_ranks],
        };
        let passes = 3 * self.place.len() * self.num_microbatches;
        (0..passes).try_for_each(|_| trial.take_one())?;
        let (name, place) = (name.to_string(), self.place.clone());
        Some(Schedule { name, num_microbatches: self.num_microbatches, place, ranks: trial.lists })
    }
}

impl Trial<'_> {
    /// Takes the pass that can start first anywhere; `None` if there is none.
    fn take_one(&mut self) -> Option<()> {
        let mut first: Option<(f64, usize, Action)> = None;
        for rank in 0..self.free.len() {
            let choice = match self.asked[rank] {
                Some(choice) => choice,
                None => self.choice(rank),
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
                self.at[rank] += 1;
            }
            Action::InputGradient { stage, microbatch } => {
                self.free[rank] = start + times(stage).input;
                self.input[stage].push(self.free[rank]);
                self.owed[rank].push((stage, microbatch));
                self.at[rank] += 1;
            }
            Action::WeightGradient { stage, .. } => {
                self.free[rank] = start + times(stage).weight;
                self.paid[rank] += 1;
                self.live[rank] -= 1;
            }
            _ => {}
        }
        self.lists[rank].push(action);
        self.asked[rank] = None;
        if let Some((stage, _, _)) = Schedule::pass(action) {
            for near in stage.saturating_sub(1)..(stage + 2).min(self.search.place.len()) {
                self.asked[self.search.place[near]] = None;
            }
        }
        Some(())
    }

    /// What a rank would do next, and when.
    fn choice(&self, rank: usize) -> Choice {
        match self.policy {
            Policy::Preference(preference, room) => self.preferred(rank, preference, room),
            Policy::Order(orders) => self.in_order(rank, &orders[rank]),
        }
    }

    /// The first half that a rank owes.
    fn debt(&self, rank: usize) -> Choice {
        let &(stage, microbatch) = self.owed[rank].get(self.paid[rank])?;
        Some((self.free[rank], Action::WeightGradient { stage, microbatch }))
    }

    fn in_order(&self, rank: usize, order: &[Action]) -> Choice {
        let (debt, free) = (self.debt(rank), self.free[rank]);
        let Some(&next) = order.get(self.at[rank]) else { return debt };
        let (stage, _, back) = Schedule::pass(next)?;
        if !back && self.live[rank] >= self.search.live_max && debt.is_some() {
            return debt;
        }
        let pass = if back { Pass::Input } else { Pass::Forward };
        match self.next(rank, stage, pass) {
            Some((ready, action)) if ready <= free => Some((free, action)),
            later => debt.or(later),
        }
    }

    /// A pass that is ready when the rank is free, in order of preference; a half that is owed; else the pass that is
    /// ready first.
    fn preferred(&self, rank: usize, preference: [(Pass, bool); 4], room: usize) -> Choice {
        let free = self.free[rank];
        let mut soonest: Choice = None;
        for (pass, later) in preference {
            for (at, &stage) in self.own[rank].iter().enumerate() {
                let kept = if at == 0 { room } else { 0 };
                let full = pass == Pass::Forward && self.live[rank] + kept >= self.search.live_max;
                if (at > 0) != later || full {
                    continue;
                }
                let Some((ready, action)) = self.next(rank, stage, pass) else { continue };
                if ready <= free {
                    return Some((free, action));
                }
                if soonest.is_none_or(|(least, _)| ready < least) {
                    soonest = Some((ready, action));
                }
            }
        }
        self.debt(rank).or(soonest)
    }

    /// The next pass of a kind in a stage, and when what it needs is there.
    fn next(&self, rank: usize, stage: usize, pass: Pass) -> Choice {
        let search = self.search;
        let arrival = |ends: &[Vec<f64>], other: usize, microbatch: usize| {
            let apart = if search.place[other] == rank { 0.0 } else { search.transfer };
            ends[other].get(microbatch).map(|end| end + apart)
        };
        match pass {
            Pass::Forward => {
                let microbatch = self.forward[stage].len();
                if microbatch >= search.num_microbatches {
                    return None;
                }
                let ready = match stage.checked_sub(1) {
                    Some(before) => arrival(&self.forward, before, microbatch)?,
                    None => 0.0,
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
