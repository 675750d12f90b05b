//! DualPipeV: the V-shaped half of DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1).

use super::action::{Action, Schedule};
use super::schedule::check_counts;
use super::v_shaped::stage_ranks;
use shardgrad_dist::Result;
use std::collections::VecDeque;

/// The list of one rank, under construction.
struct ListBuilder {
    /// The two stages of the rank.
    stages: [usize; 2],
    forward: [usize; 2],
    back: [usize; 2],
    /// Deferred weight gradients.
    deferred: VecDeque<Action>,
    actions: Vec<Action>,
}

impl ListBuilder {
    fn forward(&mut self, chunk: usize) {
        let (stage, microbatch) = (self.stages[chunk], self.forward[chunk]);
        self.forward[chunk] += 1;
        self.actions.push(Action::Forward { stage, microbatch });
    }

    fn backward(&mut self, chunk: usize) {
        let (stage, microbatch) = (self.stages[chunk], self.back[chunk]);
        self.back[chunk] += 1;
        self.actions.push(Action::Backward { stage, microbatch });
    }

    /// Adds a backward pass with deferred weight gradients.
    fn input_gradient(&mut self, chunk: usize) {
        let (stage, microbatch) = (self.stages[chunk], self.back[chunk]);
        self.back[chunk] += 1;
        self.actions.push(Action::InputGradient { stage, microbatch });
        self.deferred.push_back(Action::WeightGradient { stage, microbatch });
    }

    fn weight_gradient(&mut self) {
        self.actions.extend(self.deferred.pop_front());
    }
}

impl Schedule {
    /// DualPipeV: rank i has stages i and 2p - 1 - i. Backward passes are split only where a rank would wait. In the
    /// steady phase each forward pass is next to a backward pass of the other stage, so that the transfers of one can
    /// overlap the other. A step takes at most (p - 1) (F + 2B - 3W) longer than the work of a rank (F, B and W: passes
    /// of one stage, B whole; without overlap of the pairs). A rank holds at most 2p + 1 passes if there are at least
    /// 2p microbatches.
    ///
    /// # Errors
    /// As [`Schedule::gpipe`].
    #[doc(alias = "DualPipe")]
    #[doc(alias = "DualPipeV")]
    pub fn dualpipe_v(num_ranks: usize, num_microbatches: usize) -> Result<Schedule> {
        check_counts(num_ranks, num_microbatches)?;
        // The list for more microbatches, without the surplus ones, is also valid.
        let m = num_microbatches.max(2 * num_ranks);
        let exists = |action: &Action| match action {
            Action::WeightGradient { microbatch, .. } => *microbatch < num_microbatches,
            other => Schedule::pass(*other).is_some_and(|(_, microbatch, _)| microbatch < num_microbatches),
        };
        let list = |rank: usize| list(num_ranks, m, rank).into_iter().filter(exists).collect();
        Ok(Schedule {
            name: "dualpipe-v".to_string(),
            num_microbatches,
            stage_ranks: stage_ranks(num_ranks),
            ranks: (0..num_ranks).map(list).collect(),
        })
    }
}

fn list(p: usize, m: usize, rank: usize) -> Vec<Action> {
    let (below, above) = (p - 1 - rank, rank + 1);
    let mut list = ListBuilder {
        stages: [rank, 2 * p - 1 - rank],
        forward: [0; 2],
        back: [0; 2],
        deferred: VecDeque::new(),
        actions: Vec::with_capacity(5 * m),
    };
    (0..2 * below).for_each(|_| list.forward(0));
    for _ in 0..above {
        list.forward(0);
        list.forward(1);
    }
    for _ in 0..below {
        list.input_gradient(1);
        list.weight_gradient();
        list.forward(1);
    }
    for _ in 0..m + above - 2 * p {
        list.forward(0);
        list.backward(1);
        list.forward(1);
        list.backward(0);
    }
    for _ in 0..below {
        list.backward(1);
        list.forward(1);
        list.backward(0);
    }
    // The second half of these backward passes is split; an odd rank begins with its second stage.
    for turn in 0..above {
        let (first, second) = match (2 * turn + 1).cmp(&above) {
            std::cmp::Ordering::Less => (false, false),
            std::cmp::Ordering::Equal => (false, true),
            std::cmp::Ordering::Greater => (true, true),
        };
        if first {
            list.input_gradient(1)
        } else {
            list.backward(1)
        }
        if second { list.input_gradient(0) } else { list.backward(0) }
    }
    for _ in 0..below {
        list.weight_gradient();
        list.input_gradient(0);
    }
    while !list.deferred.is_empty() {
        list.weight_gradient();
    }
    list.actions
}

#[cfg(test)]
mod tests {
    use super::super::simulate::PassTimes;
    use super::*;

    #[test]
    fn dualpipe_v_keeps_its_stated_bounds() {
        for p in 1..=12 {
            for m in [2 * p, 2 * p + 1, 3 * p, 5 * p + 2] {
                for [f, i, w] in [[1.0, 1.0, 1.0], [1.0, 1.25, 0.75], [1.0, 1.5, 0.5]] {
                    let schedule = Schedule::dualpipe_v(p, m).unwrap();
                    let links: Vec<(usize, usize)> = (1..2 * p).map(|s| (s - 1, s)).collect();
                    let held = schedule.with_transfers(&links).verify(&links).unwrap().peak_live;
                    assert!(held.iter().all(|n| *n <= 2 * p + 1), "{p} {m}: {held:?}");
                    let times = vec![PassTimes { forward: f, input: i, weight: w }; 2 * p];
                    let span = schedule.simulate(&links, &times, 0.0).makespan();
                    let waits = span - 2.0 * m as f64 * (f + i + w);
                    let stated = (p as f64 - 1.0) * (f + 2.0 * (i + w) - 3.0 * w);
                    // The stated bound assumes that the passes of a pair end together; one after the other they wait
                    // less.
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
