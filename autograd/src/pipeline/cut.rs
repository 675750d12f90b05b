//! Where a recorded program is cut into stages.

use super::schedule::check_stages;
use crate::program::Program;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_tensor::{Layout, op};
use smallvec::SmallVec;
use std::str::FromStr;

/// How a program is cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// Between layers, so that the costliest stage costs as little as can be. A layer is what shares a path up to its
    /// first number (`h.3`); where there are too few of them, between any two ops.
    #[default]
    Balanced,
    /// As balanced, by the time that each layer is measured to take before the first step
    /// ([`Profile`](super::Profile)). Stages may begin elsewhere in another run.
    Measured,
    /// This many numbered layers for each stage; what comes before the first belongs to the first stage, what comes
    /// after the last to the last.
    Layers(Vec<usize>),
    /// Each stage but the first begins with the first op at such a path (`h.2`, `head`).
    At(Vec<String>),
}

impl FromStr for Cut {
    type Err = Error;

    /// Reads `balanced`, `measured`, numbers of layers (`3,5`), or paths (`h.2,h.7`).
    fn from_str(text: &str) -> Result<Cut> {
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        if text.trim() == "balanced" {
            return Ok(Cut::Balanced);
        }
        if text.trim() == "measured" {
            return Ok(Cut::Measured);
        }
        if parts.iter().any(|p| p.is_empty()) {
            return Err(Error::new(Kind::Config, format!("`{text}` says no cuts")).detail(
                "help",
                "write balanced, measured, layers a stage as in 3,5, or paths as in h.2,h.7",
            ));
        }
        let counts: Option<Vec<usize>> = parts.iter().map(|p| p.parse().ok()).collect();
        Ok(counts.map_or_else(|| Cut::At(parts.iter().map(|p| (*p).to_string()).collect()), Cut::Layers))
    }
}

impl Program {
    /// The records with which the stages after the first begin.
    ///
    /// # Errors
    /// `Kind::Config` if the cut does not give as many stages, or names a path that the program does not have; for no stage.
    pub fn cut(&self, rank: &Rank, cut: &Cut, num_stages: usize) -> Result<Vec<usize>> {
        check_stages(num_stages)?;
        let starts = match cut {
            Cut::Balanced => self.balanced(rank, num_stages)?,
            Cut::Measured => {
                return Err(Error::new(
                    Kind::Config,
                    "a cut by measured times needs a profile of the program",
                )
                .detail("help", "measure it with Profile::measure and use Profile::cut"));
            }
            Cut::Layers(counts) => self.by_layers(counts)?,
            Cut::At(paths) => paths.iter().map(|path| self.first_at(path)).collect::<Result<_>>()?,
        };
        if starts.len() + 1 != num_stages {
            let text = format!("the cuts make {} stages, the schedule has {num_stages}", starts.len() + 1);
            return Err(Error::new(Kind::Config, text));
        }
        if let Some(pair) = starts.windows(2).find(|pair| pair[0] > pair[1]) {
            let [a, b] = [pair[0], pair[1]].map(|at| &self.records[at].path);
            return Err(Error::new(Kind::Config, format!("the cut at {b} comes before the one at {a}")));
        }
        Ok(starts)
    }

    fn first_at(&self, path: &str) -> Result<usize> {
        let under =
            |p: &str| p.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        self.records.iter().position(|r| under(&r.path)).ok_or_else(|| {
            let mut heads: Vec<&str> = self.records.iter().map(|r| head(&r.path)).collect();
            heads.dedup();
            Error::new(Kind::Config, format!("no op of the model is at `{path}`"))
                .detail("paths", heads.join(", "))
        })
    }

    /// The records with which another numbered layer begins.
    fn layer_starts(&self) -> Vec<usize> {
        let mut starts: Vec<usize> = Vec::new();
        for (at, record) in self.records.iter().enumerate() {
            let known = |s: &usize| head(&self.records[*s].path) == head(&record.path);
            if is_numbered(head(&record.path)) && !starts.iter().any(known) {
                starts.push(at);
            }
        }
        starts
    }

    fn by_layers(&self, counts: &[usize]) -> Result<Vec<usize>> {
        let starts = self.layer_starts();
        let (asked, there): (usize, usize) = (counts.iter().sum(), starts.len());
        if asked != there {
            let text = format!("the stages have {asked} layers, the model has {there}");
            return Err(Error::new(Kind::Config, text));
        }
        let firsts = counts.iter().scan(0, |sum, n| {
            *sum += n;
            Some(*sum)
        });
        // A stage without layers that comes last still has what comes after them.
        let end = |first: usize| starts.get(first).copied().unwrap_or_else(|| self.after_layers());
        Ok(firsts.take(counts.len() - 1).map(end).collect())
    }

    /// The record after the last that belongs to a numbered layer.
    fn after_layers(&self) -> usize {
        self.records.iter().rposition(|r| is_numbered(head(&r.path))).map_or(0, |at| at + 1)
    }

