//! The proof of a schedule, before its first step: it is run through without any value.

use super::action::{Action, Schedule, Transfer};
use super::sweep::Sweep;
use super::table::Table;
use shardgrad_dist::{Error, Kind, Result};
use std::collections::HashMap;

/// What is known of a schedule that holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Per rank, the largest number of forward passes whose backward pass was still to come.
    pub peak_live: Vec<usize>,
}

/// How far the backward pass of a microbatch in a stage is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Back {
    No,
    Halved,
    Done,
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    No,
    Sent,
    Received,
}

/// The state of a run without values.
struct Walk<'a> {
    schedule: &'a Schedule,
    trains: bool,
    /// Whether a send waits for its receive.
    blocking: bool,
    /// The rows of the transfers of a link in `ways`: towards later stages, and back.
    rows: HashMap<(usize, usize), usize>,
    /// Of each stage, those that it takes from and those that it gives to.
    takes: Vec<Vec<usize>>,
    gives: Vec<Vec<usize>>,
    forward: Table<bool>,
    back: Table<Back>,
    ways: Table<Way>,
    /// Backward passes of a stage that are still to come.
    owed: Vec<usize>,
    reduced: Vec<bool>,
    /// How far each rank is in its list.
    at: Vec<usize>,
}

/// Why an action cannot be taken: never, or not yet.
enum Obstacle {
    Wrong(String),
    /// For another rank.
    Waits(usize),
}

fn wrong<T>(why: impl Into<String>) -> Result<T, Obstacle> {
    Err(Obstacle::Wrong(why.into()))
}

impl Schedule {
    /// Proves that the lists do what they should, for stages that hand values along `links`: every microbatch passes every
    /// stage once in each direction, after what it needs; transfers are paired; every stage's gradients are reduced
    /// once, after its last pass; nobody waits forever (sends do not wait, receives do).
    ///
    /// # Errors
    /// `Kind::Config` naming the first action that is wrong, or those in which all ranks wait.
    pub fn verify(&self, links: &[(usize, usize)]) -> Result<Verified> {
        Ok(self.walk(links, false)?.0)
    }

    /// Proves the same where a send waits until the other rank is in the receive that belongs to it, as on transports
    /// without buffers. What holds so holds on every transport; see [`Schedule::with_meetings`].
    ///
    /// # Errors
    /// As [`Schedule::verify`].
    pub fn verify_blocking(&self, links: &[(usize, usize)]) -> Result<Verified> {
        Ok(self.walk(links, true)?.0)
    }

    /// What is known of a schedule that holds, and how often a rank was looked at for that.
    pub(super) fn walk(&self, links: &[(usize, usize)], blocking: bool) -> Result<(Verified, usize)> {
        if let Some(&lost) = self.place.iter().find(|&&rank| rank >= self.ranks.len()) {
            let text = format!("a stage lives on rank {lost}, but there are {} ranks", self.ranks.len());
            return Err(self.error(text));
        }
        let mut walk = Walk::new(self, links, blocking);
        let (mut live, mut peak_live) = (vec![0usize; self.ranks.len()], vec![0; self.ranks.len()]);
        let (mut sweep, mut num_looks) = (Sweep::over(self.ranks.len()), 0);
        while let Some(rank) = sweep.next() {
            num_looks += 1;
            while let Some(&action) = self.ranks[rank].get(walk.at[rank]) {
                match (walk.take(rank, action), action) {
                    (Ok(()), Action::Send(transfer)) => sweep.wake(self.place[transfer.to]),
                    (Ok(()), _) => {}
                    (Err(Obstacle::Waits(other)), _) => {
                        // A send that waits, waits for this.
                        if matches!(action, Action::Receive(t) if walk.meets(other, Action::Send(t))) {
                            sweep.wake(other);
                        }
                        break;
                    }
                    (Err(Obstacle::Wrong(why)), _) => return Err(self.wrong(rank, walk.at[rank], &why)),
                }
                match action {
                    Action::Forward { .. } if walk.trains => live[rank] += 1,
                    Action::Backward { .. } | Action::WeightGradient { .. } => live[rank] -= 1,
                    _ => {}
                }
                peak_live[rank] = peak_live[rank].max(live[rank]);
                walk.at[rank] += 1;
            }
        }
        walk.check_end()?;
        Ok((Verified { peak_live }, num_looks))
    }

