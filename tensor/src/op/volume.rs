//! How much an op has to do, judged by its signature: no kernel is asked.

use super::Op;
use crate::context::Context;
use crate::layout::Layout;
use shardgrad_dist::Rank;
use smallvec::SmallVec;

/// [`Op::volume`] of an op on some layouts: an estimate of its cost that needs no kernel.
#[must_use]
pub fn volume(op: &dyn Op, rank: &Rank, args: &[&Layout], outputs: &[Layout]) -> usize {
    op.volume(tuples(op, rank, args, outputs), args, outputs)
}

/// How many index tuples the signature of an op runs over.
#[must_use]
pub fn tuples(op: &dyn Op, rank: &Rank, args: &[&Layout], outputs: &[Layout]) -> usize {
    let signature = Context::of(rank).signature(op.signature());
    let made = outputs.first().map_or(0, Layout::numel);
    let Ok(labels) =
        signature.bind(|i| args.get(i).map_or(0, |l| l.ndim()), |k| outputs.get(k).map(Layout::ndim))
    else {
        return made;
    };
    let mut extents: SmallVec<[usize; 8]> = SmallVec::from_elem(1, labels.count());
    for (layout, row) in args.iter().zip(labels.inputs()) {
        for (d, label) in row.iter().enumerate().take(layout.ndim()) {
            if let Some(extent) = extents.get_mut(usize::from(*label)) {
                *extent = (*extent).max(layout.extent(d));
            }
        }
    }
    extents.iter().fold(1, |all: usize, extent| all.saturating_mul(*extent)).max(made)
}
