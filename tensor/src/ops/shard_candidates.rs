//! Exchange between the shards of a dim, for ops whose result over the whole dim is chosen among a few candidates of each shard.

use crate::execution::local_tensor::{LocalTensor, launch};
use crate::op::ForwardContext;
use crate::tensor::redistribute::all_gather;
use shardgrad_dist::{AxisSet, Result};
use shardgrad_kernels::op::binary::ACCUMULATE;
use shardgrad_kernels::op::index::GATHER;
use shardgrad_kernels::{DType, Dims, Scalar, Strides};

/// Gathers a local tensor of all shards of a dim of the first argument, in the order of the shards: (shard, elements). All shards give
/// equally many elements.
pub(super) fn gather_shards(
    local: &ForwardContext<'_>,
    x: &[&LocalTensor],
    dim: usize,
    own: LocalTensor,
) -> Result<LocalTensor> {
    let (mesh, len) = (local.rank.mesh(), own.numel());
    let list = local.inputs[0].dims()[dim].axes;
    let axes: AxisSet = list.iter().collect();
    let gathered = all_gather(local.rank, local.with_lineage(x, own), axes, local.site)?;
    // Members come in the order of the axes in the mesh, shards in the order of the axes in the layout.
    let mut shape: Dims = axes.iter().map(|axis| mesh.size(axis)).collect();
    let position =
        |axis| axes.iter().position(|other| other == axis).expect("a set has the axes of its list");
    let mut order: Dims = list.iter().map(position).collect();
    order.push(shape.len());
    shape.push(len);
    let in_order = gathered.with_view(Strides::contiguous(&shape).permute(&order)).contiguous(local.rank)?;
    let num_shards = shape[..shape.len() - 1].iter().product();
    Ok(in_order.with_view(Strides::contiguous(&[num_shards, len])))
}

/// The candidates of a shard of a dim: at most k of each row, best first, with their positions in the whole dim.
pub(super) struct Candidates {
    /// Any dtype, `(rows, candidates)`, contiguous.
    pub(super) values: LocalTensor,
    /// i64, of the same shape.
    pub(super) positions: LocalTensor,
}

impl Candidates {
    /// Makes positions in this rank's shard positions in the whole dim.
    pub(super) fn in_shard(
        local: &ForwardContext<'_>,
        dim: usize,
        values: LocalTensor,
        positions: &LocalTensor,
    ) -> Result<Candidates> {
        let start = local.inputs[0].range(dim, local.rank.coordinates()).start as f64;
        let mut whole = LocalTensor::full(local.rank, DType::I64, &values.view.shape, start)?;
        let positions = positions.with_view(Strides::contiguous(&values.view.shape));
        launch(local.rank, &ACCUMULATE, &[&positions], &mut [&mut whole], &[])?;
        Ok(Candidates { values, positions: whole })
    }

    /// Gathers the candidates of all shards, up to k of each, in the order of the shards, on every rank. Two all-gathers of k numbers
    /// for each row. Equal candidates stay in the order of their positions if each shard's are.
    pub(super) fn gathered(
        &self,
        local: &ForwardContext<'_>,
        x: &[&LocalTensor],
        dim: usize,
        k: usize,
    ) -> Result<Candidates> {
        let whole = local.inputs[0].dims()[dim];
        let num_shards = whole.shard_index(local.rank.mesh(), local.rank.coordinates()).1;
        let lens: Vec<usize> = (0..num_shards)
            .map(|i| k.min(whole.shard_start(i + 1, num_shards) - whole.shard_start(i, num_shards)))
            .collect();
        let exchange = |own: &LocalTensor| -> Result<LocalTensor> {
            let (rows, len) = (own.view.shape[0], own.view.shape[1]);
            let mut padded = LocalTensor::full(local.rank, own.dtype, &[rows, k], 0.0)?;
            padded.write(local.rank, Strides::contiguous(&[rows, k]).narrow(1, 0, len), own)?;
            let all = gather_shards(local, x, dim, padded)?;
            let shards = Strides::contiguous(&[num_shards, rows, k]);
            let mut dense = LocalTensor::alloc(local.rank, own.dtype, &[rows, lens.iter().sum()])?;
            let mut start = 0;
            for (shard, &len) in lens.iter().enumerate() {
                let part = all.with_view(shards.select(0, shard).narrow(1, 0, len));
                let to = Strides::contiguous(&dense.view.shape).narrow(1, start, start + len);
                dense.write(local.rank, to, &part)?;
                start += len;
            }
            Ok(dense)
        };
        Ok(Candidates { values: exchange(&self.values)?, positions: exchange(&self.positions)? })
    }

    /// The elements of one of both tensors at some columns: i64, `(rows, n)`.
    pub(super) fn pick(
        local: &ForwardContext<'_>,
        from: &LocalTensor,
        columns: &LocalTensor,
    ) -> Result<LocalTensor> {
        let (rows, width) = (from.view.shape[0], from.view.shape[1]);
        let count = columns.numel() / rows.max(1);
        let mut picked = LocalTensor::alloc(local.rank, from.dtype, &[rows, count, 1])?;
        let from = from.with_view(Strides::contiguous(&[rows, width, 1]).at(from.view.offset));
        let columns = columns.with_view(Strides::contiguous(&[rows, count, 1]));
        let scalars = [Scalar::Int(0), Scalar::Int(width as i64)];
        launch(local.rank, &GATHER, &[&from, &columns], &mut [&mut picked], &scalars)?;
        Ok(picked.with_view(Strides::contiguous(&[rows, count])))
    }
}
