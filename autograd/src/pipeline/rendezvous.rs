//! Rendezvous transfers: schedules for transports on which a send blocks until its receive.

use super::action::{Action, Schedule, Transfer};
use super::simulate::PassTimes;

impl Schedule {
    /// The same passes with transfers that do not deadlock where a send blocks until its receive
    /// ([`verify_blocking`](Schedule::verify_blocking)). Orders all passes by their end, simulated with equal lengths,
    /// and puts each transfer right after the pass that makes the values, on both of its ranks. The lists are parts of
    /// one total order, so there is no circular wait. A rank may receive earlier than it needs to. The schedule must be
    /// verified.
    #[must_use]
    pub fn with_blocking_transfers(&self, links: &[(usize, usize)]) -> Schedule {
        let passes = self.passes_only();
        let even = PassTimes { forward: 1.0, input: 1.0, weight: 1.0 };
        let timeline = passes.simulate(links, &vec![even; self.num_stages()], 0.0);
        let mut line: Vec<(f64, usize, Action)> = Vec::new();
        for (rank, spans) in timeline.ranks.iter().enumerate() {
            line.extend(spans.iter().map(|span| (span.time.end, rank, span.action)));
        }
        // A stable sort keeps the order of each rank's passes.
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut predecessors, mut successors) =
            (vec![Vec::new(); self.num_stages()], vec![Vec::new(); self.num_stages()]);
        for &(from, to) in links {
            predecessors[to].push(from);
            successors[from].push(to);
        }
        let mut ranks = vec![Vec::new(); self.ranks.len()];
        for (_, rank, action) in line {
            ranks[rank].push(action);
            let Some((from, microbatch, back)) = Schedule::pass(action) else { continue };
            let others: &Vec<usize> = if back { &predecessors[from] } else { &successors[from] };
            for &to in others.iter().filter(|to| self.stage_ranks[**to] != rank) {
                let transfer = Transfer { from, to, microbatch };
                ranks[rank].push(Action::Send(transfer));
                ranks[self.stage_ranks[to]].push(Action::Receive(transfer));
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
    fn every_schedule_verifies_with_rendezvous_transfers() {
        for name in NAMES {
            for (p, m) in [(1, 2), (2, 2), (3, 6), (4, 8), (8, 16), (4, 12)] {
                let plain = Schedule::named(name, p, m).unwrap();
                let n = plain.num_stages();
                let mut links: Vec<(usize, usize)> = (1..n).map(|s| (s - 1, s)).collect();
                // A value that skips stages.
                links.extend((n > 2).then_some((0, n - 1)));
                let schedule = plain.with_blocking_transfers(&links);
                assert_eq!(schedule.passes_only(), plain, "{name} {p} {m}");
                let peak = schedule.verify_blocking(&links).unwrap_or_else(|e| panic!("{name} {p} {m}: {e}"));
                assert_eq!(peak, schedule.verify(&links).unwrap(), "{name} {p} {m}");
                assert_eq!(peak, plain.with_transfers(&links).verify(&links).unwrap(), "{name} {p} {m}");
            }
        }
    }

    /// With a worklist a rank is visited a few times; visiting all ranks after each change would take as many visits
    /// per rank as there are ranks.
    #[test]
    fn verification_and_simulation_visit_ranks_a_few_times() {
        let stages = 1_000;
        let links: Vec<(usize, usize)> = (1..stages).map(|s| (s - 1, s)).collect();
        let even = PassTimes { forward: 1.0, input: 1.0, weight: 1.0 };
        let schedule = Schedule::one_f_one_b(stages, 1).unwrap().with_transfers(&links);
        let (proved, visits) = schedule.dry_run(&links, false).unwrap();
        // One visit on the way forward and one on the way back.
        assert_eq!((proved.peak_live, visits), (vec![1; stages], 2 * stages - 1));
        let (timeline, visits) = schedule.simulate_counting(&links, &vec![even; stages], 0.0);
        assert_eq!((timeline.makespan(), visits), (3.0 * stages as f64, 2 * stages - 1));
        let meeting = Schedule::one_f_one_b(stages, 1).unwrap().with_blocking_transfers(&links);
        let (proved, visits) = meeting.dry_run(&links, true).unwrap();
        assert_eq!(proved.peak_live, vec![1; stages]);
        // A blocked send is visited once more.
        assert!(visits <= 5 * stages, "{visits}");
    }
}
