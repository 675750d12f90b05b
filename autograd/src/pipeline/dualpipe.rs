//! DualPipeV: the V-shaped half of DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1).

use super::action::{Action, Schedule};
use super::schedule::check_counts;
use super::vee::place;
use shardgrad_dist::Result;
use std::collections::VecDeque;

/// The list of one rank as it is written.
struct List {
    /// The stages of the rank.
    stages: [usize; 2],
    forward: [usize; 2],
    back: [usize; 2],
    /// Gradients of parameters that are put off.
    owed: VecDeque<Action>,
    actions: Vec<Action>,
}

impl List {
    fn forward(&mut self, chunk: usize) {
        let (stage, microbatch) = (self.stages[chunk], self.forward[chunk]);
        self.forward[chunk] += 1;
        self.actions.push(Action::Forward { stage, microbatch });
    }

    fn back(&mut self, chunk: usize) {
        let (stage, microbatch) = (self.stages[chunk], self.back[chunk]);
        self.back[chunk] += 1;
        self.actions.push(Action::Backward { stage, microbatch });
    }

    /// The backward pass, whose gradients of parameters are put off.
    fn half(&mut self, chunk: usize) {
        let (stage, microbatch) = (self.stages[chunk], self.back[chunk]);
        self.back[chunk] += 1;
        self.actions.push(Action::InputGradient { stage, microbatch });
        self.owed.push_back(Action::WeightGradient { stage, microbatch });
    }

    fn pay(&mut self) {
        self.actions.extend(self.owed.pop_front());
    }
}

impl Schedule {
    /// Rank i has stages i and 2p - 1 - i; whole backward passes, halved only where a rank would wait. In the middle each
    /// forward pass stands beside a backward pass of the other stage, so that transfers of one can go on under the other.
    /// A step takes (p - 1) (F + 2B - 3W) more than the work of a rank at most (F, B and W: passes of one stage, B whole;
    /// without overlap of the pairs), and a rank holds 2p + 1 passes, if there are 2p microbatches or more.
    ///
    /// # Errors
    /// As [`Schedule::gpipe`].
    pub fn dualpipe_v(num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        check_counts(num_ranks, num_microbatches)?;
        // A list for more microbatches, without those that there are not, is a list too.
        let m = num_microbatches.max(2 * num_ranks);
        let there = |action: &Action| match action {
            Action::WeightGradient { microbatch, .. } => *microbatch < num_microbatches,
            other => Schedule::pass(*other).is_some_and(|(_, microbatch, _)| microbatch < num_microbatches),
        };
        let list = |rank: usize| list(num_ranks, m, rank).into_iter().filter(there).collect();
        Ok(Schedule {
            name: "dualpipe-v".to_string(),
            num_microbatches,
            place: place(num_ranks),
            ranks: (0..num_ranks).map(list).collect(),
        })
    }
}

fn list(p: usize, m: usize, rank: usize) -> Vec<Action> {
    let (below, above) = (p - 1 - rank, rank + 1);
    let mut list = List {
        stages: [rank, 2 * p - 1 - rank],
        forward: [0; 2],
        back: [0; 2],
        owed: VecDeque::new(),
        actions: Vec::with_capacity(5 * m),
    };
    (0..2 * below).for_each(|_| list.forward(0));
    for _ in 0..above {
        list.forward(0);
        list.forward(1);
    }
    for _ in 0..below {
        list.half(1);
        list.pay();
        list.forward(1);
    }
    for _ in 0..m + above - 2 * p {
        list.forward(0);
        list.back(1);
        list.forward(1);
        list.back(0);
    }
    for _ in 0..below {
        list.back(1);
        list.forward(1);
        list.back(0);
    }
    // The second half of what comes back is halved; an odd rank begins with its second stage.
    for turn in 0..above {
        let (first, second) = match (2 * turn + 1).cmp(&above) {
            std::cmp::Ordering::Less => (false, false),
            std::cmp::Ordering::Equal => (false, true),
            std::cmp::Ordering::Greater => (true, true),
        };
        if first {
            list.half(1)
        } else {
            list.back(1)
        }
        if second { list.half(0) } else { list.back(0) }
    }
    for _ in 0..below {
        list.pay();
        list.half(0);
    }
    while !list.owed.is_empty() {
        list.pay();
    }
    list.actions
}

#[cfg(test)]
mod tests {
    use super::super::simulate::Times;
    use super::*;

    #[test]
    fn closed_forms() {
        for p in 1..=12 {
            for m in [2 * p, 2 * p + 1, 3 * p, 5 * p + 2] {
                for [f, i, w] in [[1.0, 1.0, 1.0], [1.0, 1.25, 0.75], [1.0, 1.5, 0.5]] {
                    let schedule = Schedule::dualpipe_v(p, m).unwrap();
                    let links: Vec<(usize, usize)> = (1..2 * p).map(|s| (s - 1, s)).collect();
                    let held = schedule.with_transfers(&links).verify(&links).unwrap().peak_live;
                    assert!(held.iter().all(|n| *n <= 2 * p + 1), "{p} {m}: {held:?}");
                    let times = vec![Times { forward: f, input: i, weight: w }; 2 * p];
                    let span = schedule.simulate(&links, &times, 0.0).makespan();
                    let waits = span - 2.0 * m as f64 * (f + i + w);
                    let stated = (p as f64 - 1.0) * (f + 2.0 * (i + w) - 3.0 * w);
                    // What is stated takes the passes of a pair to end together; one after the other they wait for less.
                    assert!(waits <= stated + 1e-9, "{p} {m}: {waits}, not {stated}");
                    let fused = 2.0 * (p as f64 - 1.0) * (f + i + w);
                    assert!(p == 1 || waits < 0.5 * fused, "{p} {m}: {waits}, 1F1B {fused}");
                }
            }
            for m in 1..2 * p {
                let schedule = Schedule::dualpipe_v(p, m).unwrap();
                let links: Vec<(usize, usize)> = (1..2 * p).map(|s| (s - 1, s)).collect();
                schedule.with_transfers(&links).verify(&links).unwrap();
            }
        }
    }
}
