//! Leaves: parameters as they are stored, and derived leaves: the same parameters in the layouts they are computed in.

mod gathered;
mod gather_groups;
mod step_gathers;
mod reductions;

pub(crate) use gather_groups::GatherGroups;
pub use gather_groups::{GatherMember, GatherOrder, GatherPolicy, GatheredLifetime};
pub(crate) use gathered::{Regather, largest_numel, layout_of_sums};
use reductions::Reductions;
pub(crate) use step_gathers::StepGather;

use crate::id::{Id, Key, KeyMap};
use crate::node::{Node, add_cotangent};
use crate::program::AccumulationDType;
use crate::route::along_route;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::{Context, Layout, PackCacheGuard, Tensor, unwind};
use smallvec::SmallVec;
use std::collections::hash_map::Entry;
use std::panic::Location;
use std::rc::Rc;

/// A parameter in one layout: as it is stored, or derived from that by a route.
struct Leaf {
    key: Key,
    layout: Layout,
    /// Released by [`Leaves::take_gradients`], so that the optimizer can update the parameter in place.
    tensor: Option<Tensor>,
    /// Keeps prepacked forms of the tensor in the pack cache while rounds read it again.
    reuse: Option<PackCacheGuard>,
    /// The [identity](Tensor::identity) of the tensor, also after its release; 0 if the tensor was dropped for good.
    tensor_id: usize,
    /// The identities of the same value, gathered before and freed.
    former_ids: SmallVec<[usize; 2]>,
    origin: Option<(u32, Rc<Redistribute>)>,
    /// The leaves derived from this one, one per layout.
    derived: SmallVec<[u32; 1]>,
    cotangent: Option<Tensor>,
    /// Whether the gradient of a leaf derived from this one is being reduced.
    awaits_reduction: bool,
    /// Whether a reduced gradient is added as soon as it arrives: it is the only contribution of the round, so that the order of the
    /// sum stays.
    adds_at_arrival: bool,
    /// The dtypes in which cotangents are accumulated: at least that of the stored parameter, which is wider than the
    /// dtype it is computed in under mixed precision.
    accumulation: AccumulationDType,
    policy: GatherPolicy,
    /// The name of the parameter in the model.
    path: Rc<str>,
    /// The caller's line.
    site: &'static Location<'static>,
    /// The last round that used this leaf.
    last_used_round: Option<u32>,
    /// The recording that made the tensor; 0 outside of recordings.
    recording: u32,
}

impl Leaf {
    /// A leaf that is not derived from another.
    #[inline]
    fn new(parameter: Parameter<'_>, reuse: Option<PackCacheGuard>, (path, site): CallSite) -> Leaf {
        let Parameter { key, tensor, accumulation, policy } = parameter;
        Leaf {
            key,
            layout: tensor.layout().clone(),
            tensor: Some(tensor.clone()),
            reuse,
            tensor_id: tensor.identity(),
            former_ids: SmallVec::new(),
            origin: None,
            derived: SmallVec::new(),
            cotangent: None,
            awaits_reduction: false,
            adds_at_arrival: false,
            accumulation,
            policy,
            path,
            site,
            last_used_round: None,
            recording: 0,
        }
    }

    /// Drops the handle of the tensor.
    fn release_tensor(&mut self) {
        (self.tensor, self.reuse) = (None, None);
    }

    /// Holds the same value in another tensor, after the tensor before was freed. Variables of that tensor stay valid.
    fn hold_again(&mut self, tensor: Tensor) {
        let before = std::mem::replace(&mut self.tensor_id, tensor.identity());
        if before != 0 && !self.former_ids.contains(&before) {
            self.former_ids.push(before);
        }
        self.tensor = Some(tensor);
    }

    /// Takes over the tensor of another leaf and the route to it. The accumulated cotangent stays.
    fn replace_with(&mut self, other: Leaf) {
        self.former_ids.clear();
        self.policy = other.policy;
        (self.tensor, self.tensor_id, self.origin) = (other.tensor, other.tensor_id, other.origin);
        (self.reuse, self.recording) = (other.reuse, other.recording);
        (self.layout, self.accumulation, self.site) = (other.layout, other.accumulation, other.site);
    }
}

