//! Leaves: parameters as they are stored, and derived leaves: the same parameters in the layouts they are computed in.

use crate::gathered::largest_numel;
use crate::id::{Id, Key};
use crate::program::AccumulationDType;
use crate::tape::accumulate::add;
use crate::tape::{Arena, BackwardSite, Leaf, Node, Tape};
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_tensor::op::Vjp;
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::{Layout, Tensor, unwind};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

impl Leaf {
    /// A leaf that is not derived from another.
    fn new(
        key: Key,
        tensor: &Tensor,
        accumulation: AccumulationDType,
        (path, site): (Rc<str>, &'static Location<'static>),
    ) -> Leaf {
        Leaf {
            key,
            layout: tensor.layout().clone(),
            tensor: Some(tensor.clone()),
            reuse: None,
            tensor_id: tensor.identity(),
            origin: None,
            derived: SmallVec::new(),
            cotangent: None,
            accumulation,
            path,
            site,
            last_used_round: None,
            recording: 0,
        }
    }

    /// Drops the handle of the tensor.
    pub(crate) fn release_tensor(&mut self) {
        (self.tensor, self.reuse) = (None, None);
    }

    /// Takes over the tensor of another leaf and the route to it. The accumulated cotangent stays.
    fn replace_with(&mut self, other: Leaf) {
        (self.tensor, self.tensor_id, self.origin) = (other.tensor, other.tensor_id, other.origin);
        (self.reuse, self.recording) = (other.reuse, other.recording);
        (self.layout, self.accumulation, self.site) = (other.layout, other.accumulation, other.site);
    }
}

impl Arena {
    /// Whether the leaf still stands for the tensor of a variable. A leaf that released its tensor takes the tensor up
    /// again. The comparison by identity is safe: the variable has held its tensor throughout, so no later tensor has
    /// the same identity.
    fn ensure_current(&mut self, at: usize, tensor: &Tensor) -> bool {
        let leaf = &mut self.leaves[at];
        let fits = leaf.tensor_id == tensor.identity();
        if fits && leaf.tensor.is_none() {
            leaf.tensor = Some(tensor.clone());
        }
        fits
    }

