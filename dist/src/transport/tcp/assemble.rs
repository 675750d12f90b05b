//! Results of collectives from the payloads that the members of a group sent.

use crate::call::{Op, ReduceOp, Request};
use crate::error::Result;
use crate::transport::buffer_ops;
use crate::transport::thread::is_root;
use shardgrad_kernels::{Backend, Buffer};
use smallvec::SmallVec;
use std::ops::Range;

/// The group ranks of the other members, starting after this rank, so that members do not all write to the same one first.
pub(super) fn other_group_ranks(request: &Request<'_>) -> impl Iterator<Item = usize> + use<> {
    let (group_rank, size) = (request.position.group_rank, request.position.size());
    (1..size).map(move |step| (group_rank + step) % size)
}

/// Uploads bytes to a new buffer.
pub(super) fn upload(backend: &dyn Backend, bytes: &[u8]) -> Result<Buffer> {
    let mut buffer = backend.alloc(bytes.len())?;
    backend.upload(bytes, &mut buffer)?;
    Ok(buffer)
}

/// Reduces one range of the elements of all members. The other members have sent only this range.
pub(super) fn reduce_range(
    backend: &dyn Backend,
    request: &Request<'_>,
    received: &[&[u8]],
    range: &Range<usize>,
) -> Result<Buffer> {
    let (dtype, group_rank) = (request.call.dtype, request.position.group_rank);
    let bytes = range.len() * dtype.size();
    let own = || {
        let mut own = backend.alloc(bytes)?;
        let x = request.x.expect("bug: a member of a reduction without a buffer");
        buffer_ops::copy(backend, dtype, x, range.clone(), &mut own, 0)?;
        Ok(own)
    };
    let of = |i: usize| if i == group_rank { own() } else { upload(backend, received[i]) };
    let all = (0..received.len()).map(of).collect::<Result<Vec<Buffer>>>()?;
    let reduce_op = match request.op {
        Op::AllReduce(reduce_op) => reduce_op,
        _ => ReduceOp::Sum,
    };
    let mut y = backend.alloc(bytes)?;
    buffer_ops::reduce(backend, dtype, reduce_op, all.iter(), &(0..range.len()), &mut y)?;
    Ok(y)
}

/// Computes the result of a call whose payloads have all arrived.
pub(super) fn form_result(
    backend: &dyn Backend,
    request: &Request<'_>,
    received: &[&[u8]],
) -> Result<Option<Buffer>> {
    let (dtype, group_rank) = (request.call.dtype, request.position.group_rank);
    let Some(numel) = request.result_numel() else { return Ok(None) };
    if is_root(request) {
        return Ok(request.x.cloned());
    }
    match request.op {
        Op::ReduceScatter => {
            let range = request.payload().elements(group_rank, group_rank);
            return reduce_range(backend, request, received, &range).map(Some);
        }
        Op::Broadcast { root } => return upload(backend, received[root]).map(Some),
        _ => {}
    }
    let theirs = |i: usize| (i != group_rank).then(|| upload(backend, received[i])).transpose();
    let theirs = (0..received.len()).map(theirs).collect::<Result<Vec<Option<Buffer>>>>()?;
    let operands: SmallVec<[Option<&Buffer>; 8]> = theirs.iter().map(|b| b.as_ref().or(request.x)).collect();
    let mut y = backend.alloc(numel * dtype.size())?;
    if request.op == Op::AllToAll {
        for (i, x) in operands.iter().enumerate() {
            let x = x.expect("bug: a member of an all_to_all without a buffer");
            let start =
                if i == group_rank { request.payload().elements(group_rank, group_rank).start } else { 0 };
            let part = start..start + request.received[i];
            buffer_ops::copy(backend, dtype, x, part, &mut y, buffer_ops::offset(request.received, i))?;
        }
    } else {
        buffer_ops::form_result(backend, request, &operands, &mut y)?;
    }
    Ok(Some(y))
}