/// A tensor that becomes a leaf: its key and the dtypes in which its cotangents are accumulated.
#[derive(Clone, Copy)]
pub(crate) struct Parameter<'a> {
    pub(crate) key: Key,
    pub(crate) tensor: &'a Tensor,
    pub(crate) accumulation: AccumulationDType,
    pub(crate) policy: GatherPolicy,
}

/// The path in the model and the caller's line.
type CallSite = (Rc<str>, &'static Location<'static>);

/// The leaves of a tape.
#[derive(Default)]
pub(crate) struct Leaves {
    leaves: Vec<Leaf>,
    by_key: KeyMap<u32>,
    /// Whether several rounds read the leaves.
    are_reused: bool,
    groups: GatherGroups,
    /// Small parameters that are kept for the step, until they are gathered.
    step_gathers: Vec<GatherMember>,
    /// Whether a leaf is gathered with a group.
    has_groups: bool,
    /// Whether a leaf has its gradient reduced in each round.
    reduces_each_round: bool,
    reductions: Reductions,
}

impl Leaves {
    /// Removes all leaves.
    pub(crate) fn clear(&mut self) {
        self.leaves.clear();
        self.by_key.clear();
        if !self.reductions.are_unused() {
            self.reductions = Reductions::default();
        }
        (self.are_reused, self.has_groups, self.reduces_each_round) = (false, false, false);
        (self.groups, self.step_gathers) = (GatherGroups::default(), Vec::new());
    }

    /// Sets the groups in which parameters are gathered.
    pub(crate) fn set_groups(&mut self, groups: GatherGroups) {
        self.groups = groups;
    }

    /// States whether several rounds read the leaves.
    pub(crate) fn set_reused(&mut self, are_reused: bool) {
        self.are_reused = are_reused;
    }

    /// The number of leaves, derived ones included.
    pub(crate) fn len(&self) -> usize {
        self.leaves.len()
    }

    /// The key of a leaf's parameter.
    pub(crate) fn key(&self, at: usize) -> Key {
        self.leaves[at].key
    }

    /// The dtypes in which the cotangents of a leaf are accumulated.
    pub(crate) fn accumulation(&self, at: usize) -> AccumulationDType {
        self.leaves[at].accumulation
    }

    /// The accumulated cotangent of a leaf.
    pub(crate) fn cotangent_mut(&mut self, at: usize) -> &mut Option<Tensor> {
        &mut self.leaves[at].cotangent
    }

    /// Adds a cotangent to the accumulated one of a leaf, in a dtype of the leaf's range.
    pub(crate) fn add(&mut self, at: usize, cotangent: Tensor) {
        let leaf = &mut self.leaves[at];
        add_cotangent(&mut leaf.cotangent, unwind(leaf.accumulation.cast(cotangent)));
    }

    /// The leaf of a parameter, if it holds this tensor and accumulates in the same dtypes. Meta tensors are compared by
    /// layout: they have nothing else.
    pub(crate) fn find(&self, parameter: Parameter<'_>, is_meta: bool) -> Option<(Id, Tensor)> {
        let Parameter { key, tensor, accumulation, .. } = parameter;
        let same = |t: &&Tensor| t.ptr_eq(tensor) || is_meta && t.layout() == tensor.layout();
        let at = *self.by_key.get(&key)?;
        let leaf = &self.leaves[at as usize];
        let held = leaf.tensor.as_ref().filter(same).filter(|_| leaf.accumulation == accumulation)?;
        Some((Id::Leaf(at), held.clone()))
    }

