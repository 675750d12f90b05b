//! Microbatches as leaves of canonical sums: each gradient of a microbatch is the sum of one leaf.

use super::{Runner, Step, receive};
use crate::id::{Gradients, Id, Key};
use shardgrad_dist::{Error, Kind, Phase, Result};
use shardgrad_tensor::training_step::canonical_sum::{SumTree, TreeSums};
use shardgrad_tensor::{Context, Tensor};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::Location;

/// The sums of gradients over the leaves that were found, and gradients of passes that are not complete.
pub(super) struct PendingLeaves {
    tree: SumTree,
    /// The leaf of microbatch 0.
    first: usize,
    sums: BTreeMap<Key, TreeSums<Tensor>>,
    /// Gradients by external input that the first halves of split backward passes have computed, by stage and microbatch.
    halves: HashMap<(usize, usize), Gradients>,
}

impl PendingLeaves {
    pub(super) fn new(tree: SumTree, first: usize) -> PendingLeaves {
        PendingLeaves { tree, first, sums: BTreeMap::new(), halves: HashMap::new() }
    }

    pub(super) fn into_sums(self) -> BTreeMap<Key, TreeSums<Tensor>> {
        self.sums
    }

    /// Keeps the gradients of the first half of a split backward pass until the second.
    pub(super) fn keep_half(&mut self, stage: usize, microbatch: usize, gradients: Gradients) {
        self.halves.insert((stage, microbatch), gradients);
    }
}

impl Step<'_> {
    /// Adds the gradients of a complete backward pass, by external input, to the sums: each in its stored layout and dtype, as the pass of
    /// a leaf without stages has it.
    pub(super) fn add_leaf(&mut self, stage: usize, microbatch: usize, gradients: Gradients) -> Result<()> {
        let Some(leaves) = &mut self.leaves else { return Ok(()) };
        let mut all = leaves.halves.remove(&(stage, microbatch)).unwrap_or_default();
        for (external, gradient) in gradients {
            if all.insert(external, gradient).is_some() {
                return Err(Error::new(
                    Kind::Unsupported,
                    "a split backward pass computes a gradient in both halves, whose sum has no canonical form",
                )
                .detail("help", "use a schedule without split backward passes, such as 1f1b"));
            }
        }
        let seed = |(external, gradient): (Key, Tensor)| -> Option<(Id, Tensor)> {
            Some((self.parameters.get(&(external as u32))?.summed.id()?, gradient))
        };
        let seeds: Vec<(Id, Tensor)> = all.into_iter().filter_map(seed).collect();
        self.tape.backward_from(seeds);
        let leaf = SumTree::leaf(leaves.first + microbatch);
        for (key, gradient) in self.tape.gradients() {
            let sums = leaves.sums.entry(key).or_insert_with(|| TreeSums::new(leaves.tree));
            sums.add(leaf, Some(gradient), |left, right| left.accumulate(&right))?;
        }
        Ok(())
    }
}

impl Runner<'_> {
    /// Sums the gradients of the uses of each parameter, in the order of their keys, and returns the sums by the key of the parameter,
    /// on all ranks whose stages use it. `param_of` returns the key of the parameter of which a key is a use, `stored` the parameter of
    /// this rank. A collective call: every pipeline rank calls it together.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`; errors of the transport.
    #[track_caller]
    pub fn sum_uses(
        &self,
        mut gradients: Gradients,
        param_of: &dyn Fn(Key) -> Key,
        stored: &dyn Fn(Key) -> Tensor,
        is_trained: &dyn Fn(Key) -> bool,
    ) -> Result<Gradients> {
        let (site, here) = (Location::caller(), self.rank.world().coordinate(self.axis));
        let mut sums = Gradients::new();
        for (param, Uses { uses, ranks }) in self.uses(param_of) {
            if !ranks.contains(&here) || !is_trained(param) {
                continue;
            }
            let others: Vec<usize> = ranks.iter().copied().filter(|rank| *rank != here).collect();
            let stored = stored(param);
            let (rank, layout) = (stored.rank(), stored.layout().dual());
            let path = Context::of(rank).path();
            let call = self.call(&layout, Phase::Backward, &path, site);
            let mut own: BTreeMap<Key, Tensor> = BTreeMap::new();
            for (key, _) in uses.iter().filter(|(_, from)| **from == here) {
                let gradient = match gradients.remove(key) {
                    Some(gradient) => gradient,
                    None if others.is_empty() => continue,
                    None => Tensor::zeros(rank, &layout)?,
                };
                let piece = gradient.local().flat(rank)?;
                others.iter().try_for_each(|to| self.send_to(&call, &piece, *to))?;
                own.insert(*key, gradient);
            }
            let mut sum: Option<Tensor> = None;
            for (key, from) in &uses {
                let gradient = match *from == here {
                    true => own.remove(key),
                    false => Some(receive(rank, &call, layout.clone(), *from)?),
                };
                sum = match (sum, gradient) {
                    (Some(sum), Some(gradient)) => Some(sum.accumulate(&gradient)?),
                    (sum, gradient) => sum.or(gradient),
                };
            }
            sums.extend(sum.map(|sum| (param, sum)));
        }
        Ok(sums)
    }

    /// The uses with a gradient of each parameter, and all pipeline ranks that read it.
    fn uses(&self, param_of: &dyn Fn(Key) -> Key) -> BTreeMap<Key, Uses> {
        let with_gradient = self.stages.keys_with_gradient();
        let mut params: BTreeMap<Key, Uses> = BTreeMap::new();
        for (stage, rank) in self.schedule.stage_ranks.iter().enumerate() {
            for key in self.stages.keys(stage) {
                let param = params.entry(param_of(key)).or_default();
                param.ranks.insert(*rank);
                if with_gradient.contains(&key) {
                    param.uses.insert(key, *rank);
                }
            }
        }
        params.retain(|_, param| !param.uses.is_empty());
        params
    }
}

/// The uses of a parameter.
#[derive(Default)]
struct Uses {
    /// The pipeline rank that has the gradient of each use.
    uses: BTreeMap<Key, usize>,
    /// The pipeline ranks that read the parameter.
    ranks: BTreeSet<usize>,
}
