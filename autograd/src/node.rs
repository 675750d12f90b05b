//! Nodes of the tape: one per recorded op or checkpointed block of a round, and the sums of cotangents.

use crate::id::Id;
use crate::regather::SavedUngathered;
use shardgrad_dist::{Error, Rank, Result};
use shardgrad_tensor::op::{
    Cotangents, GradAccumulator, Vjp, check_cotangent_layouts, check_cotangents_present,
};
use shardgrad_tensor::tensor::redistribute::complete_partial_sum;
use shardgrad_tensor::{Context, Inference, Layout, Op, Tensor, op, unwind};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::rc::Rc;

/// A flag per argument of a node.
pub(crate) type Mask = SmallVec<[bool; 4]>;

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

/// Inputs that are leaves of gather groups, as (input, leaf).
pub(crate) type SavedLeaves = SmallVec<[(u32, u32); 1]>;

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
    /// Inputs whose tensors are set before a vjp that reads them.
    pub(crate) leaves: SavedLeaves,
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

    /// Per input, whether it has a gradient.
    pub(crate) fn inputs_with_gradient(&self) -> Mask {
        // Pushed one by one: `collect` reserves memory first, which costs more than a few pushes.
        let mut mask = Mask::new();
        self.inputs.iter().for_each(|id| mask.push(id.is_some()));
        mask
    }

    /// The inputs that were saved as the number of a leaf: (input, leaf).
    fn saved_leaves(&self) -> &[(u32, u32)] {
        self.saved.indirect.as_ref().map_or(&[], |indirect| &indirect.leaves)
    }

    /// The inputs that were saved as they were before they were gathered, by number.
    fn saved_ungathered(&self) -> &[(usize, SavedUngathered)] {
        self.saved.indirect.as_ref().map_or(&[], |indirect| &indirect.ungathered)
    }

    /// The inputs that were saved as the number of a leaf and that the vjp of the wanted cotangents reads, as (input, leaf).
    pub(crate) fn saved_leaves_read(&self, wanted: &[bool]) -> SavedLeaves {
        let leaves = self.saved_leaves();
        match &self.kind {
            _ if leaves.is_empty() || !wanted.contains(&true) => SavedLeaves::new(),
            NodeKind::Op(op, _) => {
                let read = op.saved_for_backward_of(wanted).inputs;
                let is_read = |(input, _): &&(u32, u32)| read.contains(&(*input as usize));
                leaves.iter().filter(is_read).copied().collect()
            }
            NodeKind::Block(_) => SavedLeaves::from_slice(leaves),
        }
    }

    /// Sets the tensor of an input that was saved as the number of a leaf.
    pub(crate) fn set_saved_input(&mut self, input: u32, tensor: Tensor) {
        self.saved.inputs[input as usize] = Some(tensor);
    }

    /// Drops the tensors of the inputs that were saved as the number of a leaf.
    pub(crate) fn release_saved_leaves(&mut self) {
        let SavedTensors { inputs, indirect, .. } = &mut self.saved;
        for (input, _) in indirect.iter().flat_map(|indirect| &indirect.leaves) {
            inputs[*input as usize] = None;
        }
    }

    /// The tensors saved for backward.
    pub(crate) fn saved(&self) -> impl Iterator<Item = &Tensor> {
        let ungathered = self.saved.indirect.iter().flat_map(|indirect| &indirect.ungathered);
        let ungathered = ungathered.map(|(_, saved)| saved.from());
        self.saved.inputs.iter().chain(&self.saved.outputs).flatten().chain(ungathered)
    }

    /// Whether inputs were saved as they were before they were gathered.
    pub(crate) fn has_ungathered(&self) -> bool {
        !self.saved_ungathered().is_empty()
    }

    /// Whether the vjp of the wanted cotangents reads inputs that were saved as they were before they were gathered.
    pub(crate) fn reads_ungathered(&self, wanted: &[bool]) -> bool {
        self.op().is_some_and(|(op, _)| {
            let read = op.saved_for_backward_of(wanted).inputs;
            self.saved_ungathered().iter().any(|(input, _)| read.contains(input))
        })
    }

    /// The inputs that were saved as they were before they were gathered.
    pub(crate) fn ungathered(&self) -> impl Iterator<Item = &SavedUngathered> {
        self.saved_ungathered().iter().map(|(_, saved)| saved)
    }

    /// Whether the node computes more than one multiply-add for each number that it reads or writes: long enough to gather meanwhile.
    pub(crate) fn is_product(&self, rank: &Rank) -> bool {
        let Some((op, inference)) = self.op() else { return true };
        let inputs: SmallVec<[&Layout; 6]> = inference.inputs().iter().collect();
        let numbers: usize = inputs.iter().copied().chain(&inference.outputs).map(Layout::numel).sum();
        op::estimate_work(op, rank, &inputs, &inference.outputs) > numbers
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
                let in_vjp = context.enter_vjp();
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
                drop(in_vjp);
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
    // Where sums are canonical, the leaves of one cotangent are joined before another cotangent is added.
    let [sum, cotangent] = [sum, cotangent].map(|x| complete_partial_sum(x, Location::caller()));
    let (sum, cotangent) = (sum?, cotangent?);
    let wide = if sum.dtype().size() < cotangent.dtype().size() { cotangent.dtype() } else { sum.dtype() };
    sum.into_dtype(wide)?.accumulate(&cotangent.into_dtype(wide)?)
}
