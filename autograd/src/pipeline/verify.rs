//! Verification of a schedule before its first step, by a dry run without values.

use super::action::{Action, Schedule, Transfer};
use super::simulate::StageTable;
use super::worklist::Worklist;
use shardgrad_dist::{Error, Kind, Result};
use std::collections::HashMap;

/// Facts about a verified schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Per rank, the largest number of live passes: forward done, backward not.
    pub peak_live: Vec<usize>,
}

/// The progress of a microbatch's backward pass in a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BackwardState {
    NotStarted,
    /// Input gradients only.
    InputDone,
    Done,
}

/// The progress of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferState {
    NotSent,
    Sent,
    Received,
}

/// The state of a dry run.
struct DryRun<'a> {
    schedule: &'a Schedule,
    trains: bool,
    /// Whether a send blocks until its receive.
    blocking: bool,
    /// The row of a link's forward transfers in `transfers`; the row after it is for gradients.
    rows: HashMap<(usize, usize), usize>,
    /// The stages that a stage receives values from, and those it sends values to.
    predecessors: Vec<Vec<usize>>,
    successors: Vec<Vec<usize>>,
    forward: StageTable<bool>,
    back: StageTable<BackwardState>,
    transfers: StageTable<TransferState>,
    /// The backward passes of each stage still to come.
    backward_left: Vec<usize>,
    reduced: Vec<bool>,
    /// The position of each rank in its list.
    at: Vec<usize>,
}

/// Why an action cannot run: it is wrong, or it must wait.
enum Obstacle {
    Wrong(String),
    /// For another rank.
    Waits(usize),
}

fn wrong<T>(why: impl Into<String>) -> Result<T, Obstacle> {
    Err(Obstacle::Wrong(why.into()))
}

impl Schedule {
    /// Verifies the schedule for stages that send values along `links`: every microbatch passes every stage once
    /// forward and once backward, after the passes it depends on; sends and receives are paired; each stage's gradients
    /// are reduced once, after its last backward pass; there is no deadlock (sends do not block, receives do).
    ///
    /// # Errors
    /// `Kind::Config` naming the first wrong action, or the actions of a deadlock.
    pub fn verify(&self, links: &[(usize, usize)]) -> Result<Verified> {
        Ok(self.dry_run(links, false)?.0)
    }

    /// As [`Schedule::verify`], where a send blocks until the other rank has reached its receive (rendezvous), as on
    /// transports without buffers. A schedule that passes is valid on every transport; see
    /// [`Schedule::with_blocking_transfers`].
    ///
    /// # Errors
    /// As [`Schedule::verify`].
    pub fn verify_blocking(&self, links: &[(usize, usize)]) -> Result<Verified> {
        Ok(self.dry_run(links, true)?.0)
    }

    /// The verification, and the number of times a rank was visited.
    pub(super) fn dry_run(&self, links: &[(usize, usize)], blocking: bool) -> Result<(Verified, usize)> {
        if let Some(&lost) = self.stage_ranks.iter().find(|&&rank| rank >= self.ranks.len()) {
            let text = format!("a stage is on rank {lost}, but there are {} ranks", self.ranks.len());
            return Err(self.error(text));
        }
        let mut run = DryRun::new(self, links, blocking);
        let (mut live, mut peak_live) = (vec![0usize; self.ranks.len()], vec![0; self.ranks.len()]);
        let (mut worklist, mut num_visits) = (Worklist::new(self.ranks.len()), 0);
        while let Some(rank) = worklist.next() {
            num_visits += 1;
            while let Some(&action) = self.ranks[rank].get(run.at[rank]) {
                match (run.take(rank, action), action) {
                    (Ok(()), Action::Send(transfer)) => worklist.wake(self.stage_ranks[transfer.to]),
                    (Ok(()), _) => {}
                    (Err(Obstacle::Waits(other)), _) => {
                        // This receive unblocks a waiting send.
                        if matches!(action, Action::Receive(t) if run.is_at(other, Action::Send(t))) {
                            worklist.wake(other);
                        }
                        break;
                    }
                    (Err(Obstacle::Wrong(why)), _) => return Err(self.wrong(rank, run.at[rank], &why)),
                }
                match action {
                    Action::Forward { .. } if run.trains => live[rank] += 1,
                    Action::Backward { .. } | Action::WeightGradient { .. } => live[rank] -= 1,
                    _ => {}
                }
                peak_live[rank] = peak_live[rank].max(live[rank]);
                run.at[rank] += 1;
            }
        }
        run.check_end()?;
        Ok((Verified { peak_live }, num_visits))
    }

