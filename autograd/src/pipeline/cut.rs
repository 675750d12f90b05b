//! Cutting a recorded program into stages.

use super::schedule::check_stages;
use crate::program::Program;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_tensor::{Layout, op};
use smallvec::SmallVec;
use std::fmt;
use std::str::FromStr;

/// Where a program is cut into stages.
#[doc(alias = "split points")]
#[doc(alias = "SplitPoint")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// Between layers, so that the largest cost of a stage is as small as possible. A layer is all ops whose path is
    /// equal up to its first number (`h.3`). Between any two ops if there are fewer layers than stages.
    #[default]
    Balanced,
    /// As `Balanced`, with the time of each layer as measured before the first step ([`Profile`](super::Profile)).
    /// Another run may cut elsewhere.
    Measured,
    /// The number of numbered layers of each stage. Ops before the first layer belong to the first stage, ops after the
    /// last layer to the last.
    Layers(Vec<usize>),
    /// Each stage but the first begins with the first op at such a path (`h.2`, `head`).
    At(Vec<String>),
}

impl FromStr for Cut {
    type Err = Error;

    /// Parses `balanced`, `measured`, numbers of layers (`3,5`), or paths (`h.2,h.7`).
    fn from_str(text: &str) -> Result<Cut> {
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        if text.trim() == "balanced" {
            return Ok(Cut::Balanced);
        }
        if text.trim() == "measured" {
            return Ok(Cut::Measured);
        }
        if parts.iter().any(|p| p.is_empty()) {
            return Err(Error::new(Kind::Config, format!("`{text}` is not a list of cuts")).detail(
                "help",
                "write balanced, measured, numbers of layers per stage as in 3,5, or paths as in h.2,h.7",
            ));
        }
        let counts: Option<Vec<usize>> = parts.iter().map(|p| p.parse().ok()).collect();
        Ok(counts.map_or_else(|| Cut::At(parts.iter().map(|p| (*p).to_string()).collect()), Cut::Layers))
    }
}

/// The text that [`FromStr`] parses.
impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cut::Balanced => f.write_str("balanced"),
            Cut::Measured => f.write_str("measured"),
            Cut::Layers(counts) => {
                let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
                f.write_str(&counts.join(","))
            }
            Cut::At(paths) => f.write_str(&paths.join(",")),
        }
    }
}

