//! Leaves: parameters as they are stored, and in the layouts in which they are computed.

use crate::id::{Id, Key};
use crate::program::SumDType;
use crate::tape::sums::add;
use crate::tape::{Arena, Leaf, Node, Stand, Tape};
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_tensor::op::Vjp;
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::{Layout, Tensor, op, unwind};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

impl Leaf {
    /// A leaf of no other one.
    fn new(
        key: Key,
        tensor: &Tensor,
        sums: SumDType,
        (path, site): (Rc<str>, &'static Location<'static>),
    ) -> Leaf {
        Leaf {
            key,
            layout: tensor.layout().clone(),
            tensor: Some(tensor.clone()),
            reuse: None,
            last: tensor.identity(),
            origin: None,
            forms: SmallVec::new(),
            cotangent: None,
            sums,
            path,
            site,
            used: None,
        }
    }

    /// Lets go of its tensor.
    pub(crate) fn give_up(&mut self) {
        (self.tensor, self.reuse) = (None, None);
    }

    /// Takes over the tensor of another one, and how it came about. Cotangents that were added up stay.
    fn upload_into(&mut self, other: Leaf) {
        (self.tensor, self.last, self.origin) = (other.tensor, other.last, other.origin);
        self.reuse = other.reuse;
        (self.layout, self.sums, self.site) = (other.layout, other.sums, other.site);
    }
}

impl Arena {
    /// Whether a leaf is the tensor of a variable that stands for it. One that was given up is taken up again, as long as no other
    /// tensor has come in between: the variable has held its tensor since, so that none that came later has its identity.
    fn takes(&mut self, at: usize, tensor: &Tensor) -> bool {
        let leaf = &mut self.leaves[at];
        let fits = leaf.last == tensor.identity();
        if fits && leaf.tensor.is_none() {
            leaf.tensor = Some(tensor.clone());
        }
        fits
    }

    /// Gives up the tensors of some leaves for good.
    fn forget(&mut self, family: &[usize]) {
        for at in family {
            self.leaves[*at].give_up();
            self.leaves[*at].last = 0;
        }
    }

    /// A leaf and all that are derived of it.
    fn family(&self, at: usize) -> Vec<usize> {
        let mut family = vec![at];
        let mut next = 0;
        while let Some(at) = family.get(next) {
            family.extend(self.leaves[*at].forms.iter().map(|form| *form as usize));
            next += 1;
        }
        family
    }

    /// Derived leaves to which nothing is added any more once a node was pulled back: the number of the node, and the leaf, in
    /// ascending order. Only those that alone make up the gradient of their parameter, whose sum is the same whenever it is formed.
    pub(crate) fn ends(&self, nodes: &[Node]) -> Vec<(usize, usize)> {
        let mut first = vec![None; self.leaves.len()];
        for (node, inputs) in nodes.iter().map(|node| &node.inputs).enumerate() {
            for leaf in inputs.iter().filter_map(|id| id.and_then(Id::leaf)) {
                first[leaf].get_or_insert(node);
            }
        }
        let is_alone = |origin: usize| {
            let leaf = &self.leaves[origin];
            leaf.forms.len() == 1 && leaf.cotangent.is_none() && first[origin].is_none()
        };
        let end = |(at, leaf): (usize, &Leaf)| {
            let (origin, _) = leaf.origin.as_ref()?;
            // What is derived of it in turn adds to it last of all.
            Some((first[at].filter(|_| leaf.forms.is_empty() && is_alone(*origin as usize))?, at))
        };
        let mut ends: Vec<(usize, usize)> = self.leaves.iter().enumerate().filter_map(end).collect();
        ends.sort_unstable();
        ends
    }

    /// Gives a parameter another tensor, and its other layouts up.
    fn replace(&mut self, at: usize, new: Leaf) -> Result<()> {
        let (family, old) = (self.family(at), &self.leaves[at]);
        let refused = |what: &str, help: &str| {
            let mut error = Error::new(Kind::Unsupported, format!("leaf: parameter {} {what}", new.key))
                .detail("before", format!("{}, added up in {}", old.layout, old.sums.least))
                .detail("now", format!("{}, added up in {}", new.layout, new.sums.least));
            if !old.path.is_empty() {
                error = error.detail("at", old.path.to_string());
            }
            Err(error.detail("help", help))
        };
        if family.iter().any(|at| self.leaves[*at].used == Some(self.round)) {
            let help = "call backward() before it changes or its gradient is taken, or give the other tensor a key of its own";
            return refused(
                "is another tensor than the one that this round has used, or its gradient was taken since",
                help,
            );
        }
        let collects = family.iter().any(|at| self.leaves[*at].cotangent.is_some());
        if collects && (&old.layout, old.sums) != (&new.layout, new.sums) {
            return refused("lies otherwise than its gradient", "take Tape::gradients() before it changes");
        }
        self.forget(&family);
        self.leaves[at].upload_into(new);
        Ok(())
    }
}

impl Tape {
    /// The same, empty as it is, for so many rounds: of several the back end is told that they read the leaves again
    /// ([`Tensor::reuse`]), until the gradients are handed out. What it keeps of them takes memory so long; results are the same.
    #[must_use]
    pub fn for_rounds(self, rounds: usize) -> Tape {
        self.arena().reuses = rounds > 1;
        self
    }

