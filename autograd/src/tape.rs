//! The tape: leaves that last for a step, nodes that last for a round.
//!
//! A leaf is a parameter as it is stored; a derived leaf is the same parameter in the layout it is computed in, with
//! the route (a redistribution) between the two. A round is one forward and one backward pass. Microbatches are rounds
//! on one tape (gradient accumulation): each [`Var::backward`](crate::Var::backward) consumes the nodes and adds to the
//! leaves, and [`Tape::gradients`] takes the adjoint of every route once, whatever the number of rounds.
//!
//! A derived leaf keeps its tensor from its first use until [`Tape::gradients`], or until the tape is dropped. So a rank
//! that stores a shard of a parameter and computes with all of it (FSDP) holds the whole parameter for the rest of the
//! step; within [`Tape::checkpoint`] it holds the whole parameter for one block at a time.

pub(crate) mod accumulate;

use crate::id::{Gradients, Id, Key, KeyMap, Noise, NoiseState};
use crate::program::{AccumulationDType, OpRecord, Recorder, RecordingCache, Slot};
use accumulate::add;
use shardgrad_dist::{Error, Rank};
use shardgrad_tensor::op::{
    Cotangents, GradAccumulator, Vjp, check_cotangent_layouts, check_cotangents_present,
};
use shardgrad_tensor::{Context, Inference, Layout, Op, PackCacheGuard, Tensor};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell, RefMut};
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::rc::{Rc, Weak};

/// A parameter in one layout: as it is stored, or derived from that by a route.
pub(crate) struct Leaf {
    pub(crate) key: Key,
    pub(crate) layout: Layout,
    /// Released by [`Tape::gradients`], so that the optimizer can update the parameter in place.
    pub(crate) tensor: Option<Tensor>,
    /// Keeps prepacked forms of the tensor in the pack cache while rounds read it again.
    pub(crate) reuse: Option<PackCacheGuard>,
    /// The [identity](Tensor::identity) of the tensor, also after its release; 0 if the tensor was dropped for good.
    pub(crate) tensor_id: usize,
    pub(crate) origin: Option<(u32, Rc<dyn Op>)>,
    /// The leaves derived from this one, one per layout.
    pub(crate) derived: SmallVec<[u32; 1]>,
    pub(crate) cotangent: Option<Tensor>,
    /// The dtypes in which cotangents are accumulated: at least that of the stored parameter, which is wider than the
    /// dtype it is computed in under mixed precision.
    pub(crate) accumulation: AccumulationDType,
    /// The name of the parameter in the model.
    pub(crate) path: Rc<str>,
    /// The caller's line.
    pub(crate) site: &'static Location<'static>,
    /// The last round that used this leaf.
    pub(crate) last_used_round: Option<u32>,
    /// The recording that made the tensor; 0 outside of recordings.
    pub(crate) recording: u32,
}

/// How the cotangents of a node's inputs are computed.
pub(crate) enum NodeKind {
    /// By the vjp of an op, whose arguments and outputs have the inferred layouts.
    Op(Rc<dyn Op>, Rc<Inference>),
    /// By recomputing a checkpointed block.
    Block(Box<dyn BlockVjp>),
}

/// A block of ops that is one node of the tape.
pub(crate) trait BlockVjp {
    /// The cotangents of the wanted inputs from those of the outputs. Where the node took an accumulator, the cotangent
    /// includes the sum accumulated so far.
    fn vjp(
        &self,
        rank: &Rank,
        inputs: &[Option<Tensor>],
        cotangents: &[Option<Tensor>],
        of: (&[bool], &[GradAccumulator]),
    ) -> Cotangents;
}

/// A recorded operation: the tensors saved for backward, and the ids of its inputs.
pub(crate) struct Node {
    pub(crate) kind: NodeKind,
    pub(crate) inputs: SmallVec<[Option<Id>; 4]>,
    pub(crate) saved_inputs: SmallVec<[Option<Tensor>; 4]>,
    pub(crate) saved_outputs: SmallVec<[Option<Tensor>; 2]>,
    pub(crate) cotangents: SmallVec<[Option<Tensor>; 1]>,
    pub(crate) path: Rc<str>,
    /// The caller's line.
    pub(crate) site: &'static Location<'static>,
}

