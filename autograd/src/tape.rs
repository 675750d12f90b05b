//! The tape: leaves that last for a step, nodes that last for a round.
//!
//! A leaf is a parameter as it is stored; a derived leaf is the same parameter in the layout it is computed in, with
//! the route between the two. Microbatches are rounds on one tape: each [`Tape::backward`] uses up the nodes and
//! adds to the leaves, and [`Tape::gradients`] takes the adjoint of every route once, whatever the number of rounds.

use crate::program::{OpRecord, Program, Recorder, Slot};
use crate::var::Var;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_tensor::op::{Cotangents, Vjp};
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::{Context, Layout, Op, Tensor, Value, unwind};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::panic::Location;
use std::rc::Rc;

/// What a parameter is called on a tape: a number that its owner chose.
pub type Key = u64;

/// Gradients by parameter, in the dual of the stored layout (which is the stored layout itself).
pub type Gradients = BTreeMap<Key, Tensor>;

/// Where a variable stands on its tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Id {
    /// A leaf, by number.
    Leaf(u32),
    /// An output of a node of a round.
    Made { round: u32, node: u32, out: u8 },
}

struct Leaf {
    key: Key,
    tensor: Tensor,
    origin: Option<(u32, Rc<dyn Op>)>,
    cotangent: Option<Tensor>,
}

/// How the cotangents of a node's inputs come about.
pub(crate) enum Work {
    /// By the vjp of an op.
    Op(Rc<dyn Op>),
    /// By replaying a program and going backwards through it.
    Replay(Program),
}

pub(crate) struct Node {
    pub(crate) work: Work,
    pub(crate) inputs: SmallVec<[Option<Id>; 4]>,
    pub(crate) kept_inputs: SmallVec<[Option<Tensor>; 4]>,
    pub(crate) kept_outputs: SmallVec<[Option<Tensor>; 2]>,
    pub(crate) input_layouts: SmallVec<[Layout; 3]>,
    pub(crate) output_layouts: SmallVec<[Layout; 2]>,
    pub(crate) cotangents: SmallVec<[Option<Tensor>; 1]>,
    pub(crate) path: Rc<str>,
}

#[derive(Default)]
struct Arena {
    leaves: Vec<Leaf>,
    by_key: HashMap<Key, u32>,
    nodes: Vec<Node>,
    round: u32,
}

struct Inner {
    rank: Rank,
    arena: RefCell<Arena>,
    records: Cell<bool>,
    noise: Cell<Option<Noise>>,
    recorder: RefCell<Option<Recorder>>,
}

/// What random ops are keyed by, beside their own name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    /// The seed of the run.
    pub seed: u64,
    /// The step of the run.
    pub step: u64,
    /// The row of the global batch with which this round's rows begin, so that microbatches do not matter.
    pub first_row: u64,
}

/// What happened, in order. Cloning copies the handle.
#[derive(Clone)]
pub struct Tape(Rc<Inner>);

impl Tape {
    /// An empty tape that records.
    #[must_use]
    pub fn new(rank: &Rank) -> Tape {
        Tape::with_recording(rank, true)
    }

    /// A tape that records nothing: for inference and validation.
    #[must_use]
    pub fn inference(rank: &Rank) -> Tape {
        Tape::with_recording(rank, false)
    }

    fn with_recording(rank: &Rank, records: bool) -> Tape {
        Tape(Rc::new(Inner {
            rank: rank.clone(),
            arena: RefCell::default(),
            records: Cell::new(records),
            noise: Cell::new(None),
            recorder: RefCell::default(),
        }))
    }

