//! The tape: leaves that last for a step, nodes that last for a round.
//!
//! A leaf is a parameter as it is stored; a derived leaf is the same parameter in the layout it is computed in, with
//! the route between the two. Microbatches are rounds on one tape: each [`Var::backward`](crate::Var::backward) uses up the
//! nodes and adds to the leaves, and [`Tape::gradients`] takes the adjoint of every route once, whatever the number of rounds.
//!
//! A derived leaf lives from its first use until the gradients are handed out or the tape is dropped. So each rank holds a
//! parameter that it stores a shard of, and computes with whole, for the rest of the step.

pub(crate) mod sums;

use crate::id::{ByKey, Draws, Gradients, Id, Key, Noise};
use crate::program::{Keeper, OpRecord, Recorder, Slot, SumDType};
use shardgrad_dist::{Error, Rank};
use shardgrad_tensor::op::{Cotangents, Offer, Vjp, check_given, check_lawful};
use shardgrad_tensor::{Context, Inference, Layout, Op, PackCacheGuard, Tensor};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell, RefMut};
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::rc::{Rc, Weak};
use sums::add;

pub(crate) struct Leaf {
    pub(crate) key: Key,
    pub(crate) layout: Layout,
    /// Given up when gradients are handed out, so that the optimizer can update the parameter in place.
    pub(crate) tensor: Option<Tensor>,
    /// While it is held for rounds that read it again.
    pub(crate) reuse: Option<PackCacheGuard>,
    /// The [identity](Tensor::identity) of the tensor that it is, or was; 0 for one that is no more.
    pub(crate) last: usize,
    pub(crate) origin: Option<(u32, Rc<dyn Op>)>,
    /// The leaves derived of it, one for each layout.
    pub(crate) forms: SmallVec<[u32; 1]>,
    pub(crate) cotangent: Option<Tensor>,
    /// The dtypes in which cotangents are added up: at least that of the stored parameter, which is wider than the one it is computed
    /// with in mixed precision.
    pub(crate) sums: SumDType,
    /// What the parameter is called in the model.
    pub(crate) path: Rc<str>,
    /// The line that asked for it.
    pub(crate) site: &'static Location<'static>,
    /// The last round that has used it.
    pub(crate) used: Option<u32>,
}

/// How the cotangents of a node's inputs come about.
pub(crate) enum Work {
    /// By the vjp of an op, whose arguments and outputs lie as was inferred.
    Op(Rc<dyn Op>, Rc<Inference>),
    /// By computing a whole block again.
    Block(Box<dyn PullBack>),
}

/// A block of ops that is one node of the tape.
pub(crate) trait PullBack {
    /// Cotangents of the wanted inputs from those of the outputs, with the sums in them that were taken up.
    fn pull_back(
        &self,
        rank: &Rank,
        inputs: &[Option<Tensor>],
        cotangents: &[Option<Tensor>],
        of: (&[bool], &[Offer]),
    ) -> Cotangents;
}

/// Something that happened: what it kept, and where its cotangents go.
pub(crate) struct Node {
    pub(crate) work: Work,
    pub(crate) inputs: SmallVec<[Option<Id>; 4]>,
    pub(crate) kept_inputs: SmallVec<[Option<Tensor>; 4]>,
    pub(crate) kept_outputs: SmallVec<[Option<Tensor>; 2]>,
    pub(crate) cotangents: SmallVec<[Option<Tensor>; 1]>,
    pub(crate) path: Rc<str>,
    /// The line that asked for it.
    pub(crate) site: &'static Location<'static>,
}

/// Where a backward pass stands: the line that asked for the op whose cotangents are formed, and the op.
pub(crate) type Stand = Cell<Option<(&'static Location<'static>, &'static str)>>;

#[derive(Default)]
pub(crate) struct Arena {
    pub(crate) leaves: Vec<Leaf>,
    pub(crate) by_key: ByKey<u32>,
    nodes: Vec<Node>,
    pub(crate) round: u32,
    /// Whether several rounds are to come.
    pub(crate) reuses: bool,
}

/// The memory of the tape before, empty: a rank makes one tape after the other.
#[derive(Default)]
struct Spare(Cell<Option<Arena>>);

struct Inner {
    rank: Rank,
    context: Rc<Context>,
    spare: Rc<Spare>,
    arena: RefCell<Arena>,
    records: Cell<bool>,
    /// Whether the user asked for no gradients.
    quiet: Cell<bool>,
    outline: bool,
    /// Whether a gradient can reach a parameter, or a program is to name it.
    keeps_leaves: bool,
    /// Whether gradients are taken after the next backward pass.
    is_last: Cell<bool>,
    draws: Draws,
    recorder: RefCell<Option<Box<Recorder>>>,
    /// How many recordings there were.
    recordings: Cell<u32>,
    /// What keeps something that the running one has made.
    keepers: RefCell<Vec<Weak<dyn Keeper>>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut arena = std::mem::take(self.arena.get_mut());
        arena.leaves.clear();
        arena.by_key.clear();
        arena.nodes.clear();
        (arena.round, arena.reuses) = (0, false);
        self.spare.0.set(Some(arena));
    }
}

