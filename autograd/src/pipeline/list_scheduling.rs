//! List scheduling: simulates the ranks, and gives each rank the pass that a policy prefers among those that can start.

use super::action::{Action, Schedule};
use super::simulate::PassTimes;

/// The input of a schedule search.
#[derive(Clone, Debug, PartialEq)]
pub struct ScheduleSearch {
    /// The pipeline rank of each stage. Each stage sends its values to the next.
    pub stage_ranks: Vec<usize>,
    /// The number of microbatches.
    pub num_microbatches: usize,
    /// The memory bound: the largest number of passes that a rank may hold, over its stages, between forward pass and
    /// end of backward pass.
    pub live_max: usize,
    /// The times of each stage's passes.
    pub times: Vec<PassTimes>,
    /// The time from the end of a pass to the arrival of its values on another rank.
    pub transfer: f64,
}

/// The kinds of passes that a policy chooses between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PassKind {
    Forward,
    Input,
}

/// How a rank chooses its next pass. Deferred weight gradients fill the time in which a rank would wait.
#[derive(Clone, Copy, Debug)]
pub(super) enum Policy<'a> {
    /// By preference: kinds of passes, each of the rank's first stage (false) or its later ones (true). The number of
    /// passes is room reserved for later stages: forward passes of the first stage leave it free.
    Preference([(PassKind, bool); 4], usize),
    /// By a given order of forward passes and input gradients on each rank. Deferred weight gradients come before a
    /// forward pass that would exceed the memory bound.
    Order(&'a [Vec<Action>]),
}

/// A pass and its start, if there is one.
type Choice = Option<(f64, Action)>;

/// The state of a list scheduling run.
struct ListScheduler<'a> {
    search: &'a ScheduleSearch,
    policy: Policy<'a>,
    /// The ends of passes, per stage and microbatch.
    forward: Vec<Vec<f64>>,
    input: Vec<Vec<f64>>,
    free: Vec<f64>,
    live: Vec<usize>,
    /// The deferred weight gradients of each rank, in order, and the number of those already scheduled.
    deferred: Vec<Vec<(usize, usize)>>,
    num_deferred_done: Vec<usize>,
    lists: Vec<Vec<Action>>,
    /// The stages of each rank.
    stages_of_rank: Vec<Vec<usize>>,
    /// The next pass of each rank; `None` where it must be computed again.
    choices: Vec<Option<Choice>>,
    /// The position of each rank in its given order.
    position: Vec<usize>,
}

impl ScheduleSearch {
    /// The number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.stage_ranks.iter().max().map_or(0, |most| most + 1)
    }

    /// The schedule that a policy leads to; `None` if no rank can continue.
    pub(super) fn list_schedule(&self, name: &str, policy: Policy<'_>) -> Option<Schedule> {
        let num_ranks = self.num_ranks();
        let none = || vec![Vec::with_capacity(self.num_microbatches); self.stage_ranks.len()];
        let mut stages_of_rank = vec![Vec::new(); num_ranks];
        self.stage_ranks.iter().enumerate().for_each(|(stage, rank)| stages_of_rank[*rank].push(stage));
        let mut scheduler = ListScheduler {
            search: self,
            policy,
            forward: none(),
            input: none(),
            free: vec![0.0; num_ranks],
            live: vec![0; num_ranks],
            deferred: vec![Vec::new(); num_ranks],
            num_deferred_done: vec![0; num_ranks],
            lists: vec![Vec::new(); num_ranks],
            stages_of_rank,
            choices: vec![None; num_ranks],
            position: vec![0; num_ranks],
        };
        let passes = 3 * self.stage_ranks.len() * self.num_microbatches;
        (0..passes).try_for_each(|_| scheduler.schedule_one())?;
        let (name, stage_ranks) = (name.to_string(), self.stage_ranks.clone());
        Some(Schedule { name, num_microbatches: self.num_microbatches, stage_ranks, ranks: scheduler.lists })
    }
}

