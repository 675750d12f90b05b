//! What a rank of a pipeline does, one thing after another.

use shardgrad_dist::{Error, Kind, Result};
use std::collections::{HashMap, HashSet};
use std::fmt;

/// Forward passes of all ranks at most: so many of 1F1B on 1024 ranks take 0.8 GB to plan.
pub(super) const PASSES_MAX: usize = 1 << 21;

/// One thing that a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// The forward pass of a stage on a microbatch: `F0.3` is stage 0, microbatch 3.
    Forward {
        /// Which stage.
        stage: usize,
        /// Which microbatch.
        microbatch: usize,
    },
    /// Its backward pass, `B0.3`.
    Backward {
        /// Which stage.
        stage: usize,
        /// Which microbatch.
        microbatch: usize,
    },
    /// The half of the backward pass that makes the gradients of what the stage took, `I0.3`.
    InputGradient {
        /// Which stage.
        stage: usize,
        /// Which microbatch.
        microbatch: usize,
    },
    /// The other half, which makes the gradients of its parameters, `W0.3`.
    WeightGradient {
        /// Which stage.
        stage: usize,
        /// Which microbatch.
        microbatch: usize,
    },
    /// Hands on what a stage made for another one, `S0>1.3`; on the way back, the gradients of what it got, `S1>0.3`.
    /// Nobody waits in it.
    Send(Transfer),
    /// Waits for what another stage hands on: `R0>1.3`.
    Receive(Transfer),
    /// Brings the sums of the gradients of a stage's parameters to where those are stored, `G0`: over data-parallel
    /// ranks, once a step. A parameter that another stage of the rank reads too goes with the last of them.
    Reduce {
        /// Which stage.
        stage: usize,
    },
}

/// What one stage leaves for another: activations towards later stages, their gradients towards earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Transfer {
    /// The stage that made it.
    pub from: usize,
    /// The stage that needs it.
    pub to: usize,
    /// Which microbatch.
    pub microbatch: usize,
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}>{}.{}", self.from, self.to, self.microbatch)
    }
}

impl Transfer {
    /// Whether it carries activations, not gradients.
    #[must_use]
    pub fn is_forward(self) -> bool {
        self.from < self.to
    }
}

/// The action lists of all ranks for one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What messages call it.
    pub name: String,
    /// The number of microbatches.
    pub num_microbatches: usize,
    /// The place on the pipeline axis where each stage lives.
    pub place: Vec<usize>,
    /// What each rank does, in order.
    pub ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// The number of stages.
    #[must_use]
    pub fn num_stages(&self) -> usize {
        self.place.len()
    }

    /// Whether there is a backward pass.
    #[must_use]
    pub fn trains(&self) -> bool {
        let forward = |a: &Action| matches!(a, Action::Forward { .. } | Action::Send(_) | Action::Receive(_));
        !self.ranks.iter().flatten().all(forward)
    }

    /// The pass of a stage that an action is, if it is one: stage, microbatch, and whether it hands gradients back.
    pub(super) fn pass(action: Action) -> Option<(usize, usize, bool)> {
        match action {
            Action::Forward { stage, microbatch } => Some((stage, microbatch, false)),
            Action::Backward { stage, microbatch } | Action::InputGradient { stage, microbatch } => {
                Some((stage, microbatch, true))
            }
            _ => None,
        }
    }

    /// The same lists, completed for stages that hand values along `links` (from, to): transfers that a list does not spell
    /// stand right before the pass that needs them and right after the one that makes them, a stage's gradients are
    /// reduced right after its last pass.
    #[must_use]
    pub fn with_transfers(&self, links: &[(usize, usize)]) -> Schedule {
        let spelled = self.spelled();
        let mut near: HashMap<usize, Vec<(usize, usize)>> = HashMap::new();
        for link in links.iter().filter(|(from, to)| self.place.get(*from) != self.place.get(*to)) {
            near.entry(link.0).or_default().push(*link);
            near.entry(link.1).or_default().push(*link);
        }
        let complete = |list: &Vec<Action>| -> Vec<Action> {
            let mut out = Vec::with_capacity(2 * list.len());
            let last = last_passes(list);
            let mut seen = HashSet::new();
            for (at, action) in list.iter().enumerate() {
                let transfers = |back: bool, stage: usize, microbatch: usize| {
                    let links = near.get(&stage).into_iter().flatten();
                    links.map(move |&(from, to)| match back {
                        true => Transfer { from: to, to: from, microbatch },
                        false => Transfer { from, to, microbatch },
                    })
                };
                let fresh = |a: &Action| spelled.is_empty() || !spelled.contains(a);
                // A pass that comes twice has its transfers once, so that it is the pass that is refused.
                let pass = Schedule::pass(*action).filter(|_| seen.insert(*action));
                if let Some((stage, microbatch, back)) = pass {
                    let all = transfers(back, stage, microbatch);
                    out.extend(all.clone().filter(|t| t.to == stage).map(Action::Receive).filter(fresh));
                    out.push(*action);
                    out.extend(all.filter(|t| t.from == stage).map(Action::Send).filter(fresh));
                } else {
                    out.push(*action);
                }
                out.extend(last.get(&at).map(|stage| Action::Reduce { stage: *stage }).filter(fresh));
            }
            out
        };
        Schedule { ranks: self.ranks.iter().map(complete).collect(), ..self.clone() }
    }

    /// The same lists, of which the passes are left.
    #[must_use]
    pub fn passes_only(&self) -> Schedule {
        let pass = |a: &&Action| !matches!(a, Action::Send(_) | Action::Receive(_) | Action::Reduce { .. });
        let ranks = self.ranks.iter().map(|list| list.iter().filter(pass).copied().collect()).collect();
        Schedule { ranks, ..self.clone() }
    }

    /// What of transfers and reductions the lists spell.
    fn spelled(&self) -> HashSet<Action> {
        let spelled = |a: &&Action| matches!(a, Action::Send(_) | Action::Receive(_) | Action::Reduce { .. });
        self.ranks.iter().flatten().filter(spelled).copied().collect()
    }
}