/// What happened, in order. Cloning copies the handle.
#[derive(Clone)]
pub struct Tape(Rc<Inner>);

impl Tape {
    /// An empty tape that records.
    #[must_use]
    pub fn new(rank: &Rank) -> Tape {
        Tape::with(rank, true, false)
    }

    /// A tape that records nothing: for inference and validation. It keeps nothing of a parameter: a layout in which one is
    /// computed lives as long as the variables in it, and each use of a parameter makes it anew.
    #[must_use]
    pub fn inference(rank: &Rank) -> Tape {
        Tape::with(rank, false, false)
    }

    /// A tape on which variables have layouts and no values: ops are checked and recorded, not computed. Parameters may
    /// be anywhere.
    #[must_use]
    pub(crate) fn outline(rank: &Rank) -> Tape {
        Tape::with(rank, false, true)
    }

    fn with(rank: &Rank, records: bool, outline: bool) -> Tape {
        let spare = rank.extension::<Spare>().clone();
        Tape(Rc::new(Inner {
            rank: rank.clone(),
            context: rank.extension::<Context>().clone(),
            arena: RefCell::new(spare.0.take().unwrap_or_default()),
            spare,
            records: Cell::new(records),
            quiet: Cell::new(false),
            outline,
            keeps_leaves: records || outline,
            is_last: Cell::new(false),
            draws: Draws::default(),
            recorder: RefCell::default(),
            recordings: Cell::new(0),
            keepers: RefCell::default(),
        }))
    }