    fn balanced(&self, rank: &Rank, num_stages: usize) -> Result<Vec<usize>> {
        let places = self.places(num_stages)?;
        let costs: Vec<usize> = (0..self.records.len()).map(|at| self.volume(rank, at)).collect();
        Ok(smallest_maximum(&costs, &places, num_stages))
    }

    /// The records before which a program may be cut: between layers, or, where those are too few, between any two ops.
    pub(super) fn places(&self, num_stages: usize) -> Result<Vec<usize>> {
        let inside = |at: usize| self.blocks.iter().any(|b| b.start < at && at < b.end);
        let changes = |at: &usize| head(&self.records[*at].path) != head(&self.records[at - 1].path);
        let all: Vec<usize> = (1..self.records.len()).filter(|at| !inside(*at)).collect();
        let mut places: Vec<usize> = all.iter().copied().filter(changes).collect();
        if places.len() + 1 < num_stages {
            places = all;
        }
        if places.len() + 1 < num_stages {
            let text = format!("{} ops cannot be cut into {num_stages} stages", self.records.len());
            return Err(Error::new(Kind::Config, text).detail("help", "use a smaller pipeline axis"));
        }
        Ok(places)
    }

    /// The [`op::volume`] of a record.
    pub(super) fn volume(&self, rank: &Rank, at: usize) -> usize {
        let record = &self.records[at];
        let layouts: SmallVec<[&Layout; 4]> = record.inputs.iter().map(|slot| self.layout(*slot)).collect();
        op::volume(&*record.op, rank, &layouts, &record.outputs)
    }
}

/// A path up to its first number, or its first word if it has none.
fn head(path: &str) -> &str {
    let mut end = 0;
    for part in path.split('.') {
        end += part.len();
        if part.bytes().all(|b| b.is_ascii_digit()) && !part.is_empty() {
            return &path[..end];
        }
        end += 1;
    }
    path.split('.').next().unwrap_or(path)
}

fn is_numbered(head: &str) -> bool {
    head.ends_with(|c: char| c.is_ascii_digit()) && head.contains('.')
}

/// Cuts at some of the places such that the largest sum of costs between cuts is smallest; among equals the earliest.
pub(super) fn smallest_maximum(costs: &[usize], places: &[usize], num_parts: usize) -> Vec<usize> {
    let mut sums = vec![0u128];
    costs.iter().for_each(|c| sums.push(sums[sums.len() - 1] + *c as u128));
    let ends: Vec<usize> = places.iter().copied().chain([costs.len()]).collect();
    // best[k][j]: cutting the costs before ends[j] into k + 1 parts: the largest part, and the last cut.
    let mut best = vec![ends.iter().map(|&e| (sums[e], 0)).collect::<Vec<(u128, usize)>>()];
    for k in 1..num_parts {
        let row = (0..ends.len()).map(|j| {
            let cut = |i: usize| (best[k - 1][i].0.max(sums[ends[j]] - sums[ends[i]]), i);
            (k - 1..j).map(cut).min().unwrap_or((u128::MAX, 0))
        });
        best.push(row.collect());
    }
    let mut cuts = Vec::with_capacity(num_parts - 1);
    let mut at = ends.len() - 1;
    for k in (1..num_parts).rev() {
        at = best[k][at].1;
        cuts.push(ends[at]);
    }
    cuts.reverse();
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_by_hand() {
        let heads = ["h.3.attn.c_attn.weight", "model.layers.12.mlp", "wte.weight", "", "ln_f", "a.b.0"];
        assert_eq!(heads.map(head), ["h.3", "model.layers.12", "wte", "", "ln_f", "a.b.0"]);
        assert!(is_numbered("h.3") && !is_numbered("wte") && !is_numbered("fc1"));
    }

    #[test]
    fn the_costliest_part_costs_as_little_as_can_be() {
        assert_eq!(smallest_maximum(&[1, 1, 1, 1], &[1, 2, 3], 2), [2]);
        assert_eq!(smallest_maximum(&[5, 1, 1, 1, 1, 1], &[1, 2, 3, 4, 5], 2), [1]);
        assert_eq!(smallest_maximum(&[1, 9, 1, 1], &[2, 3], 2), [2]);
        assert_eq!(smallest_maximum(&[3, 3, 3, 3, 3, 3], &[1, 2, 3, 4, 5], 3), [2, 4]);
        assert_eq!(smallest_maximum(&[7], &[], 1), Vec::<usize>::new());
    }

    #[test]
    fn texts_of_cuts() {
        assert_eq!("balanced".parse::<Cut>().unwrap(), Cut::Balanced);
        assert_eq!(" measured".parse::<Cut>().unwrap(), Cut::Measured);
        assert_eq!("3, 5".parse::<Cut>().unwrap(), Cut::Layers(vec![3, 5]));
        assert_eq!("h.1,head".parse::<Cut>().unwrap(), Cut::At(vec!["h.1".into(), "head".into()]));
        assert!("h.1,".parse::<Cut>().is_err());
    }
}