/// Where in a list the last pass with gradients of a stage's parameters is, and of which stage.
fn last_passes(list: &[Action]) -> HashMap<usize, usize> {
    let mut last: HashMap<usize, usize> = HashMap::new();
    for (at, action) in list.iter().enumerate() {
        if let Action::Backward { stage, .. } | Action::WeightGradient { stage, .. } = action {
            last.insert(*stage, at);
        }
    }
    last.into_iter().map(|(stage, at)| (at, stage)).collect()
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Forward { stage, microbatch } => write!(f, "F{stage}.{microbatch}"),
            Action::Backward { stage, microbatch } => write!(f, "B{stage}.{microbatch}"),
            Action::InputGradient { stage, microbatch } => write!(f, "I{stage}.{microbatch}"),
            Action::WeightGradient { stage, microbatch } => write!(f, "W{stage}.{microbatch}"),
            Action::Send(t) => write!(f, "S{t}"),
            Action::Receive(t) => write!(f, "R{t}"),
            Action::Reduce { stage } => write!(f, "G{stage}"),
        }
    }
}

impl std::str::FromStr for Action {
    type Err = Error;

    fn from_str(text: &str) -> Result<Action> {
        let refuse = || {
            Error::new(Kind::Config, format!("`{text}` is no action of a schedule")).detail(
                "help",
                "write F0.3, B0.3, I0.3 or W0.3 (stage.microbatch), S0>1.3 or R0>1.3 (from>to.microbatch), G0 (stage)",
            )
        };
        let number = |digits: &str| digits.parse::<usize>().map_err(|_| refuse());
        let (kind, rest) = text.split_at_checked(1).ok_or_else(refuse)?;
        if kind == "G" {
            return Ok(Action::Reduce { stage: number(rest)? });
        }
        let (place, microbatch) = rest.split_once('.').ok_or_else(refuse)?;
        let microbatch = number(microbatch)?;
        match kind {
            "F" => Ok(Action::Forward { stage: number(place)?, microbatch }),
            "B" => Ok(Action::Backward { stage: number(place)?, microbatch }),
            "I" => Ok(Action::InputGradient { stage: number(place)?, microbatch }),
            "W" => Ok(Action::WeightGradient { stage: number(place)?, microbatch }),
            "S" | "R" => {
                let (from, to) = place.split_once('>').ok_or_else(refuse)?;
                let transfer = Transfer { from: number(from)?, to: number(to)?, microbatch };
                Ok(if kind == "S" { Action::Send(transfer) } else { Action::Receive(transfer) })
            }
            _ => Err(refuse()),
        }
    }
}

/// One line a rank, actions with spaces between.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ranks.iter().enumerate().try_for_each(|(rank, list)| {
            let words: Vec<String> = list.iter().map(Action::to_string).collect();
            writeln!(f, "{rank}: {}", words.join(" "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_read_back() {
        for text in ["F0.3", "B12.0", "I1.1", "W2.0", "S0>1.3", "R3>2.11", "G2"] {
            assert_eq!(text.parse::<Action>().unwrap().to_string(), text);
        }
        for text in ["", "F", "F1", "F1.", "X1.2", "S1.2", "R1>2", "F-1.0", "é1.2", "G", "G1.2"] {
            assert_eq!(text.parse::<Action>().unwrap_err().kind(), Kind::Config, "{text}");
        }
    }
}
