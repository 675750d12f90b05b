//! Schedules as data: the actions of each pipeline rank, in order.

use shardgrad_dist::{Error, Kind, Result};
use std::collections::{HashMap, HashSet};
use std::fmt;

/// The largest number of forward passes of a schedule, over all ranks: 1F1B of this size on 1024 ranks takes 0.8 GB to
/// plan.
pub(super) const PASSES_MAX: usize = 1 << 21;

/// One action of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// The forward pass of a stage on a microbatch: `F0.3` is stage 0, microbatch 3.
    Forward {
        /// The stage.
        stage: usize,
        /// The microbatch.
        microbatch: usize,
    },
    /// The whole backward pass, `B0.3`.
    Backward {
        /// The stage.
        stage: usize,
        /// The microbatch.
        microbatch: usize,
    },
    /// The part of a split backward pass that computes the gradients of the stage's inputs, `I0.3`.
    InputGradient {
        /// The stage.
        stage: usize,
        /// The microbatch.
        microbatch: usize,
    },
    /// The part of a split backward pass that computes the gradients of the stage's parameters, `W0.3`.
    WeightGradient {
        /// The stage.
        stage: usize,
        /// The microbatch.
        microbatch: usize,
    },
    /// Sends values that a stage made to another stage, `S0>1.3`, or the gradients of values back, `S1>0.3`. Does not
    /// block.
    Send(Transfer),
    /// Receives values or gradients from another stage, `R0>1.3`. Blocks until they arrive.
    Receive(Transfer),
    /// Reduces the accumulated gradients of a stage's parameters over data-parallel ranks to their stored layouts, once
    /// per step, `G0`. A parameter that several stages of the rank read is reduced with the last of them.
    Reduce {
        /// The stage.
        stage: usize,
    },
}

/// Values that one stage sends to another: activations to later stages, their gradients to earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Transfer {
    /// The stage that made the values.
    pub from: usize,
    /// The stage that needs the values.
    pub to: usize,
    /// The microbatch.
    pub microbatch: usize,
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}>{}.{}", self.from, self.to, self.microbatch)
    }
}

impl Transfer {
    /// Whether it carries activations (true) or gradients (false).
    #[must_use]
    pub fn is_forward(self) -> bool {
        self.from < self.to
    }
}

/// The action lists of all ranks for one step.
#[doc(alias = "pipeline schedule")]
#[doc(alias = "PipelineSchedule")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The name in messages.
    pub name: String,
    /// The number of microbatches.
    pub num_microbatches: usize,
    /// The pipeline rank (coordinate on the pipeline axis) of each stage.
    pub stage_ranks: Vec<usize>,
    /// The actions of each pipeline rank, in order.
    pub ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// The number of stages.
    #[must_use]
    pub fn num_stages(&self) -> usize {
        self.stage_ranks.len()
    }

    /// Whether the lists have a backward pass.
    #[must_use]
    pub fn trains(&self) -> bool {
        let forward = |a: &Action| matches!(a, Action::Forward { .. } | Action::Send(_) | Action::Receive(_));
        !self.ranks.iter().flatten().all(forward)
    }

    /// The pass that an action is, as (stage, microbatch, is it backward); `None` for weight gradients and actions that
    /// are no pass.
    pub(super) fn pass(action: Action) -> Option<(usize, usize, bool)> {
        match action {
            Action::Forward { stage, microbatch } => Some((stage, microbatch, false)),
            Action::Backward { stage, microbatch } | Action::InputGradient { stage, microbatch } => {
                Some((stage, microbatch, true))
            }
            _ => None,
        }
    }

    /// The same schedule with all transfers along `links` (from, to) and all reductions. A transfer that the lists
    /// leave out goes right after the pass that makes the values and right before the pass that needs them; a reduction
    /// goes right after the last backward pass of its stage.
    #[must_use]
    pub fn with_transfers(&self, links: &[(usize, usize)]) -> Schedule {
        let spelled = self.spelled();
        let mut near: HashMap<usize, Vec<(usize, usize)>> = HashMap::new();
        for link in links.iter().filter(|(from, to)| self.stage_ranks.get(*from) != self.stage_ranks.get(*to))
        {
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
                // A duplicate pass gets no second transfers, so that the verification reports the pass and not them.
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

    /// The same schedule without transfers and reductions.
    #[must_use]
    pub fn passes_only(&self) -> Schedule {
        let pass = |a: &&Action| !matches!(a, Action::Send(_) | Action::Receive(_) | Action::Reduce { .. });
        let ranks = self.ranks.iter().map(|list| list.iter().filter(pass).copied().collect()).collect();
        Schedule { ranks, ..self.clone() }
    }

    /// The transfers and reductions in the lists.
    fn spelled(&self) -> HashSet<Action> {
        let spelled = |a: &&Action| matches!(a, Action::Send(_) | Action::Receive(_) | Action::Reduce { .. });
        self.ranks.iter().flatten().filter(spelled).copied().collect()
    }
}

/// The index in a list of each stage's last backward pass that gives weight gradients, and the stage.
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
            Error::new(Kind::Config, format!("`{text}` is not an action of a schedule")).detail(
                "help",
                "write F0.3, B0.3, I0.3 or W0.3 (stage.microbatch), S0>1.3 or R0>1.3 (from>to.microbatch), G0 (stage)",
            )
        };
        let number = |digits: &str| digits.parse::<usize>().map_err(|_| refuse());
        let (kind, rest) = text.split_at_checked(1).ok_or_else(refuse)?;
        if kind == "G" {
            return Ok(Action::Reduce { stage: number(rest)? });
        }
        let (target, microbatch) = rest.split_once('.').ok_or_else(refuse)?;
        let microbatch = number(microbatch)?;
        match kind {
            "F" => Ok(Action::Forward { stage: number(target)?, microbatch }),
            "B" => Ok(Action::Backward { stage: number(target)?, microbatch }),
            "I" => Ok(Action::InputGradient { stage: number(target)?, microbatch }),
            "W" => Ok(Action::WeightGradient { stage: number(target)?, microbatch }),
            "S" | "R" => {
                let (from, to) = target.split_once('>').ok_or_else(refuse)?;
                let transfer = Transfer { from: number(from)?, to: number(to)?, microbatch };
                Ok(if kind == "S" { Action::Send(transfer) } else { Action::Receive(transfer) })
            }
            _ => Err(refuse()),
        }
    }
}

/// One line per rank, actions separated by spaces.
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
    fn actions_round_trip_as_text() {
        for text in ["F0.3", "B12.0", "I1.1", "W2.0", "S0>1.3", "R3>2.11", "G2"] {
            assert_eq!(text.parse::<Action>().unwrap().to_string(), text);
        }
        for text in ["", "F", "F1", "F1.", "X1.2", "S1.2", "R1>2", "F-1.0", "é1.2", "G", "G1.2"] {
            assert_eq!(text.parse::<Action>().unwrap_err().kind(), Kind::Config, "{text}");
        }
    }
}
