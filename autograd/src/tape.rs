//! The tape: leaves that last for a step, nodes that last for a round.
//!
//! A leaf is a parameter as it is stored; a derived leaf is the same parameter in the layout it is computed in, with
//! the route (a redistribution) between the two. A round is one forward and one backward pass. Microbatches are rounds
//! on one tape (gradient accumulation): each [`Var::backward`](crate::Var::backward) consumes the nodes and adds to the
//! leaves, and [`Tape::gradients`] takes the adjoint of every route once, whatever the number of rounds.
//!
//! A derived leaf keeps its tensor from its first use until [`Tape::gradients`], or until the tape is dropped. So a rank
//! that stores a shard of a parameter and computes with all of it (FSDP) holds the whole parameter for the rest of the
//! step; within [`Tape::checkpoint`] it holds the whole parameter for one block at a time. A [`GatherPolicy`] states otherwise.

mod recording;
mod var;
mod replay;
mod activation_checkpoint;
mod split_backward;

pub use replay::Values;
pub(crate) use split_backward::DeferredWeightGrads;
pub use var::Var;
pub(crate) use var::no_gradient_error;

use crate::accumulate::{add, backward_node};
use crate::gathers_ahead::GathersAhead;
use crate::id::{Gradients, Id, Key, Noise, NoiseState, UseCounts};
use crate::leaf::{
    GatherGroups, GatherMember, GatherOrder, GatherPolicy, GatheredLifetime, Leaves, Parameter, Regather,
    StepGather,
};
use crate::node::{Node, with_backward_site};
use crate::program::{AccumulationDType, Recorder, RecordingCache};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_tensor::tensor::reduce_buckets::BucketBytes;
use shardgrad_tensor::{Context, Layout, Tensor, Value};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fmt;
use std::panic::Location;
use std::rc::{Rc, Weak};

/// The leaves of a tape and the nodes of its current round.
#[derive(Default)]
struct Arena {
    leaves: Leaves,
    nodes: Vec<Node>,
    round: u32,
}

impl Arena {
    /// Takes the nodes of the current round and ends the round.
    fn take_nodes(&mut self) -> Vec<Node> {
        self.round += 1;
        std::mem::take(&mut self.nodes)
    }
}

/// The emptied arena of the previous tape, reused because a rank creates one tape after another.
#[derive(Default)]
struct SpareArena(Cell<Option<Rc<RefCell<Arena>>>>);

struct Inner {
    rank: Rank,
    context: Rc<Context>,
    spare: Rc<SpareArena>,
    /// Shared with nothing else; the handle makes it cheap to move from one tape to the next.
    arena: Rc<RefCell<Arena>>,
    records: Cell<bool>,
    /// Whether [`Tape::no_grad`] is active.
    no_grad: Cell<bool>,
    meta: bool,
    /// Whether parameters become leaves: on tapes that record, and on meta tapes, whose programs name their parameters.
    tracks_parameters: bool,
    /// Whether nodes save what a gathered activation was gathered from, and not the activation.
    regathers: Cell<bool>,
    /// Whether the next backward pass is the last before [`Tape::gradients`].
    expects_gradients: Cell<bool>,
    draws: NoiseState,
    uses: UseCounts,
    recorder: RefCell<Option<Box<Recorder>>>,
    /// The number of recordings so far.
    num_recordings: Cell<u32>,
    /// Caches that hold values of the running recording.
    caches: RefCell<Vec<Weak<dyn RecordingCache>>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut arena = self.arena.borrow_mut();
        arena.leaves.clear();
        arena.nodes.clear();
        arena.round = 0;
        self.spare.0.set(Some(self.arena.clone()));
    }
}

/// The tape: a record of the ops applied, in order. A clone is another handle of the same tape.
#[doc(alias = "autograd graph")]
#[doc(alias = "GradientTape")]
#[derive(Clone)]
pub struct Tape(Rc<Inner>);

impl Tape {
    /// An empty tape that records.
    #[must_use]
    pub fn new(rank: &Rank) -> Tape {
        Tape::with(rank, true, false)
    }

    /// A tape that records nothing: for inference and validation. The tape holds no parameters: a compute layout of one
    /// lives as long as the variables in it, and each use of the parameter makes it anew.
    #[doc(alias = "inference_mode")]
    #[must_use]
    pub fn inference(rank: &Rank) -> Tape {
        Tape::with(rank, false, false)
    }

