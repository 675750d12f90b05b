//! Leaves: parameters as they are stored, and in the layouts in which they are computed.

use crate::id::{Id, Key};
use crate::tape::{Leaf, Tape};
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::{Context, DType, Layout, Tensor, op, unwind};
use smallvec::SmallVec;
use std::panic::Location;
use std::rc::Rc;

impl Leaf {
    /// A leaf without a tensor.
    fn new(key: Key, layout: &Layout, sums: DType, path: Rc<str>) -> Leaf {
        let (layout, forms) = (layout.clone(), SmallVec::new());
        Leaf { key, layout, tensor: None, origin: None, forms, cotangent: None, sums, path }
    }

    /// Takes over the tensor of another one, and how it came about. Cotangents that were added up stay.
    fn refill(&mut self, other: Leaf) {
        (self.tensor, self.origin, self.sums) = (other.tensor, other.origin, other.sums);
    }
}

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
            arena.leaves.push(Leaf::new(key, tensor.layout(), sums, Context::of(self.rank()).path()));
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
        let (mut arena, origin_at) = (self.arena(), origin as usize);
        let mut forms = arena.leaves[origin_at].forms.iter().map(|at| *at as usize);
        let known = forms.find(|at| arena.leaves[*at].layout == *to);
        if let Some((at, held)) = known.and_then(|at| Some((at, arena.leaves[at].tensor.clone()?))) {
            return Some((Id::Leaf(at as u32), held));
        }
        let op = unwind(Redistribute::between(self.rank(), stored.layout(), to));
        let inference = unwind(op::plan(&*op, self.rank(), &[stored.layout()], &[], site));
        let made = match self.is_outline() {
            true => op::outline(&inference, self.rank()),
            false => unwind(op::run(&*op, &[stored], &inference, self.rank(), site)),
        };
        let tensor = made.into_iter().next().expect("redistribute has one output");
        let (key, sums) = (arena.leaves[origin_at].key, arena.leaves[origin_at].sums);
        let path = arena.leaves[origin_at].path.clone();
        let form = Leaf {
            tensor: Some(tensor.clone()),
            origin: Some((origin, op)),
            ..Leaf::new(key, to, sums, path)
        };
        // One that an earlier step has given up is taken up again.
        let at = known.unwrap_or(arena.leaves.len());
        match known {
            Some(at) => arena.leaves[at].refill(form),
            None => {
                arena.leaves[origin_at].forms.push(at as u32);
                arena.leaves.push(form);
            }
        }
        Some((Id::Leaf(at as u32), tensor))
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
