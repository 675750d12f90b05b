//! Accumulation of cotangents, and nodes that add to a gradient accumulator in place.

use crate::id::Id;
use crate::leaf::Leaves;
use crate::node::{BackwardSite, Node, add_cotangent};
use crate::program::AccumulationDType;
use shardgrad_dist::Rank;
use shardgrad_tensor::op::GradAccumulator;
use shardgrad_tensor::{Context, Tensor, unwind};
use smallvec::SmallVec;

/// The cotangents accumulated so far, per argument of a node.
type Accumulators = SmallVec<[GradAccumulator; 4]>;

/// Runs a node backward and adds the cotangents of its wanted inputs to the accumulated ones, unless the node does so in
/// place.
pub(crate) fn backward_node(
    (leaves, earlier): (&mut Leaves, &mut [Node]),
    node: &mut Node,
    wanted: &[bool],
    (rank, context): (&Rank, &Context),
    backward_site: &BackwardSite,
) {
    context.set_path(node.path());
    // Anomaly detection inspects each cotangent before it is added.
    let accumulators = match node.accumulates_in_place() && !context.detects_anomalies() {
        true => take_accumulators((leaves, earlier), node.inputs(), wanted),
        false => Accumulators::new(),
    };
    let cotangents = node.vjp((rank, context), (wanted, &accumulators), backward_site);
    for (input, accumulator) in node.inputs().iter().zip(&accumulators) {
        if let (Some(id), Some(sum)) = (*input, accumulator.take()) {
            *accumulated_cotangent(leaves, earlier, id) = Some(sum);
        }
    }
    for (i, (input, cotangent)) in node.inputs().iter().zip(cotangents).enumerate() {
        match (*input, cotangent, node.op()) {
            // The op that produced the value expects cotangents in the value's dtype.
            (Some(id @ Id::Output { .. }), Some(cotangent), Some((_, inference))) => {
                let accumulation = AccumulationDType::of(inference.inputs()[i].dtype());
                add(leaves, earlier, id, unwind(accumulation.cast(cotangent)));
            }
            (Some(id), Some(cotangent), _) => add(leaves, earlier, id, cotangent),
            _ => {}
        }
    }
}

/// Adds a cotangent to the accumulated one of a value. Leaves choose the dtype of the sum.
pub(crate) fn add(leaves: &mut Leaves, nodes: &mut [Node], id: Id, cotangent: Tensor) {
    match id {
        Id::Leaf(at) => leaves.add(at as usize, cotangent),
        Id::Output { .. } => add_cotangent(accumulated_cotangent(leaves, nodes, id), cotangent),
    }
}

/// The place where the cotangents of a value are accumulated.
fn accumulated_cotangent<'a>(
    leaves: &'a mut Leaves,
    nodes: &'a mut [Node],
    id: Id,
) -> &'a mut Option<Tensor> {
    match id {
        Id::Leaf(at) => leaves.cotangent_mut(at as usize),
        Id::Output { node, out, .. } => nodes[node as usize].cotangent_mut(out as usize),
    }
}

/// Takes the accumulated cotangents of a node's inputs out of their places. A value that appears twice among the inputs
/// appears once here, where its first cotangent would be added.
fn take_accumulators(
    (leaves, earlier): (&mut Leaves, &mut [Node]),
    inputs: &[Option<Id>],
    wanted: &[bool],
) -> Accumulators {
    let sum = |(id, wanted): (&Option<Id>, &bool)| {
        accumulated_cotangent(leaves, earlier, id.filter(|_| *wanted)?).take()
    };
    inputs.iter().zip(wanted).map(sum).map(GradAccumulator::new).collect()
}
