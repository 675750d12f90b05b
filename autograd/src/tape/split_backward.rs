//! Split backward: input gradients first, because the previous stage waits for them; weight gradients later, to fill
//! pipeline bubbles.
//!
//! Where parameters are gathered in groups ([`GatherPolicy`](crate::GatherPolicy)), input gradients gather the weights again, and
//! weight gradients only what their vjps read: the weight of a norm, but not that of a product.
//!
//! Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241.

use super::Tape;
use crate::accumulate::{add, backward_node};
use crate::gathers_ahead::GathersAhead;
use crate::id::{Id, Key};
use crate::node::{Mask, Node, with_backward_site};
use shardgrad_tensor::Tensor;
use smallvec::SmallVec;

/// The nodes of a round after their input gradients: per argument, whether its cotangent is still pending.
pub(crate) struct DeferredWeightGrads {
    nodes: Vec<Node>,
    pending: Vec<Mask>,
}

impl DeferredWeightGrads {
    /// Backpropagates the given cotangents to the leaves of some keys (the inputs of the stage) and defers all
    /// cotangents that no such leaf needs. A checkpointed block gives all its cotangents now, so that it is recomputed
    /// once.
    #[doc(alias = "zero bubble")]
    #[doc(alias = "stage_backward_input")]
    pub(crate) fn backward_inputs(
        tape: &Tape,
        seeds: impl IntoIterator<Item = (Id, Tensor)>,
        keys: impl Fn(Key) -> bool,
    ) -> DeferredWeightGrads {
        let mut arena = tape.0.arena.borrow_mut();
        let mut nodes = arena.take_nodes();
        for (id, seed) in seeds {
            add(&mut arena.leaves, &mut nodes, id, seed);
        }
        let targets: Vec<bool> = (0..arena.leaves.len()).map(|at| keys(arena.leaves.key(at))).collect();
        let mut reaches: Vec<bool> = Vec::with_capacity(nodes.len());
        let mut now: Vec<Mask> = Vec::with_capacity(nodes.len());
        for node in &nodes {
            let reaches_target = |id: &Option<Id>| match *id {
                Some(Id::Leaf(at)) => targets[at as usize],
                Some(Id::Output { node, .. }) => reaches[node as usize],
                None => false,
            };
            let mut mask: Mask = node.inputs().iter().map(reaches_target).collect();
            reaches.push(mask.contains(&true));
            if node.op().is_none() && mask.contains(&true) {
                mask = node.inputs_with_gradient();
            }
            now.push(mask);
        }
        let pending = nodes.iter().zip(&now).map(|(node, now)| {
            node.inputs().iter().zip(now).map(|(input, now)| input.is_some() && !now).collect::<Mask>()
        });
        let mut deferred = DeferredWeightGrads { pending: pending.collect(), nodes };
        drop(arena);
        deferred.backward_masked(tape, &now);
        deferred
    }

    /// Starts leaves from gradients accumulated elsewhere, before [`DeferredWeightGrads::backward_weights`] adds to
    /// them.
    pub(crate) fn preload_gradients(&self, tape: &Tape, sum: impl FnMut(Key) -> Option<Tensor>) {
        if !tape.context().detects_anomalies() {
            let inputs = self.nodes.iter().flat_map(Node::inputs).zip(self.pending.iter().flatten());
            let pending = inputs.filter_map(|(input, pending)| input.filter(|_| *pending));
            tape.0.arena.borrow_mut().leaves.preload(pending, sum);
        }
    }

    /// Backpropagates the deferred weight gradients.
    #[doc(alias = "stage_backward_weight")]
    pub(crate) fn backward_weights(mut self, tape: &Tape) {
        let pending = std::mem::take(&mut self.pending);
        self.pending = pending.iter().map(|mask| SmallVec::from_elem(false, mask.len())).collect();
        self.backward_masked(tape, &pending);
    }

    /// Runs nodes backward, each for the cotangents in its mask. A node without pending cotangents drops its saved
    /// tensors.
    fn backward_masked(&mut self, tape: &Tape, masks: &[Mask]) {
        let context = tape.context();
        let _backward = context.set_backward(true);
        let arena = &mut *tape.0.arena.borrow_mut();
        let mut gathers_ahead = GathersAhead::of(&self.nodes, |at| masks[at].clone(), tape.rank());
        let mut ready = arena.leaves.ready_after(&self.nodes, false);
        let mut groups = arena.leaves.begin_backward(&self.nodes, |at| masks[at].clone());
        with_backward_site(|backward_site| {
            for at in (0..self.nodes.len()).rev() {
                let (earlier, node) = self.nodes.split_at_mut(at);
                let node = &mut node[0];
                gathers_ahead.begin_due(earlier, tape.place());
                if node.has_cotangent() && masks[at].contains(&true) {
                    arena.leaves.prepare_backward(&mut groups, (at, node), &masks[at], tape.place());
                    backward_node(
                        (&mut arena.leaves, earlier),
                        node,
                        &masks[at],
                        tape.place(),
                        backward_site,
                    );
                    node.release_saved_leaves();
                }
                if !self.pending[at].contains(&true) {
                    node.empty();
                }
                while let Some((_, leaf)) = ready.pop_if(|(node, _)| *node == at) {
                    arena.leaves.begin_reduction(leaf, tape.place(), backward_site);
                }
            }
        });
        arena.leaves.free_all_groups();
        arena.leaves.finish_reductions(tape.rank());
    }
}