    fn error(&self, text: String) -> Error {
        Error::new(Kind::Config, format!("schedule {}: {text}", self.name))
    }

    fn wrong(&self, rank: usize, at: usize, why: &str) -> Error {
        let action = self.ranks[rank][at];
        self.error(format!("action {at} of rank {rank}, {action}, {why}"))
    }
}

impl<'a> Walk<'a> {
    fn new(schedule: &'a Schedule, links: &[(usize, usize)], blocking: bool) -> Walk<'a> {
        let (n, m) = (schedule.num_stages(), schedule.num_microbatches);
        let (mut takes, mut gives) = (vec![Vec::new(); n], vec![Vec::new(); n]);
        for &(from, to) in links.iter().filter(|(from, to)| from.max(to) < &n) {
            takes[to].push(from);
            gives[from].push(to);
        }
        let rows = links.iter().enumerate().map(|(at, link)| (*link, 2 * at)).collect();
        Walk {
            schedule,
            trains: schedule.trains(),
            blocking,
            rows,
            takes,
            gives,
            forward: Table::new(n, m, false),
            back: Table::new(n, m, Back::No),
            ways: Table::new(2 * links.len(), m, Way::No),
            owed: vec![m; n],
            reduced: vec![false; n],
            at: vec![0; schedule.ranks.len()],
        }
    }

    /// Takes an action, or says what is in its way.
    fn take(&mut self, rank: usize, action: Action) -> Result<(), Obstacle> {
        match action {
            Action::Forward { stage, microbatch } => {
                self.check_place(rank, stage, microbatch)?;
                self.check_forward(rank, stage, microbatch)?;
                self.forward[(stage, microbatch)] = true;
            }
            Action::Backward { stage, microbatch } | Action::InputGradient { stage, microbatch } => {
                self.check_place(rank, stage, microbatch)?;
                self.check_back(rank, action, stage, microbatch)?;
                let whole = matches!(action, Action::Backward { .. });
                self.back[(stage, microbatch)] = if whole { Back::Done } else { Back::Halved };
                self.owed[stage] -= usize::from(whole);
            }
            Action::WeightGradient { stage, microbatch } => {
                self.check_place(rank, stage, microbatch)?;
                match self.back[(stage, microbatch)] {
                    Back::Halved => self.back[(stage, microbatch)] = Back::Done,
                    Back::Done => return wrong("makes gradients that are there already"),
                    Back::No => return wrong(format!("comes before I{stage}.{microbatch}")),
                }
                self.owed[stage] -= 1;
            }
            Action::Send(transfer) => self.hand_over(rank, transfer)?,
            Action::Receive(transfer) => self.accept(rank, transfer)?,
            Action::Reduce { stage } => self.reduce(rank, stage)?,
        }
        Ok(())
    }

    fn check_place(&self, rank: usize, stage: usize, microbatch: usize) -> Result<(), Obstacle> {
        let (n, m) = (self.schedule.num_stages(), self.schedule.num_microbatches);
        if stage >= n || microbatch >= m {
            return wrong(format!("is of none of the {n} stages and {m} microbatches"));
        }
        let home = self.schedule.place[stage];
        if home != rank { wrong(format!("is of a stage that lives on rank {home}")) } else { Ok(()) }
    }

    fn check_forward(&self, rank: usize, stage: usize, microbatch: usize) -> Result<(), Obstacle> {
        if self.forward[(stage, microbatch)] {
            return wrong("comes twice");
        }
        for &other in &self.takes[stage] {
            let here = match self.schedule.place[other] == rank {
                true => self.forward[(other, microbatch)],
                false => self.ways[(self.rows[&(other, stage)], microbatch)] == Way::Received,
            };
            if !here {
                return wrong(format!("needs what stage {other} hands on, which is not there"));
            }
        }
        Ok(())
    }

    fn check_back(&self, rank: usize, pass: Action, stage: usize, microbatch: usize) -> Result<(), Obstacle> {
        let before = self.back[(stage, microbatch)];
        let same = matches!(
            (before, pass),
            (Back::Halved, Action::InputGradient { .. }) | (Back::Done, Action::Backward { .. })
        );
        match before {
            Back::No => {}
            _ if same => return wrong("comes twice"),
            _ => return wrong("makes gradients that are there already"),
        }
        if !self.forward[(stage, microbatch)] {
            return wrong("comes before its forward pass");
        }
        for &other in &self.gives[stage] {
            let here = match self.schedule.place[other] == rank {
                true => self.back[(other, microbatch)] != Back::No,
                false => self.ways[(self.rows[&(stage, other)] + 1, microbatch)] == Way::Received,
            };
            if !here {
                return wrong(format!("needs what stage {other} hands on, which is not there"));
            }
        }
        Ok(())
    }

    /// The row of a transfer, and the ranks between which it goes.
    fn check_transfer(&self, transfer: Transfer) -> Result<(usize, [usize; 2]), Obstacle> {
        let Transfer { from, to, microbatch } = transfer;
        let link = if transfer.is_forward() { (from, to) } else { (to, from) };
        let num_stages = self.schedule.num_stages();
        let Some(row) = self.rows.get(&link).filter(|_| from.max(to) < num_stages) else {
            return wrong(format!("but stage {from} has nothing for stage {to}"));
        };
        if microbatch >= self.schedule.num_microbatches {
            return wrong(format!("is of none of the {} microbatches", self.schedule.num_microbatches));
        }
        let row = row + usize::from(!transfer.is_forward());
        Ok((row, [self.schedule.place[from], self.schedule.place[to]]))
    }

    /// Whether the action that another rank has come to is this one.
    fn meets(&self, other: usize, action: Action) -> bool {
        self.schedule.ranks[other].get(self.at[other]) == Some(&action)
    }

    fn hand_over(&mut self, rank: usize, transfer: Transfer) -> Result<(), Obstacle> {
        let (row, [from, to]) = self.check_transfer(transfer)?;
        let Transfer { from: stage, microbatch, .. } = transfer;
        let made = match transfer.is_forward() {
            true => self.forward[(stage, microbatch)],
            false => self.back[(stage, microbatch)] != Back::No,
        };
        match () {
            () if from != rank => wrong(format!("but stage {stage} lives on rank {from}")),
            () if to == rank => wrong("but both stages live on one rank"),
            () if !made => wrong("comes before the pass that makes it"),
            () if self.ways[(row, microbatch)] != Way::No => wrong("comes twice"),
            () if self.blocking && !self.meets(to, Action::Receive(transfer)) => Err(Obstacle::Waits(to)),
            () => {
                self.ways[(row, microbatch)] = Way::Sent;
                Ok(())
            }
        }
    }

    fn accept(&mut self, rank: usize, transfer: Transfer) -> Result<(), Obstacle> {
        let (row, [from, to]) = self.check_transfer(transfer)?;
        if to != rank {
            return wrong(format!("but stage {} lives on rank {to}", transfer.to));
        }
        if from == rank {
            return wrong("but both stages live on one rank");
        }
        match self.ways[(row, transfer.microbatch)] {
            Way::Received => wrong("comes twice"),
            // Messages that come before it are kept until they are asked for.
            Way::Sent => {
                self.ways[(row, transfer.microbatch)] = Way::Received;
                Ok(())
            }
            Way::No => Err(Obstacle::Waits(from)),
        }
    }

    fn reduce(&mut self, rank: usize, stage: usize) -> Result<(), Obstacle> {
        self.check_place(rank, stage, 0)?;
        if self.reduced[stage] {
            return wrong("comes twice");
        }
        if self.owed[stage] > 0 {
            let text = format!("comes before {} of the stage's backward passes", self.owed[stage]);
            return wrong(text);
        }
        self.reduced[stage] = true;
        Ok(())
    }

    /// Nobody is left waiting, no message is left over, no pass is missing.
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
            return Err(schedule.error(format!("nobody can go on: {}", waits.join(", "))));
        }
        let left = |action: &&Action| match **action {
            Action::Send(t) => {
                self.check_transfer(t).is_ok_and(|(row, _)| self.ways[(row, t.microbatch)] == Way::Sent)
            }
            _ => false,
        };
        if let Some(left) = schedule.ranks.iter().flatten().find(left) {
            return Err(schedule.error(format!("{left} is never received")));
        }
        for stage in 0..schedule.num_stages() {
            let missing = (0..schedule.num_microbatches).find_map(|microbatch| {
                let back = match self.back[(stage, microbatch)] {
                    Back::No => Some(Action::Backward { stage, microbatch }),
                    Back::Halved => Some(Action::WeightGradient { stage, microbatch }),
                    Back::Done => None,
                };
                let forward = Action::Forward { stage, microbatch };
                let forward = (!self.forward[(stage, microbatch)]).then_some(forward);
                forward.or(back.filter(|_| self.trains))
            });
            let missing =
                missing.or((self.trains && !self.reduced[stage]).then_some(Action::Reduce { stage }));
            if let Some(missing) = missing {
                let text = format!("{missing} is missing on rank {}", schedule.place[stage]);
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

    /// A schedule from its lines; stage i lives on rank i.
    fn read(lines: &[&str], num_microbatches: usize) -> Schedule {
        let list = |line: &&str| line.split_whitespace().map(|w| w.parse().unwrap()).collect();
        Schedule {
            name: "test".to_string(),
            num_microbatches,
            place: (0..lines.len()).collect(),
            ranks: lines.iter().map(list).collect(),
        }
    }

    #[test]
    fn what_is_made_holds_and_peaks_are_those_of_the_papers() {
        for p in 1..=8 {
            for m in [1, 2, 3, 5, 8, 16] {
                let gpipe =
                    Schedule::gpipe(p, m).unwrap().with_transfers(&chain(p)).verify(&chain(p)).unwrap();
                assert_eq!(gpipe.peak_live, vec![m; p]);
                let alternating = Schedule::one_f_one_b(p, m).unwrap().with_transfers(&chain(p));
                let peaks: Vec<usize> = (0..p).map(|s| (p - s).min(m)).collect();
                assert_eq!(alternating.verify(&chain(p)).unwrap().peak_live, peaks);
                let place: Vec<usize> = (0..p).collect();
                let forward = Schedule::forward_only(&place, p).unwrap().with_transfers(&chain(p));
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
        // A value that passes over stages in between.
        let links = [(0, 1), (1, 2), (0, 2)];
        Schedule::one_f_one_b(3, 4).unwrap().with_transfers(&links).verify(&links).unwrap();
    }

    #[test]
    fn broken_lists_are_refused_by_their_first_bad_action() {
        let good = ["F0.0 S0>1.0 R1>0.0 B0.0 G0", "R0>1.0 F1.0 B1.0 S1>0.0 G1"];
        read(&good, 1).verify(&chain(2)).unwrap();
        let halves = ["F0.0 S0>1.0 R1>0.0 I0.0 W0.0 G0", "R0>1.0 F1.0 I1.0 S1>0.0 W1.0 G1"];
        read(&halves, 1).verify(&chain(2)).unwrap();
        let broken: [(&[&str], &str); 37] = [
            // Passes.
            (&["F0.0 F0.0", ""], "action 1 of rank 0, F0.0, comes twice"),
            (&["F0.0 S0>1.0 R1>0.0 B0.0 B0.0 G0", good[1]], "action 4 of rank 0, B0.0, comes twice"),
            (&["F0.0 S0>1.0 R1>0.0 I0.0 I0.0 G0", good[1]], "action 4 of rank 0, I0.0, comes twice"),
            (&["F0.0 S0>1.0 R1>0.0 I0.0 W0.0 W0.0", good[1]], "W0.0, makes gradients that are there already"),
            (&["F0.0 S0>1.0 R1>0.0 B0.0 W0.0", good[1]], "W0.0, makes gradients that are there already"),
            (&["F0.0 S0>1.0 R1>0.0 W0.0", good[1]], "action 3 of rank 0, W0.0, comes before I0.0"),
            (&["F0.0 S0>1.0 R1>0.0 I0.0 B0.0", good[1]], "B0.0, makes gradients that are there already"),
            (&["F0.0 S0>1.0 R1>0.0 B0.0 I0.0", good[1]], "I0.0, makes gradients that are there already"),
            (&["B0.0", good[1]], "action 0 of rank 0, B0.0, comes before its forward pass"),
            (&[good[0], "R0>1.0 I1.0"], "action 1 of rank 1, I1.0, comes before its forward pass"),
            (&["F0.0 B0.0", good[1]], "action 1 of rank 0, B0.0, needs what stage 1 hands on"),
            (&[good[0], "F1.0"], "action 0 of rank 1, F1.0, needs what stage 0 hands on"),
            (&["F0.1", ""], "F0.1, is of none of the 2 stages and 1 microbatches"),
            (&["F2.0", ""], "F2.0, is of none of the 2 stages"),
            (&["F0.0 S0>1.0 R1>0.0 B0.7", good[1]], "B0.7, is of none of the 2 stages and 1 microbatches"),
            (&["W9.0", ""], "W9.0, is of none of the 2 stages"),
            (&["F1.0", ""], "action 0 of rank 0, F1.0, is of a stage that lives on rank 1"),
            (&[good[0], "R0>1.0 F1.0 B0.0"], "action 2 of rank 1, B0.0, is of a stage that lives on rank 0"),
            // What is missing.
            (&["", ""], "F0.0 is missing on rank 0"),
            (&["F0.0 S0>1.0 R1>0.0 I0.0", good[1]], "W0.0 is missing on rank 0"),
            (&["F0.0 S0>1.0", "R0>1.0 F1.0 B1.0 G1"], "B0.0 is missing on rank 0"),
            (&["F0.0 S0>1.0 R1>0.0 B0.0", good[1]], "G0 is missing on rank 0"),
            // Transfers.
            (&["S0>1.0", good[1]], "action 0 of rank 0, S0>1.0, comes before the pass that makes it"),
            (&[good[0], "R0>1.0 F1.0 S1>0.0 B1.0"], "S1>0.0, comes before the pass that makes it"),
            (&["F0.0 S0>1.0 S0>1.0", ""], "action 2 of rank 0, S0>1.0, comes twice"),
            (&["F0.0 S0>1.0", "R0>1.0 F1.0 R0>1.0"], "action 2 of rank 1, R0>1.0, comes twice"),
            (&["F0.0 S0>2.0", ""], "S0>2.0, but stage 0 has nothing for stage 2"),
            (&["F0.0 S0>1.5", ""], "S0>1.5, is of none of the 1 microbatches"),
            (&["R0>1.0", ""], "action 0 of rank 0, R0>1.0, but stage 1 lives on rank 1"),
            (&[good[0], "S0>1.0"], "action 0 of rank 1, S0>1.0, but stage 0 lives on rank 0"),
            (&["F0.0 S0>1.0", good[1]], "S1>0.0 is never received"),
            // Reductions.
            (&["F0.0 S0>1.0 R1>0.0 G0 B0.0", good[1]], "G0, comes before 1 of the stage's backward passes"),
            (&["F0.0 S0>1.0 R1>0.0 B0.0 G0 G0", good[1]], "action 5 of rank 0, G0, comes twice"),
            (&["G1", ""], "action 0 of rank 0, G1, is of a stage that lives on rank 1"),
            (&["G2", ""], "action 0 of rank 0, G2, is of none of the 2 stages"),
            // Waits.
            (
                &["F0.0 R1>0.0 S0>1.0 B0.0", good[1]],
                "nobody can go on: rank 0 waits for rank 1 in R1>0.0, rank 1 waits for rank 0 in R0>1.0",
            ),
            (&["F0.0 S0>1.0 R1>0.0 B0.0", "R0>1.0 F1.0 B1.0"], "nobody can go on: rank 0 waits for rank 1"),
        ];
        for (lines, why) in broken {
            let error = read(lines, 1).verify(&chain(2)).unwrap_err();
            assert!(error.kind() == Kind::Config && error.message().contains(why), "{lines:?}: {error}");
        }
        let lost = Schedule { place: vec![0, 2], ..Schedule::gpipe(2, 1).unwrap() };
        assert!(lost.verify(&chain(2)).unwrap_err().message().contains("lives on rank 2"));
        let together = Schedule { place: vec![0, 0], ..read(&["F0.0 S0>1.0"], 1) };
        assert!(together.verify(&chain(2)).unwrap_err().message().contains("both stages live on one rank"));
        let together = Schedule { place: vec![0, 0], ..read(&["F0.0 R0>1.0"], 1) };
        assert!(together.verify(&chain(2)).unwrap_err().message().contains("both stages live on one rank"));
    }

    #[test]
    fn a_circle_of_blocking_sends_is_found() {
        // Each hands over before it takes: harmless with buffers, a standstill without.
        let crossed = Schedule::one_f_one_b(2, 2).unwrap().with_transfers(&chain(2));
        crossed.verify(&chain(2)).unwrap();
        let error = crossed.verify_blocking(&chain(2)).unwrap_err();
        let why = "nobody can go on: rank 0 waits for rank 1 in S0>1.1, rank 1 waits for rank 0 in S1>0.0";
        assert!(error.message().contains(why), "{error}");
        let order = [
            "F0.0 S0>1.0 F0.1 R1>0.0 B0.0 S0>1.1 R1>0.1 B0.1 G0",
            "R0>1.0 F1.0 B1.0 S1>0.0 R0>1.1 F1.1 B1.1 S1>0.1 G1",
        ];
        assert_eq!(read(&order, 2).verify_blocking(&chain(2)).unwrap().peak_live, [2, 1]);
        // Without buffers messages come in the order in which they are sent.
        let swapped = order.map(|line| line.replace("R1>0.0 B0.0 S0>1.1", "S0>1.1 R1>0.0 B0.0"));
        let error = read(&[&swapped[0], &swapped[1]], 2).verify_blocking(&chain(2)).unwrap_err();
        assert!(error.message().contains("rank 0 waits for rank 1 in S0>1.1"), "{error}");
        let twice = read(&["F0.0 S0>1.0 S0>1.0", "R0>1.0 F1.0"], 1).verify_blocking(&chain(2)).unwrap_err();
        assert!(twice.message().contains("action 2 of rank 0, S0>1.0, comes twice"), "{twice}");
    }

    #[test]
    fn messages_may_be_read_in_another_order_than_they_were_sent() {
        let swapped = [
            "F0.0 F0.1 S0>1.1 S0>1.0 R1>0.0 B0.0 R1>0.1 B0.1 G0",
            "R0>1.0 F1.0 B1.0 S1>0.0 R0>1.1 F1.1 B1.1 S1>0.1 G1",
        ];
        assert_eq!(read(&swapped, 2).verify(&chain(2)).unwrap().peak_live, [2, 1]);
    }
}
