//! Which ranks may be able to go on: sweeps over all of them that pass over those for which nothing has changed.

use std::collections::BTreeSet;

/// Ranks to be looked at, in the order of sweeps from the first rank to the last. Each is looked at once to begin with, and
/// again when it is woken.
pub(super) struct Sweep {
    /// Those of this sweep that are still to come, and those of the next one.
    now: BTreeSet<usize>,
    next: BTreeSet<usize>,
    /// The rank that is looked at.
    at: usize,
}

impl Sweep {
    /// Over so many ranks.
    pub(super) fn over(num_ranks: usize) -> Sweep {
        Sweep { now: (0..num_ranks).collect(), next: BTreeSet::new(), at: 0 }
    }

    /// Something has changed for a rank: it is looked at when its turn comes.
    pub(super) fn wake(&mut self, rank: usize) {
        if rank > self.at {
            self.now.insert(rank)
        } else {
            self.next.insert(rank)
        };
    }
}

impl Iterator for Sweep {
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
    fn ranks_come_in_the_order_of_sweeps_and_only_if_they_are_woken() {
        let mut sweep = Sweep::over(4);
        let mut seen = Vec::new();
        while let Some(rank) = sweep.next() {
            seen.push(rank);
            // Rank 1 wakes both of its neighbours once, rank 3 the first and itself.
            match (rank, seen.len()) {
                (1, 2) => [0, 2].into_iter().for_each(|rank| sweep.wake(rank)),
                (3, 4) => [3, 0].into_iter().for_each(|rank| sweep.wake(rank)),
                _ => {}
            }
        }
        assert_eq!(seen, [0, 1, 2, 3, 0, 3]);
    }
}
