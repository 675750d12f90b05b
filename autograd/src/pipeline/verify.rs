//! The proof of a schedule, before its first step: it is run through without any value.

use super::action::{Action, Schedule, Transfer};
use shardgrad_dist::{Error, Kind, Result};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What is known of a schedule that holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Per rank, the largest number of forward passes whose backward pass was still to come.
    pub peak_live: Vec<usize>,
}

/// The state of a run without values.
struct Walk<'a> {
    schedule: &'a Schedule,
    links: &'a [(usize, usize)],
    trains: bool,
    done: BTreeSet<Action>,
    received: BTreeSet<Transfer>,
    /// Messages under way, by pair of ranks.
    under_way: BTreeMap<(usize, usize), VecDeque<Transfer>>,
}

/// Why an action cannot be taken: never, or not yet.
enum Obstacle {
    Wrong(String),
    Waits(String),
}

impl Schedule {
    /// Proves that the lists do what they should, for stages that hand values along `links`: every microbatch passes every
    /// stage once in each direction, after what it needs; transfers are paired; nobody waits forever (sends do
    /// not wait, receives do).
    ///
    /// # Errors
    /// `Kind::Config` naming the first action that is wrong, or those in which all ranks wait.
    pub fn verify(&self, links: &[(usize, usize)]) -> Result<Verified> {
        if let Some(&lost) = self.place.iter().find(|&&rank| rank >= self.ranks.len()) {
            let text = format!("a stage lives on rank {lost}, but there are {} ranks", self.ranks.len());
            return Err(self.error(text));
        }
        let trains = self.trains();
        let mut walk = Walk {
            schedule: self,
            links,
            trains,
            done: BTreeSet::new(),
            received: BTreeSet::new(),
            under_way: BTreeMap::new(),
        };
        let mut at = vec![0; self.ranks.len()];
        let (mut live, mut peak_live) = (vec![0usize; self.ranks.len()], vec![0; self.ranks.len()]);
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for rank in 0..self.ranks.len() {
                while let Some(&action) = self.ranks[rank].get(at[rank]) {
                    match walk.take(rank, action) {
                        Ok(()) => {}
                        Err(Obstacle::Waits(_)) => break,
                        Err(Obstacle::Wrong(why)) => return Err(self.wrong(rank, at[rank], &why)),
                    }
                    match action {
                        Action::Forward { .. } if trains => live[rank] += 1,
                        Action::Backward { .. } | Action::WeightGradient { .. } => live[rank] -= 1,
                        _ => {}
                    }
                    peak_live[rank] = peak_live[rank].max(live[rank]);
                    at[rank] += 1;
                    moved = true;
                }
            }
        }
        walk.check_end(&at)?;
        Ok(Verified { peak_live })
    }

    fn error(&self, text: String) -> Error {
        Error::new(Kind::Config, format!("schedule {}: {text}", self.name))
    }

    fn wrong(&self, rank: usize, at: usize, why: &str) -> Error {
        let action = self.ranks[rank][at];
        self.error(format!("action {at} of rank {rank}, {action}, {why}"))
    }
}

