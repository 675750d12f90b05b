//! Gathered parameters of checkpointed blocks: freed when the block has run, and gathered again for its backward pass.
//!
//! A derived leaf keeps its tensor for the step, so that a parameter moves once, whatever the number of microbatches. Activation
//! checkpointing trades time for memory, and so it does here: what a block gathers from a shard is freed with the block's
//! activations, and the recomputation gathers it again. The leaf itself stays, so that gradients are accumulated and reduced once
//! per step. Parameters that are used outside of blocks, and compute layouts that take no more memory than the stored ones, are kept
//! as ever.

use crate::id::Id;
use crate::tape::{Arena, Tape};
use shardgrad_dist::Result;
use shardgrad_tensor::{Layout, Op, Tensor, op, unwind};
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
    /// The parameter in its compute layout, on a tape of the same rank.
    pub(crate) fn run(&self, tape: &Tape, stored: &Tensor) -> Tensor {
        tape.context().set_path(&self.path);
        let along = |from: Tensor, op: &Rc<dyn Op>| unwind(tape.along_route(&**op, &from, self.site));
        self.routes.iter().fold(stored.clone(), along)
    }
}

/// The number of elements of the largest local tensor of a layout, the same on all ranks: that of the last ranks.
pub(crate) fn largest_numel(layout: &Layout) -> usize {
    let mesh = layout.mesh();
    let last: Vec<usize> = mesh.axes().map(|axis| mesh.size(axis) - 1).collect();
    layout.local_shape(&last).iter().product()
}

impl Arena {
    /// The routes by which a recording made the tensor of a leaf, and the leaf at which they start. Without routes if the leaf has
    /// its tensor from elsewhere.
    fn routes_in(&self, recording: u32, leaf: usize) -> (usize, SmallVec<[Rc<dyn Op>; 1]>) {
        let (mut at, mut routes) = (leaf, SmallVec::new());
        while let (true, Some((origin, op))) =
            (self.leaves[at].recording == recording, &self.leaves[at].origin)
        {
            routes.push(op.clone());
            at = *origin as usize;
        }
        routes.reverse();
        (at, routes)
    }

    /// Whether a recording gathered the tensor of a leaf, so that it is larger than the tensor that it was made from.
    fn is_gathered_in(&self, recording: u32, leaf: usize) -> bool {
        let (from, routes) = self.routes_in(recording, leaf);
        !routes.is_empty()
            && largest_numel(&self.leaves[leaf].layout) > largest_numel(&self.leaves[from].layout)
    }
}

impl Tape {
    /// What a checkpointed block that was just recorded saves of a leaf which it gathered: the tensor from which it was gathered, and
    /// the way to gather it again. `None` for all other values, which the block saves as they are.
    pub(crate) fn saved_ungathered(&self, id: Option<Id>) -> Option<(Tensor, Regather)> {
        let (recording, leaf) = (self.last_recording(), id?.leaf()?);
        let arena = self.arena();
        if !arena.is_gathered_in(recording, leaf) {
            return None;
        }
        let (from, routes) = arena.routes_in(recording, leaf);
        let (path, site) = (arena.leaves[leaf].path.clone(), arena.leaves[leaf].site);
        Some((arena.leaves[from].tensor.clone()?, Regather { routes, path, site }))
    }

    /// Frees the parameters that the block recorded last has gathered. The next use gathers them again.
    pub(crate) fn free_gathered(&self) {
        let (recording, mut arena) = (self.last_recording(), self.arena());
        let gathered: Vec<usize> =
            (0..arena.leaves.len()).filter(|leaf| arena.is_gathered_in(recording, *leaf)).collect();
        gathered.into_iter().for_each(|leaf| arena.leaves[leaf].release_tensor());
    }

    /// A tensor moved along a route.
    ///
    /// # Errors
    /// Errors of the collectives, `Kind::OutOfMemory`.
    pub(crate) fn along_route(
        &self,
        route: &dyn Op,
        from: &Tensor,
        site: &'static Location<'static>,
    ) -> Result<Tensor> {
        let context = (self.rank(), self.context());
        let inference = op::plan(route, context, &[from.layout()], &[], site)?;
        let made = match self.is_meta() {
            true => op::meta(&inference, self.rank()),
            false => op::run(route, &[from.local()], &inference, context, site)?,
        };
        Ok(made.into_iter().next().expect("redistribute has one output"))
    }
}
