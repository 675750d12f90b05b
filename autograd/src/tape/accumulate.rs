//! Accumulation of cotangents, and nodes that add to a gradient accumulator in place.

use super::{BackwardSite, Leaf, Node, NodeKind, Tape};
use crate::id::{Id, Key};
use crate::program::AccumulationDType;
use shardgrad_dist::Result;
use shardgrad_tensor::op::GradAccumulator;
use shardgrad_tensor::{Tensor, unwind};
use smallvec::SmallVec;

/// The cotangents accumulated so far, per argument of a node.
type Accumulators = SmallVec<[GradAccumulator; 4]>;

impl Tape {
    /// Runs a node backward and adds the cotangents of its wanted inputs to the accumulated ones, unless the node does
    /// so in place.
    pub(crate) fn backward_node(
        &self,
        (leaves, earlier): (&mut [Leaf], &mut [Node]),
        node: &mut Node,
        wanted: &[bool],
        backward_site: &BackwardSite,
    ) {
        let context = self.context();
        context.set_path(&node.path);
        // Anomaly detection inspects each cotangent before it is added, where that does not change the bits.
        let adds_in_place = match &node.kind {
            NodeKind::Op(op, _) => {
                op.accumulates_in_place() && (!context.detects_anomalies() || op.rounds_sums_once())
            }
            NodeKind::Block(_) => !context.detects_anomalies(),
        };
        let accumulators = match adds_in_place {
            true => take_accumulators((leaves, earlier), &node.inputs, wanted),
            false => Accumulators::new(),
        };
        let cotangents = node.vjp(self.rank(), context, (wanted, &accumulators), backward_site);
        for (input, accumulator) in node.inputs.iter().zip(&accumulators) {
            if let (Some(id), Some(sum)) = (*input, accumulator.take()) {
                *accumulated_cotangent(leaves, earlier, id) = Some(sum);
            }
        }
        for (i, (input, cotangent)) in node.inputs.iter().zip(cotangents).enumerate() {
            match (*input, cotangent, &node.kind) {
                // The op that produced the value expects cotangents in the value's dtype.
                (Some(id @ Id::Output { .. }), Some(cotangent), NodeKind::Op(_, inference)) => {
                    let accumulation = AccumulationDType::of(inference.inputs()[i].dtype());
                    add(leaves, earlier, id, unwind(accumulation.cast(cotangent)));
                }
                (Some(id), Some(cotangent), _) => add(leaves, earlier, id, cotangent),
                _ => {}
            }
        }
    }

    /// Starts the leaves of the round from gradients accumulated elsewhere, before a backward pass from these seeds
    /// adds to them.
    pub(crate) fn preload_gradients(&self, seeds: &[(Id, Tensor)], sum: impl FnMut(Key) -> Option<Tensor>) {
        if !self.context().detects_anomalies() {
            let arena = &mut *self.arena();
            let inputs = arena.nodes.iter().flat_map(|node| &node.inputs).copied().flatten();
            preload(&mut arena.leaves, inputs.chain(seeds.iter().map(|(id, _)| *id)), sum);
        }
    }
}

/// The place where the cotangents of a value are accumulated.
fn accumulated_cotangent<'a>(
    leaves: &'a mut [Leaf],
    nodes: &'a mut [Node],
    id: Id,
) -> &'a mut Option<Tensor> {
    match id {
        Id::Leaf(at) => &mut leaves[at as usize].cotangent,
        Id::Output { node, out, .. } => &mut nodes[node as usize].cotangents[out as usize],
    }
}

/// Adds a cotangent to the accumulated one of a value: partial to partial, no communication. Leaves choose the dtype of
/// the sum.
pub(crate) fn add(leaves: &mut [Leaf], nodes: &mut [Node], id: Id, cotangent: Tensor) {
    let cotangent = match id {
        Id::Leaf(at) => unwind(leaves[at as usize].accumulation.cast(cotangent)),
        Id::Output { .. } => cotangent,
    };
    let slot = accumulated_cotangent(leaves, nodes, id);
    *slot = Some(match slot.take() {
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

/// Starts leaves from gradients accumulated elsewhere, where a single cotangent will be added. Several cotangents of
/// one leaf are added to each other first, so that the sum has the same bits.
pub(crate) fn preload(
    leaves: &mut [Leaf],
    uses: impl Iterator<Item = Id>,
    mut sum: impl FnMut(Key) -> Option<Tensor>,
) {
    let mut counts = vec![0; leaves.len()];
    uses.filter_map(Id::leaf).for_each(|leaf| counts[leaf] += 1);
    for (leaf, count) in leaves.iter_mut().zip(counts) {
        let is_alone = leaf.origin.is_none() && leaf.derived.is_empty();
        if count == 1 && is_alone && leaf.cotangent.is_none() {
            leaf.cotangent = sum(leaf.key);
        }
    }
}

/// Takes the accumulated cotangents of a node's inputs out of their places. A value that appears twice among the inputs
/// appears once here, where its first cotangent would be added.
fn take_accumulators(
    (leaves, earlier): (&mut [Leaf], &mut [Node]),
    inputs: &[Option<Id>],
    wanted: &[bool],
) -> Accumulators {
    let sum = |(id, wanted): (&Option<Id>, &bool)| {
        accumulated_cotangent(leaves, earlier, id.filter(|_| *wanted)?).take()
    };
    inputs.iter().zip(wanted).map(sum).map(GradAccumulator::new).collect()
}
