//! A worklist of ranks that may be able to continue: sweeps over the ranks that skip those for which nothing has
//! changed.

use std::collections::BTreeSet;

/// Ranks to visit, in sweeps from the first rank to the last. Each rank is visited once at the start, and again after
/// each wake-up.
pub(super) struct Worklist {
    /// The ranks left in this sweep, and those of the next one.
    now: BTreeSet<usize>,
    next: BTreeSet<usize>,
    /// The rank being visited.
    at: usize,
}

impl Worklist {
    /// A worklist of all ranks.
    pub(super) fn new(num_ranks: usize) -> Worklist {
        Worklist { now: (0..num_ranks).collect(), next: BTreeSet::new(), at: 0 }
    }

    /// Schedules another visit of a rank.
    pub(super) fn wake(&mut self, rank: usize) {
        if rank > self.at {
            self.now.insert(rank)
        } else {
            self.next.insert(rank)
        };
    }
}

impl Iterator for Worklist {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.now.is_empty() {
            std::mem::swap(&mut self.now, &mut self.next);
        }
        let rank = self.now.pop_first()?;
        self.at = rank;
        Some(rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worklist_visits_woken_ranks_in_sweep_order() {
        let mut worklist = Worklist::new(4);
        let mut seen = Vec::new();
        while let Some(rank) = worklist.next() {
            seen.push(rank);
            // Rank 1 wakes both of its neighbours once, rank 3 the first and itself.
            match (rank, seen.len()) {
                (1, 2) => [0, 2].into_iter().for_each(|rank| worklist.wake(rank)),
                (3, 4) => [3, 0].into_iter().for_each(|rank| worklist.wake(rank)),
                _ => {}
            }
        }
        assert_eq!(seen, [0, 1, 2, 3, 0, 3]);
    }
}