    /// Adds the leaf of a parameter, or replaces the tensor that it holds and drops its other layouts.
    ///
    /// # Errors
    /// `Kind::Unsupported` if a pending backward pass or gradient depends on the tensor before.
    pub(crate) fn insert(&mut self, parameter: Parameter<'_>, round: u32, site: CallSite) -> Result<Id> {
        let reuse = self.are_reused.then(|| parameter.tensor.cache_packed());
        self.has_groups |= matches!(parameter.policy.lifetime, GatheredLifetime::Group(_));
        self.reduces_each_round |= parameter.policy.reduces_each_round;
        // A leaf is large: the new one is made in its place, and the key is looked up once.
        let at = match self.by_key.entry(parameter.key) {
            Entry::Occupied(known) => {
                let at = *known.get();
                self.replace(at as usize, Leaf::new(parameter, reuse, site), round)?;
                at
            }
            Entry::Vacant(unknown) => {
                let at = *unknown.insert(self.leaves.len() as u32);
                self.leaves.push(Leaf::new(parameter, reuse, site));
                at
            }
        };
        Ok(Id::Leaf(at))
    }

    /// Replaces the tensor of a parameter and drops its other layouts.
    fn replace(&mut self, at: usize, new: Leaf, round: u32) -> Result<()> {
        let (subtree, old) = (self.subtree(at), &self.leaves[at]);
        let refused = |what: &str, help: &str| {
            let mut error = Error::new(Kind::Unsupported, format!("leaf: parameter {} {what}", new.key))
                .detail("before", format!("{}, accumulated in {}", old.layout, old.accumulation.min))
                .detail("now", format!("{}, accumulated in {}", new.layout, new.accumulation.min));
            if !old.path.is_empty() {
                error = error.detail("at", old.path.to_string());
            }
            Err(error.detail("help", help))
        };
        if subtree.iter().any(|at| self.leaves[*at].last_used_round == Some(round)) {
            let help = "call backward() before the parameter changes or its gradient is taken, or use another key for the other tensor";
            return refused(
                "is not the tensor that this round has used, or its gradient was taken since",
                help,
            );
        }
        let holds_gradient = |leaf: &Leaf| leaf.cotangent.is_some() || leaf.awaits_reduction;
        let collects = subtree.iter().any(|at| holds_gradient(&self.leaves[*at]));
        if collects && (&old.layout, old.accumulation) != (&new.layout, new.accumulation) {
            return refused(
                "differs in layout or dtype from its accumulated gradient",
                "call Tape::gradients() before the parameter changes",
            );
        }
        self.drop_tensors(&subtree);
        self.leaves[at].replace_with(new);
        Ok(())
    }

    /// Whether the leaf still stands for the tensor of a variable. A leaf that released its tensor takes the tensor up
    /// again. The comparison by identity is safe: the variable has held its tensor throughout, so no later tensor has
    /// the same identity.
    fn ensure_current(&mut self, at: usize, tensor: &Tensor) -> bool {
        let leaf = &mut self.leaves[at];
        let identity = tensor.identity();
        let fits = leaf.tensor_id == identity || leaf.former_ids.contains(&identity);
        if fits && leaf.tensor.is_none() {
            leaf.tensor_id = identity;
            leaf.tensor = Some(tensor.clone());
        }
        fits
    }

    /// Marks a leaf as used in a round; returns false if its parameter is another tensor than that of the variable now.
    pub(crate) fn mark_used(&mut self, at: usize, tensor: &Tensor, round: u32) -> bool {
        let is_current = self.ensure_current(at, tensor);
        if is_current {
            self.leaves[at].last_used_round = Some(round);
        }
        is_current
    }

    /// Drops the tensors of some leaves for good.
    fn drop_tensors(&mut self, subtree: &[usize]) {
        for at in subtree {
            self.leaves[*at].release_tensor();
            self.leaves[*at].tensor_id = 0;
            self.leaves[*at].former_ids.clear();
        }
    }

    /// A leaf and all leaves derived from it.
    fn subtree(&self, at: usize) -> Vec<usize> {
        let mut subtree = vec![at];
        let mut next = 0;
        while let Some(at) = subtree.get(next) {
            subtree.extend(self.leaves[*at].derived.iter().map(|derived_leaf| *derived_leaf as usize));
            next += 1;
        }
        subtree
    }