    /// The number and the tensor of the leaf of a parameter, whose cotangents are added up in some dtype; made at its first use.
    /// None where no gradient can reach it, so that nothing holds the tensor when it is to be updated. A parameter that comes back
    /// as another tensor takes the place of the one before, unless something is pending that depends on that.
    pub(crate) fn leaf_at(
        &self,
        key: Key,
        tensor: &Tensor,
        sums: SumDType,
        site: &'static Location<'static>,
    ) -> (Option<Id>, Tensor) {
        if !self.keeps_leaves() {
            return (None, tensor.clone());
        }
        let mut arena = self.arena();
        let known = arena.by_key.get(&key).copied();
        // In outline there is nothing but the layout.
        let same = |t: &Tensor| t.same_as(tensor) || self.is_outline() && t.layout() == tensor.layout();
        let held = known.map(|at| (at, &arena.leaves[at as usize]));
        let held = held.filter(|(_, leaf)| leaf.sums == sums && leaf.tensor.as_ref().is_some_and(same));
        if let Some((at, Some(tensor))) = held.map(|(at, leaf)| (at, leaf.tensor.clone())) {
            return (Some(Id::Leaf(at)), tensor);
        }
        if self.is_quiet() && !self.is_recording() {
            return (None, tensor.clone());
        }
        let path = self.context().path();
        let reuse = arena.reuses.then(|| tensor.reuse());
        let mut new = Leaf::new(key, tensor, sums, (path, site));
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

    /// Whether what a variable stands for is gone: the graph of a round with its backward pass, a leaf when its parameter is
    /// another tensor. The running round uses it if not.
    pub(crate) fn is_gone(&self, id: Id, tensor: &Tensor) -> bool {
        let mut arena = self.arena();
        match id {
            Id::Made { round, .. } => round != arena.round,
            Id::Leaf(at) => {
                let (at, round) = (at as usize, arena.round);
                let is_here = arena.takes(at, tensor);
                let leaf = &mut arena.leaves[at];
                if is_here {
                    leaf.used = Some(round);
                }
                !is_here
            }
        }
    }

    /// Another layout of a leaf as a derived leaf; `None` if the id is no leaf's, or that of one which is another tensor now.
    pub(crate) fn leaf_form(
        &self,
        (id, stored): (Option<Id>, &Tensor),
        to: &Layout,
        site: &'static Location<'static>,
    ) -> Option<(Id, Tensor)> {
        let Some(Id::Leaf(origin)) = id else { return None };
        let (mut arena, origin_at) = (self.arena(), origin as usize);
        if !arena.takes(origin_at, stored) {
            return None;
        }
        let mut forms = arena.leaves[origin_at].forms.iter().map(|at| *at as usize);
        let known = forms.find(|at| arena.leaves[*at].layout == *to);
        if let Some((at, held)) = known.and_then(|at| Some((at, arena.leaves[at].tensor.clone()?))) {
            return Some((Id::Leaf(at as u32), held));
        }
        let op = unwind(Redistribute::between(self.rank(), stored.layout(), to).map_err(|e| e.at(site)));
        let inference = unwind(op::plan(&*op, (self.rank(), self.context()), &[stored.layout()], &[], site));
        let made = match self.is_outline() {
            true => op::outline(&inference, self.rank()),
            false => {
                unwind(op::run(&*op, &[stored.piece()], &inference, (self.rank(), self.context()), site))
            }
        };
        let tensor = made.into_iter().next().expect("redistribute has one output");
        let (key, sums) = (arena.leaves[origin_at].key, arena.leaves[origin_at].sums.before_ranks());
        let path = arena.leaves[origin_at].path.clone();
        let reuse = arena.reuses.then(|| tensor.reuse());
        let form = Leaf { origin: Some((origin, op)), reuse, ..Leaf::new(key, &tensor, sums, (path, site)) };
        // One that an earlier step has given up is taken up again.
        let at = known.unwrap_or(arena.leaves.len());
        match known {
            Some(at) => {
                let family = arena.family(at);
                arena.forget(&family);
                arena.leaves[at].upload_into(form);
            }
            None => {
                arena.leaves[origin_at].forms.push(at as u32);
                arena.leaves.push(form);
            }
        }
        Some((Id::Leaf(at as u32), tensor))
    }

    /// Takes the cotangent of a derived leaf back along its route, if it has one, to the leaf that it is derived of.
    pub(crate) fn take_back(&self, arena: &mut Arena, at: usize, stand: &Stand) {
        let leaf = &mut arena.leaves[at];
        let Some((origin, op)) = leaf.origin.clone() else { return };
        let Some(cotangent) = leaf.cotangent.take() else { return };
        self.context().set_path(&leaf.path);
        stand.set(Some((leaf.site, op.name())));
        let back = op.vjp(&Vjp {
            rank: self.rank(),
            inputs: &[None],
            outputs: &[None],
            input_layouts: &[arena.leaves[origin as usize].layout.clone()],
            output_layouts: &[cotangent.layout().dual()],
            grads: &[Some(cotangent)],
            wanted: &[true],
            taken: RefCell::default(),
            sums: &[],
        });
        let back = back.into_iter().next().flatten().expect("redistribute has a vjp");
        add(&mut arena.leaves, &mut [], Id::Leaf(origin), back);
    }

    pub(crate) fn key_of(&self, id: Id) -> Option<Key> {
        match id {
            Id::Leaf(at) => Some(self.arena().leaves[at as usize].key),
            Id::Made { .. } => None,
        }
    }

    /// The dtypes in which cotangents of a value are added up.
    pub(crate) fn sums_of(&self, id: Option<Id>, tensor: &Tensor) -> SumDType {
        match id {
            Some(Id::Leaf(at)) => self.arena().leaves[at as usize].sums,
            _ => SumDType::of(tensor.dtype()),
        }
    }
}
