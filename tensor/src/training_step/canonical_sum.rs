//! Canonical sums of gradients and scalars over leaves of rows: the join of the sums of all ranks of an axis.

use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::placement::Placement;
use crate::tensor::Tensor;
use crate::tensor::redistribute::all_reduce;
use shardgrad_dist::{AxisSet, Call, Error, Kind, Origin, Phase, Rank, ReduceOp, Result};
use shardgrad_kernels::{Device, Strides};
use std::panic::Location;

pub use shardgrad_kernels::{SumTree, TreeSums};

/// Refuses a device whose kernels and collectives keep no promise about the order of sums.
///
/// # Errors
/// `Kind::Unsupported` unless the rank computes on the CPU or on the null back end.
pub fn check_device(rank: &Rank) -> Result<()> {
    match rank.backend().device() {
        Device::Cpu | Device::Null => Ok(()),
        device => Err(Error::new(
            Kind::Unsupported,
            format!(
                "sums on {device} have no canonical form: products of its library choose their own order"
            ),
        )),
    }
}

/// Sums tensors over the leaves of a tree, with the same bits for every number of ranks along some axes of the world: each rank passes
/// the sums of its roots, in the order of [`TreeSums::into_roots`], all of one layout without the axes, and gets the sum of all
/// leaves. One all-reduce, or one all-to-all and one all-gather ([`Rank::all_reduce_canonical`]). A collective call.
///
/// # Errors
/// `Kind::OutOfMemory`; errors of the collective.
pub fn sum_roots(
    axes: AxisSet,
    tree: SumTree,
    roots: &[Tensor],
    phase: Phase,
    site: &'static Location<'static>,
) -> Result<Tensor> {
    let [first, ..] = roots else {
        return Err(Error::new(
            Kind::Collective,
            "a canonical sum without any root: a rank has at least one",
        )
        .at(site));
    };
    let (rank, layout, numel) = (first.rank(), first.layout(), first.local().numel());
    let joined = match roots {
        [one] => one.local().flat(rank)?,
        several => {
            let mut joined = LocalTensor::alloc(rank, first.dtype(), &[several.len() * numel])?;
            for (i, root) in several.iter().enumerate() {
                let shape = &root.local().view.shape;
                joined.write(rank, Strides::contiguous(shape).at(i * numel), root.local())?;
            }
            joined
        }
    };
    let context = Context::of(rank);
    let path = context.path();
    let (dtype, origin) = (first.dtype(), Origin::default());
    let call = Call { axes, dtype, phase, path: &path, origin, site };
    let sum = rank.world().all_reduce_canonical(&call, &joined.buffer, numel, tree)?;
    let sum = LocalTensor::from_buffer(sum, dtype, &first.local().view.shape);
    Ok(Tensor::assemble(rank, layout.clone(), sum))
}

/// Returns tensors with partial sums completed over the ranks of the mesh, each of which holds one root of the leaves; a tensor that is no
/// partial sum is returned as it is. One all-reduce for all tensors of a dtype. A collective call.
///
/// # Errors
/// `Kind::OutOfMemory`; errors of the collective.
pub fn complete_partial_sums(tensors: &[&Tensor], site: &'static Location<'static>) -> Result<Vec<Tensor>> {
    let axes_of = |i: &usize| {
        let (layout, mesh) = (tensors[*i].layout(), tensors[*i].rank().mesh());
        layout.partial().iter().filter(|axis| mesh.size(*axis) > 1).collect::<AxisSet>()
    };
    let mut completed: Vec<Tensor> = tensors.iter().map(|tensor| (*tensor).clone()).collect();
    let mut open: Vec<usize> = (0..tensors.len()).filter(|i| !axes_of(i).is_empty()).collect();
    while let Some(&first) = open.first() {
        let (rank, dtype, axes) = (tensors[first].rank(), tensors[first].dtype(), axes_of(&first));
        let alike: Vec<usize>;
        (alike, open) = open.into_iter().partition(|i| tensors[*i].dtype() == dtype && axes_of(i) == axes);
        let locals = || alike.iter().map(|i| tensors[*i].local());
        let mut joined = LocalTensor::alloc(rank, dtype, &[locals().map(LocalTensor::numel).sum()])?;
        let mut end = 0;
        for local in locals() {
            joined.write(rank, Strides::contiguous(&local.view.shape).at(end), local)?;
            end += local.numel();
        }
        let sum = all_reduce(rank, joined, axes, ReduceOp::Sum, site)?;
        let mut start = 0;
        for i in alike {
            let (layout, local) = (tensors[i].layout(), tensors[i].local());
            let complete =
                axes.iter().fold(layout.clone(), |l, axis| l.with_placement(axis, Placement::Invariant));
            let part = sum.with_view(Strides::contiguous(&local.view.shape).at(start)).contiguous(rank)?;
            start += local.numel();
            completed[i] = Tensor::assemble(rank, complete, LocalTensor { lineage: local.lineage, ..part });
        }
    }
    Ok(completed)
}

/// [`sum_roots`] of f64 numbers: the numbers of one root after another. Returns the sums, equal on all ranks; this rank's own first
/// numbers on the null back end.
///
/// # Errors
/// As [`sum_roots`].
pub fn sum_root_numbers(
    rank: &Rank,
    axes: AxisSet,
    tree: SumTree,
    roots: &[Vec<f64>],
    site: &'static Location<'static>,
) -> Result<Vec<f64>> {
    let roots: Vec<Tensor> = roots
        .iter()
        .map(|numbers| Tensor::from_host(rank, &[numbers.len()], numbers))
        .collect::<Result<_>>()?;
    let sums = sum_roots(axes, tree, &roots, Phase::Control, site)?;
    sums.local().download(rank, if rank.is_dry_run() { 0 } else { sums.local().numel() })
}