    /// A tape on which variables have layouts and no values: ops are checked and recorded, not computed. Parameters may
    /// be on any device.
    #[doc(alias = "meta device")]
    #[doc(alias = "FakeTensor")]
    #[must_use]
    fn meta(rank: &Rank) -> Tape {
        Tape::with(rank, false, true)
    }

    fn with(rank: &Rank, records: bool, meta: bool) -> Tape {
        let spare = rank.extension::<SpareArena>().clone();
        Tape(Rc::new(Inner {
            rank: rank.clone(),
            context: rank.extension::<Context>().clone(),
            arena: spare.0.take().unwrap_or_default(),
            spare,
            records: Cell::new(records),
            no_grad: Cell::new(false),
            meta,
            tracks_parameters: records || meta,
            regathers: Cell::new(true),
            expects_gradients: Cell::new(false),
            draws: NoiseState::default(),
            uses: UseCounts::default(),
            recorder: RefCell::default(),
            num_recordings: Cell::new(0),
            caches: RefCell::default(),
        }))
    }

    /// Prepares an empty tape for several rounds (gradient accumulation). With more than one round, the back end
    /// caches prepacked operands of the leaves ([`Tensor::cache_packed`]) until [`Tape::gradients`], because each round reads them. This takes memory; results are the same.
    #[doc(alias = "gradient accumulation")]
    #[doc(alias = "accumulation steps")]
    #[must_use]
    pub fn for_rounds(self, rounds: usize) -> Tape {
        self.0.arena.borrow_mut().leaves.set_reused(rounds > 1);
        self
    }

    /// Gathers parameters in groups on an empty tape: the first use of a parameter gathers all members of its group, and those of
    /// the group that comes next in `order`. [`GatherPolicy::lifetime`] of a member is its index in `groups`.
    #[doc(alias = "forward_prefetch")]
    #[must_use]
    pub fn with_gather_groups(self, groups: Vec<Vec<GatherMember>>, order: &Rc<GatherOrder>) -> Tape {
        self.0.arena.borrow_mut().leaves.set_groups(GatherGroups::new(groups, order.clone()));
        self
    }

    /// Gathers small parameters together on an empty tape that keeps their gathered form for the step: the first use of one of them
    /// gathers all that take at most [`SHARED_BYTES_MAX`](shardgrad_tensor::tensor::gather_ahead::SHARED_BYTES_MAX), in shared
    /// collectives.
    #[must_use]
    pub fn with_step_gathers(self, members: Vec<GatherMember>) -> Tape {
        self.0.arena.borrow_mut().leaves.set_step_gathers(members);
        self
    }

    /// Gathers the small ones of some leaves in shared collectives, and keeps them: [`Var::to_layout_at`] finds them in these layouts.
    pub(crate) fn gather_together(&self, gathers: Vec<StepGather>) {
        self.0.arena.borrow_mut().leaves.gather_together(gathers, (self.rank(), self.context()));
    }

    /// Frees the parameters of all gather groups at the end of a forward pass whose backward pass comes after other passes.
    pub(crate) fn end_forward(&self) {
        self.0.arena.borrow_mut().leaves.end_forward();
    }

    /// Sets the bytes at which an empty tape closes the buckets in which it reduces gradients.
    #[doc(alias = "bucket_cap_mb")]
    #[must_use]
    pub fn with_bucket_bytes(self, bytes: BucketBytes) -> Tape {
        self.0.arena.borrow_mut().leaves.set_bucket_bytes(bytes);
        self
    }

