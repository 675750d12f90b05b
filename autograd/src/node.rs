//! Nodes of the tape: one per recorded op or checkpointed block of a round, and the sums of cotangents.

use crate::id::Id;
use crate::regather::SavedUngathered;
use shardgrad_dist::{Error, Rank, Result};
use shardgrad_tensor::op::{
    Cotangents, GradAccumulator, Vjp, check_cotangent_layouts, check_cotangents_present,
};
use shardgrad_tensor::{Context, Inference, Op, Tensor, unwind};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::rc::Rc;

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

/// The tensors that a node saved for backward, by input and by output.
#[derive(Default)]
pub(crate) struct SavedTensors {
    pub(crate) inputs: SmallVec<[Option<Tensor>; 4]>,
    pub(crate) outputs: SmallVec<[Option<Tensor>; 2]>,
    /// Inputs that are not saved as tensors. Few nodes have any, so the others stay small.
    pub(crate) indirect: Option<Box<IndirectInputs>>,
}

/// Inputs that a node saves in other forms than their tensors.
#[derive(Default)]
pub(crate) struct IndirectInputs {
    /// Leaves of gather groups, as (input, leaf): their tensors are filled in before the vjp.
    pub(crate) leaves: SmallVec<[(u32, u32); 1]>,
    /// Inputs that were gathered, by number: they are gathered again before a vjp that reads them.
    pub(crate) ungathered: SmallVec<[(usize, SavedUngathered); 1]>,
}

impl SavedTensors {
    /// The inputs that are not saved as tensors, to add one.
    pub(crate) fn indirect_mut(&mut self) -> &mut IndirectInputs {
        self.indirect.get_or_insert_default()
    }
}

/// A recorded operation: the tensors saved for backward, and the ids of its inputs.
pub(crate) struct Node {
    kind: NodeKind,
    inputs: SmallVec<[Option<Id>; 4]>,
    saved: SavedTensors,
    cotangents: SmallVec<[Option<Tensor>; 1]>,
    path: Rc<str>,
    /// The caller's line.
    site: &'static Location<'static>,
}

impl Node {
    /// A node with the given number of visible outputs.
    #[inline]
    pub(crate) fn new(
        kind: NodeKind,
        inputs: SmallVec<[Option<Id>; 4]>,
        saved: SavedTensors,
        num_outputs: usize,
        (path, site): (Rc<str>, &'static Location<'static>),
    ) -> Node {
        let cotangents = SmallVec::from_elem(None, num_outputs);
        Node { kind, inputs, saved, cotangents, path, site }
    }

    /// The ids of the inputs; `None` for an input without a gradient.
    pub(crate) fn inputs(&self) -> &[Option<Id>] {
        &self.inputs
    }

    /// The op of the node and its inference; `None` for a block.
    pub(crate) fn op(&self) -> Option<(&dyn Op, &Inference)> {
        match &self.kind {
            NodeKind::Op(op, inference) => Some((&**op, inference)),
            NodeKind::Block(_) => None,
        }
    }

    /// The name of the parameter or checkpoint used last before the node.
    pub(crate) fn path(&self) -> &Rc<str> {
        &self.path
    }

    /// The inputs that were saved as the number of a leaf: (input, leaf).
    pub(crate) fn saved_leaves(&self) -> &[(u32, u32)] {
        self.saved.indirect.as_ref().map_or(&[], |indirect| &indirect.leaves)
    }

    /// Fills in the tensors of the inputs that were saved as the number of a leaf.
    pub(crate) fn fill_saved_leaves(&mut self, mut tensor: impl FnMut(u32) -> Tensor) {
        let Some(indirect) = &mut self.saved.indirect else { return };
        for (input, leaf) in std::mem::take(&mut indirect.leaves) {
            self.saved.inputs[input as usize] = Some(tensor(leaf));
        }
    }

    /// The tensors saved for backward.
    pub(crate) fn saved(&self) -> impl Iterator<Item = &Tensor> {
        let ungathered = self.saved.indirect.iter().flat_map(|indirect| &indirect.ungathered);
        let ungathered = ungathered.map(|(_, saved)| saved.from());
        self.saved.inputs.iter().chain(&self.saved.outputs).flatten().chain(ungathered)
    }