    /// Another layout of a leaf, as a derived leaf; `None` if the leaf's parameter is another tensor now. `recording` is the running
    /// recording, or 0. Brings the gather group of the leaf into use.
    pub(crate) fn derive(
        &mut self,
        (origin, stored): (u32, &Tensor),
        to: &Layout,
        place: (&Rank, &Context, bool),
        (round, recording): (u32, u32),
        site: &'static Location<'static>,
    ) -> Option<(Id, Tensor)> {
        let (rank, context, is_meta) = place;
        let lifetime = self.leaves[origin as usize].policy.lifetime;
        match lifetime {
            GatheredLifetime::Group(group) if !is_meta => {
                self.use_group(group, (rank, context), round, site);
            }
            _ if !is_meta => self.gather_for_step(lifetime, (rank, context), round, site),
            _ => {}
        }
        // Only leaves without a lifetime of their own belong to a checkpointed block.
        let recording = if lifetime == GatheredLifetime::StepOrBlock { recording } else { 0 };
        self.derive_by_steps((origin, stored), to, place, recording, site)
    }

    /// Another layout of a leaf; where its gradient is reduced in each round, by way of the layout in which the sums are kept.
    fn derive_by_steps(
        &mut self,
        (origin, stored): (u32, &Tensor),
        to: &Layout,
        place: (&Rank, &Context, bool),
        recording: u32,
        site: &'static Location<'static>,
    ) -> Option<(Id, Tensor)> {
        let leaf = &self.leaves[origin as usize];
        if leaf.policy.reduces_each_round && leaf.origin.is_none() && !place.2 {
            let summed = layout_of_sums(stored.layout(), to);
            if summed != *stored.layout() && summed != *to {
                let (id, stored) = self.derive_one((origin, stored), &summed, place, recording, site)?;
                let origin = id.leaf().expect("a derived leaf is a leaf") as u32;
                return self.derive_one((origin, &stored), to, place, recording, site);
            }
        }
        self.derive_one((origin, stored), to, place, recording, site)
    }

    /// Adds the leaf of a parameter that is gathered already, with its stored form as its origin. Each backward pass reduces its
    /// gradient.
    pub(crate) fn insert_gathered(
        &mut self,
        parameter: Parameter<'_>,
        gathered: &Tensor,
        (rank, round): (&Rank, u32),
        (path, site): CallSite,
    ) -> Result<Id> {
        let route = Redistribute::between(rank, parameter.tensor.layout(), gathered.layout())?;
        let (key, accumulation) = (parameter.key, parameter.accumulation.before_reduction());
        let policy = parameter.policy;
        let origin =
            self.insert(parameter, round, (path.clone(), site))?.leaf().expect("a parameter is a leaf");
        let derived = Parameter { key, tensor: gathered, accumulation, policy };
        let at = self.leaves.len() as u32;
        let leaf = Leaf::new(derived, None, (path, site));
        self.leaves.push(Leaf { origin: Some((origin as u32, route)), ..leaf });
        self.leaves[origin].derived.push(at);
        Ok(Id::Leaf(at))
    }

    /// Another layout of a leaf, as a derived leaf.
    fn derive_one(
        &mut self,
        (origin, stored): (u32, &Tensor),
        to: &Layout,
        place: (&Rank, &Context, bool),
        recording: u32,
        site: &'static Location<'static>,
    ) -> Option<(Id, Tensor)> {
        let origin_at = origin as usize;
        if !self.ensure_current(origin_at, stored) {
            return None;
        }
        let mut derived = self.leaves[origin_at].derived.iter().map(|at| *at as usize);
        let known = derived.find(|at| self.leaves[*at].layout == *to);
        if let Some((at, held)) = known.and_then(|at| Some((at, self.leaves[at].tensor.clone()?))) {
            return Some((Id::Leaf(at as u32), held));
        }
        let op = unwind(Redistribute::between(place.0, stored.layout(), to).map_err(|e| e.at(site)));
        let tensor = unwind(along_route(&*op, stored, place, site));
        // What a block gathers is freed with the block: no later round reads it.
        let is_freed = recording != 0 && largest_numel(to) > largest_numel(stored.layout());
        let policy = self.leaves[origin_at].policy;
        let is_freed = is_freed || matches!(policy.lifetime, GatheredLifetime::Group(_));
        // Nodes and variables refer to the leaf of a group that was freed.
        if let Some(at) =
            known.filter(|at| self.gathered_group(*at).is_some() && self.leaves[*at].tensor_id != 0)
        {
            self.leaves[at].hold_again(tensor.clone());
            return Some((Id::Leaf(at as u32), tensor));
        }
        let stored = &self.leaves[origin_at];
        let (key, accumulation) = (stored.key, stored.accumulation.before_reduction());
        let reuse = (self.are_reused && !is_freed).then(|| tensor.cache_packed());
        let derived = Parameter { key, tensor: &tensor, accumulation, policy };
        let new = Leaf::new(derived, reuse, (stored.path.clone(), site));
        let derived = Leaf { origin: Some((origin, op)), recording, ..new };
        // A leaf whose tensor an earlier step or a checkpointed block released is filled again.
        let at = known.unwrap_or(self.leaves.len());
        match known {
            Some(at) => {
                let subtree = self.subtree(at);
                self.drop_tensors(&subtree);
                self.leaves[at].replace_with(derived);
            }
            None => {
                self.leaves[origin_at].derived.push(at as u32);
                self.leaves.push(derived);
            }
        }
        Some((Id::Leaf(at as u32), tensor))
    }