    /// The rank whose tape this is.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        &self.0.rank
    }

    /// Where the program stands on the rank.
    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    /// Turns random ops on (`None`, the default, turns them off: dropout is then the identity). A loop of one's own says so for
    /// each round.
    pub fn set_noise(&self, noise: Option<Noise>) {
        self.0.draws.begin(noise);
    }

    /// Counts a draw by a key; gives how many there were before it, since [`Tape::set_noise`]. What draws more than once in a
    /// round can take other numbers each time by it, the same ones on every mesh.
    #[must_use]
    pub fn count_draw(&self, key: u64) -> u64 {
        self.0.draws.count(key)
    }

    /// What random ops are keyed by, if they are on.
    #[must_use]
    pub fn noise(&self) -> Option<Noise> {
        self.0.draws.noise()
    }

    /// Whether [`Tape::noise`] was ever asked for: what is made then may be of the step that it names.
    #[must_use]
    pub fn noise_is_asked(&self) -> bool {
        self.0.draws.is_asked()
    }

    /// Whether variables have layouts only.
    #[must_use]
    pub fn is_outline(&self) -> bool {
        self.0.outline
    }

    /// Whether parameters are leaves.
    pub(crate) fn keeps_leaves(&self) -> bool {
        self.0.keeps_leaves
    }

    /// Whether ops are put on the tape.
    pub(crate) fn records(&self) -> bool {
        self.0.records.get()
    }

    /// Runs `f` without recording; what it makes are constants, and of a parameter that is first used in it nothing is kept.
    pub fn no_grad<T>(&self, f: impl FnOnce() -> T) -> T {
        let before = self.0.quiet.replace(true);
        let value = self.without_nodes(f);
        self.0.quiet.set(before);
        value
    }

    /// Whether what is made now is to have no gradient.
    pub(crate) fn is_quiet(&self) -> bool {
        self.0.quiet.get()
    }

    /// Runs `f` without nodes; a recorder goes on.
    pub(crate) fn without_nodes<T>(&self, f: impl FnOnce() -> T) -> T {
        let before = self.0.records.replace(false);
        let value = f();
        self.0.records.set(before);
        value
    }

    /// Runs `f` as if no block were recorded: to the block, what it makes comes from outside.
    pub(crate) fn outside<T>(&self, f: impl FnOnce() -> T) -> T {
        let (recorder, before) = (self.0.recorder.take(), self.0.records.replace(!self.is_quiet()));
        let value = f();
        self.0.records.set(before);
        self.0.recorder.replace(recorder);
        value
    }

    /// Whether a program is recorded right now.
    pub(crate) fn is_recording(&self) -> bool {
        self.0.recorder.borrow().is_some()
    }

    /// The number of the recording that runs; 0 if none does.
    pub(crate) fn recording(&self) -> u32 {
        if self.is_recording() { self.0.recordings.get() } else { 0 }
    }

    /// Starts (or, with `None`, ends) a recording; gives the recorder that was there.
    pub(crate) fn set_recorder(&self, recorder: Option<Recorder>) -> Option<Recorder> {
        let ended = self.recording();
        self.0.keepers.take().iter().filter_map(Weak::upgrade).for_each(|keeper| keeper.forget(ended));
        self.0.recordings.set(self.0.recordings.get() + u32::from(recorder.is_some()));
        self.0.recorder.replace(recorder.map(Box::new)).map(|recorder| *recorder)
    }

    /// Has a keeper forget what the running recording has made when that ends.
    pub(crate) fn note_keeper(&self, keeper: Weak<dyn Keeper>) {
        self.0.keepers.borrow_mut().push(keeper);
    }

    /// What is recorded right now.
    pub(crate) fn recorder(&self) -> RefMut<'_, Recorder> {
        let running = self.0.recorder.borrow_mut();
        RefMut::map(running, |running| &mut **running.as_mut().expect("asked for while recording only"))
    }

    /// The slot of a value that came from outside of the recording.
    pub(crate) fn outer_slot(&self, id: Option<Id>, tensor: &Tensor) -> Slot {
        let (key, sums) = (id.and_then(|id| self.key_of(id)), self.sums_of(id, tensor));
        self.recorder().outer((id, key), tensor, sums)
    }

    /// How many ops the running recording has.
    pub(crate) fn num_records(&self) -> usize {
        self.0.recorder.borrow().as_ref().map_or(0, |r| r.program.records.len())
    }

    /// Says that a range of records is to be computed again in the backward pass.
    pub(crate) fn note_block(&self, block: Range<usize>) {
        self.recorder().program.blocks.push(block);
    }

    /// Adds a record; gives its number.
    pub(crate) fn note(&self, record: OpRecord) -> u32 {
        let mut recorder = self.recorder();
        recorder.program.records.push(record);
        recorder.program.records.len() as u32 - 1
    }

    /// Whether two handles name the same tape.
    pub(crate) fn same_as(&self, other: &Tape) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    #[inline]
    pub(crate) fn push(&self, node: Node) -> (u32, u32) {
        let mut arena = self.0.arena.borrow_mut();
        arena.nodes.push(node);
        (arena.round, arena.nodes.len() as u32 - 1)
    }

    pub(crate) fn arena(&self) -> RefMut<'_, Arena> {
        self.0.arena.borrow_mut()
    }

    /// Backpropagates given cotangents to the leaves; the nodes of the round are used up.
    pub(crate) fn backward_from(&self, seeds: impl IntoIterator<Item = (Id, Tensor)>) {
        let context = self.context();
        let before = context.set_backward(true);
        let mut arena = self.arena();
        let mut nodes = arena.take_nodes();
        let mut ends = if self.0.is_last.take() { arena.ends(&nodes) } else { Vec::new() };
        for (id, seed) in seeds {
            add(&mut arena.leaves, &mut nodes, id, seed);
        }
        named(|stand| {
            for at in (0..nodes.len()).rev() {
                let (earlier, node) = nodes.split_at_mut(at);
                let node = &mut node[0];
                if node.cotangents.iter().any(Option::is_some) {
                    let wanted: SmallVec<[bool; 4]> = node.inputs.iter().map(Option::is_some).collect();
                    self.pull((&mut arena.leaves, earlier), node, &wanted, stand);
                }
                nodes.truncate(at);
                while let Some((_, leaf)) = ends.pop_if(|(node, _)| *node == at) {
                    self.take_back(&mut arena, leaf, stand);
                }
            }
        });
        // Its memory serves the next round.
        arena.nodes = nodes;
        context.set_backward(before);
    }

    /// Says that gradients are taken after the next backward pass. It takes the adjoint of a parameter's route as soon as it has
    /// added the last cotangent to it, so that a device can reduce that gradient while it forms the others. The gradients are the
    /// same, and every rank says so alike.
    pub fn expect_gradients(&self) {
        self.0.is_last.set(true);
    }

    /// The gradients collected so far, brought to the stored layouts (the adjoint of each route runs here, once),
    /// and taken off the tape.
    #[must_use]
    pub fn gradients(&self) -> Gradients {
        let context = self.context();
        let before = context.set_backward(true);
        let mut arena = self.0.arena.borrow_mut();
        let mut gradients = Gradients::new();
        for at in (0..arena.leaves.len()).rev() {
            let leaf = &mut arena.leaves[at];
            leaf.give_up();
            if leaf.origin.is_some() {
                named(|stand| self.take_back(&mut arena, at, stand));
            } else if let Some(cotangent) = leaf.cotangent.take() {
                gradients.insert(leaf.key, cotangent);
            }
        }
        context.set_backward(before);
        gradients
    }

    /// Bytes that the nodes of the running round keep alive for the backward pass, each buffer counted once.
    #[must_use]
    pub fn saved_bytes(&self) -> usize {
        let arena = self.0.arena.borrow();
        let mut seen = HashSet::new();
        let kept = arena.nodes.iter().flat_map(|n| n.kept_inputs.iter().chain(&n.kept_outputs)).flatten();
        kept.filter(|t| seen.insert(t.piece().buffer.address())).map(|t| t.piece().buffer.bytes()).sum()
    }

    /// The number of nodes of the running round.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.0.arena.borrow().nodes.len()
    }
}

