//! Leaves: parameters as they are stored, and in the layouts in which they are computed.

use crate::id::{Id, Key};
use crate::tape::{Leaf, Tape};
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::{Context, DType, Layout, Tensor, op, unwind};
use std::panic::Location;

impl Tape {
    /// The number and the tensor of the leaf of a parameter, whose cotangents are added up in some dtype; made at its first use.
    /// None where no gradient can reach it, so that nothing holds the tensor when it is to be updated.
    pub(crate) fn leaf_at(&self, key: Key, tensor: &Tensor, sums: DType) -> (Option<Id>, Tensor) {
        if !self.keeps_leaves() {
            return (None, tensor.clone());
        }
        let mut arena = self.arena();
        let known = arena.by_key.get(&key).copied();
        // What the step uses already has its other layouts made.
        let in_use = known.is_some_and(|at| arena.leaves[at as usize].tensor.is_some());
        if self.is_quiet() && !self.is_recording() && !in_use {
            return (None, tensor.clone());
        }
        let at = known.unwrap_or_else(|| {
            let at = arena.leaves.len() as u32;
            let layout = tensor.layout().clone();
            let path = Context::of(self.rank()).path();
            arena.leaves.push(Leaf { key, layout, tensor: None, origin: None, cotangent: None, sums, path });
            arena.by_key.insert(key, at);
            at
        });
        let held = arena.leaves[at as usize].tensor.get_or_insert_with(|| tensor.clone());
        (Some(Id::Leaf(at)), held.clone())
    }

    /// Another layout of a leaf as a derived leaf; `None` if the id is no leaf's.
    pub(crate) fn leaf_form(
        &self,
        (id, stored): (Option<Id>, &Tensor),
        to: &Layout,
        site: &'static Location<'static>,
    ) -> Option<(Id, Tensor)> {
        let Some(Id::Leaf(origin)) = id else { return None };
        let mut arena = self.arena();
        let from_origin = |l: &Leaf| l.origin.as_ref().is_some_and(|o| o.0 == origin);
        let known = arena.leaves.iter().position(|l| from_origin(l) && l.tensor.is_some() && l.layout == *to);
        let at = known.unwrap_or_else(|| {
            let origin_at = origin as usize;
            let key = arena.leaves[origin_at].key;
            let op = unwind(Redistribute::between(self.rank(), stored.layout(), to));
            let inference = unwind(op::plan(&*op, self.rank(), &[stored.layout()], &[], site));
            let made = match self.is_outline() {
                true => op::outline(&inference, self.rank()),
                false => unwind(op::run(&*op, &[stored], &inference, self.rank(), site)),
            };
            let tensor = made.into_iter().next().expect("redistribute has one output");
            let (layout, origin) = (to.clone(), Some((origin, op)));
            let (path, sums) = (arena.leaves[origin_at].path.clone(), arena.leaves[origin_at].sums);
            arena.leaves.push(Leaf {
                key,
                layout,
                tensor: Some(tensor),
                origin,
                cotangent: None,
                sums,
                path,
            });
            arena.leaves.len() - 1
        });
        Some((Id::Leaf(at as u32), arena.leaves[at].tensor.clone().expect("a leaf in use has its tensor")))
    }

    pub(crate) fn key_of(&self, id: Id) -> Option<Key> {
        match id {
            Id::Leaf(at) => Some(self.arena().leaves[at as usize].key),
            Id::Made { .. } => None,
        }
    }

    /// In which dtype cotangents of a value are added up.
    pub(crate) fn sums_of(&self, id: Option<Id>, tensor: &Tensor) -> DType {
        match id {
            Some(Id::Leaf(at)) => self.arena().leaves[at as usize].sums,
            _ => tensor.dtype(),
        }
    }
}