    /// Derived leaves whose gradient is reduced once a node has run backward, as (node, leaf) in ascending order: all leaves
    /// whose gradient is reduced in each round; and, in the last round, the leaves that are the only contribution to the
    /// gradient of their parameter, because the sum of one is independent of the order.
    pub(crate) fn ready_after(&mut self, nodes: &[Node], is_last_round: bool) -> Vec<(usize, usize)> {
        if !is_last_round && !self.reduces_each_round {
            return Vec::new();
        }
        let mut first = vec![None; self.leaves.len()];
        for (node, inputs) in nodes.iter().map(Node::inputs).enumerate() {
            for leaf in inputs.iter().filter_map(|id| id.and_then(Id::leaf)) {
                first[leaf].get_or_insert(node);
            }
        }
        for (leaf, first) in self.leaves.iter_mut().zip(&first) {
            leaf.adds_at_arrival = leaf.derived.len() == 1 && first.is_none();
        }
        let is_only_derived = |origin: usize| {
            let leaf = &self.leaves[origin];
            leaf.adds_at_arrival && leaf.cotangent.is_none()
        };
        let ready_after = |(at, leaf): (usize, &Leaf)| {
            let (origin, _) = leaf.origin.as_ref()?;
            if leaf.policy.reduces_each_round && (is_last_round || self.is_gathered(at)) {
                // After its derived leaves, which have higher numbers.
                return Some((self.subtree(at).into_iter().filter_map(|at| first[at]).min()?, at));
            }
            if !is_last_round {
                return None;
            }
            // A leaf with derived leaves of its own receives their gradients last.
            Some((first[at].filter(|_| leaf.derived.is_empty() && is_only_derived(*origin as usize))?, at))
        };
        let mut ready: Vec<(usize, usize)> = self.leaves.iter().enumerate().filter_map(ready_after).collect();
        ready.sort_unstable();
        ready
    }

    /// Starts leaves from gradients accumulated elsewhere, where a single cotangent will be added. Several cotangents of
    /// one leaf are added to each other first, so that the sum has the same bits.
    pub(crate) fn preload(
        &mut self,
        uses: impl Iterator<Item = Id>,
        mut sum: impl FnMut(Key) -> Option<Tensor>,
    ) {
        let mut counts = vec![0; self.leaves.len()];
        uses.filter_map(Id::leaf).for_each(|leaf| counts[leaf] += 1);
        for (leaf, count) in self.leaves.iter_mut().zip(counts) {
            let is_alone = leaf.origin.is_none() && leaf.derived.is_empty();
            if count == 1 && is_alone && leaf.cotangent.is_none() {
                leaf.cotangent = sum(leaf.key);
            }
            // Of the uses of a gathered leaf, one sum arrives along its route.
            let is_reduced = leaf.origin.is_none() && leaf.policy.reduces_each_round && !is_alone;
            if is_reduced && leaf.cotangent.is_none() {
                leaf.cotangent = sum(leaf.key);
            }
        }
    }
}