    /// The rank whose tape this is.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        &self.0.rank
    }

    /// Turns random ops on (`None`, the default, turns them off: dropout is then the identity).
    pub fn set_noise(&self, noise: Option<Noise>) {
        self.0.noise.set(noise);
    }

    /// What random ops are keyed by, if they are on.
    #[must_use]
    pub fn noise(&self) -> Option<Noise> {
        self.0.noise.get()
    }

    /// Whether ops are put on the tape.
    pub(crate) fn records(&self) -> bool {
        self.0.records.get()
    }

    /// A tensor that no gradient reaches.
    #[must_use]
    pub fn constant(&self, tensor: Tensor) -> Var {
        Var::new(self, tensor, None, None)
    }

    /// The leaf of a parameter; made at its first use, the same one ever after.
    #[must_use]
    pub fn leaf(&self, key: Key, tensor: &Tensor) -> Var {
        let mut arena = self.0.arena.borrow_mut();
        let known = arena.by_key.get(&key).copied();
        let at = known.unwrap_or_else(|| {
            let at = arena.leaves.len() as u32;
            arena.leaves.push(Leaf { key, tensor: tensor.clone(), origin: None, cotangent: None });
            arena.by_key.insert(key, at);
            at
        });
        let tensor = arena.leaves[at as usize].tensor.clone();
        drop(arena);
        Var::new(self, tensor, Some(Id::Leaf(at)), None)
    }

    /// Runs `f` without recording; what it makes are constants.
    pub fn no_grad<T>(&self, f: impl FnOnce() -> T) -> T {
        let before = self.0.records.replace(false);
        let value = f();
        self.0.records.set(before);
        value
    }

    /// Another layout of a leaf as a derived leaf; `None` if the variable is no leaf.
    pub(crate) fn leaf_form(&self, leaf: &Var, to: &Layout, site: &'static Location<'static>) -> Option<Var> {
        let Some(Id::Leaf(origin)) = leaf.id() else { return None };
        let mut arena = self.0.arena.borrow_mut();
        let same = |l: &Leaf| l.origin.as_ref().is_some_and(|o| o.0 == origin) && l.tensor.layout() == to;
        let at = match arena.leaves.iter().position(same) {
            Some(at) => at as u32,
            None => {
                let op = unwind(Redistribute::new(&self.0.rank, leaf.layout(), to));
                let inference = unwind(shardgrad_tensor::op::plan(&*op, &self.0.rank, &[leaf.layout()], &[], site));
                let made = unwind(shardgrad_tensor::op::run(
                    &*op,
                    std::slice::from_ref(leaf.tensor()),
                    &inference,
                    &self.0.rank,
                    site,
                ));
                let key = arena.leaves[origin as usize].key;
                let tensor = made.into_iter().next().expect("redistribute has one output");
                arena.leaves.push(Leaf { key, tensor, origin: Some((origin, op)), cotangent: None });
                arena.leaves.len() as u32 - 1
            }
        };
        let tensor = arena.leaves[at as usize].tensor.clone();
        drop(arena);
        Some(Var::new(self, tensor, Some(Id::Leaf(at)), None))
    }

    pub(crate) fn key_of(&self, id: Id) -> Option<Key> {
        match id {
            Id::Leaf(at) => Some(self.0.arena.borrow().leaves[at as usize].key),
            Id::Made { .. } => None,
        }
    }

    pub(crate) fn check_readable(&self, site: &'static Location<'static>) -> Result<()> {
        if self.0.recorder.borrow().is_none() {
            return Ok(());
        }
        Err(Error::new(Kind::Unsupported, "a value is read while the program is recorded")
            .detail("help", "return the tensor from the recorded function and read it afterwards")
            .at(site))
    }

    /// Puts an applied op on the tape (and into the recorder, if there is one); gives its visible outputs.
    pub(crate) fn recorded_op(
        &self,
        op: &Rc<dyn Op>,
        args: &[Var],
        outputs: SmallVec<[Tensor; 2]>,
        site: &'static Location<'static>,
    ) -> SmallVec<[Var; 2]> {
        let visible = outputs.len() - op.num_saved();
        let slots = self.note(op, args, &outputs[..visible]);
        let layouts: SmallVec<[&Layout; 4]> = args.iter().map(|v| v.layout()).collect();
        let differentiable = shardgrad_tensor::op::differentiable_args(&**op, &layouts);
        let mut inputs: SmallVec<[Option<Id>; 4]> = SmallVec::new();
        for (arg, differentiable) in args.iter().zip(&differentiable) {
            inputs.push(if *differentiable { self.live(arg, site) } else { None });
        }
        let needed = self.0.records.get()
            && inputs.iter().any(Option::is_some)
            && outputs[..visible].iter().any(|t| t.dtype().is_float());
        let id = needed.then(|| {
            let keeps = op.keeps();
            let keep = |i: usize, kept: &[usize], t: &Tensor| kept.contains(&i).then(|| t.clone());
            self.push(Node {
                work: Work::Op(op.clone()),
                inputs,
                kept_inputs: args.iter().enumerate().map(|(i, v)| keep(i, keeps.inputs, v.tensor())).collect(),
                kept_outputs: outputs.iter().enumerate().map(|(i, t)| keep(i, keeps.outputs, t)).collect(),
                input_layouts: args.iter().map(|v| v.layout().clone()).collect(),
                output_layouts: outputs.iter().map(|t| t.layout().clone()).collect(),
                cotangents: SmallVec::from_elem(None, visible),
                path: Context::of(&self.0.rank).path(),
            })
        });
        outputs
            .into_iter()
            .take(visible)
            .enumerate()
            .map(|(out, tensor)| {
                let id = id.filter(|_| tensor.dtype().is_float());
                let id = id.map(|(round, node)| Id::Made { round, node, out: out as u8 });
                Var::new(self, tensor, id, slots.map(|record| Slot::Made { record, out: out as u8 }))
            })
            .collect()
    }

    /// The id of an argument, unless it is a constant.
    fn live(&self, arg: &Var, site: &'static Location<'static>) -> Option<Id> {
        let id = arg.id()?;
        if !Rc::ptr_eq(&self.0, &arg.tape().0) {
            Error::new(Kind::Unsupported, "two variables of different tapes meet in one op")
                .detail("help", "use one tape a step, or detach() the older variable")
                .at(site)
                .raise();
        }
        if let Id::Made { round, .. } = id
            && round != self.0.arena.borrow().round
        {
            Error::new(Kind::Unsupported, "a variable from before the last backward pass is used again")
                .detail("help", "its graph is gone: recompute it, or detach() it to use its value")
                .at(site)
                .raise();
        }
        Some(id)
    }

    pub(crate) fn push(&self, node: Node) -> (u32, u32) {
        let mut arena = self.0.arena.borrow_mut();
        arena.nodes.push(node);
        (arena.round, arena.nodes.len() as u32 - 1)
    }

    fn note(&self, op: &Rc<dyn Op>, args: &[Var], outputs: &[Tensor]) -> Option<u32> {
        let mut recorder = self.0.recorder.borrow_mut();
        let recorder = recorder.as_mut()?;
        let inputs = args.iter().map(|v| recorder.slot(v)).collect();
        let outputs = outputs.iter().map(|t| t.layout().clone()).collect();
        let path = Context::of(&self.0.rank).path();
        recorder.program.records.push(OpRecord { op: op.clone(), inputs, outputs, path });
        Some(recorder.program.records.len() as u32 - 1)
    }

    /// Runs model text under a recorder and without nodes: the program, its outer variables, its results.
    pub(crate) fn recorded(
        &self,
        arguments: &[Var],
        text: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
    ) -> Result<(Program, Vec<Var>, Vec<Var>)> {
        if self.0.recorder.borrow().is_some() {
            return Err(Error::new(Kind::Unsupported, "a program is recorded inside the recording of another"));
        }
        let mut recorder = Recorder::default();
        arguments.iter().for_each(|v| {
            recorder.slot(v);
        });
        *self.0.recorder.borrow_mut() = Some(recorder);
        let results = self.no_grad(|| text(arguments));
        let mut recorder = self.0.recorder.borrow_mut().take().expect("set above");
        let results = results?;
        let outputs = results.iter().map(|v| recorder.slot(v)).collect();
        recorder.program.outputs = outputs;
        Ok((recorder.program, recorder.outers, results))
    }

    /// Backpropagates from a scalar: cotangents are added to the leaves, the nodes of the round are used up.
    pub(crate) fn backward(&self, loss: &Var, site: &'static Location<'static>) -> Result<()> {
        if loss.layout().numel() != 1 || loss.layout().ndim() != 0 {
            return Err(Error::new(Kind::Shape, format!("backward of a tensor that is no scalar: {}", loss.layout()))
                .detail("help", "reduce it first: x.mean().backward() or x.sum().backward()")
                .at(site));
        }
        let id = loss.id().and_then(|_| self.live(loss, site)).ok_or_else(|| {
            Error::new(Kind::Unsupported, "backward of a value that no gradient reaches")
                .detail("help", "no parameter took part in it, or it was made under no_grad or an inference tape")
                .at(site)
        })?;
        let seed = Tensor::full(&self.0.rank, &loss.layout().dual(), 1.0)?;
        self.backward_from([(id, seed)]);
        Ok(())
    }

    /// Backpropagates given cotangents to the leaves; the nodes of the round are used up.
    pub(crate) fn backward_from(&self, seeds: impl IntoIterator<Item = (Id, Tensor)>) {
        let context = Context::of(&self.0.rank);
        let before = context.set_backward(true);
        let mut arena = self.0.arena.borrow_mut();
        let mut nodes = std::mem::take(&mut arena.nodes);
        arena.round += 1;
        for (id, seed) in seeds {
            add(&mut arena.leaves, &mut nodes, id, seed);
        }
        while let Some(mut node) = nodes.pop() {
            if node.cotangents.iter().all(Option::is_none) {
                continue;
            }
            context.set_path(&node.path);
            for (input, cotangent) in node.inputs.clone().into_iter().zip(node.pull_back(&self.0.rank, &context)) {
                if let (Some(id), Some(cotangent)) = (input, cotangent) {
                    add(&mut arena.leaves, &mut nodes, id, cotangent);
                }
            }
        }
        context.set_backward(before);
    }

    /// The gradients collected so far, brought to the stored layouts (the adjoint of each route runs here, once),
    /// and taken off the tape.
    #[must_use]
    pub fn gradients(&self) -> Gradients {
        let context = Context::of(&self.0.rank);
        let before = context.set_backward(true);
        let mut arena = self.0.arena.borrow_mut();
        let mut gradients = Gradients::new();
        for at in (0..arena.leaves.len()).rev() {
            let leaf = &mut arena.leaves[at];
            let Some(cotangent) = leaf.cotangent.take() else { continue };
            match leaf.origin.clone() {
                None => {
                    gradients.insert(leaf.key, cotangent);
                }
                Some((origin, op)) => {
                    let layout = arena.leaves[origin as usize].tensor.layout().clone();
                    let vjp = Vjp {
                        rank: &self.0.rank,
                        inputs: &[None],
                        outputs: &[None],
                        input_layouts: &[layout],
                        output_layouts: &[cotangent.layout().dual()],
                        grads: &[Some(cotangent)],
                        wanted: &[true],
                    };
                    let back = op.vjp(&vjp).into_iter().next().flatten().expect("redistribute has a vjp");
                    add(&mut arena.leaves, &mut [], Id::Leaf(origin), back);
                }
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
    /// Cotangents of the inputs from those of the outputs.
    fn pull_back(&mut self, rank: &Rank, context: &Context) -> Cotangents {
        let wanted: SmallVec<[bool; 4]> = self.inputs.iter().map(Option::is_some).collect();
        match &self.work {
            Work::Op(op) => {
                let closed = context.set_closed(true);
                let cotangents = op.vjp(&Vjp {
                    rank,
                    inputs: &self.kept_inputs,
                    outputs: &self.kept_outputs,
                    input_layouts: &self.input_layouts,
                    output_layouts: &self.output_layouts,
                    grads: &self.cotangents,
                    wanted: &wanted,
                });
                context.set_closed(closed);
                for (cotangent, layout) in cotangents.iter().zip(&self.input_layouts) {
                    let lawful = cotangent.as_ref().is_none_or(|c| *c.layout() == layout.dual());
                    assert!(lawful, "bug in shardgrad: {op:?} gave {cotangent:?} for an argument of {layout}");
                }
                cotangents
            }
            Work::Replay(program) => crate::remat::pull_back(rank, program, &self.kept_inputs, &self.cotangents, &wanted),
        }
    }
}

/// Adds a cotangent where it belongs: partial to partial, no communication.
fn add(leaves: &mut [Leaf], nodes: &mut [Node], id: Id, cotangent: Tensor) {
    let slot = match id {
        Id::Leaf(at) => &mut leaves[at as usize].cotangent,
        Id::Made { node, out, .. } => &mut nodes[node as usize].cotangents[out as usize],
    };
    *slot = Some(match slot.take() {
        None => cotangent,
        Some(sum) => unwind(sum.accumulate(&cotangent)),
    });
}

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arena = self.0.arena.borrow();
        write!(f, "Tape({} leaves, {} nodes, round {})", arena.leaves.len(), arena.nodes.len(), arena.round)
    }
}
