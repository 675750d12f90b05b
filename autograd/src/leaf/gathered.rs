//! Gathered parameters of checkpointed blocks: freed when the block has run, and gathered again for its backward pass.
//!
//! A derived leaf keeps its tensor for the step, so that a parameter moves once, whatever the number of microbatches. Activation
//! checkpointing trades time for memory, and so it does here: what a block gathers from a shard is freed with the block's
//! activations, and the recomputation gathers it again. The leaf itself stays, so that gradients are accumulated and reduced once
//! per step. Parameters that are used outside of blocks, and compute layouts that take no more memory than the stored ones, are kept
//! for the step.

use super::Leaves;
use crate::route::along_route;
use shardgrad_dist::{Axis, Rank};
use shardgrad_tensor::{Context, Layout, Op, Placement, Tensor, unwind};
use smallvec::SmallVec;
use std::panic::Location;
use std::rc::Rc;

/// How a checkpointed block gets a parameter in its compute layout again: along routes from the stored tensor.
pub(crate) struct Regather {
    routes: SmallVec<[Rc<dyn Op>; 1]>,
    path: Rc<str>,
    site: &'static Location<'static>,
}

impl Regather {
    /// The parameter in its compute layout.
    pub(crate) fn run(&self, rank: &Rank, context: &Context, stored: &Tensor) -> Tensor {
        context.set_path(&self.path);
        let along = |from: Tensor, op: &Rc<dyn Op>| {
            unwind(along_route(&**op, &from, (rank, context, false), self.site))
        };
        self.routes.iter().fold(stored.clone(), along)
    }
}

/// The number of elements of the largest local tensor of a layout, the same on all ranks: that of the last ranks.
pub(crate) fn largest_numel(layout: &Layout) -> usize {
    let mesh = layout.mesh();
    let last: Vec<usize> = mesh.axes().map(|axis| mesh.size(axis) - 1).collect();
    layout.local_shape(&last).iter().product()
}

/// The layout in which gradients are summed that each backward pass reduces: as sharded as the stored one. Axes over which a parameter
/// is stored as copies and computed as replicas are reduced once, at the end, so that they move one sum of shards (hybrid sharding).
pub(crate) fn layout_of_sums(stored: &Layout, computed: &Layout) -> Layout {
    let is_reduced_last = |axis: &Axis| {
        (stored.placement(*axis), computed.placement(*axis)) == (Placement::Invariant, Placement::Replicate)
    };
    let axes = stored.mesh().axes().filter(is_reduced_last);
    axes.fold(stored.clone(), |layout, axis| layout.with_placement(axis, Placement::Replicate))
}

impl Leaves {
    /// The leaf of the stored form of a leaf's parameter.
    pub(super) fn stored_leaf(&self, leaf: usize) -> usize {
        let mut at = leaf;
        while let Some((origin, _)) = &self.leaves[at].origin {
            at = *origin as usize;
        }
        at
    }

    /// Whether a leaf is larger than the stored form of its parameter.
    pub(super) fn is_gathered(&self, leaf: usize) -> bool {
        let stored = self.stored_leaf(leaf);
        largest_numel(&self.leaves[leaf].layout) > largest_numel(&self.leaves[stored].layout)
    }

    /// What a checkpointed block with this recording saves of a leaf which the block gathered: the tensor from which it was gathered,
    /// and the way to gather it again. `None` for all other leaves, which the block saves as they are.
    pub(crate) fn saved_ungathered(&self, recording: u32, leaf: usize) -> Option<(Tensor, Regather)> {
        if !self.is_gathered_in(recording, leaf) {
            return None;
        }
        let (from, routes) = self.routes_in(recording, leaf);
        let (path, site) = (self.leaves[leaf].path.clone(), self.leaves[leaf].site);
        Some((self.leaves[from].tensor.clone()?, Regather { routes, path, site }))
    }

    /// Frees the leaves that a recorded block has gathered. The next use gathers them again.
    pub(crate) fn free_gathered(&mut self, recording: u32) {
        let gathered: Vec<usize> =
            (0..self.leaves.len()).filter(|leaf| self.is_gathered_in(recording, *leaf)).collect();
        gathered.into_iter().for_each(|leaf| self.leaves[leaf].release_tensor());
    }

    /// Whether a recording gathered the tensor of a leaf, so that it is larger than the tensor that it was made from.
    fn is_gathered_in(&self, recording: u32, leaf: usize) -> bool {
        let (from, routes) = self.routes_in(recording, leaf);
        !routes.is_empty()
            && largest_numel(&self.leaves[leaf].layout) > largest_numel(&self.leaves[from].layout)
    }

    /// The routes by which a recording made the tensor of a leaf, and the leaf at which they start. Without routes if the leaf has
    /// its tensor from elsewhere.
    fn routes_in(&self, recording: u32, leaf: usize) -> (usize, SmallVec<[Rc<dyn Op>; 1]>) {
        let (mut at, mut routes) = (leaf, SmallVec::new());
        while let (true, Some((origin, op))) =
            (self.leaves[at].recording == recording, &self.leaves[at].origin)
        {
            routes.push(op.clone() as Rc<dyn Op>);
            at = *origin as usize;
        }
        routes.reverse();
        (at, routes)
    }
}
