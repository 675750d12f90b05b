//! The all-reduce of a canonical sum, whose bits do not depend on the number of ranks.

use super::{Rank, invalid_call};
use crate::call::{Call, ReduceOp};
use crate::error::Result;
use crate::transport::buffer_ops;
use shardgrad_kernels::{Backend, Buffer, DType, SumTree, TreeNode, TreeSums};

/// One addend: a buffer and the position of its first element.
type Addend = (Buffer, usize);

impl Rank {
    /// Sums `numel` elements over the leaves of a tree of canonical sums, with the same bits for every number of ranks: rank r of k has
    /// summed the leaves r B / k .. (r + 1) B / k, and passes the sums of its maximal nodes ([`SumTree::roots`]), `numel` elements each,
    /// one node after another. All members get the sum of all leaves. Each node is rounded to the dtype.
    ///
    /// Where each rank has one node, this is [`Rank::all_reduce`], whose tree over the ranks is the upper part of the tree over the
    /// leaves (except for 16-bit floats, which it rounds once). Otherwise rank i gets part i of all nodes, an all-to-all, joins them
    /// in the order of the tree, and the sums are gathered. With m nodes of each rank a rank sends and receives
    /// (m + 1) (k - 1) / k of the elements.
    ///
    /// # Errors
    /// See [`Rank`]; also `Collective` if the ranks of the group do not divide the leaves.
    pub fn all_reduce_canonical(
        &self,
        call: &Call<'_>,
        x: &Buffer,
        numel: usize,
        tree: SumTree,
    ) -> Result<Buffer> {
        let position = self.position(call)?;
        let num_ranks = position.size();
        let runs: Option<Vec<_>> = (0..num_ranks).map(|rank| tree.run(rank, num_ranks)).collect();
        let Some(runs) = runs else {
            let num_leaves = tree.num_leaves();
            let why = format!(
                "a canonical sum of {num_leaves} leaves over {num_ranks} ranks, which do not divide them"
            );
            return Err(invalid_call(call, why));
        };
        let roots: Vec<Vec<TreeNode>> = runs.into_iter().map(|run| tree.roots(run)).collect();
        let is_rounded_alike = num_ranks == 1 || call.dtype == call.dtype.accumulator();
        if is_rounded_alike && roots.iter().all(|roots| roots.len() == 1) {
            return self.all_reduce(call, x, numel, ReduceOp::Sum);
        }
        let held = roots[position.group_rank].len() * numel;
        if x.bytes() / call.dtype.size() < held {
            let bytes = x.bytes();
            let why = format!("a buffer of {bytes} bytes is too short for {}[{held}]", call.dtype);
            return Err(invalid_call(call, why));
        }
        let part = |rank: usize| rank * numel / num_ranks..(rank + 1) * numel / num_ranks;
        let own = part(position.group_rank);
        let backend = &**self.backend();
        let mut sent = backend.alloc(held * call.dtype.size())?;
        let mut at = 0;
        for to in (0..num_ranks).map(part) {
            for root in 0..roots[position.group_rank].len() {
                let from = root * numel + to.start..root * numel + to.end;
                buffer_ops::copy(backend, call.dtype, x, from, &mut sent, at)?;
                at += to.len();
            }
        }
        let sends: Vec<usize> =
            (0..num_ranks).map(|to| roots[position.group_rank].len() * part(to).len()).collect();
        let receives: Vec<usize> = roots.iter().map(|roots| roots.len() * own.len()).collect();
        let received = self.all_to_all(call, &sent, &sends, &receives)?;
        let mut sums = TreeSums::new(tree);
        for (number, node) in roots.iter().flatten().enumerate() {
            let addend = (received.clone(), number * own.len());
            let join = |left, right| add(backend, call.dtype, own.len(), left, right);
            sums.add(*node, Some(addend), join)?;
        }
        let total = sums.into_roots().next().and_then(|(_, sum)| sum).expect("a tree has a root");
        let counts: Vec<usize> = (0..num_ranks).map(|rank| part(rank).len()).collect();
        self.all_gather(call, &total.0, &counts)
    }
}

/// Adds two runs of `numel` elements.
fn add(backend: &dyn Backend, dtype: DType, numel: usize, left: Addend, right: Addend) -> Result<Addend> {
    let mut sum = backend.alloc(numel * dtype.size())?;
    buffer_ops::add(backend, dtype, numel, [(&left.0, left.1), (&right.0, right.1)], &mut sum)?;
    Ok((sum, 0))
}