impl Program {
    /// The first record of each stage after the first.
    ///
    /// # Errors
    /// `Kind::Config` if the cut gives another number of stages or names a path that the program does not have, and for
    /// no stage.
    pub fn cut(&self, rank: &Rank, cut: &Cut, num_stages: usize) -> Result<Vec<usize>> {
        check_stages(num_stages)?;
        let starts = match cut {
            Cut::Balanced => self.balanced(rank, num_stages)?,
            Cut::Measured => {
                return Err(Error::new(Kind::Config, "Cut::Measured needs a profile of the program")
                    .detail("help", "measure it with Profile::measure and use Profile::cut"));
            }
            Cut::Layers(counts) => self.by_layers(counts)?,
            Cut::At(paths) => paths.iter().map(|path| self.first_at(path)).collect::<Result<_>>()?,
        };
        if starts.len() + 1 != num_stages {
            let text = format!("the cut makes {} stages, the schedule has {num_stages}", starts.len() + 1);
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
            let mut heads: Vec<&str> = self.records.iter().map(|r| layer_prefix(&r.path)).collect();
            heads.dedup();
            Error::new(Kind::Config, format!("no op of the model is at `{path}`"))
                .detail("paths", heads.join(", "))
        })
    }

    /// The first record of each numbered layer.
    fn layer_starts(&self) -> Vec<usize> {
        let mut starts: Vec<usize> = Vec::new();
        for (at, record) in self.records.iter().enumerate() {
            let known = |s: &usize| layer_prefix(&self.records[*s].path) == layer_prefix(&record.path);
            if is_numbered(layer_prefix(&record.path)) && !starts.iter().any(known) {
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
        // A last stage without layers still gets the ops after the layers.
        let end = |first: usize| starts.get(first).copied().unwrap_or_else(|| self.after_layers());
        Ok(firsts.take(counts.len() - 1).map(end).collect())
    }

    /// The record after the last of a numbered layer.
    fn after_layers(&self) -> usize {
        self.records.iter().rposition(|r| is_numbered(layer_prefix(&r.path))).map_or(0, |at| at + 1)
    }

    fn balanced(&self, rank: &Rank, num_stages: usize) -> Result<Vec<usize>> {
        let cut_points = self.cut_points(num_stages)?;
        let costs: Vec<usize> = (0..self.records.len()).map(|at| self.volume(rank, at)).collect();
        Ok(min_max_partition(&costs, &cut_points, num_stages))
    }

    /// The records before which a program may be cut: between layers, or between any two ops if there are fewer layers
    /// than stages. Never within a checkpointed block.
    pub(super) fn cut_points(&self, num_stages: usize) -> Result<Vec<usize>> {
        let inside = |at: usize| self.blocks.iter().any(|b| b.start < at && at < b.end);
        let changes =
            |at: &usize| layer_prefix(&self.records[*at].path) != layer_prefix(&self.records[at - 1].path);
        let all: Vec<usize> = (1..self.records.len()).filter(|at| !inside(*at)).collect();
        let mut cut_points: Vec<usize> = all.iter().copied().filter(changes).collect();
        if cut_points.len() + 1 < num_stages {
            cut_points = all;
        }
        if cut_points.len() + 1 < num_stages {
            let text = format!("{} ops cannot be cut into {num_stages} stages", self.records.len());
            return Err(Error::new(Kind::Config, text).detail("help", "use a smaller pipeline axis"));
        }
        Ok(cut_points)
    }

    /// The [`op::estimate_work`] of a record.
    pub(super) fn volume(&self, rank: &Rank, at: usize) -> usize {
        let record = &self.records[at];
        let layouts: SmallVec<[&Layout; 4]> = record.inputs.iter().map(|slot| self.layout(*slot)).collect();
        op::estimate_work(&*record.op, rank, &layouts, &record.outputs)
    }
}

/// A path up to its first number, or its first word if it has no number.
fn layer_prefix(path: &str) -> &str {
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

fn is_numbered(layer_prefix: &str) -> bool {
    layer_prefix.ends_with(|c: char| c.is_ascii_digit()) && layer_prefix.contains('.')
}

/// Partitions costs at some of the cut points so that the largest sum of a part is as small as possible (linear
/// partition problem); among equals the earliest cuts.
#[doc(alias = "linear partition")]
pub(super) fn min_max_partition(costs: &[usize], cut_points: &[usize], num_parts: usize) -> Vec<usize> {
    let mut sums = vec![0u128];
    costs.iter().for_each(|c| sums.push(sums[sums.len() - 1] + *c as u128));
    let ends: Vec<usize> = cut_points.iter().copied().chain([costs.len()]).collect();
    // best[k][j]: the smallest largest part of the costs before ends[j] in k + 1 parts, and the last cut.
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
    fn layer_prefix_examples() {
        let heads = ["h.3.attn.c_attn.weight", "model.layers.12.mlp", "wte.weight", "", "ln_f", "a.b.0"];
        assert_eq!(heads.map(layer_prefix), ["h.3", "model.layers.12", "wte", "", "ln_f", "a.b.0"]);
        assert!(is_numbered("h.3") && !is_numbered("wte") && !is_numbered("fc1"));
    }

    #[test]
    fn min_max_partition_examples() {
        assert_eq!(min_max_partition(&[1, 1, 1, 1], &[1, 2, 3], 2), [2]);
        assert_eq!(min_max_partition(&[5, 1, 1, 1, 1, 1], &[1, 2, 3, 4, 5], 2), [1]);
        assert_eq!(min_max_partition(&[1, 9, 1, 1], &[2, 3], 2), [2]);
        assert_eq!(min_max_partition(&[3, 3, 3, 3, 3, 3], &[1, 2, 3, 4, 5], 3), [2, 4]);
        assert_eq!(min_max_partition(&[7], &[], 1), Vec::<usize>::new());
    }

    #[test]
    fn cut_parses() {
        assert_eq!("balanced".parse::<Cut>().unwrap(), Cut::Balanced);
        assert_eq!(" measured".parse::<Cut>().unwrap(), Cut::Measured);
        assert_eq!("3, 5".parse::<Cut>().unwrap(), Cut::Layers(vec![3, 5]));
        assert_eq!("h.1,head".parse::<Cut>().unwrap(), Cut::At(vec!["h.1".into(), "head".into()]));
        assert!("h.1,".parse::<Cut>().is_err());
    }
}
