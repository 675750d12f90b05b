//! A backward pass in two halves: first what others wait for, later the rest.
//!
//! A pipeline stage owes its predecessor the gradient of what it took, and nobody the gradients of its parameters: those
//! can fill the time in which it would wait. Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241.

use crate::id::{Id, Key};
use crate::tape::sums::{add, give};
use crate::tape::{Node, Tape, Work, named};
use shardgrad_tensor::Tensor;
use smallvec::SmallVec;

/// Per argument of a node, whether something holds.
type Mask = SmallVec<[bool; 4]>;

/// The nodes of a round, with what the first half has left: per argument, whether its cotangent is still to come.
pub(crate) struct Rest {
    nodes: Vec<Node>,
    left: Vec<Mask>,
}

impl Tape {
    /// Backpropagates given cotangents to the leaves of some keys, and leaves for later what no such leaf needs. A block
    /// that is computed again is computed once, so it gives all of its cotangents now.
    pub(crate) fn backward_towards(
        &self,
        seeds: impl IntoIterator<Item = (Id, Tensor)>,
        keys: impl Fn(Key) -> bool,
    ) -> Rest {
        let mut arena = self.arena();
        let mut nodes = arena.take_nodes();
        for (id, seed) in seeds {
            add(&mut arena.leaves, &mut nodes, id, seed);
        }
        let aims: Vec<bool> = arena.leaves.iter().map(|leaf| keys(leaf.key)).collect();
        let mut reaches: Vec<bool> = Vec::with_capacity(nodes.len());
        let mut now: Vec<Mask> = Vec::with_capacity(nodes.len());
        for node in &nodes {
            let leads = |id: &Option<Id>| match *id {
                Some(Id::Leaf(at)) => aims[at as usize],
                Some(Id::Made { node, .. }) => reaches[node as usize],
                None => false,
            };
            let mut mask: Mask = node.inputs.iter().map(leads).collect();
            reaches.push(mask.contains(&true));
            if matches!(node.work, Work::Block(_)) && mask.contains(&true) {
                mask = node.inputs.iter().map(Option::is_some).collect();
            }
            now.push(mask);
        }
        let left = nodes.iter().zip(&now).map(|(node, now)| {
            node.inputs.iter().zip(now).map(|(input, now)| input.is_some() && !now).collect::<Mask>()
        });
        let mut rest = Rest { left: left.collect(), nodes };
        drop(arena);
        self.walk(&mut rest, &now);
        rest
    }

    /// Gives leaves what was added up for them elsewhere, before [`Tape::backward_rest`] adds to it.
    pub(crate) fn begin_rest_with(&self, rest: &Rest, sum: impl FnMut(Key) -> Option<Tensor>) {
        if !self.context().is_watched() {
            let inputs = rest.nodes.iter().flat_map(|node| &node.inputs).zip(rest.left.iter().flatten());
            let left = inputs.filter_map(|(input, left)| input.filter(|_| *left));
            give(&mut self.arena().leaves, left, sum);
        }
    }

    /// Backpropagates what the first half has left.
    pub(crate) fn backward_rest(&self, mut rest: Rest) {
        let left = std::mem::take(&mut rest.left);
        rest.left = left.iter().map(|mask| SmallVec::from_elem(false, mask.len())).collect();
        self.walk(&mut rest, &left);
    }

    /// Goes backwards through nodes and takes the cotangents of the arguments that a mask names. A node that has none left
    /// to give is emptied.
    fn walk(&self, rest: &mut Rest, masks: &[Mask]) {
        let context = self.context();
        let before = context.set_backward(true);
        let mut arena = self.arena();
        named(|stand| {
            for at in (0..rest.nodes.len()).rev() {
                let (earlier, node) = rest.nodes.split_at_mut(at);
                let node = &mut node[0];
                let given = node.cotangents.iter().any(Option::is_some);
                if given && masks[at].contains(&true) {
                    self.pull((&mut arena.leaves, earlier), node, &masks[at], stand);
                }
                if !rest.left[at].contains(&true) {
                    node.empty();
                }
            }
        });
        context.set_backward(before);
    }
}
