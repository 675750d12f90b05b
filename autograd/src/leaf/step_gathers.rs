//! Small parameters whose gathered form is kept for the step (ZeRO 1 and 2, stages of pipelines): the first use of such a
//! parameter gathers all of them, in shared collectives. The step needs and holds all of them until the gradients are taken, so that to
//! gather early takes no more memory.

use super::gather_groups::{GatherMember, GatheredLifetime, Place};
use super::{Leaves, largest_numel};
use crate::id::Id;
use shardgrad_tensor::tensor::gather_ahead::SHARED_BYTES_MAX;
use shardgrad_tensor::{Layout, Tensor};
use std::panic::Location;
use std::rc::Rc;

/// A leaf to gather with others.
pub(crate) struct StepGather {
    pub(crate) leaf: Id,
    pub(crate) tensor: Tensor,
    /// The layout to bring it to.
    pub(crate) computed: Layout,
    /// The name of the parameter in the model.
    pub(crate) path: Rc<str>,
    /// The line of the first use.
    pub(crate) site: &'static Location<'static>,
}

/// Whether the gathered form of a parameter is small enough to share a collective; equal on all ranks.
fn is_small(computed: &Layout) -> bool {
    largest_numel(computed) * computed.dtype().size() <= SHARED_BYTES_MAX
}

impl Leaves {
    /// Sets the parameters whose gathered form is kept for the step. Small ones are gathered together.
    pub(crate) fn set_step_gathers(&mut self, members: Vec<GatherMember>) {
        self.step_gathers = members.into_iter().filter(|member| is_small(&member.computed)).collect();
    }

    /// Gathers the small parameters that are kept for the step, at the first use of a parameter with this lifetime.
    pub(super) fn gather_for_step(
        &mut self,
        lifetime: GatheredLifetime,
        place: Place<'_>,
        round: u32,
        site: &'static Location<'static>,
    ) {
        if lifetime != GatheredLifetime::Step || self.step_gathers.is_empty() {
            return;
        }
        let members = std::mem::take(&mut self.step_gathers);
        let leaves: Vec<usize> =
            members.iter().filter_map(|member| self.leaf_of_member(member, place, round, site)).collect();
        self.gather_leaves(&leaves, place, site);
    }

    /// Gathers the small ones of some leaves in shared collectives. A later use of the same layout finds the tensor.
    pub(crate) fn gather_together(&mut self, gathers: Vec<StepGather>, place: Place<'_>) {
        let Some(site) = gathers.first().map(|gather| gather.site) else { return };
        let mut leaves = Vec::new();
        for StepGather { leaf, tensor, computed, path, site } in gathers {
            let Some(origin) = leaf.leaf() else { continue };
            if is_small(&computed) && largest_numel(&computed) > largest_numel(tensor.layout()) {
                leaves.push(self.ungathered_leaf((origin, &tensor), &computed, place.0, (path, site)));
            }
        }
        self.gather_leaves(&leaves, place, site);
    }

    /// Gathers those of some leaves that have no tensor, in shared collectives, and holds the results for all rounds.
    fn gather_leaves(&mut self, leaves: &[usize], place: Place<'_>, site: &'static Location<'static>) {
        let path = place.1.path();
        if let Some(gathers) = self.begin_leaves(leaves, false, place, site) {
            self.finish_leaves(gathers);
        }
        place.1.set_path(&path);
        if self.are_reused {
            for at in leaves {
                let leaf = &mut self.leaves[*at];
                leaf.reuse = leaf.tensor.as_ref().map(Tensor::cache_packed);
            }
        }
    }
}
