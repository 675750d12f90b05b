//! What goes to which member of a group, and what becomes of what comes from them.

use crate::call::{Op, ReduceOp, Request};
use crate::error::Result;
use crate::transport::local;
use crate::transport::thread::is_root;
use shardgrad_kernels::{Backend, Buffer};
use smallvec::SmallVec;
use std::ops::Range;

/// The places of the others in the group, from the next one on, so that not all write to the same one first.
pub(super) fn others(request: &Request<'_>) -> impl Iterator<Item = usize> + use<> {
    let (place, size) = (request.seat.place, request.seat.size());
    (1..size).map(move |step| (place + step) % size)
}

/// New memory with these contents.
pub(super) fn uploaded(backend: &dyn Backend, bytes: &[u8]) -> Result<Buffer> {
    let mut buffer = backend.alloc(bytes.len())?;
    backend.upload(bytes, &mut buffer)?;
    Ok(buffer)
}

/// One range of the elements of all members combined, of which the others have sent this range alone.
pub(super) fn combined(
    backend: &dyn Backend,
    request: &Request<'_>,
    brought: &[&[u8]],
    range: &Range<usize>,
) -> Result<Buffer> {
    let (dtype, place) = (request.call.dtype, request.seat.place);
    let bytes = range.len() * dtype.size();
    let own = || {
        let mut own = backend.alloc(bytes)?;
        let x = request.x.expect("every member of a reduction brings a buffer");
        local::copy(backend, dtype, x, range.clone(), &mut own, 0)?;
        Ok(own)
    };
    let of = |i: usize| if i == place { own() } else { uploaded(backend, brought[i]) };
    let all = (0..brought.len()).map(of).collect::<Result<Vec<Buffer>>>()?;
    let how = match request.op {
        Op::AllReduce(how) => how,
        _ => ReduceOp::Sum,
    };
    let mut y = backend.alloc(bytes)?;
    local::combine(backend, dtype, how, all.iter(), &(0..range.len()), &mut y)?;
    Ok(y)
}

/// The result of a call for which nothing more has to come.
pub(super) fn form(
    backend: &dyn Backend,
    request: &Request<'_>,
    brought: &[&[u8]],
) -> Result<Option<Buffer>> {
    let (dtype, place) = (request.call.dtype, request.seat.place);
    let Some(numel) = request.result_numel() else { return Ok(None) };
    if is_root(request) {
        return Ok(request.x.cloned());
    }
    match request.op {
        Op::ReduceScatter => {
            let range = request.payload().elements(place, place);
            return combined(backend, request, brought, &range).map(Some);
        }
        Op::Broadcast { root } => return uploaded(backend, brought[root]).map(Some),
        _ => {}
    }
    let theirs = |i: usize| (i != place).then(|| uploaded(backend, brought[i])).transpose();
    let theirs = (0..brought.len()).map(theirs).collect::<Result<Vec<Option<Buffer>>>>()?;
    let shown: SmallVec<[Option<&Buffer>; 8]> = theirs.iter().map(|b| b.as_ref().or(request.x)).collect();
    let mut y = backend.alloc(numel * dtype.size())?;
    if request.op == Op::AllToAll {
        for (i, x) in shown.iter().enumerate() {
            let x = x.expect("every member of an exchange brings a buffer");
            let start = if i == place { request.payload().elements(place, place).start } else { 0 };
            let part = start..start + request.received[i];
            local::copy(backend, dtype, x, part, &mut y, local::before(request.received, i))?;
        }
    } else {
        local::form(backend, request, &shown, &mut y)?;
    }
    Ok(Some(y))
}
