//! Parameters that are stored as shards and gathered in groups (ZeRO 3, FSDP): a group is gathered before its first use, freed when
//! other groups are used, and gathered again for the backward pass.
//!
//! Nodes save the number of a leaf in place of its gathered tensor, so that the leaf alone holds it. When the group of a parameter
//! comes into use, the next group is gathered too: on a back end with a communication stream it arrives while the first one is
//! computed with. Which group is next is known from the nodes in the backward pass, and from the forward pass before in the forward
//! pass. All ranks run the same ops, so that all gather in the same order. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
//! Sharded Data Parallel", arXiv 2304.11277.

use super::{Leaves, Parameter};
use crate::id::{Id, Key};
use crate::node::Node;
use crate::program::AccumulationDType;
use crate::regather::along_route;
use shardgrad_dist::Rank;
use shardgrad_tensor::{Context, Layout, Tensor, unwind};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

/// How long a tape keeps the gathered form of a parameter that is stored as shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GatheredLifetime {
    /// For the step; a checkpointed block frees what it gathers.
    #[default]
    StepOrBlock,
    /// For the step, also in checkpointed blocks.
    Step,
    /// While its group of parameters is in use or comes next. Forward and backward pass gather it each.
    Group(u32),
}

/// How a tape treats a parameter that is stored as shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GatherPolicy {
    /// How long the gathered form is kept.
    pub lifetime: GatheredLifetime,
    /// Whether each backward pass reduces the gradient, so that the sum over microbatches is as sharded as the parameter. Otherwise
    /// gradients are summed first, and reduced once per step.
    pub reduces_each_round: bool,
}

impl GatherPolicy {
    /// The gather group, if the gathered form is kept for one.
    fn group(self) -> Option<u32> {
        match self.lifetime {
            GatheredLifetime::Group(group) => Some(group),
            GatheredLifetime::StepOrBlock | GatheredLifetime::Step => None,
        }
    }
}

/// A parameter of a gather group.
#[derive(Clone, Debug)]
pub struct GatherMember {
    /// The parameter's key.
    pub key: Key,
    /// The stored tensor.
    pub stored: Tensor,
    /// The layout in which it is computed.
    pub computed: Layout,
    /// Its policy.
    pub policy: GatherPolicy,
    /// Its name in the model.
    pub path: Rc<str>,
}

/// The order in which forward passes use gather groups: at first the order of the groups, then that of the last forward pass. A model
/// shares it with all its tapes.
#[derive(Debug, Default)]
pub struct GatherOrder(RefCell<Vec<u32>>);

impl GatherOrder {
    /// The order 0, 1, .. of groups.
    #[must_use]
    pub fn of_groups(num_groups: usize) -> GatherOrder {
        GatherOrder(RefCell::new((0..num_groups as u32).collect()))
    }

    /// The position of the use of a group after a position, and the group after that.
    fn find(&self, group: u32, after: Option<usize>) -> Option<(usize, Option<u32>)> {
        let order = self.0.borrow();
        let start = after.map_or(0, |after| after + 1);
        let at = start + order.get(start..)?.iter().position(|known| *known == group)?;
        Some((at, order.get(at + 1).copied()))
    }
}

/// The gather groups of a tape.
#[derive(Default)]
pub(crate) struct GatherGroups {
    /// The parameters of each group, until the gradients are taken.
    members: Vec<Vec<GatherMember>>,
    order: Rc<GatherOrder>,
    /// The position in the order of the group in use.
    position: Option<usize>,
    /// The groups that this forward pass has used, in order; the last one is in use.
    used: Vec<u32>,
}

impl GatherGroups {
    pub(crate) fn new(members: Vec<Vec<GatherMember>>, order: Rc<GatherOrder>) -> GatherGroups {
        GatherGroups { members, order, position: None, used: Vec::new() }
    }

    /// Drops the handles of the stored tensors, so that the optimizer can update them in place.
    pub(super) fn release(&mut self) {
        self.members.clear();
    }

    /// Ends a forward pass: the next one is expected to use the groups in the same order.
    fn end_forward(&mut self) {
        self.position = None;
        if !self.used.is_empty() {
            self.order.0.replace(std::mem::take(&mut self.used));
        }
    }
}

/// The leaves of one group that some nodes in a row need, and the node at which a backward pass meets them.
struct Segment {
    node: usize,
    group: u32,
    leaves: Vec<usize>,
}

/// The gather groups that a backward pass needs, in reverse order: the next one is last.
pub(crate) struct BackwardGroups {
    segments: Vec<Segment>,
    in_use: SmallVec<[u32; 2]>,
}

type Place<'a> = (&'a Rank, &'a Context);

impl Leaves {
    /// The group of a leaf whose gathered form is kept for its group only; `None` for the stored form and for all other leaves.
    pub(crate) fn gathered_group(&self, at: usize) -> Option<u32> {
        let leaf = &self.leaves[at];
        leaf.origin.as_ref().and(leaf.policy.group())
    }

    /// Marks a freed group leaf as used in a round, for a node that saves its number; `None` if the leaf is not one, or is another
    /// tensor now.
    pub(crate) fn save_by_number(&mut self, at: usize, tensor: &Tensor, round: u32) -> Option<u32> {
        if !self.has_groups {
            return None;
        }
        self.gathered_group(at)?;
        self.mark_used(at, tensor, round).then_some(at as u32)
    }

