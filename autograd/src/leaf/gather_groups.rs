//! Parameters that are stored as shards and gathered in groups (ZeRO 3, FSDP): a group is gathered before its first use, freed when
//! other groups are used, and gathered again for the backward pass.
//!
//! Nodes save the number of a leaf in place of its gathered tensor, so that the leaf alone holds it. When the group of a parameter
//! comes into use, the gathers of the next group begin: on a communication stream or thread they run while the group in use is computed
//! with. Small parameters of a group share a collective. In the backward pass the recorded nodes determine the next group, in
//! a forward pass the forward pass before. All ranks run the same ops, so that all gather in the same order.
//!
//! Microbatches of a pipeline are in flight together, each on a tape of its own: a forward pass frees its groups at its end, so that
//! tapes in flight hold shards. Of a split backward pass each half gathers what its vjps read.
//!
//! Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv 2304.11277.

use super::{CallSite, Leaf, Leaves, Parameter, layout_of_sums};
use crate::id::{Id, Key};
use crate::node::Node;
use crate::program::AccumulationDType;
use crate::route::along_route;
use shardgrad_dist::Rank;
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::tensor::gather_ahead::{BegunGathers, GatherRequest};
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

/// The order in which forward passes use gather groups: at first as expected, then that of the last forward pass. A model shares it
/// with all its tapes.
#[derive(Debug, Default)]
pub struct GatherOrder(RefCell<Vec<u32>>);

impl GatherOrder {
    /// The order in which the first forward pass is expected to use groups.
    #[must_use]
    pub fn new(groups: impl IntoIterator<Item = u32>) -> GatherOrder {
        GatherOrder(RefCell::new(groups.into_iter().collect()))
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
    /// None until a group is used, unless groups were set.
    order: Option<Rc<GatherOrder>>,
    /// The position in the order of the group in use.
    position: Option<usize>,
    /// The groups that this forward pass has used, in order; the last one is in use.
    used: Vec<u32>,
    /// Gathers that were begun and not used yet, by group.
    pending: Vec<(u32, LeafGathers)>,
}

/// Gathers of leaves that were begun.
pub(super) struct LeafGathers {
    /// The leaves, with the identities of the stored tensors.
    leaves: Vec<(usize, usize)>,
    gathers: BegunGathers,
}

impl GatherGroups {
    pub(crate) fn new(members: Vec<Vec<GatherMember>>, order: Rc<GatherOrder>) -> GatherGroups {
        GatherGroups { members, order: Some(order), position: None, used: Vec::new(), pending: Vec::new() }
    }

    /// Drops the handles of the stored tensors, so that the optimizer can update them in place.
    pub(super) fn release(&mut self) {
        self.members.clear();
        self.pending.clear();
    }

    /// Whether gathers of a group were begun.
    fn is_pending(&self, group: u32) -> bool {
        self.pending.iter().any(|(pending, _)| *pending == group)
    }

    /// The position of a group in the order, and the group after it.
    fn next_in_order(&self, group: u32) -> Option<(usize, Option<u32>)> {
        self.order.as_ref()?.find(group, self.position)
    }

