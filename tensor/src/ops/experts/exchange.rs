//! Expert parallelism by exchange: each token-expert pair travels to the rank of its expert and back (all-to-all of unequal pieces),
//! where one mesh axis shards both rows and experts. Dispatch and combine are each other's adjoints.

use super::token_expert_pairs::{SortedOrder, TokenExpertPairs};
use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::placement::Placement;
use crate::layout::refusal::Refusal;
use crate::op::{ForwardContext, Op, infer_by_signature};
use crate::tensor::redistribute::all_to_all;
use shardgrad_dist::{AxisSet, Mesh, Result};
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::ops::Range;
use std::rc::Rc;

/// The arguments that are stacks of expert matrices.
pub(super) const STACKS: Range<usize> = 3..6;

/// The axes over which pairs are exchanged: those that shard the experts, if all of them also shard rows; `None` if no pair leaves
/// its rank, or the signature refuses the layouts. `args` are the arguments of an op on experts, with or without a cotangent.
pub(crate) fn exchange_axes(args: &[&Layout]) -> Option<AxisSet> {
    let experts = args[STACKS.start].dims().first()?.axes;
    let rows: AxisSet = (args.iter().enumerate())
        .filter(|(i, _)| !STACKS.contains(i))
        .flat_map(|(_, layout)| layout.dims().split_last().map_or(&[][..], |(_, rows)| rows))
        .flat_map(|dim| dim.axes.iter())
        .collect();
    let axes: AxisSet = experts.iter().collect();
    let shards_rows = !experts.is_empty() && experts.iter().all(|axis| rows.contains(axis));
    // Members of a group are in mesh order, so the shards of experts must be too.
    let is_in_mesh_order = experts.iter().eq(axes.iter());
    let is_common = args[STACKS]
        .iter()
        .all(|stack| stack.dims().first().is_some_and(|dim| dim.axes == experts) && stack.ndim() == 3);
    (shards_rows && is_in_mesh_order && is_common).then_some(axes)
}

/// Infers layouts where pairs are exchanged as where each rank has all experts, since the op moves the pairs itself. Otherwise, and
/// for all else, by the signature. `stack_outputs` are the outputs that are stacks.
pub(super) fn infer<O: Op>(
    op: &O,
    context: &Context,
    args: &[&Layout],
    dtypes: &[DType],
    want: &[Option<Layout>],
    stack_outputs: Range<usize>,
) -> Result<Rc<Inference>, Refusal> {
    if exchange_axes(args).is_none() {
        return infer_by_signature(op, context, args, dtypes, want);
    }
    let axes = args[STACKS.start].dims()[0].axes;
    let whole = |(i, layout): (usize, &&Layout)| match STACKS.contains(&i) {
        true => axes.iter().rev().fold((*layout).clone(), |l, a| l.with_placement(a, Placement::Replicate)),
        false => (*layout).clone(),
    };
    let sharded =
        |layout: &Layout| axes.iter().fold(layout.clone(), |l, a| l.with_placement(a, Placement::Shard(0)));
    let with_whole_stacks: SmallVec<[Layout; 7]> = args.iter().enumerate().map(whole).collect();
    let borrowed: SmallVec<[&Layout; 7]> = with_whole_stacks.iter().collect();
    let inferred = infer_by_signature(op, context, &borrowed, dtypes, want)?;
    let mut targets = inferred.targets.clone();
    targets[STACKS].iter_mut().for_each(|target| *target = target.as_ref().map(sharded));
    let mut outputs = inferred.outputs.clone();
    outputs[stack_outputs].iter_mut().for_each(|output| *output = sharded(output));
    Ok(Rc::new(inferred.with_layouts(targets, outputs)))
}

/// An exchange of the token-expert pairs of a group of ranks.
pub(super) struct Exchange<'a> {
    local: &'a ForwardContext<'a>,
    /// The arguments of the op, which determine the lineage of what is exchanged.
    args: &'a [&'a LocalTensor],
    axes: AxisSet,
    /// The number of pairs that each member of the group gets from this rank.
    sent: Vec<usize>,
    /// The number of pairs that this rank gets from each member.
    received: Vec<usize>,
    /// The received pairs, sorted by this rank's experts.
    pub(super) pairs: TokenExpertPairs<'a>,
}