    fn error(&self, text: String) -> Error {
        Error::new(Kind::Config, format!("schedule {}: {text}", self.name))
    }

    fn wrong(&self, rank: usize, at: usize, why: &str) -> Error {
        let action = self.ranks[rank][at];
        self.error(format!("action {at} of rank {rank}, {action}, {why}"))
    }
}

impl<'a> DryRun<'a> {
    fn new(schedule: &'a Schedule, links: &[(usize, usize)], blocking: bool) -> DryRun<'a> {
        let (n, m) = (schedule.num_stages(), schedule.num_microbatches);
        let (mut predecessors, mut successors) = (vec![Vec::new(); n], vec![Vec::new(); n]);
        for &(from, to) in links.iter().filter(|(from, to)| from.max(to) < &n) {
            predecessors[to].push(from);
            successors[from].push(to);
        }
        let rows = links.iter().enumerate().map(|(at, link)| (*link, 2 * at)).collect();
        DryRun {
            schedule,
            trains: schedule.trains(),
            blocking,
            rows,
            predecessors,
            successors,
            forward: StageTable::new(n, m, false),
            back: StageTable::new(n, m, BackwardState::NotStarted),
            transfers: StageTable::new(2 * links.len(), m, TransferState::NotSent),
            backward_left: vec![m; n],
            reduced: vec![false; n],
            at: vec![0; schedule.ranks.len()],
        }
    }

    /// Runs an action, or returns the obstacle.
    fn take(&mut self, rank: usize, action: Action) -> Result<(), Obstacle> {
        match action {
            Action::Forward { stage, microbatch } => {
                self.check_stage(rank, stage, microbatch)?;
                self.check_forward(rank, stage, microbatch)?;
                self.forward[(stage, microbatch)] = true;
            }
            Action::Backward { stage, microbatch } | Action::InputGradient { stage, microbatch } => {
                self.check_stage(rank, stage, microbatch)?;
                self.check_back(rank, action, stage, microbatch)?;
                let whole = matches!(action, Action::Backward { .. });
                self.back[(stage, microbatch)] =
                    if whole { BackwardState::Done } else { BackwardState::InputDone };
                self.backward_left[stage] -= usize::from(whole);
            }
            Action::WeightGradient { stage, microbatch } => {
                self.check_stage(rank, stage, microbatch)?;
                match self.back[(stage, microbatch)] {
                    BackwardState::InputDone => self.back[(stage, microbatch)] = BackwardState::Done,
                    BackwardState::Done => {
                        return wrong("computes gradients that an earlier action has computed");
                    }
                    BackwardState::NotStarted => return wrong(format!("comes before I{stage}.{microbatch}")),
                }
                self.backward_left[stage] -= 1;
            }
            Action::Send(transfer) => self.dry_run_send(rank, transfer)?,
            Action::Receive(transfer) => self.receive(rank, transfer)?,
            Action::Reduce { stage } => self.reduce(rank, stage)?,
        }
        Ok(())
    }

    fn check_stage(&self, rank: usize, stage: usize, microbatch: usize) -> Result<(), Obstacle> {
        let (n, m) = (self.schedule.num_stages(), self.schedule.num_microbatches);
        if stage >= n || microbatch >= m {
            return wrong(format!(
                "names a stage or microbatch that does not exist ({n} stages, {m} microbatches, counted from 0)"
            ));
        }
        let home = self.schedule.stage_ranks[stage];
        if home != rank { wrong(format!("is of a stage on rank {home}")) } else { Ok(()) }
    }

    fn check_forward(&self, rank: usize, stage: usize, microbatch: usize) -> Result<(), Obstacle> {
        if self.forward[(stage, microbatch)] {
            return wrong("is a duplicate");
        }
        for &other in &self.predecessors[stage] {
            let here = match self.schedule.stage_ranks[other] == rank {
                true => self.forward[(other, microbatch)],
                false => self.transfers[(self.rows[&(other, stage)], microbatch)] == TransferState::Received,
            };
            if !here {
                return wrong(format!("needs the values of stage {other}, which this rank does not have"));
            }
        }
        Ok(())
    }

    fn check_back(&self, rank: usize, pass: Action, stage: usize, microbatch: usize) -> Result<(), Obstacle> {
        let before = self.back[(stage, microbatch)];
        let same = matches!(
            (before, pass),
            (BackwardState::InputDone, Action::InputGradient { .. })
                | (BackwardState::Done, Action::Backward { .. })
        );
        match before {
            BackwardState::NotStarted => {}
            _ if same => return wrong("is a duplicate"),
            _ => return wrong("computes gradients that an earlier action has computed"),
        }
        if !self.forward[(stage, microbatch)] {
            return wrong("comes before its forward pass");
        }
        for &other in &self.successors[stage] {
            let here = match self.schedule.stage_ranks[other] == rank {
                true => self.back[(other, microbatch)] != BackwardState::NotStarted,
                false => {
                    self.transfers[(self.rows[&(stage, other)] + 1, microbatch)] == TransferState::Received
                }
            };
            if !here {
                return wrong(format!("needs the values of stage {other}, which this rank does not have"));
            }
        }
        Ok(())
    }

    /// The row of a transfer, and its two ranks.
    fn check_transfer(&self, transfer: Transfer) -> Result<(usize, [usize; 2]), Obstacle> {
        let Transfer { from, to, microbatch } = transfer;
        let link = if transfer.is_forward() { (from, to) } else { (to, from) };
        let num_stages = self.schedule.num_stages();
        let Some(row) = self.rows.get(&link).filter(|_| from.max(to) < num_stages) else {
            return wrong(format!("but stage {to} reads no value of stage {from}"));
        };
        if microbatch >= self.schedule.num_microbatches {
            return wrong(format!(
                "names a microbatch that does not exist ({} microbatches, counted from 0)",
                self.schedule.num_microbatches
            ));
        }
        let row = row + usize::from(!transfer.is_forward());
        Ok((row, [self.schedule.stage_ranks[from], self.schedule.stage_ranks[to]]))
    }

    /// Whether another rank is at this action.
    fn is_at(&self, other: usize, action: Action) -> bool {
        self.schedule.ranks[other].get(self.at[other]) == Some(&action)
    }

    fn dry_run_send(&mut self, rank: usize, transfer: Transfer) -> Result<(), Obstacle> {
        let (row, [from, to]) = self.check_transfer(transfer)?;
        let Transfer { from: stage, microbatch, .. } = transfer;
        let made = match transfer.is_forward() {
            true => self.forward[(stage, microbatch)],
            false => self.back[(stage, microbatch)] != BackwardState::NotStarted,
        };
        match () {
            () if from != rank => wrong(format!("but stage {stage} is on rank {from}")),
            () if to == rank => wrong("but both stages are on one rank"),
            () if !made => wrong("comes before the pass that makes its values"),
            () if self.transfers[(row, microbatch)] != TransferState::NotSent => wrong("is a duplicate"),
            () if self.blocking && !self.is_at(to, Action::Receive(transfer)) => Err(Obstacle::Waits(to)),
            () => {
                self.transfers[(row, microbatch)] = TransferState::Sent;
                Ok(())
            }
        }
    }

    fn receive(&mut self, rank: usize, transfer: Transfer) -> Result<(), Obstacle> {
        let (row, [from, to]) = self.check_transfer(transfer)?;
        if to != rank {
            return wrong(format!("but stage {} is on rank {to}", transfer.to));
        }
        if from == rank {
            return wrong("but both stages are on one rank");
        }
        match self.transfers[(row, transfer.microbatch)] {
            TransferState::Received => wrong("is a duplicate"),
            // Messages that arrive before it stay buffered.
            TransferState::Sent => {
                self.transfers[(row, transfer.microbatch)] = TransferState::Received;
                Ok(())
            }
            TransferState::NotSent => Err(Obstacle::Waits(from)),
        }
    }

    fn reduce(&mut self, rank: usize, stage: usize) -> Result<(), Obstacle> {
        self.check_stage(rank, stage, 0)?;
        if self.reduced[stage] {
            return wrong("is a duplicate");
        }
        if self.backward_left[stage] > 0 {
            let text = format!("comes before {} of the stage's backward passes", self.backward_left[stage]);
            return wrong(text);
        }
        self.reduced[stage] = true;
        Ok(())
    }

    /// Checks that no rank waits, no message is left, and no pass is missing.
    fn check_end(&mut self) -> Result<()> {
        let schedule = self.schedule;
        let mut waits = Vec::new();
        for rank in 0..schedule.ranks.len() {
            if let Some(&action) = schedule.ranks[rank].get(self.at[rank])
                && let Err(Obstacle::Waits(other)) = self.take(rank, action)
            {
                waits.push(format!("rank {rank} waits for rank {other} in {action}"));
            }
        }
        if !waits.is_empty() {
            return Err(schedule.error(format!("deadlock: {}", waits.join(", "))));
        }
        let left = |action: &&Action| match **action {
            Action::Send(t) => self
                .check_transfer(t)
                .is_ok_and(|(row, _)| self.transfers[(row, t.microbatch)] == TransferState::Sent),
            _ => false,
        };
        if let Some(left) = schedule.ranks.iter().flatten().find(left) {
            return Err(schedule.error(format!("{left} is never received")));
        }
        for stage in 0..schedule.num_stages() {
            let missing = (0..schedule.num_microbatches).find_map(|microbatch| {
                let back = match self.back[(stage, microbatch)] {
                    BackwardState::NotStarted => Some(Action::Backward { stage, microbatch }),
                    BackwardState::InputDone => Some(Action::WeightGradient { stage, microbatch }),
                    BackwardState::Done => None,
                };
                let forward = Action::Forward { stage, microbatch };
                let forward = (!self.forward[(stage, microbatch)]).then_some(forward);
                forward.or(back.filter(|_| self.trains))
            });
            let missing =
                missing.or((self.trains && !self.reduced[stage]).then_some(Action::Reduce { stage }));
            if let Some(missing) = missing {
                let text = format!("{missing} is missing on rank {}", schedule.stage_ranks[stage]);
                return Err(schedule.error(text));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(n: usize) -> Vec<(usize, usize)> {
        (1..n).map(|s| (s - 1, s)).collect()
    }

    /// A schedule from its lines, with stage i on rank i.
    fn read(lines: &[&str], num_microbatches: usize) -> Schedule {
        let list = |line: &&str| line.split_whitespace().map(|w| w.parse().unwrap()).collect();
        Schedule {
            name: "test".to_string(),
            num_microbatches,
            stage_ranks: (0..lines.len()).collect(),
            ranks: lines.iter().map(list).collect(),
        }
    }

    #[test]
    fn named_schedules_verify_with_published_peaks() {
        for p in 1..=8 {
            for m in [1, 2, 3, 5, 8, 16] {
                let gpipe =
                    Schedule::gpipe(p, m).unwrap().with_transfers(&chain(p)).verify(&chain(p)).unwrap();
                assert_eq!(gpipe.peak_live, vec![m; p]);
                let alternating = Schedule::one_f_one_b(p, m).unwrap().with_transfers(&chain(p));
                let peaks: Vec<usize> = (0..p).map(|s| (p - s).min(m)).collect();
                assert_eq!(alternating.verify(&chain(p)).unwrap().peak_live, peaks);
                let stage_ranks: Vec<usize> = (0..p).collect();
                let forward = Schedule::forward_only(&stage_ranks, p, m).unwrap().with_transfers(&chain(p));
                assert_eq!(forward.verify(&chain(p)).unwrap().peak_live, vec![0; p]);
                let halves =
                    Schedule::zb_h1(p, m).unwrap().with_transfers(&chain(p)).verify(&chain(p)).unwrap();
                assert!(halves.peak_live.iter().all(|n| *n <= p), "{halves:?}");
                Schedule::zb_h2(p, m).unwrap().with_transfers(&chain(p)).verify(&chain(p)).unwrap();
                if m % p == 0 {
                    let chain = chain(3 * p);
                    Schedule::interleaved(p, m, 3).unwrap().with_transfers(&chain).verify(&chain).unwrap();
                }
            }
        }
        // A value that skips stages.
        let links = [(0, 1), (1, 2), (0, 2)];
        Schedule::one_f_one_b(3, 4).unwrap().with_transfers(&links).verify(&links).unwrap();
    }

    #[test]
    fn verify_names_the_first_wrong_action() {
        let good = ["F0.0 S0>1.0 R1>0.0 B0.0 G0", "R0>1.0 F1.0 B1.0 S1>0.0 G1"];
        read(&good, 1).verify(&chain(2)).unwrap();
        let halves = ["F0.0 S0>1.0 R1>0.0 I0.0 W0.0 G0", "R0>1.0 F1.0 I1.0 S1>0.0 W1.0 G1"];
        read(&halves, 1).verify(&chain(2)).unwrap();
        let broken: [(&[&str], &str); 37] = [
            // Passes.
            (&["F0.0 F0.0", ""], "action 1 of rank 0, F0.0, is a duplicate"),
            (&["F0.0 S0>1.0 R1>0.0 B0.0 B0.0 G0", good[1]], "action 4 of rank 0, B0.0, is a duplicate"),
            (&["F0.0 S0>1.0 R1>0.0 I0.0 I0.0 G0", good[1]], "action 4 of rank 0, I0.0, is a duplicate"),
            (
                &["F0.0 S0>1.0 R1>0.0 I0.0 W0.0 W0.0", good[1]],
                "W0.0, computes gradients that an earlier action has computed",
            ),
            (
                &["F0.0 S0>1.0 R1>0.0 B0.0 W0.0", good[1]],
                "W0.0, computes gradients that an earlier action has computed",
            ),
            (&["F0.0 S0>1.0 R1>0.0 W0.0", good[1]], "action 3 of rank 0, W0.0, comes before I0.0"),
            (
                &["F0.0 S0>1.0 R1>0.0 I0.0 B0.0", good[1]],
                "B0.0, computes gradients that an earlier action has computed",
            ),
            (
                &["F0.0 S0>1.0 R1>0.0 B0.0 I0.0", good[1]],
                "I0.0, computes gradients that an earlier action has computed",
            ),
            (&["B0.0", good[1]], "action 0 of rank 0, B0.0, comes before its forward pass"),
            (&[good[0], "R0>1.0 I1.0"], "action 1 of rank 1, I1.0, comes before its forward pass"),
            (&["F0.0 B0.0", good[1]], "action 1 of rank 0, B0.0, needs the values of stage 1"),
            (&[good[0], "F1.0"], "action 0 of rank 1, F1.0, needs the values of stage 0"),
            (
                &["F0.1", ""],
                "F0.1, names a stage or microbatch that does not exist (2 stages, 1 microbatches, counted from 0)",
            ),
            (&["F2.0", ""], "F2.0, names a stage or microbatch that does not exist (2 stages"),
            (
                &["F0.0 S0>1.0 R1>0.0 B0.7", good[1]],
                "B0.7, names a stage or microbatch that does not exist (2 stages, 1 microbatches, counted from 0)",
            ),
            (&["W9.0", ""], "W9.0, names a stage or microbatch that does not exist (2 stages"),
            (&["F1.0", ""], "action 0 of rank 0, F1.0, is of a stage on rank 1"),
            (&[good[0], "R0>1.0 F1.0 B0.0"], "action 2 of rank 1, B0.0, is of a stage on rank 0"),
            // Missing actions.
            (&["", ""], "F0.0 is missing on rank 0"),
            (&["F0.0 S0>1.0 R1>0.0 I0.0", good[1]], "W0.0 is missing on rank 0"),
            (&["F0.0 S0>1.0", "R0>1.0 F1.0 B1.0 G1"], "B0.0 is missing on rank 0"),
            (&["F0.0 S0>1.0 R1>0.0 B0.0", good[1]], "G0 is missing on rank 0"),
            // Transfers.
            (&["S0>1.0", good[1]], "action 0 of rank 0, S0>1.0, comes before the pass that makes its values"),
            (&[good[0], "R0>1.0 F1.0 S1>0.0 B1.0"], "S1>0.0, comes before the pass that makes its values"),
            (&["F0.0 S0>1.0 S0>1.0", ""], "action 2 of rank 0, S0>1.0, is a duplicate"),
            (&["F0.0 S0>1.0", "R0>1.0 F1.0 R0>1.0"], "action 2 of rank 1, R0>1.0, is a duplicate"),
            (&["F0.0 S0>2.0", ""], "S0>2.0, but stage 2 reads no value of stage 0"),
            (&["F0.0 S0>1.5", ""], "S0>1.5, names a microbatch that does not exist (1 microbatches"),
            (&["R0>1.0", ""], "action 0 of rank 0, R0>1.0, but stage 1 is on rank 1"),
            (&[good[0], "S0>1.0"], "action 0 of rank 1, S0>1.0, but stage 0 is on rank 0"),
            (&["F0.0 S0>1.0", good[1]], "S1>0.0 is never received"),
            // Reductions.
            (&["F0.0 S0>1.0 R1>0.0 G0 B0.0", good[1]], "G0, comes before 1 of the stage's backward passes"),
            (&["F0.0 S0>1.0 R1>0.0 B0.0 G0 G0", good[1]], "action 5 of rank 0, G0, is a duplicate"),
            (&["G1", ""], "action 0 of rank 0, G1, is of a stage on rank 1"),
            (
                &["G2", ""],
                "action 0 of rank 0, G2, names a stage or microbatch that does not exist (2 stages",
            ),
            // Deadlocks.
            (
                &["F0.0 R1>0.0 S0>1.0 B0.0", good[1]],
                "deadlock: rank 0 waits for rank 1 in R1>0.0, rank 1 waits for rank 0 in R0>1.0",
            ),
            (&["F0.0 S0>1.0 R1>0.0 B0.0", "R0>1.0 F1.0 B1.0"], "deadlock: rank 0 waits for rank 1"),
        ];
        for (lines, why) in broken {
            let error = read(lines, 1).verify(&chain(2)).unwrap_err();
            assert!(error.kind() == Kind::Config && error.message().contains(why), "{lines:?}: {error}");
        }
        let lost = Schedule { stage_ranks: vec![0, 2], ..Schedule::gpipe(2, 1).unwrap() };
        assert!(lost.verify(&chain(2)).unwrap_err().message().contains("is on rank 2"));
        let together = Schedule { stage_ranks: vec![0, 0], ..read(&["F0.0 S0>1.0"], 1) };
        assert!(together.verify(&chain(2)).unwrap_err().message().contains("both stages are on one rank"));
        let together = Schedule { stage_ranks: vec![0, 0], ..read(&["F0.0 R0>1.0"], 1) };
        assert!(together.verify(&chain(2)).unwrap_err().message().contains("both stages are on one rank"));
    }

    #[test]
    fn verify_blocking_finds_circular_sends() {
        // Each rank sends before it receives: valid with buffers, a deadlock without.
        let crossed = Schedule::one_f_one_b(2, 2).unwrap().with_transfers(&chain(2));
        crossed.verify(&chain(2)).unwrap();
        let error = crossed.verify_blocking(&chain(2)).unwrap_err();
        let why = "deadlock: rank 0 waits for rank 1 in S0>1.1, rank 1 waits for rank 0 in S1>0.0";
        assert!(error.message().contains(why), "{error}");
        let order = [
            "F0.0 S0>1.0 F0.1 R1>0.0 B0.0 S0>1.1 R1>0.1 B0.1 G0",
            "R0>1.0 F1.0 B1.0 S1>0.0 R0>1.1 F1.1 B1.1 S1>0.1 G1",
        ];
        assert_eq!(read(&order, 2).verify_blocking(&chain(2)).unwrap().peak_live, [2, 1]);
        // Without buffers messages must be received in the order in which they are sent.
        let swapped = order.map(|line| line.replace("R1>0.0 B0.0 S0>1.1", "S0>1.1 R1>0.0 B0.0"));
        let error = read(&[&swapped[0], &swapped[1]], 2).verify_blocking(&chain(2)).unwrap_err();
        assert!(error.message().contains("rank 0 waits for rank 1 in S0>1.1"), "{error}");
        let twice = read(&["F0.0 S0>1.0 S0>1.0", "R0>1.0 F1.0"], 1).verify_blocking(&chain(2)).unwrap_err();
        assert!(twice.message().contains("action 2 of rank 0, S0>1.0, is a duplicate"), "{twice}");
    }

    #[test]
    fn verify_allows_receives_out_of_order() {
        let swapped = [
            "F0.0 F0.1 S0>1.1 S0>1.0 R1>0.0 B0.0 R1>0.1 B0.1 G0",
            "R0>1.0 F1.0 B1.0 S1>0.0 R0>1.1 F1.1 B1.1 S1>0.1 G1",
        ];
        assert_eq!(read(&swapped, 2).verify(&chain(2)).unwrap().peak_live, [2, 1]);
    }
}