    /// Ends a forward pass: the next one is expected to use the groups in the same order.
    fn end_forward(&mut self) {
        self.position = None;
        if !self.used.is_empty() {
            let used = std::mem::take(&mut self.used);
            self.order.get_or_insert_default().0.replace(used);
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

pub(super) type Place<'a> = (&'a Rank, &'a Context);

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

    /// Brings a group into use in a forward pass: frees the groups before, gathers the parameters of this group, and begins to gather
    /// those of the next.
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
        let next = match self.groups.next_in_order(group) {
            Some((at, next)) => {
                self.groups.position = Some(at);
                next
            }
            None => None,
        };
        let in_use: SmallVec<[u32; 2]> = [group].into_iter().chain(next).collect();
        self.free_groups_except(&in_use);
        let path = place.1.path();
        self.finish_gathers(group);
        self.begin_members(group, false, place, round, site);
        self.finish_gathers(group);
        if let Some(next) = next.filter(|next| !self.groups.is_pending(*next)) {
            self.begin_members(next, true, place, round, site);
        }
        place.1.set_path(&path);
    }

    /// Begins to gather the parameters of a group that are not gathered yet; ahead of their use if it `may_overlap`.
    fn begin_members(
        &mut self,
        group: u32,
        may_overlap: bool,
        place: Place<'_>,
        round: u32,
        site: &'static Location<'static>,
    ) {
        let members = std::mem::take(&mut self.groups.members);
        let of_group = members.get(group as usize).into_iter().flatten();
        let leaves: Vec<usize> =
            of_group.filter_map(|member| self.leaf_of_member(member, place, round, site)).collect();
        self.groups.members = members;
        self.begin_gathers((group, may_overlap), &leaves, place, site);
    }

    /// The leaf of a parameter in its compute layout, without a tensor if it is new; `None` if the tape holds another tensor of the
    /// parameter, which is gathered at its use.
    pub(super) fn leaf_of_member(
        &mut self,
        member: &GatherMember,
        place: Place<'_>,
        round: u32,
        site: &'static Location<'static>,
    ) -> Option<usize> {
        let GatherMember { key, stored, computed, policy, path } = member;
        let origin_site = (path.clone(), site);
        let accumulation = AccumulationDType::of(stored.dtype());
        let parameter = Parameter { key: *key, tensor: stored, accumulation, policy: *policy };
        let root = match self.find(parameter, false) {
            Some((id, _)) => id,
            None if self.by_key.contains_key(key) => return None,
            None => unwind(self.insert(parameter, round, origin_site.clone())),
        };
        let root = root.leaf().expect("a parameter is a leaf") as u32;
        let summed = layout_of_sums(stored.layout(), computed);
        let (origin, from) = match policy.reduces_each_round && summed != *stored.layout() {
            true => self.derive_one((root, stored), &summed, (place.0, place.1, false), 0, site)?,
            false => (Id::Leaf(root), stored.clone()),
        };
        let origin = origin.leaf().expect("a derived leaf is a leaf");
        Some(self.ungathered_leaf((origin, &from), computed, place.0, origin_site))
    }

    /// The leaf of another layout of a leaf, without a tensor if it is new.
    pub(super) fn ungathered_leaf(
        &mut self,
        (origin, from): (usize, &Tensor),
        computed: &Layout,
        rank: &Rank,
        (path, site): CallSite,
    ) -> usize {
        let known =
            self.leaves[origin].derived.iter().find(|at| self.leaves[**at as usize].layout == *computed);
        if let Some(at) = known {
            return *at as usize;
        }
        let route = unwind(Redistribute::between(rank, from.layout(), computed).map_err(|e| e.at(site)));
        let Leaf { key, policy, .. } = self.leaves[origin];
        let accumulation = self.leaves[origin].accumulation.before_reduction();
        let like = Parameter { key, tensor: from, accumulation, policy };
        let mut leaf = Leaf::new(like, None, (path, site));
        (leaf.layout, leaf.tensor, leaf.tensor_id) = (computed.clone(), None, 0);
        leaf.origin = Some((origin as u32, route));
        let at = self.leaves.len();
        self.leaves[origin].derived.push(at as u32);
        self.leaves.push(leaf);
        at
    }

    /// Begins to gather those of some leaves of a group that have no tensor.
    fn begin_gathers(
        &mut self,
        (group, may_overlap): (u32, bool),
        leaves: &[usize],
        place: Place<'_>,
        site: &'static Location<'static>,
    ) {
        if let Some(gathers) = self.begin_leaves(leaves, may_overlap, place, site) {
            self.groups.pending.push((group, gathers));
        }
    }

    /// Begins to gather those of some leaves that have no tensor; `None` if nothing is left to finish. Leaves derived from gathered ones
    /// are not gathered.
    pub(super) fn begin_leaves(
        &mut self,
        leaves: &[usize],
        may_overlap: bool,
        place: Place<'_>,
        site: &'static Location<'static>,
    ) -> Option<LeafGathers> {
        let origin_of =
            |leaves: &Leaves, at: usize| leaves.leaves[at].origin.as_ref().map(|(at, _)| *at as usize);
        let is_missing = |at: &&usize| {
            let origin = origin_of(self, **at);
            self.leaves[**at].tensor.is_none() && origin.is_some_and(|origin| !self.is_gathered(origin))
        };
        let missing: Vec<usize> = leaves.iter().filter(is_missing).copied().collect();
        if missing.is_empty() {
            return None;
        }
        if place.1.detects_anomalies() {
            missing.iter().for_each(|at| drop(self.gathered_again(*at, place)));
            return None;
        }
        let mut requests = Vec::with_capacity(missing.len());
        for &at in &missing {
            let origin = origin_of(self, at).expect("a missing leaf is derived");
            let from = self.gathered_again(origin, place);
            let leaf = &self.leaves[at];
            requests.push(GatherRequest { from, to: leaf.layout.clone(), path: leaf.path.clone() });
        }
        let gathers =
            unwind(BegunGathers::begin(place.0, &requests, may_overlap, site).map_err(|e| e.at(site)));
        let leaves =
            missing.into_iter().map(|at| (at, self.leaves[self.stored_leaf(at)].tensor_id)).collect();
        Some(LeafGathers { leaves, gathers })
    }

    /// Takes over the gathered tensors of a group, if they were begun.
    fn finish_gathers(&mut self, group: u32) {
        while let Some(at) = self.groups.pending.iter().position(|(pending, _)| *pending == group) {
            let (_, gathers) = self.groups.pending.swap_remove(at);
            self.finish_leaves(gathers);
        }
    }

    /// Takes over gathered tensors.
    pub(super) fn finish_leaves(&mut self, LeafGathers { leaves, gathers }: LeafGathers) {
        for ((at, stored_id), tensor) in leaves.into_iter().zip(unwind(gathers.finish())) {
            // The parameter may be another tensor by now.
            let is_current = self.leaves[self.stored_leaf(at)].tensor_id == stored_id;
            if is_current && self.leaves[at].tensor.is_none() {
                self.leaves[at].hold_again(tensor);
            }
        }
    }

    /// Frees the gathered form of the parameters of all groups but some.
    fn free_groups_except(&mut self, kept: &[u32]) {
        for at in 0..self.leaves.len() {
            if self.gathered_group(at).is_some_and(|group| !kept.contains(&group)) {
                self.leaves[at].release_tensor();
            }
        }
        self.groups.pending.retain(|(pending, _)| kept.contains(pending));
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

    /// Ends a forward pass after which other passes come before the backward one: frees all groups.
    pub(crate) fn end_forward(&mut self) {
        self.groups.end_forward();
        self.free_all_groups();
    }

    /// Ends a forward pass, and returns the groups that the backward pass of its nodes needs, where `wanted` states the wanted
    /// cotangents of a node.
    pub(crate) fn begin_backward(
        &mut self,
        nodes: &[Node],
        wanted: impl Fn(usize) -> SmallVec<[bool; 4]>,
    ) -> BackwardGroups {
        self.groups.end_forward();
        let mut segments: Vec<Segment> = Vec::new();
        if self.has_groups {
            for (node, (_, leaf)) in (0..nodes.len()).rev().flat_map(|at| {
                nodes[at].saved_leaves_read(&wanted(at)).into_iter().map(move |leaf| (at, leaf))
            }) {
                let Some(group) = self.gathered_group(leaf as usize) else { continue };
                match segments.last_mut() {
                    Some(last) if last.group == group => last.leaves.push(leaf as usize),
                    _ => segments.push(Segment { node, group, leaves: vec![leaf as usize] }),
                }
            }
            segments.reverse();
        }
        let mut groups = BackwardGroups { segments, in_use: SmallVec::new() };
        self.gather_for_backward(&mut groups, None);
        groups
    }

    /// Gathers what the vjp of a node reads for the wanted cotangents, and begins to gather the group after that; sets the tensors
    /// that the node saved by number.
    pub(crate) fn prepare_backward(
        &mut self,
        groups: &mut BackwardGroups,
        (at, node): (usize, &mut Node),
        wanted: &[bool],
        place: Place<'_>,
    ) {
        if !self.has_groups {
            return;
        }
        let read = node.saved_leaves_read(wanted);
        if read.is_empty() {
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
        for (input, leaf) in read {
            node.set_saved_input(input, self.gathered_again(leaf as usize, place));
        }
    }

    /// Frees the groups that are neither in use nor next, gathers the given leaves, and begins to gather those of the next group.
    fn gather_for_backward(&mut self, groups: &mut BackwardGroups, leaves: Option<(&[usize], Place<'_>)>) {
        if !self.has_groups {
            return;
        }
        let next = groups.segments.last();
        let kept: SmallVec<[u32; 4]> =
            groups.in_use.iter().copied().chain(next.map(|next| next.group)).collect();
        self.free_groups_except(&kept);
        let Some((leaves, place)) = leaves else { return };
        for group in &groups.in_use {
            self.finish_gathers(*group);
            let of_group: Vec<usize> =
                leaves.iter().filter(|at| self.gathered_group(**at) == Some(*group)).copied().collect();
            let Some(first) = of_group.first() else { continue };
            self.begin_gathers((*group, false), &of_group, place, self.leaves[*first].site);
            self.finish_gathers(*group);
        }
        if let Some(next) = next.filter(|next| !self.groups.is_pending(next.group)) {
            self.begin_gathers((next.group, true), &next.leaves, place, self.leaves[next.leaves[0]].site);
        }
    }

    /// Frees all groups, as at the end of a backward pass.
    pub(crate) fn free_all_groups(&mut self) {
        if self.has_groups {
            self.free_groups_except(&[]);
        }
    }
}