impl<'a> Exchange<'a> {
    /// Exchanges the number of pairs of each expert, the only numbers that shapes depend on, and waits for them. `own` are this rank's
    /// pairs, sorted by all experts.
    ///
    /// A dry run, which has no values, assumes balanced routing: equally many pairs of a rank for each expert.
    pub(super) fn of(
        local: &'a ForwardContext<'a>,
        args: &'a [&'a LocalTensor],
        axes: AxisSet,
        own: &TokenExpertPairs<'_>,
    ) -> Result<Exchange<'a>> {
        let (rank, mesh) = (local.rank, local.rank.mesh());
        let experts = local.inputs[STACKS.start].dims()[0];
        let members = Member::all_of(local, mesh, axes);
        let own_experts = experts.range(mesh, rank.coordinates());
        let counts = match rank.is_dry_run() {
            true => balanced(own.count(), experts.extent),
            false => own.counts()?,
        };
        let split: Vec<usize> = members.iter().map(|member| member.experts.len()).collect();
        let merged = vec![own_experts.len(); members.len()];
        let sent_counts = local.with_lineage(args, LocalTensor::upload(rank, &[counts.len()], &counts)?);
        let counts_of_members = all_to_all(rank, sent_counts, axes, [&split, &merged], local.site)?;
        let of_members: Vec<Vec<i64>> = match rank.is_dry_run() {
            true => {
                let of = |member: &Member| {
                    balanced(member.num_pairs, experts.extent)[own_experts.clone()].to_vec()
                };
                members.iter().map(of).collect()
            }
            false => {
                let all: Vec<i64> = counts_of_members.download(rank, own_experts.len() * members.len())?;
                (0..members.len())
                    .map(|i| all[i * own_experts.len()..][..own_experts.len()].to_vec())
                    .collect()
            }
        };
        let total = |counts: &[i64]| counts.iter().sum::<i64>() as usize;
        let sent = members.iter().map(|member| total(&counts[member.experts.clone()])).collect();
        let received = of_members.iter().map(|counts| total(counts)).collect();
        let order = order_by_expert(&of_members, own_experts.len());
        let pairs = TokenExpertPairs::received(rank, &order, own_experts.len())?;
        Ok(Exchange { local, args, axes, sent, received, pairs })
    }

    /// Sends each pair's row of a matrix, sorted by expert, to the rank of its expert. Returns the received rows, sorted by expert.
    pub(super) fn dispatch(&self, rows: LocalTensor) -> Result<LocalTensor> {
        let received = self.send_rows(rows, [&self.sent, &self.received])?;
        self.pairs.gather_rows(&received)
    }

    /// Sends each pair's row back to the rank of its token: the inverse, and so the adjoint, of [`Exchange::dispatch`].
    pub(super) fn combine(&self, rows: &LocalTensor) -> Result<LocalTensor> {
        self.send_rows(self.pairs.unpermute(rows)?, [&self.received, &self.sent])
    }

    fn send_rows(&self, rows: LocalTensor, [sent, received]: [&[usize]; 2]) -> Result<LocalTensor> {
        let width = rows.view.shape[1];
        let elements = |counts: &[usize]| -> Vec<usize> { counts.iter().map(|n| n * width).collect() };
        let rows = self.local.with_lineage(self.args, rows);
        let counts = [elements(sent), elements(received)];
        let flat =
            all_to_all(self.local.rank, rows, self.axes, counts.each_ref().map(|c| &c[..]), self.local.site)?;
        Ok(LocalTensor::from_buffer(flat.buffer, flat.dtype, &[received.iter().sum(), width]))
    }
}

/// A rank of the group that exchanges pairs.
struct Member {
    /// The experts that the rank holds.
    experts: Range<usize>,
    /// The number of token-expert pairs of the rank's rows.
    num_pairs: usize,
}

impl Member {
    /// All members, in group order.
    fn all_of(local: &ForwardContext<'_>, mesh: &Mesh, axes: AxisSet) -> Vec<Member> {
        let (index, stack) = (&local.inputs[1], &local.inputs[STACKS.start]);
        let member = |rank: usize| {
            let coordinate = mesh.coordinate(rank);
            let num_pairs = index.local_shape(&coordinate).iter().product();
            Member { experts: stack.range(0, &coordinate), num_pairs }
        };
        mesh.group(local.rank.index(), axes).into_iter().map(member).collect()
    }
}

/// The number of pairs of each expert under balanced routing: equal up to one.
fn balanced(num_pairs: usize, num_experts: usize) -> Vec<i64> {
    let start = |e: usize| (e as u128 * num_pairs as u128 / num_experts.max(1) as u128) as i64;
    (0..num_experts).map(|e| start(e + 1) - start(e)).collect()
}

/// The order by expert of pairs that come member by member, each member's sorted by expert. Pairs of one expert stay in the order of
/// members: rows in the order of one rank's, if members hold consecutive rows.
fn order_by_expert(of_members: &[Vec<i64>], num_experts: usize) -> SortedOrder {
    let mut next: Vec<i64> = Vec::with_capacity(of_members.len());
    let mut total = 0;
    for counts in of_members {
        next.push(total);
        total += counts.iter().sum::<i64>();
    }
    let mut sorted =
        SortedOrder { order: Vec::new(), inverse_order: vec![0; total as usize], starts: vec![0] };
    for e in 0..num_experts {
        for (at, counts) in next.iter_mut().zip(of_members) {
            sorted.order.extend(*at..*at + counts[e]);
            *at += counts[e];
        }
        sorted.starts.push(sorted.order.len() as i64);
    }
    for (position, pair) in sorted.order.iter().enumerate() {
        sorted.inverse_order[*pair as usize] = position as i64;
    }
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_members_are_sorted_by_expert() {
        // Member 0 sends one pair of expert 0 and two of expert 2; member 1 sends nothing; member 2 one each of experts 0 and 2.
        let sorted = order_by_expert(&[vec![1, 0, 2], vec![0, 0, 0], vec![1, 0, 1]], 3);
        assert_eq!(sorted.order, [0, 3, 1, 2, 4]);
        assert_eq!(sorted.inverse_order, [0, 2, 3, 1, 4]);
        assert_eq!(sorted.starts, [0, 2, 2, 5]);
        let none = order_by_expert(&[vec![], vec![]], 0);
        assert_eq!((none.order.len(), &none.starts[..]), (0, &[0][..]));
    }

    #[test]
    fn balanced_counts_differ_by_one_at_most() {
        assert_eq!(balanced(7, 3), [2, 2, 3]);
        assert_eq!(balanced(0, 2), [0, 0]);
        assert!(balanced(5, 0).is_empty());
    }
}