    /// The rank of this tape.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        &self.0.rank
    }

    /// The context of the rank: current path, phase, plans.
    fn context(&self) -> &Context {
        &self.0.context
    }

    /// The rank and its context.
    fn place(&self) -> (&Rank, &Context) {
        (&self.0.rank, &self.0.context)
    }

    /// Sets the random numbers of the round, or with `None` turns random layers off: dropout is then the identity. A
    /// custom training loop of a model with dropout calls this before each round.
    pub fn set_noise(&self, noise: Option<Noise>) {
        self.0.draws.begin(noise);
    }

    /// Counts a draw by a key and returns the number of earlier ones since [`Tape::set_noise`]. A layer that draws more
    /// than once in a round uses the count to take other random numbers each time, the same ones on every mesh.
    #[must_use]
    pub fn count_draw(&self, key: u64) -> u64 {
        self.0.draws.count(key)
    }

    /// Counts a use of the parameter of a key and returns the number of earlier ones on this tape: a caller that wants the gradient of
    /// each use separately makes a leaf under another key for each.
    #[must_use]
    pub fn count_use(&self, key: Key) -> u64 {
        self.0.uses.count(key)
    }

    /// The key of random ops, if they are on.
    #[must_use]
    pub fn noise(&self) -> Option<Noise> {
        self.0.draws.noise()
    }

    /// Whether this is a tape for training on which [`Tape::set_noise`] was never called: a random layer refuses it,
    /// because the layer would be the identity unnoticed.
    #[must_use]
    pub fn lacks_noise(&self) -> bool {
        self.0.tracks_parameters && !self.0.meta && !self.0.draws.was_set()
    }

    /// Whether [`Tape::noise`] was ever called. If so, values on this tape may depend on the step and row in it.
    #[must_use]
    pub fn noise_was_read(&self) -> bool {
        self.0.draws.was_read()
    }

    /// Whether variables have layouts only.
    #[must_use]
    pub fn is_meta(&self) -> bool {
        self.0.meta
    }

    /// Whether ops are recorded as nodes.
    fn records(&self) -> bool {
        self.0.records.get()
    }

    /// Whether two handles are of the same tape.
    fn same_as(&self, other: &Tape) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Whether the backward pass gathers activations again ([`Var::to_regathered_layout_at`]).
    fn regathers(&self) -> bool {
        self.0.regathers.get()
    }

    /// Keeps gathered activations for the backward pass.
    fn keep_gathered(&self) {
        self.0.regathers.set(false);
    }

    /// Adds a node; returns the round and the number of the node in it.
    #[inline]
    fn push_node(&self, node: Node) -> (u32, u32) {
        let mut arena = self.0.arena.borrow_mut();
        arena.nodes.push(node);
        (arena.round, arena.nodes.len() as u32 - 1)
    }

    /// Wraps a tensor as a constant: it has no gradient.
    #[must_use]
    pub fn constant(&self, tensor: Tensor) -> Var {
        Var::new(self, tensor, None, None)
    }

    /// The leaf of a parameter; created at its first use, and the same leaf as long as the parameter is the same
    /// tensor. A constant on a tape that does not record, and under [`Tape::no_grad`].
    ///
    /// # Panics
    /// Unwinds with `Kind::Unsupported` if the current round has used another tensor under this key, or if the layout
    /// differs from that of the gradient accumulated under it.
    #[doc(alias = "watch")]
    #[doc(alias = "requires_grad")]
    #[track_caller]
    #[must_use]
    pub fn leaf(&self, key: Key, tensor: &Tensor) -> Var {
        self.leaf_accumulated_in(key, tensor, AccumulationDType::of(tensor.dtype()))
    }

    /// The leaf of a parameter, as [`Tape::leaf`], with a policy for its gathered form and its gradient, for the caller's line `site`.
    ///
    /// # Panics
    /// As [`Tape::leaf`].
    #[must_use]
    pub fn leaf_with_policy_at(
        &self,
        key: Key,
        tensor: &Tensor,
        policy: GatherPolicy,
        site: &'static Location<'static>,
    ) -> Var {
        let accumulation = AccumulationDType::of(tensor.dtype());
        self.leaf_of(Parameter { key, tensor, accumulation, policy }, site)
    }

    /// The leaf of a parameter whose cotangents are accumulated in dtypes no narrower than its own.
    #[track_caller]
    pub(crate) fn leaf_accumulated_in(
        &self,
        key: Key,
        tensor: &Tensor,
        accumulation: AccumulationDType,
    ) -> Var {
        let policy = GatherPolicy::default();
        self.leaf_of(Parameter { key, tensor, accumulation, policy }, Location::caller())
    }

    fn leaf_of(&self, parameter: Parameter<'_>, site: &'static Location<'static>) -> Var {
        let (id, tensor) = self.parameter_leaf(parameter, site);
        let leaf = Var::new(self, tensor, id, None);
        if self.is_no_grad() { leaf.detach() } else { leaf }
    }

    /// The leaf of a parameter that was gathered from a stored tensor, as `gathered`. Its gradient has the layout of the stored one, to
    /// which each backward pass reduces it.
    #[track_caller]
    pub(crate) fn gathered_leaf(&self, key: Key, stored: &Tensor, gathered: &Tensor) -> Result<Var> {
        let lifetime = GatheredLifetime::Step;
        let policy = GatherPolicy { lifetime, reduces_each_round: true };
        let accumulation = AccumulationDType::of(stored.dtype());
        let parameter = Parameter { key, tensor: stored, accumulation, policy };
        let arena = &mut *self.0.arena.borrow_mut();
        let (round, call_site) = (arena.round, (self.context().path(), Location::caller()));
        let id = arena.leaves.insert_gathered(parameter, gathered, (self.rank(), round), call_site)?;
        Ok(Var::new(self, gathered.clone(), Some(id), None))
    }

    /// The id and the tensor of the leaf of a parameter; created at the first use. The id is `None` where no gradient can
    /// reach the parameter, so that the tape does not hold the tensor when the optimizer updates it. A parameter that
    /// comes back as another tensor replaces the one before, unless a pending backward pass or gradient depends on that.
    fn parameter_leaf(
        &self,
        parameter: Parameter<'_>,
        site: &'static Location<'static>,
    ) -> (Option<Id>, Tensor) {
        let constant = || (None, parameter.tensor.clone());
        if !self.0.tracks_parameters {
            return constant();
        }
        let arena = &mut *self.0.arena.borrow_mut();
        if let Some((id, tensor)) = arena.leaves.find(parameter, self.is_meta()) {
            return (Some(id), tensor);
        }
        if self.is_no_grad() && !self.is_recording() {
            return constant();
        }
        let id = arena.leaves.insert(parameter, arena.round, (self.context().path(), site));
        (Some(id.unwrap_or_else(|e| e.at(site).raise())), parameter.tensor.clone())
    }

    /// Whether the value behind a variable is gone: for a node, after the backward pass of its round; for a leaf, when
    /// its parameter is another tensor now. If not, marks a leaf as used in the current round.
    fn is_stale(&self, id: Id, tensor: &Tensor) -> bool {
        let arena = &mut *self.0.arena.borrow_mut();
        match id {
            Id::Output { round, .. } => round != arena.round,
            Id::Leaf(at) => !arena.leaves.mark_used(at as usize, tensor, arena.round),
        }
    }

    /// Another layout of a leaf, as a derived leaf; `None` if the id is not a leaf, or the leaf's parameter is another
    /// tensor now.
    fn derive_leaf(
        &self,
        (id, stored): (Option<Id>, &Tensor),
        to: &Layout,
        site: &'static Location<'static>,
    ) -> Option<(Id, Tensor)> {
        let Some(Id::Leaf(origin)) = id else { return None };
        let place = (self.rank(), self.context(), self.is_meta());
        let arena = &mut *self.0.arena.borrow_mut();
        arena.leaves.derive((origin, stored), to, place, (arena.round, self.recording()), site)
    }

    /// The number of the leaf of a gather group that a value is, for a node that saves the number in place of the tensor; `None`
    /// for all other values.
    fn saved_by_number(&self, id: Option<Id>, tensor: &Tensor) -> Option<u32> {
        let leaf = id?.leaf()?;
        let arena = &mut *self.0.arena.borrow_mut();
        arena.leaves.save_by_number(leaf, tensor, arena.round)
    }

    /// What the block that was recorded last saves of a value that it gathered, and how it gathers the value again; `None`
    /// for all other values.
    fn saved_ungathered(&self, id: Option<Id>) -> Option<(Tensor, Regather)> {
        self.0.arena.borrow().leaves.saved_ungathered(self.0.num_recordings.get(), id?.leaf()?)
    }

    /// Frees the parameters that the block recorded last has gathered.
    fn free_gathered(&self) {
        self.0.arena.borrow_mut().leaves.free_gathered(self.0.num_recordings.get());
    }

    /// The key of a leaf.
    fn key_of(&self, id: Id) -> Option<Key> {
        id.leaf().map(|at| self.0.arena.borrow().leaves.key(at))
    }

    /// The dtypes in which the cotangents of a value are accumulated.
    fn accumulation_dtype_of(&self, id: Option<Id>, tensor: &Tensor) -> AccumulationDType {
        match id.and_then(Id::leaf) {
            Some(at) => self.0.arena.borrow().leaves.accumulation(at),
            None => AccumulationDType::of(tensor.dtype()),
        }
    }

    /// Runs `block` so that the tape keeps only its arguments and the parameters it uses, and recomputes the other
    /// values in the backward pass. Values and gradients have the same bits as without checkpointing.
    ///
    /// Parameters stored as shards (FSDP) and gathered in the block are kept as shards: they are freed after the block,
    /// and gathered again by the recomputation and by the next microbatch.
    ///
    /// While a program is being recorded, the block becomes one of the program's blocks.
    ///
    /// # Errors
    /// The error of `block`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Unsupported` if the block uses a variable of another tape, or one from before the last
    /// backward pass, that is not detached.
    #[doc(alias = "gradient checkpointing")]
    #[doc(alias = "activation checkpointing")]
    #[doc(alias = "remat")]
    #[doc(alias = "rematerialization")]
    #[doc(alias = "recompute")]
    #[track_caller]
    pub fn checkpoint(
        &self,
        arguments: &[Var],
        block: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
    ) -> Result<Vec<Var>> {
        if self.is_recording() {
            let from = self.num_records();
            let results = block(arguments)?;
            let to = self.num_records();
            self.recorder().program.blocks.push(from..to);
            return Ok(results);
        }
        if !self.records() {
            return block(arguments);
        }
        activation_checkpoint::record_block(self, arguments, Location::caller(), block)
    }

    /// Backpropagates from several values at once, each with the cotangent given for it: adds gradients to the leaves and
    /// consumes the graph of the round, also that of values without a cotangent.
    ///
    /// # Errors
    /// `Kind::Layout` if a cotangent does not have the [dual](Layout::dual) layout of its value, `Kind::Unsupported` if a
    /// value has no gradient.
    ///
    /// # Panics
    /// Unwinds with `Kind::Unsupported` for a variable of another tape, or of an earlier round.
    #[doc(alias = "grad_tensors")]
    #[doc(alias = "vjp")]
    #[track_caller]
    pub fn backward(&self, cotangents: Vec<(Var, Tensor)>) -> Result<()> {
        let site = Location::caller();
        let seed = |(value, cotangent): (Var, Tensor)| {
            let id = value.id_on(self, site).ok_or_else(|| no_gradient_error(site))?;
            let dual = value.layout().dual();
            if *cotangent.layout() != dual {
                let (value, cotangent) = (value.layout(), cotangent.layout());
                let text = format!("backward() of a value {value} with a cotangent {cotangent}");
                let help = format!("the cotangent has the layout {dual}");
                return Err(Error::new(Kind::Layout, text).detail("help", help).at(site));
            }
            Ok((id, cotangent))
        };
        // Drops the variables before the pass, which may free or overwrite their values.
        let seeds: Vec<(Id, Tensor)> = cotangents.into_iter().map(seed).collect::<Result<_>>()?;
        self.backward_from(seeds);
        Ok(())
    }

    /// Starts the leaves of the round from gradients accumulated elsewhere, before a backward pass from these seeds
    /// adds to them.
    pub(crate) fn preload_gradients(&self, seeds: &[(Id, Tensor)], sum: impl FnMut(Key) -> Option<Tensor>) {
        if !self.context().detects_anomalies() {
            let arena = &mut *self.0.arena.borrow_mut();
            let inputs = arena.nodes.iter().flat_map(Node::inputs).copied().flatten();
            arena.leaves.preload(inputs.chain(seeds.iter().map(|(id, _)| *id)), sum);
        }
    }

    /// Backpropagates the given cotangents to the leaves. Consumes the nodes of the round.
    pub(crate) fn backward_from(&self, seeds: impl IntoIterator<Item = (Id, Tensor)>) {
        let _backward = self.context().set_backward(true);
        let arena = &mut *self.0.arena.borrow_mut();
        let mut nodes = arena.take_nodes();
        let is_last_round = self.0.expects_gradients.take();
        arena.leaves.finish_reductions(self.rank());
        let mut ready = arena.leaves.ready_after(&nodes, is_last_round);
        let mut groups = arena.leaves.begin_backward(&nodes, |at| nodes[at].inputs_with_gradient());
        let mut gathers_ahead = GathersAhead::of(&nodes, |at| nodes[at].inputs_with_gradient(), self.rank());
        for (id, seed) in seeds {
            add(&mut arena.leaves, &mut nodes, id, seed);
        }
        with_backward_site(|backward_site| {
            for at in (0..nodes.len()).rev() {
                let (earlier, node) = nodes.split_at_mut(at);
                let node = &mut node[0];
                gathers_ahead.begin_due(earlier, self.place());
                if node.has_cotangent() {
                    let wanted = node.inputs_with_gradient();
                    arena.leaves.prepare_backward(&mut groups, (at, node), &wanted, self.place());
                    backward_node((&mut arena.leaves, earlier), node, &wanted, self.place(), backward_site);
                }
                nodes.truncate(at);
                while let Some((_, leaf)) = ready.pop_if(|(node, _)| *node == at) {
                    arena.leaves.begin_reduction(leaf, self.place(), backward_site);
                }
            }
        });
        arena.leaves.free_all_groups();
        // After the last round, gradients that are complete only now fill the open buckets.
        if !is_last_round {
            arena.leaves.finish_reductions(self.rank());
        }
        // The next round reuses the allocation.
        arena.nodes = nodes;
    }

    /// Announces that [`Tape::gradients`] follows the next backward pass. This pass then puts the gradient of a parameter into a bucket
    /// as soon as the last cotangent has been added, and reduces full buckets while it computes the others. The gradients are the same. All ranks make this call alike.
    #[doc(alias = "set_is_last_backward")]
    #[doc(alias = "gradient reduction overlap")]
    pub fn expect_gradients(&self) {
        self.0.expects_gradients.set(true);
    }

    /// Takes the accumulated gradients off the tape, in the stored layouts. The adjoint of each route runs here, once.
    #[must_use]
    pub fn gradients(&self) -> Gradients {
        self.take_gradients(Leaves::take_gradients)
    }

    /// Takes the gradients that the first half of a split backward pass has accumulated, as [`Tape::gradients`], and keeps the stored
    /// forms that the second half gathers parameters from.
    pub(crate) fn input_gradients(&self) -> Gradients {
        self.take_gradients(Leaves::take_gradients_before_weights)
    }

    /// Takes gradients off the leaves, as a part of the backward pass.
    fn take_gradients(&self, take: impl FnOnce(&mut Leaves, (&Rank, &Context)) -> Gradients) -> Gradients {
        let _backward = self.context().set_backward(true);
        take(&mut self.0.arena.borrow_mut().leaves, self.place())
    }

    /// The bytes that the nodes of the current round keep alive for the backward pass, each buffer counted once.
    #[must_use]
    pub fn saved_bytes(&self) -> usize {
        self.saved_buffers().iter().map(|saved| saved.bytes).sum()
    }

    /// The buffers that the nodes of the current round keep alive for the backward pass, in the order of the nodes that save them first.
    #[doc(alias = "saved_tensors")]
    #[must_use]
    pub fn saved_buffers(&self) -> Vec<SavedBuffer> {
        let arena = self.0.arena.borrow();
        let mut seen = HashSet::new();
        let saved = arena.nodes.iter().flat_map(|node| node.saved().map(move |tensor| (node, tensor)));
        let first = saved.filter(|(_, tensor)| seen.insert(tensor.local().buffer.address()));
        let buffer = |(node, tensor): (&Node, &Tensor)| SavedBuffer {
            path: node.path().to_string(),
            op: node.op().map_or("checkpoint", |(op, _)| op.name()),
            bytes: tensor.local().buffer.bytes(),
        };
        first.map(buffer).collect()
    }

    /// The number of nodes of the current round.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.0.arena.borrow().nodes.len()
    }
}

/// A buffer that a tape keeps for the backward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedBuffer {
    /// The path in the model of the op that saved the buffer first: that of the parameter or activation point that was used last before the op.
    pub path: String,
    /// The name of the op; `checkpoint` for a checkpointed block.
    pub op: &'static str,
    /// The bytes of the buffer on this rank.
    pub bytes: usize,
}

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arena = self.0.arena.borrow();
        write!(f, "Tape({} leaves, {} nodes, round {})", arena.leaves.len(), arena.nodes.len(), arena.round)
    }
}