impl Node {
    /// Lets go of what was kept.
    pub(crate) fn empty(&mut self) {
        self.kept_inputs.clear();
        self.kept_outputs.clear();
        self.cotangents.clear();
    }

    /// Whether going back through it can add to sums of cotangents.
    fn takes_sums(&self) -> bool {
        match &self.work {
            Work::Op(op, _) => op.takes_sums(),
            Work::Block(_) => true,
        }
    }

    /// Cotangents of the wanted inputs from those of the outputs, with the sums in them that were taken up.
    pub(crate) fn pull_back(
        &mut self,
        rank: &Rank,
        context: &Context,
        (wanted, sums): (&[bool], &[Offer]),
        stand: &Stand,
    ) -> Cotangents {
        match &self.work {
            Work::Op(op, inference) => {
                stand.set(Some((self.site, op.name())));
                let closed = context.set_closed(true);
                let taken = op.consumes().filter(|&i| wanted[i]).and_then(|i| self.kept_inputs[i].take());
                let cotangents = op.vjp(&Vjp {
                    rank,
                    inputs: &self.kept_inputs,
                    outputs: &self.kept_outputs,
                    input_layouts: inference.inputs(),
                    output_layouts: &inference.outputs,
                    grads: &self.cotangents,
                    wanted,
                    taken: RefCell::new(taken),
                    sums,
                });
                context.set_closed(closed);
                let lawful = check_lawful(&**op, &cotangents, inference.inputs());
                lawful.and_then(|()| check_given(&**op, &cotangents, wanted)).unwrap_or_else(|e| e.raise());
                cotangents
            }
            Work::Block(block) => {
                // Its ops have lines of their own.
                stand.set(None);
                let cotangents = block.pull_back(rank, &self.kept_inputs, &self.cotangents, (wanted, sums));
                stand.set(Some((self.site, "checkpoint")));
                cotangents
            }
        }
    }
}

impl Arena {
    /// The nodes of the running round, which ends.
    pub(crate) fn take_nodes(&mut self) -> Vec<Node> {
        self.round += 1;
        std::mem::take(&mut self.nodes)
    }
}

/// Runs a part of a backward pass, which says where it stands. An error in it names the line of the user's program that asked
/// for the op, and the op: the lines within a vjp are the library's.
pub(crate) fn named<T>(part: impl FnOnce(&Stand) -> T) -> T {
    let stand = Stand::default();
    catch_unwind(AssertUnwindSafe(|| part(&stand))).unwrap_or_else(|cause| {
        match (cause.downcast::<Error>(), stand.get()) {
            (Ok(error), Some((site, op))) => error.detail("vjp", op).asked_by(site).raise(),
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
