//! Transfers for transports on which a send waits for its receive.

use super::action::{Action, Schedule, Transfer};
use super::simulate::Times;

impl Schedule {
    /// The same passes with transfers that hold where a send waits for its receive
    /// ([`verify_blocking`](Schedule::verify_blocking)): passes of equal length are laid on one line by their ends, and each
    /// transfer is put right behind the pass that makes it, on both of its ranks. The lists are parts of one
    /// order, so nobody can wait in a circle. A rank may meet another sooner than it needs to. The schedule has been verified.
    #[must_use]
    pub fn with_meetings(&self, links: &[(usize, usize)]) -> Schedule {
        let passes = self.passes_only();
        let even = Times { forward: 1.0, input: 1.0, weight: 1.0 };
        let timeline = passes.simulate(links, &vec![even; self.num_stages()], 0.0);
        let mut line: Vec<(f64, usize, Action)> = Vec::new();
        for (rank, spans) in timeline.ranks.iter().enumerate() {
            line.extend(spans.iter().map(|span| (span.time.end, rank, span.action)));
        }
        // Stable, so that passes of one rank keep their order.
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut takes, mut gives) =
            (vec![Vec::new(); self.num_stages()], vec![Vec::new(); self.num_stages()]);
        for &(from, to) in links {
            takes[to].push(from);
            gives[from].push(to);
        }
        let mut ranks = vec![Vec::new(); self.ranks.len()];
        for (_, rank, action) in line {
            ranks[rank].push(action);
            let Some((from, microbatch, back)) = Schedule::pass(action) else { continue };
            let others: &Vec<usize> = if back { &takes[from] } else { &gives[from] };
            for &to in others.iter().filter(|to| self.place[**to] != rank) {
                let transfer = Transfer { from, to, microbatch };
                ranks[rank].push(Action::Send(transfer));
                ranks[self.place[to]].push(Action::Receive(transfer));
            }
        }
        Schedule { ranks, ..self.clone() }.with_transfers(links)
    }
}

#[cfg(test)]
mod tests {
    use super::super::named::NAMES;
    use super::*;

    #[test]
    fn every_schedule_holds_without_buffers() {
        for name in NAMES {
            for (p, m) in [(1, 2), (2, 2), (3, 6), (4, 8), (8, 16), (4, 12)] {
                let plain = Schedule::named(name, p, m).unwrap();
                let n = plain.num_stages();
                let mut links: Vec<(usize, usize)> = (1..n).map(|s| (s - 1, s)).collect();
                // A value that passes over stages in between.
                links.extend((n > 2).then_some((0, n - 1)));
                let schedule = plain.with_meetings(&links);
                assert_eq!(schedule.passes_only(), plain, "{name} {p} {m}");
                let peak = schedule.verify_blocking(&links).unwrap_or_else(|e| panic!("{name} {p} {m}: {e}"));
                assert_eq!(peak, schedule.verify(&links).unwrap(), "{name} {p} {m}");
                assert_eq!(peak, plain.with_transfers(&links).verify(&links).unwrap(), "{name} {p} {m}");
            }
        }
    }

    /// Where all were looked at whenever one had moved, it was as many looks a rank as there are ranks.
    #[test]
    fn long_pipelines_are_proved_and_timed_in_a_few_looks_a_rank() {
        let stages = 1_000;
        let links: Vec<(usize, usize)> = (1..stages).map(|s| (s - 1, s)).collect();
        let even = Times { forward: 1.0, input: 1.0, weight: 1.0 };
        let schedule = Schedule::one_f_one_b(stages, 1).unwrap().with_transfers(&links);
        let (proved, looks) = schedule.walk(&links, false).unwrap();
        // One on the way there and one on the way back.
        assert_eq!((proved.peak_live, looks), (vec![1; stages], 2 * stages - 1));
        let (timeline, looks) = schedule.timed(&links, &vec![even; stages], 0.0);
        assert_eq!((timeline.makespan(), looks), (3.0 * stages as f64, 2 * stages - 1));
        let meeting = Schedule::one_f_one_b(stages, 1).unwrap().with_meetings(&links);
        let (proved, looks) = meeting.walk(&links, true).unwrap();
        assert_eq!(proved.peak_live, vec![1; stages]);
        // A send that waits is looked at once more.
        assert!(looks <= 5 * stages, "{looks}");
    }
}