    /// Drops the tensors of some leaves for good.
    fn drop_tensors(&mut self, subtree: &[usize]) {
        for at in subtree {
            self.leaves[*at].release_tensor();
            self.leaves[*at].tensor_id = 0;
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

    /// Derived leaves whose gradient is complete once a node has run backward, as (node, leaf) in ascending order. Only
    /// leaves that are the only contribution to the gradient of their parameter, because the sum of one is independent
    /// of the order.
    pub(crate) fn leaves_ready_after(&self, nodes: &[Node]) -> Vec<(usize, usize)> {
        let mut first = vec![None; self.leaves.len()];
        for (node, inputs) in nodes.iter().map(|node| &node.inputs).enumerate() {
            for leaf in inputs.iter().filter_map(|id| id.and_then(Id::leaf)) {
                first[leaf].get_or_insert(node);
            }
        }
        let is_only_derived = |origin: usize| {
            let leaf = &self.leaves[origin];
            leaf.derived.len() == 1 && leaf.cotangent.is_none() && first[origin].is_none()
        };
        let ready_after = |(at, leaf): (usize, &Leaf)| {
            let (origin, _) = leaf.origin.as_ref()?;
            // A leaf with derived leaves of its own receives their gradients last.
            Some((first[at].filter(|_| leaf.derived.is_empty() && is_only_derived(*origin as usize))?, at))
        };
        let mut ready: Vec<(usize, usize)> = self.leaves.iter().enumerate().filter_map(ready_after).collect();
        ready.sort_unstable();
        ready
    }

    /// Replaces the tensor of a parameter and drops its other layouts.
    fn replace(&mut self, at: usize, new: Leaf) -> Result<()> {
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
        if subtree.iter().any(|at| self.leaves[*at].last_used_round == Some(self.round)) {
            let help = "call backward() before the parameter changes or its gradient is taken, or use another key for the other tensor";
            return refused(
                "is not the tensor that this round has used, or its gradient was taken since",
                help,
            );
        }
        let collects = subtree.iter().any(|at| self.leaves[*at].cotangent.is_some());
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
}

impl Tape {
    /// Prepares an empty tape for several rounds (gradient accumulation). With more than one round, the back end is
    /// told that the leaves are read again ([`Tensor::cache_packed`]) until [`Tape::gradients`], and caches prepacked operands
    /// for them. This takes memory; results are the same.
    #[doc(alias = "gradient accumulation")]
    #[doc(alias = "accumulation steps")]
    #[must_use]
    pub fn for_rounds(self, rounds: usize) -> Tape {
        self.arena().reuses_leaves = rounds > 1;
        self
    }

    /// The number and the tensor of the leaf of a parameter whose cotangents are accumulated in the given dtypes;
    /// created at the first use. The number is `None` where no gradient can reach the parameter, so that the tape does
    /// not hold the tensor when the optimizer updates it. A parameter that comes back as another tensor replaces the
    /// one before, unless a pending backward pass or gradient depends on that.
    pub(crate) fn parameter_leaf(
        &self,
        key: Key,
        tensor: &Tensor,
        accumulation: AccumulationDType,
        site: &'static Location<'static>,
    ) -> (Option<Id>, Tensor) {
        if !self.tracks_parameters() {
            return (None, tensor.clone());
        }
        let mut arena = self.arena();
        let known = arena.by_key.get(&key).copied();
        // Meta tensors are compared by layout: they have nothing else.
        let same = |t: &Tensor| t.ptr_eq(tensor) || self.is_meta() && t.layout() == tensor.layout();
        let held = known.map(|at| (at, &arena.leaves[at as usize]));
        let held = held
            .filter(|(_, leaf)| leaf.accumulation == accumulation && leaf.tensor.as_ref().is_some_and(same));
        if let Some((at, Some(tensor))) = held.map(|(at, leaf)| (at, leaf.tensor.clone())) {
            return (Some(Id::Leaf(at)), tensor);
        }
        if self.is_no_grad() && !self.is_recording() {
            return (None, tensor.clone());
        }
        let path = self.context().path();
        let reuse = arena.reuses_leaves.then(|| tensor.cache_packed());
        let mut new = Leaf::new(key, tensor, accumulation, (path, site));
        new.reuse = reuse;
        let at = known.unwrap_or(arena.leaves.len() as u32);
        match known {
            Some(at) => arena.replace(at as usize, new).unwrap_or_else(|e| e.at(site).raise()),
            None => {
                arena.by_key.insert(key, at);
                arena.leaves.push(new);
            }
        }
        (Some(Id::Leaf(at)), tensor.clone())
    }

    /// Whether the value behind a variable is gone: for a node, after the backward pass of its round; for a leaf, when
    /// its parameter is another tensor now. If not, marks a leaf as used in the current round.
    pub(crate) fn is_stale(&self, id: Id, tensor: &Tensor) -> bool {
        let mut arena = self.arena();
        match id {
            Id::Output { round, .. } => round != arena.round,
            Id::Leaf(at) => {
                let (at, round) = (at as usize, arena.round);
                let is_current = arena.ensure_current(at, tensor);
                let leaf = &mut arena.leaves[at];
                if is_current {
                    leaf.last_used_round = Some(round);
                }
                !is_current
            }
        }
    }

    /// Another layout of a leaf, as a derived leaf; `None` if the id is not a leaf, or the leaf's parameter is another
    /// tensor now.
    pub(crate) fn derive_leaf(
        &self,
        (id, stored): (Option<Id>, &Tensor),
        to: &Layout,
        site: &'static Location<'static>,
    ) -> Option<(Id, Tensor)> {
        let Some(Id::Leaf(origin)) = id else { return None };
        let (mut arena, origin_at) = (self.arena(), origin as usize);
        if !arena.ensure_current(origin_at, stored) {
            return None;
        }
        let mut derived = arena.leaves[origin_at].derived.iter().map(|at| *at as usize);
        let known = derived.find(|at| arena.leaves[*at].layout == *to);
        if let Some((at, held)) = known.and_then(|at| Some((at, arena.leaves[at].tensor.clone()?))) {
            return Some((Id::Leaf(at as u32), held));
        }
        let op = unwind(Redistribute::between(self.rank(), stored.layout(), to).map_err(|e| e.at(site)));
        let tensor = unwind(self.along_route(&*op, stored, site));
        let (key, accumulation) =
            (arena.leaves[origin_at].key, arena.leaves[origin_at].accumulation.before_reduction());
        let path = arena.leaves[origin_at].path.clone();
        let recording = self.recording();
        // What a block gathers is freed with the block: no later round reads it.
        let is_freed = recording != 0 && largest_numel(to) > largest_numel(stored.layout());
        let reuse = (arena.reuses_leaves && !is_freed).then(|| tensor.cache_packed());
        let (new, origin_and_route) =
            (Leaf::new(key, &tensor, accumulation, (path, site)), Some((origin, op)));
        let derived_leaf = Leaf { origin: origin_and_route, reuse, recording, ..new };
        // A leaf whose tensor an earlier step or a checkpointed block released is filled again.
        let at = known.unwrap_or(arena.leaves.len());
        match known {
            Some(at) => {
                let subtree = arena.subtree(at);
                arena.drop_tensors(&subtree);
                arena.leaves[at].replace_with(derived_leaf);
            }
            None => {
                arena.leaves[origin_at].derived.push(at as u32);
                arena.leaves.push(derived_leaf);
            }
        }
        Some((Id::Leaf(at as u32), tensor))
    }

    /// Backpropagates the cotangent of a derived leaf, if there is one, along its route to the leaf it is derived from.
    pub(crate) fn backpropagate_route(&self, arena: &mut Arena, at: usize, backward_site: &BackwardSite) {
        let leaf = &mut arena.leaves[at];
        let Some((origin, op)) = leaf.origin.clone() else { return };
        let Some(cotangent) = leaf.cotangent.take() else { return };
        self.context().set_path(&leaf.path);
        backward_site.set(Some((leaf.site, op.name())));
        let back = op.vjp(&Vjp {
            rank: self.rank(),
            inputs: &[None],
            outputs: &[None],
            input_layouts: &[arena.leaves[origin as usize].layout.clone()],
            output_layouts: &[cotangent.layout().dual()],
            grads: &[Some(cotangent)],
            needs_input_grad: &[true],
            donated: RefCell::default(),
            accumulators: &[],
        });
        let back = back.into_iter().next().flatten().expect("redistribute has a vjp");
        add(&mut arena.leaves, &mut [], Id::Leaf(origin), back);
    }

    pub(crate) fn key_of(&self, id: Id) -> Option<Key> {
        match id {
            Id::Leaf(at) => Some(self.arena().leaves[at as usize].key),
            Id::Output { .. } => None,
        }
    }

    /// The dtypes in which the cotangents of a value are accumulated.
    pub(crate) fn accumulation_dtype_of(&self, id: Option<Id>, tensor: &Tensor) -> AccumulationDType {
        match id {
            Some(Id::Leaf(at)) => self.arena().leaves[at as usize].accumulation,
            _ => AccumulationDType::of(tensor.dtype()),
        }
    }
}