impl Walk<'_> {
    /// Takes an action, or says what is in its way.
    fn take(&mut self, rank: usize, action: Action) -> Result<(), Obstacle> {
        match action {
            Action::Forward { stage, microbatch }
            | Action::Backward { stage, microbatch }
            | Action::InputGradient { stage, microbatch }
            | Action::WeightGradient { stage, microbatch } => {
                self.check_pass(rank, action, stage, microbatch)?;
            }
            Action::Send(transfer) => self.hand_over(rank, transfer)?,
            Action::Receive(transfer) => self.accept(rank, transfer)?,
        }
        self.done.insert(action);
        Ok(())
    }

    fn check_pass(
        &self,
        rank: usize,
        action: Action,
        stage: usize,
        microbatch: usize,
    ) -> Result<(), Obstacle> {
        let wrong = |why: String| Err(Obstacle::Wrong(why));
        let schedule = self.schedule;
        if stage >= schedule.num_stages() || microbatch >= schedule.num_microbatches {
            return wrong(format!(
                "is of none of the {} stages and {} microbatches",
                schedule.num_stages(),
                schedule.num_microbatches
            ));
        }
        if schedule.place[stage] != rank {
            return wrong(format!("is of a stage that lives on rank {}", schedule.place[stage]));
        }
        if self.done.contains(&action) {
            return wrong("comes twice".to_string());
        }
        let halved = self.done.contains(&Action::InputGradient { stage, microbatch });
        if matches!(action, Action::WeightGradient { .. }) {
            let first = Action::InputGradient { stage, microbatch };
            return if halved { Ok(()) } else { wrong(format!("comes before {first}")) };
        }
        let back = !matches!(action, Action::Forward { .. });
        if back && (halved || self.done.contains(&Action::Backward { stage, microbatch })) {
            return wrong("makes gradients that are there already".to_string());
        }
        if back && !self.done.contains(&Action::Forward { stage, microbatch }) {
            return wrong("comes before its forward pass".to_string());
        }
        for &(from, to) in self.links {
            let (own, other) = if back { (from, to) } else { (to, from) };
            if own != stage {
                continue;
            }
            let transfer = Transfer { from: other, to: own, microbatch };
            let here = match schedule.place[other] == rank {
                true if back => self.is_back(other, microbatch),
                true => self.done.contains(&Action::Forward { stage: other, microbatch }),
                false => self.received.contains(&transfer),
            };
            if !here {
                return wrong(format!("needs what stage {other} hands on, which is not there"));
            }
        }
        Ok(())
    }

    /// Whether the gradients of what a stage took are there.
    fn is_back(&self, stage: usize, microbatch: usize) -> bool {
        self.done.contains(&Action::Backward { stage, microbatch })
            || self.done.contains(&Action::InputGradient { stage, microbatch })
    }

    fn check_transfer(&self, transfer: Transfer) -> Result<[usize; 2], Obstacle> {
        let Transfer { from, to, .. } = transfer;
        let link = if transfer.is_forward() { (from, to) } else { (to, from) };
        if !self.links.contains(&link) {
            return Err(Obstacle::Wrong(format!("but stage {from} has nothing for stage {to}")));
        }
        Ok([self.schedule.place[from], self.schedule.place[to]])
    }

    fn hand_over(&mut self, rank: usize, transfer: Transfer) -> Result<(), Obstacle> {
        let wrong = |why: String| Err(Obstacle::Wrong(why));
        let [from, to] = self.check_transfer(transfer)?;
        let (stage, microbatch) = (transfer.from, transfer.microbatch);
        let made = match transfer.is_forward() {
            true => self.done.contains(&Action::Forward { stage, microbatch }),
            false => self.is_back(stage, microbatch),
        };
        match () {
            () if from != rank => wrong(format!("but stage {stage} lives on rank {from}")),
            () if to == rank => wrong("but both stages live on one rank".to_string()),
            () if !made => wrong("comes before the pass that makes it".to_string()),
            () if self.done.contains(&Action::Send(transfer)) => wrong("comes twice".to_string()),
            () => {
                self.under_way.entry((from, to)).or_default().push_back(transfer);
                Ok(())
            }
        }
    }

    fn accept(&mut self, rank: usize, transfer: Transfer) -> Result<(), Obstacle> {
        let [from, to] = self.check_transfer(transfer)?;
        if to != rank {
            return Err(Obstacle::Wrong(format!("but stage {} lives on rank {to}", transfer.to)));
        }
        if self.received.contains(&transfer) {
            return Err(Obstacle::Wrong("comes twice".to_string()));
        }
        let queue = self.under_way.entry((from, to)).or_default();
        // Messages that come before it are kept until they are asked for.
        let Some(at) = queue.iter().position(|t| *t == transfer) else {
            return Err(Obstacle::Waits(format!("rank {rank} waits for rank {from} in R{transfer}")));
        };
        queue.remove(at);
        self.received.insert(transfer);
        Ok(())
    }

    /// Nobody is left waiting, no message is left over, no pass is missing.
    fn check_end(&mut self, at: &[usize]) -> Result<()> {
        let schedule = self.schedule;
        let mut waits = Vec::new();
        for (rank, &at) in at.iter().enumerate() {
            if let Some(&action) = schedule.ranks[rank].get(at)
                && let Err(Obstacle::Waits(why)) = self.take(rank, action)
            {
                waits.push(why);
            }
        }
        if !waits.is_empty() {
            return Err(schedule.error(format!("nobody can go on: {}", waits.join(", "))));
        }
        if let Some(left) = self.under_way.values().flatten().next() {
            return Err(schedule.error(format!("S{left} is never received")));
        }
        for stage in 0..schedule.num_stages() {
            for microbatch in 0..schedule.num_microbatches {
                let forward = Action::Forward { stage, microbatch };
                let back = match self.done.contains(&Action::InputGradient { stage, microbatch }) {
                    true => Action::WeightGradient { stage, microbatch },
                    false => Action::Backward { stage, microbatch },
                };
                let asked = [Some(forward), self.trains.then_some(back)];
                if let Some(missing) = asked.iter().flatten().find(|a| !self.done.contains(a)) {
                    let text = format!("{missing} is missing on rank {}", schedule.place[stage]);
                    return Err(schedule.error(text));
                }
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
                let gpipe = Schedule::gpipe(p, m).with_transfers(&chain(p)).verify(&chain(p)).unwrap();
                assert_eq!(gpipe.peak_live, vec![m; p]);
                let alternating = Schedule::one_f_one_b(p, m).with_transfers(&chain(p));
                let peaks: Vec<usize> = (0..p).map(|s| (p - s).min(m)).collect();
                assert_eq!(alternating.verify(&chain(p)).unwrap().peak_live, peaks);
                let place: Vec<usize> = (0..p).collect();
                let forward = Schedule::forward_only(&place, p).with_transfers(&chain(p));
                assert_eq!(forward.verify(&chain(p)).unwrap().peak_live, vec![0; p]);
                let halves = Schedule::zb_h1(p, m).with_transfers(&chain(p)).verify(&chain(p)).unwrap();
                assert!(halves.peak_live.iter().all(|n| *n <= p), "{halves:?}");
                Schedule::zb_h2(p, m).with_transfers(&chain(p)).verify(&chain(p)).unwrap();
                if m % p == 0 {
                    let chain = chain(3 * p);
                    Schedule::interleaved(p, m, 3).unwrap().with_transfers(&chain).verify(&chain).unwrap();
                }
            }
        }
        // A value that passes over stages in between.
        let links = [(0, 1), (1, 2), (0, 2)];
        Schedule::one_f_one_b(3, 4).with_transfers(&links).verify(&links).unwrap();
    }

    #[test]
    fn broken_lists_are_refused_by_their_first_bad_action() {
        let good = ["F0.0 S0>1.0 R1>0.0 B0.0", "R0>1.0 F1.0 B1.0 S1>0.0"];
        read(&good, 1).verify(&chain(2)).unwrap();
        let halves = ["F0.0 S0>1.0 R1>0.0 I0.0 W0.0", "R0>1.0 F1.0 I1.0 S1>0.0 W1.0"];
        read(&halves, 1).verify(&chain(2)).unwrap();
        let broken: [(&[&str], &str); 22] = [
            (&["F0.0 S0>1.0 R1>0.0 W0.0", good[1]], "W0.0, comes before I0.0"),
            (&["F0.0 S0>1.0 R1>0.0 I0.0 B0.0", good[1]], "B0.0, makes gradients that are there already"),
            (&["F0.0 S0>1.0 R1>0.0 B0.0 I0.0", good[1]], "I0.0, makes gradients that are there already"),
            (&["F0.0 S0>1.0 R1>0.0 I0.0", good[1]], "W0.0 is missing on rank 0"),
            (&["F0.0 F0.0", ""], "action 1 of rank 0, F0.0, comes twice"),
            (&["F0.0 B0.0", good[1]], "B0.0, needs what stage 1 hands on"),
            (&["B0.0", good[1]], "B0.0, comes before its forward pass"),
            (&["F0.1", ""], "F0.1, is of none of the 2 stages and 1 microbatches"),
            (&["F2.0", ""], "F2.0, is of none"),
            (&["F1.0", ""], "F1.0, is of a stage that lives on rank 1"),
            (&[good[0], "F1.0"], "action 0 of rank 1, F1.0, needs what stage 0 hands on"),
            (&["S0>1.0", good[1]], "S0>1.0, comes before the pass that makes it"),
            (&["F0.0 S0>1.0 S0>1.0", ""], "S0>1.0, comes twice"),
            (&["F0.0 S0>2.0", ""], "S0>2.0, but stage 0 has nothing for stage 2"),
            (&["R0>1.0", ""], "R0>1.0, but stage 1 lives on rank 1"),
            (&[good[0], "S0>1.0"], "S0>1.0, but stage 0 lives on rank 0"),
            (&["F0.0 S0>1.0", "R0>1.0 F1.0 R0>1.0"], "R0>1.0, comes twice"),
            (
                &["F0.0 R1>0.0 S0>1.0 B0.0", good[1]],
                "nobody can go on: rank 0 waits for rank 1 in R1>0.0, rank 1 waits",
            ),
            (&["F0.0 S0>1.0", good[1]], "S1>0.0 is never received"),
            (&["F0.0 S0>1.0", "R0>1.0 F1.0 B1.0"], "B0.0 is missing on rank 0"),
            (&["F0.0 S0>1.0 R1>0.0 B0.0", "R0>1.0 F1.0 B1.0"], "nobody can go on: rank 0 waits for rank 1"),
            (&["", ""], "F0.0 is missing on rank 0"),
        ];
        for (lines, why) in broken {
            let error = read(lines, 1).verify(&chain(2)).unwrap_err();
            assert!(error.kind() == Kind::Config && error.message().contains(why), "{lines:?}: {error}");
        }
        let lost = Schedule { place: vec![0, 2], ..Schedule::gpipe(2, 1) };
        assert!(lost.verify(&chain(2)).unwrap_err().message().contains("lives on rank 2"));
    }

    #[test]
    fn messages_may_be_read_in_another_order_than_they_were_sent() {
        let swapped = [
            "F0.0 F0.1 S0>1.1 S0>1.0 R1>0.0 B0.0 R1>0.1 B0.1",
            "R0>1.0 F1.0 B1.0 S1>0.0 R0>1.1 F1.1 B1.1 S1>0.1",
        ];
        assert_eq!(read(&swapped, 2).verify(&chain(2)).unwrap().peak_live, [2, 1]);
    }

    #[test]
    fn long_lists_are_proved_quickly() {
        let schedule = Schedule::one_f_one_b(64, 512).with_transfers(&chain(64));
        assert_eq!(schedule.verify(&chain(64)).unwrap().peak_live[0], 64);
    }
}