/// The operation that a backward pass is in: the line that applied the op, and the name of the op.
pub(crate) type BackwardSite = Cell<Option<(&'static Location<'static>, &'static str)>>;

/// The leaves of a tape and the nodes of its current round.
#[derive(Default)]
pub(crate) struct Arena {
    pub(crate) leaves: Vec<Leaf>,
    pub(crate) by_key: KeyMap<u32>,
    nodes: Vec<Node>,
    pub(crate) round: u32,
    /// Whether several rounds read the leaves.
    pub(crate) reuses_leaves: bool,
}

/// The emptied arena of the previous tape, reused because a rank creates one tape after another.
#[derive(Default)]
struct SpareArena(Cell<Option<Arena>>);

struct Inner {
    rank: Rank,
    context: Rc<Context>,
    spare: Rc<SpareArena>,
    arena: RefCell<Arena>,
    records: Cell<bool>,
    /// Whether [`Tape::no_grad`] is active.
    no_grad: Cell<bool>,
    meta: bool,
    /// Whether parameters become leaves: on tapes that record, and on meta tapes, whose programs name their parameters.
    tracks_parameters: bool,
    /// Whether the next backward pass is the last before [`Tape::gradients`].
    expects_gradients: Cell<bool>,
    draws: NoiseState,
    recorder: RefCell<Option<Box<Recorder>>>,
    /// The number of recordings so far.
    num_recordings: Cell<u32>,
    /// Caches that hold values of the running recording.
    caches: RefCell<Vec<Weak<dyn RecordingCache>>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut arena = std::mem::take(self.arena.get_mut());
        arena.leaves.clear();
        arena.by_key.clear();
        arena.nodes.clear();
        (arena.round, arena.reuses_leaves) = (0, false);
        self.spare.0.set(Some(arena));
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
    pub(crate) fn meta(rank: &Rank) -> Tape {
        Tape::with(rank, false, true)
    }

    fn with(rank: &Rank, records: bool, meta: bool) -> Tape {
        let spare = rank.extension::<SpareArena>().clone();
        Tape(Rc::new(Inner {
            rank: rank.clone(),
            context: rank.extension::<Context>().clone(),
            arena: RefCell::new(spare.0.take().unwrap_or_default()),
            spare,
            records: Cell::new(records),
            no_grad: Cell::new(false),
            meta,
            tracks_parameters: records || meta,
            expects_gradients: Cell::new(false),
            draws: NoiseState::default(),
            recorder: RefCell::default(),
            num_recordings: Cell::new(0),
            caches: RefCell::default(),
        }))
    }

    /// The rank of this tape.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        &self.0.rank
    }

    /// The context of the rank: current path, phase, plans.
    pub(crate) fn context(&self) -> &Context {
        &self.0.context
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

    /// Whether parameters are leaves.
    pub(crate) fn tracks_parameters(&self) -> bool {
        self.0.tracks_parameters
    }

    /// Whether ops are recorded as nodes.
    pub(crate) fn records(&self) -> bool {
        self.0.records.get()
    }

    /// Runs `f` without recording. Its results are constants, and the tape keeps nothing of a parameter first used in
    /// it.
    #[doc(alias = "torch.no_grad")]
    #[doc(alias = "stop_gradient")]
    pub fn no_grad<T>(&self, f: impl FnOnce() -> T) -> T {
        let before = self.0.no_grad.replace(true);
        let value = self.without_nodes(f);
        self.0.no_grad.set(before);
        value
    }

    /// Whether [`Tape::no_grad`] is active.
    pub(crate) fn is_no_grad(&self) -> bool {
        self.0.no_grad.get()
    }

    /// Runs `f` without creating nodes; an active recorder continues.
    pub(crate) fn without_nodes<T>(&self, f: impl FnOnce() -> T) -> T {
        let before = self.0.records.replace(false);
        let value = f();
        self.0.records.set(before);
        value
    }

    /// Runs `f` as if no block were being recorded, so that the block takes its results as external inputs.
    pub(crate) fn outside_recording<T>(&self, f: impl FnOnce() -> T) -> T {
        let (recorder, before) = (self.0.recorder.take(), self.0.records.replace(!self.is_no_grad()));
        let value = f();
        self.0.records.set(before);
        self.0.recorder.replace(recorder);
        value
    }

    /// Whether a program is being recorded.
    pub(crate) fn is_recording(&self) -> bool {
        self.0.recorder.borrow().is_some()
    }

    /// The number of the running recording; 0 if there is none.
    pub(crate) fn recording(&self) -> u32 {
        if self.is_recording() { self.0.num_recordings.get() } else { 0 }
    }

    /// The number of the running recording, or else of the last one.
    pub(crate) fn last_recording(&self) -> u32 {
        self.0.num_recordings.get()
    }

    /// Starts a recording, or ends it with `None`. Returns the previous recorder.
    pub(crate) fn set_recorder(&self, recorder: Option<Recorder>) -> Option<Recorder> {
        let ended = self.recording();
        self.0.caches.take().iter().filter_map(Weak::upgrade).for_each(|cache| cache.forget(ended));
        self.0.num_recordings.set(self.0.num_recordings.get() + u32::from(recorder.is_some()));
        self.0.recorder.replace(recorder.map(Box::new)).map(|recorder| *recorder)
    }

    /// Registers a cache that drops values of the running recording when the recording ends.
    pub(crate) fn register_cache(&self, cache: Weak<dyn RecordingCache>) {
        self.0.caches.borrow_mut().push(cache);
    }

    /// The active recorder. Call only while recording.
    pub(crate) fn recorder(&self) -> RefMut<'_, Recorder> {
        let running = self.0.recorder.borrow_mut();
        RefMut::map(running, |running| &mut **running.as_mut().expect("called while recording only"))
    }

    /// The slot of a value that the recording takes as an external input.
    pub(crate) fn external_slot(&self, id: Option<Id>, tensor: &Tensor) -> Slot {
        let (key, accumulation) = (id.and_then(|id| self.key_of(id)), self.accumulation_dtype_of(id, tensor));
        self.recorder().external((id, key), tensor, accumulation)
    }

    /// The number of ops recorded so far.
    pub(crate) fn num_records(&self) -> usize {
        self.0.recorder.borrow().as_ref().map_or(0, |r| r.program.records.len())
    }

    /// Marks a range of records as a checkpointed block, to be recomputed in the backward pass.
    pub(crate) fn record_block(&self, block: Range<usize>) {
        self.recorder().program.blocks.push(block);
    }

    /// Appends an op record and returns its index.
    pub(crate) fn record_op(&self, record: OpRecord) -> u32 {
        let mut recorder = self.recorder();
        recorder.program.records.push(record);
        recorder.program.records.len() as u32 - 1
    }

    /// Whether two handles are of the same tape.
    pub(crate) fn same_as(&self, other: &Tape) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    #[inline]
    pub(crate) fn push_node(&self, node: Node) -> (u32, u32) {
        let mut arena = self.0.arena.borrow_mut();
        arena.nodes.push(node);
        (arena.round, arena.nodes.len() as u32 - 1)
    }

    pub(crate) fn arena(&self) -> RefMut<'_, Arena> {
        self.0.arena.borrow_mut()
    }

    /// Backpropagates the given cotangents to the leaves. Consumes the nodes of the round.
    pub(crate) fn backward_from(&self, seeds: impl IntoIterator<Item = (Id, Tensor)>) {
        let context = self.context();
        let before = context.set_backward(true);
        let mut arena = self.arena();
        let mut nodes = arena.take_nodes();
        let mut ready =
            if self.0.expects_gradients.take() { arena.leaves_ready_after(&nodes) } else { Vec::new() };
        for (id, seed) in seeds {
            add(&mut arena.leaves, &mut nodes, id, seed);
        }
        with_backward_site(|backward_site| {
            for at in (0..nodes.len()).rev() {
                let (earlier, node) = nodes.split_at_mut(at);
                let node = &mut node[0];
                if node.cotangents.iter().any(Option::is_some) {
                    let wanted: SmallVec<[bool; 4]> = node.inputs.iter().map(Option::is_some).collect();
                    self.backward_node((&mut arena.leaves, earlier), node, &wanted, backward_site);
                }
                nodes.truncate(at);
                while let Some((_, leaf)) = ready.pop_if(|(node, _)| *node == at) {
                    self.backpropagate_route(&mut arena, leaf, backward_site);
                }
            }
        });
        // The next round reuses the allocation.
        arena.nodes = nodes;
        context.set_backward(before);
    }

    /// Announces that [`Tape::gradients`] follows the next backward pass. This pass then takes the adjoint of a
    /// parameter's route as soon as the last cotangent has been added, so that a device can reduce that gradient while
    /// it computes the others. The gradients are the same. All ranks make this call alike.
    #[doc(alias = "set_is_last_backward")]
    #[doc(alias = "gradient reduction overlap")]
    pub fn expect_gradients(&self) {
        self.0.expects_gradients.set(true);
    }

    /// Takes the accumulated gradients off the tape, in the stored layouts. The adjoint of each route runs here, once.
    #[must_use]
    pub fn gradients(&self) -> Gradients {
        let context = self.context();
        let before = context.set_backward(true);
        let mut arena = self.0.arena.borrow_mut();
        let mut gradients = Gradients::new();
        for at in (0..arena.leaves.len()).rev() {
            let leaf = &mut arena.leaves[at];
            leaf.release_tensor();
            if leaf.origin.is_some() {
                with_backward_site(|backward_site| self.backpropagate_route(&mut arena, at, backward_site));
            } else if let Some(cotangent) = leaf.cotangent.take() {
                gradients.insert(leaf.key, cotangent);
            }
        }
        context.set_backward(before);
        gradients
    }

    /// The bytes that the nodes of the current round keep alive for the backward pass, each buffer counted once.
    #[doc(alias = "saved_tensors")]
    #[must_use]
    pub fn saved_bytes(&self) -> usize {
        let arena = self.0.arena.borrow();
        let mut seen = HashSet::new();
        let saved = arena.nodes.iter().flat_map(|n| n.saved_inputs.iter().chain(&n.saved_outputs)).flatten();
        saved.filter(|t| seen.insert(t.local().buffer.address())).map(|t| t.local().buffer.bytes()).sum()
    }

    /// The number of nodes of the current round.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.0.arena.borrow().nodes.len()
    }
}