impl ListScheduler<'_> {
    /// Schedules the pass that can start first on any rank; `None` if there is none.
    fn schedule_one(&mut self) -> Option<()> {
        let mut first: Option<(f64, usize, Action)> = None;
        for rank in 0..self.free.len() {
            let choice = match self.choices[rank] {
                Some(choice) => choice,
                None => self.choice(rank),
            };
            self.choices[rank] = Some(choice);
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
                self.position[rank] += 1;
            }
            Action::InputGradient { stage, microbatch } => {
                self.free[rank] = start + times(stage).input;
                self.input[stage].push(self.free[rank]);
                self.deferred[rank].push((stage, microbatch));
                self.position[rank] += 1;
            }
            Action::WeightGradient { stage, .. } => {
                self.free[rank] = start + times(stage).weight;
                self.num_deferred_done[rank] += 1;
                self.live[rank] -= 1;
            }
            _ => {}
        }
        self.lists[rank].push(action);
        self.choices[rank] = None;
        if let Some((stage, _, _)) = Schedule::pass(action) {
            for near in stage.saturating_sub(1)..(stage + 2).min(self.search.stage_ranks.len()) {
                self.choices[self.search.stage_ranks[near]] = None;
            }
        }
        Some(())
    }

    /// The next pass of a rank, and its start.
    fn choice(&self, rank: usize) -> Choice {
        match self.policy {
            Policy::Preference(preference, room) => self.preferred(rank, preference, room),
            Policy::Order(orders) => self.in_order(rank, &orders[rank]),
        }
    }

    /// The oldest deferred weight gradient of a rank.
    fn deferred_pass(&self, rank: usize) -> Choice {
        let &(stage, microbatch) = self.deferred[rank].get(self.num_deferred_done[rank])?;
        Some((self.free[rank], Action::WeightGradient { stage, microbatch }))
    }

    fn in_order(&self, rank: usize, order: &[Action]) -> Choice {
        let (deferred_pass, free) = (self.deferred_pass(rank), self.free[rank]);
        let Some(&next) = order.get(self.position[rank]) else { return deferred_pass };
        let (stage, _, back) = Schedule::pass(next)?;
        if !back && self.live[rank] >= self.search.live_max && deferred_pass.is_some() {
            return deferred_pass;
        }
        let pass = if back { PassKind::Input } else { PassKind::Forward };
        match self.next(rank, stage, pass) {
            Some((ready, action)) if ready <= free => Some((free, action)),
            later => deferred_pass.or(later),
        }
    }

    /// The next pass of a rank by preference: the first one that is ready when the rank is free; else a deferred weight
    /// gradient; else the pass that is ready first.
    fn preferred(&self, rank: usize, preference: [(PassKind, bool); 4], room: usize) -> Choice {
        let free = self.free[rank];
        let mut soonest: Choice = None;
        for (pass, later) in preference {
            for (position, &stage) in self.stages_of_rank[rank].iter().enumerate() {
                let reserved = if position == 0 { room } else { 0 };
                let full = pass == PassKind::Forward && self.live[rank] + reserved >= self.search.live_max;
                if (position > 0) != later || full {
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
        self.deferred_pass(rank).or(soonest)
    }

    /// The next pass of a kind in a stage, and the time when its inputs arrive.
    fn next(&self, rank: usize, stage: usize, pass: PassKind) -> Choice {
        let search = self.search;
        let arrival = |ends: &[Vec<f64>], other: usize, microbatch: usize| {
            let apart = if search.stage_ranks[other] == rank { 0.0 } else { search.transfer };
            ends[other].get(microbatch).map(|end| end + apart)
        };
        match pass {
            PassKind::Forward => {
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
            PassKind::Input => {
                let microbatch = self.input[stage].len();
                let own = *self.forward[stage].get(microbatch)?;
                let ready = match stage + 1 < search.stage_ranks.len() {
                    true => arrival(&self.input, stage + 1, microbatch)?.max(own),
                    false => own,
                };
                Some((ready, Action::InputGradient { stage, microbatch }))
            }
        }
    }
}