    /// Gathers the inputs that were saved as they were before, as far as the vjp of the wanted cotangents reads them.
    fn gather_saved_inputs(&mut self, op: &dyn Op, wanted: &[bool], rank_context: (&Rank, &Context)) {
        let Some(indirect) = self.saved.indirect.as_mut().filter(|indirect| !indirect.ungathered.is_empty())
        else {
            return;
        };
        let read = op.saved_for_backward_of(wanted).inputs;
        let (now, later) =
            std::mem::take(&mut indirect.ungathered).into_iter().partition(|(i, _)| read.contains(i));
        indirect.ungathered = later;
        let now: SmallVec<[(usize, SavedUngathered); 1]> = now;
        for (input, saved) in now {
            self.saved.inputs[input] = Some(saved.gather(rank_context.0, rank_context.1));
        }
    }

    /// The accumulated cotangent of an output.
    pub(crate) fn cotangent_mut(&mut self, out: usize) -> &mut Option<Tensor> {
        &mut self.cotangents[out]
    }

    /// Whether a cotangent of any output was given.
    pub(crate) fn has_cotangent(&self) -> bool {
        self.cotangents.iter().any(Option::is_some)
    }

    /// Drops the saved tensors and cotangents.
    pub(crate) fn empty(&mut self) {
        self.saved = SavedTensors::default();
        self.cotangents.clear();
    }

    /// Whether the vjp of the node adds to gradient accumulators. Anomaly detection inspects each cotangent before it is added,
    /// where that does not change the bits.
    pub(crate) fn accumulates_in_place(&self, detects_anomalies: bool) -> bool {
        match &self.kind {
            NodeKind::Op(op, _) => op.accumulates_in_place() && (!detects_anomalies || op.rounds_sums_once()),
            NodeKind::Block(_) => !detects_anomalies,
        }
    }

    /// The cotangents of the wanted inputs from those of the outputs. Where the node took an accumulator, the cotangent
    /// includes the sum accumulated so far.
    pub(crate) fn vjp(
        &mut self,
        (rank, context): (&Rank, &Context),
        (wanted, sums): (&[bool], &[GradAccumulator]),
        backward_site: &BackwardSite,
    ) -> Cotangents {
        if let NodeKind::Op(op, _) = &self.kind {
            let op = op.clone();
            backward_site.set(Some((self.site, op.name())));
            self.gather_saved_inputs(&*op, wanted, (rank, context));
        }
        match &self.kind {
            NodeKind::Op(op, inference) => {
                let closed = context.set_in_vjp(true);
                let donated =
                    op.donated_input().filter(|&i| wanted[i]).and_then(|i| self.saved.inputs[i].take());
                let cotangents = op.vjp(&Vjp {
                    rank,
                    inputs: &self.saved.inputs,
                    outputs: &self.saved.outputs,
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
                let cotangents = block.vjp(rank, &self.saved.inputs, &self.cotangents, (wanted, sums));
                backward_site.set(Some((self.site, "checkpoint")));
                cotangents
            }
        }
    }
}

/// The operation that a backward pass is in: the line that applied the op, and the name of the op.
pub(crate) type BackwardSite = Cell<Option<(&'static Location<'static>, &'static str)>>;

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

/// Adds a cotangent to the accumulated one of a value: partial to partial, no communication.
pub(crate) fn add_cotangent(accumulated: &mut Option<Tensor>, cotangent: Tensor) {
    *accumulated = Some(match accumulated.take() {
        None => cotangent,
        Some(sum) => unwind(sum_cotangents(sum, cotangent)),
    });
}

/// The sum of two cotangents of one value, in the wider of their dtypes.
///
/// # Errors
/// `Kind::OutOfMemory`.
pub(crate) fn sum_cotangents(sum: Tensor, cotangent: Tensor) -> Result<Tensor> {
    let wide = if sum.dtype().size() < cotangent.dtype().size() { cotangent.dtype() } else { sum.dtype() };
    sum.into_dtype(wide)?.accumulate(&cotangent.into_dtype(wide)?)
}