    /// Brings a group into use in a forward pass: frees the groups before, gathers the parameters of this group and of the next.
    pub(super) fn use_group(
        &mut self,
        group: u32,
        place: Place<'_>,
        round: u32,
        site: &'static Location<'static>,
    ) {
        if self.groups.used.last() == Some(&group) {
            return;
        }
        self.groups.used.push(group);
        let next = match self.groups.order.find(group, self.groups.position) {
            Some((at, next)) => {
                self.groups.position = Some(at);
                next
            }
            None => None,
        };
        let in_use: SmallVec<[u32; 2]> = [group].into_iter().chain(next).collect();
        self.free_groups_except(&in_use);
        let path = place.1.path();
        in_use.iter().for_each(|group| self.gather_members(*group, place, round, site));
        place.1.set_path(&path);
    }

    /// Gathers the parameters of a group that are not gathered yet.
    fn gather_members(&mut self, group: u32, place: Place<'_>, round: u32, site: &'static Location<'static>) {
        let members = std::mem::take(&mut self.groups.members);
        for member in members.get(group as usize).into_iter().flatten() {
            let GatherMember { key, stored, computed, policy, path } = member;
            let accumulation = AccumulationDType::of(stored.dtype());
            let parameter = Parameter { key: *key, tensor: stored, accumulation, policy: *policy };
            let at = match self.find(parameter, false) {
                Some((Id::Leaf(at), _)) => at,
                // The tape holds another tensor of this parameter, which is gathered at its use.
                _ if self.by_key.contains_key(key) => continue,
                _ => {
                    let id = unwind(self.insert(parameter, round, (path.clone(), site)));
                    id.leaf().expect("a parameter is a leaf") as u32
                }
            };
            place.1.set_path(path);
            self.derive_by_steps((at, stored), computed, (place.0, place.1, false), 0, site);
        }
        self.groups.members = members;
    }

    /// Frees the gathered form of the parameters of all groups but some.
    fn free_groups_except(&mut self, kept: &[u32]) {
        for at in 0..self.leaves.len() {
            if self.gathered_group(at).is_some_and(|group| !kept.contains(&group)) {
                self.leaves[at].release_tensor();
            }
        }
    }

    /// The tensor of a group leaf, gathered again if it was freed.
    fn gathered_again(&mut self, at: usize, place: Place<'_>) -> Tensor {
        let leaf = &self.leaves[at];
        if let Some(tensor) = &leaf.tensor {
            return tensor.clone();
        }
        let (origin, route) = leaf.origin.clone().expect("a stored form is not freed while nodes need it");
        let (path, site) = (leaf.path.clone(), leaf.site);
        let from = self.gathered_again(origin as usize, place);
        place.1.set_path(&path);
        let tensor = unwind(along_route(&*route, &from, (place.0, place.1, false), site));
        self.leaves[at].hold_again(tensor.clone());
        tensor
    }

    /// Ends a forward pass, and returns the groups that the backward pass of its nodes needs.
    pub(crate) fn begin_backward(&mut self, nodes: &[Node]) -> BackwardGroups {
        self.groups.end_forward();
        let mut segments: Vec<Segment> = Vec::new();
        if self.has_groups {
            for (node, leaf) in
                nodes.iter().enumerate().rev().flat_map(|(at, node)| {
                    node.saved_leaves().iter().map(move |(_, leaf)| (at, *leaf as usize))
                })
            {
                let Some(group) = self.gathered_group(leaf) else { continue };
                match segments.last_mut() {
                    Some(last) if last.group == group => last.leaves.push(leaf),
                    _ => segments.push(Segment { node, group, leaves: vec![leaf] }),
                }
            }
            segments.reverse();
        }
        let mut groups = BackwardGroups { segments, in_use: SmallVec::new() };
        self.gather_for_backward(&mut groups, None);
        groups
    }

    /// Gathers what the backward pass of a node needs, and the group after that; fills in the tensors that the node saved by number.
    pub(crate) fn prepare_backward(
        &mut self,
        groups: &mut BackwardGroups,
        (at, node): (usize, &mut Node),
        place: Place<'_>,
    ) {
        if node.saved_leaves().is_empty() {
            return;
        }
        if groups.segments.last().is_some_and(|next| next.node >= at) {
            groups.in_use.clear();
            let mut leaves = Vec::new();
            // A node before that no cotangent has reached was passed over.
            while let Some(segment) = groups.segments.pop_if(|next| next.node >= at) {
                groups.in_use.push(segment.group);
                leaves.extend(segment.leaves);
            }
            self.gather_for_backward(groups, Some((&leaves, place)));
        }
        node.fill_saved_leaves(|leaf| self.gathered_again(leaf as usize, place));
    }

    /// Frees the groups that are neither in use nor next, and gathers the given leaves and those of the next group.
    fn gather_for_backward(&mut self, groups: &mut BackwardGroups, leaves: Option<(&[usize], Place<'_>)>) {
        if !self.has_groups {
            return;
        }
        let next = groups.segments.last();
        let kept: SmallVec<[u32; 4]> =
            groups.in_use.iter().copied().chain(next.map(|next| next.group)).collect();
        self.free_groups_except(&kept);
        let Some((leaves, place)) = leaves else { return };
        for leaf in leaves.iter().chain(next.iter().flat_map(|next| &next.leaves)) {
            self.gathered_again(*leaf, place);
        }
    }

    /// Frees all groups at the end of a backward pass.
    pub(crate) fn end_backward(&mut self) {
        if self.has_groups {
            self.free_groups_except(&[]);
        }
    }
}
