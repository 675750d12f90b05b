//! Control-plane collectives of a step: small sums over all ranks of the world, and messages of bytes between two ranks.

use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use shardgrad_dist::{Axis, AxisSet, Call, Origin, Phase, Rank, ReduceOp, Result};
use shardgrad_kernels::host_vec::try_copied;
use shardgrad_kernels::{DType, download};
use std::panic::Location;

/// Sums each number over all ranks of the world (for a pipeline stage too), with the same bits on every rank: one
/// all_reduce over all axes, none on a mesh of one rank. A collective call: every rank passes as many numbers. The null
/// back end records the call and returns this rank's own numbers.
///
/// # Errors
/// Errors of the collective.
#[doc(alias = "all_reduce")]
pub fn world_sum(rank: &Rank, values: &[f64], site: &'static Location<'static>) -> Result<Vec<f64>> {
    let rank = rank.world();
    let mesh = rank.mesh();
    if mesh.num_ranks() == 1 {
        return Ok(values.to_vec());
    }
    let sums = sum_over_world(rank, LocalTensor::upload(rank, &[values.len()], values)?, site)?;
    Ok(if sums.buffer.has_memory() { sums.download(rank, values.len())? } else { values.to_vec() })
}

/// [`world_sum`] of numbers on the device, without waiting for them: f64, row-major from the first byte of their memory.
pub(crate) fn sum_over_world(
    rank: &Rank,
    own: LocalTensor,
    site: &'static Location<'static>,
) -> Result<LocalTensor> {
    let rank = rank.world();
    let mesh = rank.mesh();
    if mesh.num_ranks() == 1 {
        return Ok(own);
    }
    let axes = mesh.axes().filter(|a| mesh.size(*a) > 1).collect();
    let context = Context::of(rank);
    let path = context.path();
    let call =
        Call { axes, dtype: DType::F64, phase: Phase::Control, path: &path, origin: Origin::default(), site };
    let sums = rank.all_reduce(&call, &own.buffer, own.numel(), ReduceOp::Sum)?;
    Ok(LocalTensor::from_buffer(sums, DType::F64, &own.view.shape))
}

/// Sends `len` bytes along an axis, from the rank at position `from` to the rank at position `to`, which gets them as
/// the result; the sender passes them as `bytes`. The other ranks get `None`. A collective call: every rank calls it
/// together.
///
/// # Errors
/// Errors of the transport.
#[doc(alias = "send")]
#[doc(alias = "recv")]
pub fn send_bytes(
    rank: &Rank,
    axis: Axis,
    [from, to]: [usize; 2],
    bytes: &[u8],
    len: usize,
    site: &'static Location<'static>,
) -> Result<Option<Vec<u8>>> {
    let here = rank.coordinate(axis);
    if from == to {
        let copy = || try_copied(bytes, "a message to this rank itself");
        return Ok((here == to).then(copy).transpose()?);
    }
    let axes = AxisSet::one(axis);
    let call =
        Call { axes, dtype: DType::U8, phase: Phase::Control, path: "", origin: Origin::default(), site };
    if here == from {
        rank.send(&call, &LocalTensor::upload(rank, &[bytes.len()], bytes)?.buffer, len, to)?;
    }
    if here != to {
        return Ok(None);
    }
    let received = rank.recv(&call, len, from)?;
    Ok(Some(download(&**rank.backend(), &received, len)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn world_sum_on_one_rank_makes_no_call() {
        World::run(Mesh::parse("a=1").unwrap(), |rank| {
            rank.trace().enable();
            assert_eq!(world_sum(rank, &[2.5], Location::caller())?, [2.5]);
            assert!(rank.trace().take().is_empty());
            Ok(())
        })
        .unwrap();
        World::new(Mesh::parse("a=2").unwrap())
            .dry_run(1, |rank| {
                assert_eq!(world_sum(rank, &[2.5], Location::caller())?, [2.5]);
                assert_eq!(rank.trace().take().len(), 1);
                Ok(())
            })
            .unwrap();
    }
}
