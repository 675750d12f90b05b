//! Sums of cotangents, and nodes that add to them themselves.

use super::{Leaf, Node, Stand, Tape, Work};
use crate::id::{Id, Key};
use crate::program::SumDType;
use shardgrad_dist::Result;
use shardgrad_tensor::op::Offer;
use shardgrad_tensor::{Tensor, unwind};
use smallvec::SmallVec;

/// Per argument of a node, what its value has got so far.
type Offers = SmallVec<[Offer; 4]>;

impl Tape {
    /// Pulls a node back, and adds the cotangents of its wanted inputs to what these have got so far, unless the node does so itself.
    pub(crate) fn pull(
        &self,
        (leaves, earlier): (&mut [Leaf], &mut [Node]),
        node: &mut Node,
        wanted: &[bool],
        stand: &Stand,
    ) {
        let context = self.context();
        context.set_path(&node.path);
        // Whoever watches is shown what is added before it is.
        let offers = match node.takes_sums() && !context.is_watched() {
            true => offered((leaves, earlier), &node.inputs, wanted),
            false => Offers::new(),
        };
        let cotangents = node.pull_back(self.rank(), context, (wanted, &offers), stand);
        for (input, offer) in node.inputs.iter().zip(&offers) {
            if let (Some(id), Some(sum)) = (*input, offer.take()) {
                *slot(leaves, earlier, id) = Some(sum);
            }
        }
        for (i, (input, cotangent)) in node.inputs.iter().zip(cotangents).enumerate() {
            match (*input, cotangent, &node.work) {
                // The op that made the value reads cotangents of its own dtype.
                (Some(id @ Id::Made { .. }), Some(cotangent), Work::Op(_, inference)) => {
                    let sums = SumDType::of(inference.inputs()[i].dtype());
                    add(leaves, earlier, id, unwind(sums.fit(cotangent)));
                }
                (Some(id), Some(cotangent), _) => add(leaves, earlier, id, cotangent),
                _ => {}
            }
        }
    }

    /// Gives the leaves of the round what was added up for them elsewhere, before a backward pass from these seeds adds to it.
    pub(crate) fn begin_with(&self, seeds: &[(Id, Tensor)], sum: impl FnMut(Key) -> Option<Tensor>) {
        if !self.context().is_watched() {
            let arena = &mut *self.arena();
            let inputs = arena.nodes.iter().flat_map(|node| &node.inputs).copied().flatten();
            give(&mut arena.leaves, inputs.chain(seeds.iter().map(|(id, _)| *id)), sum);
        }
    }
}

/// Where the cotangents of a value are added up.
fn slot<'a>(leaves: &'a mut [Leaf], nodes: &'a mut [Node], id: Id) -> &'a mut Option<Tensor> {
    match id {
        Id::Leaf(at) => &mut leaves[at as usize].cotangent,
        Id::Made { node, out, .. } => &mut nodes[node as usize].cotangents[out as usize],
    }
}

/// Adds a cotangent where it belongs: partial to partial, no communication. A leaf says in which dtypes.
pub(crate) fn add(leaves: &mut [Leaf], nodes: &mut [Node], id: Id, cotangent: Tensor) {
    let cotangent = match id {
        Id::Leaf(at) => unwind(leaves[at as usize].sums.fit(cotangent)),
        Id::Made { .. } => cotangent,
    };
    let slot = slot(leaves, nodes, id);
    *slot = Some(match slot.take() {
        None => cotangent,
        Some(sum) => unwind(sum_of(sum, cotangent)),
    });
}

/// The sum of two cotangents of one value, in the wider of their dtypes.
///
/// # Errors
/// `Kind::OutOfMemory`.
pub(crate) fn sum_of(sum: Tensor, cotangent: Tensor) -> Result<Tensor> {
    let wide = if sum.dtype().size() < cotangent.dtype().size() { cotangent.dtype() } else { sum.dtype() };
    sum.converted(wide)?.accumulate(&cotangent.converted(wide)?)
}

/// Gives leaves what was added up for them elsewhere, if one cotangent alone will be added to it: several ones are added to each
/// other first, so that the sum has the same bits.
pub(crate) fn give(
    leaves: &mut [Leaf],
    uses: impl Iterator<Item = Id>,
    mut sum: impl FnMut(Key) -> Option<Tensor>,
) {
    let mut counts = vec![0; leaves.len()];
    uses.filter_map(Id::leaf).for_each(|leaf| counts[leaf] += 1);
    for (leaf, count) in leaves.iter_mut().zip(counts) {
        let is_alone = leaf.origin.is_none() && leaf.forms.is_empty();
        if count == 1 && is_alone && leaf.cotangent.is_none() {
            leaf.cotangent = sum(leaf.key);
        }
    }
}

/// Takes what values have got so far out of its places. A value that stands twice among the inputs is offered once, where the first
/// of its cotangents would be added.
fn offered((leaves, earlier): (&mut [Leaf], &mut [Node]), inputs: &[Option<Id>], wanted: &[bool]) -> Offers {
    let sum = |(id, wanted): (&Option<Id>, &bool)| slot(leaves, earlier, id.filter(|_| *wanted)?).take();
    inputs.iter().zip(wanted).map(sum).map(Offer::new).collect()
}
