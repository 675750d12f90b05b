//! The gathers of activations in a backward pass begin one product ahead of the nodes that need them, so that a communication stream or
//! thread gathers while the rank multiplies.

use crate::node::{Mask, Node};
use shardgrad_dist::Rank;
use shardgrad_tensor::Context;

/// The gathers of a backward pass that are still to begin.
pub(crate) struct GathersAhead {
    /// The next in the backward pass is the last.
    starts: Vec<GatherStart>,
}

/// When the gathers of a node begin.
struct GatherStart {
    /// The node before whose vjp they begin.
    before: usize,
    /// The node that needs them.
    user: usize,
}

impl GathersAhead {
    /// Plans the gathers of a backward pass over nodes, of which each computes the cotangents of a mask. The gathers of a node begin
    /// before the closest product that runs backward before the node, or without one before the next node.
    pub(crate) fn of(nodes: &[Node], wanted: impl Fn(usize) -> Mask, rank: &Rank) -> GathersAhead {
        let start = |user: usize| {
            let mut earlier_in_backward = user + 1..nodes.len();
            let product =
                earlier_in_backward.find(|at| wanted(*at).contains(&true) && nodes[*at].is_product(rank));
            GatherStart { before: product.unwrap_or(user + 1), user }
        };
        let users = (0..nodes.len()).filter(|at| {
            let node = &nodes[*at];
            node.has_ungathered() && node.reads_ungathered(&wanted(*at))
        });
        GathersAhead { starts: users.map(start).collect() }
    }

    /// Begins the gathers that are due before the node after `earlier` runs backward.
    pub(crate) fn begin_due(&mut self, earlier: &[Node], (rank, context): (&Rank, &Context)) {
        while let Some(start) = self.starts.pop_if(|start| start.before >= earlier.len()) {
            if let Some(node) = earlier.get(start.user) {
                node.ungathered().for_each(|saved| saved.begin(rank, context));
            }
        }
    }
}
