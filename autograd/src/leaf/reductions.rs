//! Reductions of gradients: cotangents of derived leaves travel along the adjoints of their routes, in buckets.
//!
//! The backward pass hands the cotangent of a leaf to a bucket as soon as it is complete; a full bucket is reduced while the pass goes on.
//! A result is added to the leaf from which the cotangent's leaf is derived. A leaf with several contributions gets them when all
//! reductions have ended, in the order in which they began, so that sums have the same bits whatever the buckets and the time.

use super::{GatheredLifetime, Leaf, Leaves};
use crate::id::Gradients;
use crate::node::{BackwardSite, with_backward_site};
use shardgrad_dist::Rank;
use shardgrad_tensor::op::Vjp;
use shardgrad_tensor::tensor::reduce_buckets::{BucketBytes, ReduceBuckets};
use shardgrad_tensor::{Context, Op, Tensor, unwind};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The reductions of a tape that have begun.
#[derive(Default)]
pub(super) struct Reductions {
    buckets: ReduceBuckets,
    /// The leaves that get the results, with the numbers of the requests.
    origins: Vec<(usize, u32)>,
    /// Results that wait until all reductions have ended.
    arrived: BTreeMap<usize, Tensor>,
}

impl Reductions {
    /// Whether no reduction has begun, and sizes of buckets were not set.
    pub(super) fn are_unused(&self) -> bool {
        self.buckets.is_unused()
    }
}

impl Leaves {
    /// Sets the sizes of the buckets of gradients.
    pub(crate) fn set_bucket_bytes(&mut self, bytes: BucketBytes) {
        self.reductions.buckets = ReduceBuckets::of(bytes);
    }

    /// Begins to bring the cotangent of a derived leaf, if there is one, to the layout of the leaf it is derived from. A leaf that
    /// awaits the cotangent of another leaf is left for [`Leaves::take_gradients`].
    pub(crate) fn begin_reduction(
        &mut self,
        at: usize,
        (rank, context): (&Rank, &Context),
        backward_site: &BackwardSite,
    ) {
        if context.detects_anomalies() {
            return self.backpropagate_route(at, (rank, context), backward_site);
        }
        let leaf = &mut self.leaves[at];
        let Some((origin, route)) = leaf.origin.clone().filter(|_| !leaf.awaits_reduction) else { return };
        let Some(cotangent) = leaf.cotangent.take() else { return };
        backward_site.set(Some((leaf.site, route.name())));
        let request = unwind(route.reduction(cotangent, (leaf.path.clone(), leaf.site)));
        let number = unwind(self.reductions.buckets.add(rank, request));
        self.reductions.origins.push((number, origin));
        self.leaves[origin as usize].awaits_reduction = true;
        let arrived = self.reductions.buckets.take_arrived();
        self.add_results(arrived, |leaf| leaf.adds_at_arrival);
    }

    /// Waits for all reductions and adds the results to their leaves.
    pub(crate) fn finish_reductions(&mut self, rank: &Rank) {
        if self.reductions.origins.is_empty() {
            return;
        }
        let results = with_backward_site(|_| unwind(self.reductions.buckets.finish(rank)));
        self.add_results(results, |_| true);
    }

    /// Adds results of reductions to the leaves that take them now, in the order of the requests, and keeps those of other leaves.
    fn add_results(&mut self, results: Vec<(usize, Tensor)>, takes: impl Fn(&Leaf) -> bool) {
        let arrived = &mut self.reductions.arrived;
        arrived.extend(results);
        for (number, reduced) in std::mem::take(arrived) {
            let origins = &mut self.reductions.origins;
            let at = origins.binary_search_by_key(&number, |(number, _)| *number);
            let at = at.expect("bug: a result that was not requested");
            let origin = origins[at].1 as usize;
            if takes(&self.leaves[origin]) {
                origins.remove(at);
                self.leaves[origin].awaits_reduction = false;
                self.add(origin, reduced);
            } else {
                self.reductions.arrived.insert(number, reduced);
            }
        }
    }

    /// Backpropagates the cotangent of a derived leaf, if there is one, along its route at once, as anomaly detection inspects it.
    fn backpropagate_route(
        &mut self,
        at: usize,
        (rank, context): (&Rank, &Context),
        backward_site: &BackwardSite,
    ) {
        let leaf = &mut self.leaves[at];
        let Some((origin, op)) = leaf.origin.clone() else { return };
        let Some(cotangent) = leaf.cotangent.take() else { return };
        context.set_path(&leaf.path);
        backward_site.set(Some((leaf.site, op.name())));
        let back = op.vjp(&Vjp {
            rank,
            inputs: &[None],
            outputs: &[None],
            input_layouts: &[self.leaves[origin as usize].layout.clone()],
            output_layouts: &[cotangent.layout().dual()],
            grads: &[Some(cotangent)],
            needs_input_grad: &[true],
            donated: RefCell::default(),
            accumulators: &[],
        });
        self.add(origin as usize, back.into_iter().next().flatten().expect("redistribute has a vjp"));
    }

    /// Takes the accumulated gradients off the leaves, in the stored layouts, and releases the tensors. The adjoint of each
    /// route runs here, once.
    pub(crate) fn take_gradients(&mut self, place: (&Rank, &Context)) -> Gradients {
        self.groups.release();
        self.step_gathers.clear();
        self.leaves.iter_mut().for_each(Leaf::release_tensor);
        self.take_cotangents(place)
    }

    /// As [`Leaves::take_gradients`], but keeps the tensors that gather groups are gathered from.
    pub(crate) fn take_gradients_before_weights(&mut self, place: (&Rank, &Context)) -> Gradients {
        let is_done = |leaf: &&mut Leaf| !matches!(leaf.policy.lifetime, GatheredLifetime::Group(_));
        self.leaves.iter_mut().filter(is_done).for_each(Leaf::release_tensor);
        self.take_cotangents(place)
    }

    /// Takes the accumulated gradients off the leaves, each along its route to the stored layout.
    fn take_cotangents(&mut self, place: (&Rank, &Context)) -> Gradients {
        if self.leaves.iter().any(|leaf| leaf.origin.is_some()) {
            self.reduce_all(place);
        }
        // Inserted one by one: `collect` would allocate and sort a list first.
        let mut gradients = Gradients::new();
        for leaf in self.leaves.iter_mut().filter(|leaf| leaf.origin.is_none()) {
            if let Some(cotangent) = leaf.cotangent.take() {
                gradients.insert(leaf.key, cotangent);
            }
        }
        gradients
    }

    /// Brings the cotangents of all derived leaves to the leaves they are derived from.
    fn reduce_all(&mut self, place: (&Rank, &Context)) {
        // Leaves that are derived from derived ones first, so that those of one depth share buckets.
        let depths = self.depths();
        for depth in (1..=depths.iter().copied().max().unwrap_or(0)).rev() {
            self.finish_reductions(place.0);
            for at in (0..self.leaves.len()).rev().filter(|at| depths[*at] == depth) {
                with_backward_site(|site| self.begin_reduction(at, place, site));
            }
        }
        self.finish_reductions(place.0);
    }

    /// The number of routes between each leaf and the stored form of its parameter.
    fn depths(&self) -> Vec<usize> {
        let mut depths = vec![0; self.leaves.len()];
        for (at, leaf) in self.leaves.iter().enumerate() {
            if let Some((origin, _)) = &leaf.origin {
                depths[at] = depths[*origin as usize] + 1;
            }
        }
        depths
    }
}