impl Node {
    /// Drops the saved tensors and cotangents.
    pub(crate) fn empty(&mut self) {
        self.saved_inputs.clear();
        self.saved_outputs.clear();
        self.cotangents.clear();
    }

    /// Whether the vjp of the node can add to gradient accumulators.
    fn accumulates_in_place(&self) -> bool {
        match &self.kind {
            NodeKind::Op(op, _) => op.accumulates_in_place(),
            NodeKind::Block(_) => true,
        }
    }

    /// The cotangents of the wanted inputs from those of the outputs. Where the node took an accumulator, the cotangent
    /// includes the sum accumulated so far.
    pub(crate) fn vjp(
        &mut self,
        rank: &Rank,
        context: &Context,
        (wanted, sums): (&[bool], &[GradAccumulator]),
        backward_site: &BackwardSite,
    ) -> Cotangents {
        match &self.kind {
            NodeKind::Op(op, inference) => {
                backward_site.set(Some((self.site, op.name())));
                let closed = context.set_in_vjp(true);
                let donated =
                    op.donated_input().filter(|&i| wanted[i]).and_then(|i| self.saved_inputs[i].take());
                let cotangents = op.vjp(&Vjp {
                    rank,
                    inputs: &self.saved_inputs,
                    outputs: &self.saved_outputs,
                    input_layouts: inference.inputs(),
                    output_layouts: &inference.outputs,
                    grads: &self.cotangents,
                    needs_input_grad: wanted,
                    donated: RefCell::new(donated),
                    accumulators: sums,
                });
                context.set_in_vjp(closed);
                let lawful = check_cotangent_layouts(&**op, &cotangents, inference.inputs());
                lawful
                    .and_then(|()| check_cotangents_present(&**op, &cotangents, wanted))
                    .unwrap_or_else(|e| e.raise());
                cotangents
            }
            NodeKind::Block(block) => {
                // The ops of the block set their own lines.
                backward_site.set(None);
                let cotangents = block.vjp(rank, &self.saved_inputs, &self.cotangents, (wanted, sums));
                backward_site.set(Some((self.site, "checkpoint")));
                cotangents
            }
        }
    }
}

impl Arena {
    /// Takes the nodes of the current round and ends the round.
    pub(crate) fn take_nodes(&mut self) -> Vec<Node> {
        self.round += 1;
        std::mem::take(&mut self.nodes)
    }
}

/// Runs a part of a backward pass that reports its current operation. An error in it names that op and the line of the
/// user's program that applied it, since the lines within a vjp are the library's.
pub(crate) fn with_backward_site<T>(part: impl FnOnce(&BackwardSite) -> T) -> T {
    let backward_site = BackwardSite::default();
    catch_unwind(AssertUnwindSafe(|| part(&backward_site))).unwrap_or_else(|cause| {
        match (cause.downcast::<Error>(), backward_site.get()) {
            (Ok(error), Some((site, op))) => error.detail("vjp", op).replace_site(site).raise(),
            (Ok(error), None) => error.raise(),
            (Err(cause), _) => resume_unwind(cause),
        }
    })
}

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arena = self.0.arena.borrow();
        write!(f, "Tape({} leaves, {} nodes, round {})", arena.leaves.len(), arena.nodes.len(), arena.round)
    }
}
