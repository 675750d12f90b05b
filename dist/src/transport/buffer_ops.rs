//! Building blocks of collectives: copies and reductions of ranges of flat buffers.

use crate::call::{Op, ReduceOp, Request};
use crate::error::Result;
use shardgrad_kernels::op::{copy, tree_reduce};
use shardgrad_kernels::{Arg, ArgMut, Backend, Buffer, DType, Launch, Strides};
use smallvec::SmallVec;
use std::ops::Range;

/// The strided view of a range of a flat buffer.
fn flat(range: &Range<usize>) -> Strides {
    Strides::contiguous(&[range.len()]).at(range.start)
}

/// Copies the elements `from` of `x` to `y`, starting at element `at`.
pub(crate) fn copy(
    backend: &dyn Backend,
    dtype: DType,
    x: &Buffer,
    from: Range<usize>,
    y: &mut Buffer,
    at: usize,
) -> Result<()> {
    if from.is_empty() {
        return Ok(());
    }
    let (read, written) = (flat(&from), flat(&(at..at + from.len())));
    let inputs = [Arg { buffer: x, dtype, view: &read }];
    let mut outputs = [ArgMut { buffer: y, dtype, view: &written }];
    backend.launch(&copy::COPY, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] })?;
    Ok(())
}

/// Reduces the elements `from` of all operands, in the order of the operands, into the start of `y`.
pub(super) fn reduce<'a>(
    backend: &dyn Backend,
    dtype: DType,
    reduce_op: ReduceOp,
    operands: impl Iterator<Item = &'a Buffer>,
    from: &Range<usize>,
    y: &mut Buffer,
) -> Result<()> {
    let view = flat(from);
    let inputs = operands.map(|buffer| Arg { buffer, dtype, view: &view });
    reduce_views(backend, reduce_op, &inputs.collect::<SmallVec<[_; 8]>>(), y)
}

/// Reduces ranges of equal lengths, in their order, into the start of `y`.
#[cfg(feature = "nccl")]
pub(super) fn reduce_ranges<'a>(
    backend: &dyn Backend,
    dtype: DType,
    reduce_op: ReduceOp,
    operands: impl Iterator<Item = (&'a Buffer, Range<usize>)>,
    y: &mut Buffer,
) -> Result<()> {
    let operands: SmallVec<[_; 8]> = operands.map(|(buffer, range)| (buffer, flat(&range))).collect();
    let inputs = operands.iter().map(|(buffer, view)| Arg { buffer, dtype, view });
    reduce_views(backend, reduce_op, &inputs.collect::<SmallVec<[_; 8]>>(), y)
}

/// Reduces views of one shape, in their order, into the start of `y`.
fn reduce_views(
    backend: &dyn Backend,
    reduce_op: ReduceOp,
    inputs: &[Arg<'_>],
    y: &mut Buffer,
) -> Result<()> {
    let Some(Arg { dtype, view, .. }) = inputs.first().filter(|x| x.view.numel() > 0) else { return Ok(()) };
    let written = flat(&(0..view.numel()));
    let mut outputs = [ArgMut { buffer: y, dtype: *dtype, view: &written }];
    let kernel = match reduce_op {
        ReduceOp::Sum => &tree_reduce::SUM,
        ReduceOp::Max => &tree_reduce::MAX,
        ReduceOp::Min => &tree_reduce::MIN,
    };
    backend.launch(kernel, &mut Launch { inputs, outputs: &mut outputs, scalars: &[] })?;
    Ok(())
}

/// Adds `numel` elements of two operands, each from a position on, into the start of `y`.
pub(crate) fn add(
    backend: &dyn Backend,
    dtype: DType,
    numel: usize,
    operands: [(&Buffer, usize); 2],
    y: &mut Buffer,
) -> Result<()> {
    if numel == 0 {
        return Ok(());
    }
    let views = operands.map(|(_, start)| flat(&(start..start + numel)));
    let [a, b] = [0, 1].map(|i| Arg { buffer: operands[i].0, dtype, view: &views[i] });
    let written = flat(&(0..numel));
    let mut outputs = [ArgMut { buffer: y, dtype, view: &written }];
    backend
        .launch(&tree_reduce::SUM, &mut Launch { inputs: &[a, b], outputs: &mut outputs, scalars: &[] })?;
    Ok(())
}

/// The offset of part `i`: the sum of the counts before it.
pub(super) fn offset(counts: &[usize], i: usize) -> usize {
    counts[..i].iter().sum()
}

fn of<'a>(published: &Option<&'a Buffer>) -> &'a Buffer {
    published.expect("bug: a member of a reduction or gather without a buffer")
}

/// Computes the result of a call for this rank from the buffers of the members, by group rank: of all members, or of the root. An
/// all_to_all and a chunked all-reduce are computed elsewhere.
pub(super) fn form_result(
    backend: &dyn Backend,
    request: &Request<'_>,
    published: &[Option<&Buffer>],
    y: &mut Buffer,
) -> Result<()> {
    let (dtype, group_rank, counts) = (request.call.dtype, request.position.group_rank, request.counts);
    match request.op {
        Op::AllReduce(reduce_op) => {
            reduce(backend, dtype, reduce_op, published.iter().map(of), &(0..counts[0]), y)
        }
        Op::ReduceScatter => {
            let start = offset(counts, group_rank);
            let mine = start..start + counts[group_rank];
            reduce(backend, dtype, ReduceOp::Sum, published.iter().map(of), &mine, y)
        }
        Op::AllGather => published
            .iter()
            .map(of)
            .enumerate()
            .try_for_each(|(i, x)| copy(backend, dtype, x, 0..counts[i], y, offset(counts, i))),
        Op::Broadcast { root } => copy(backend, dtype, of(&published[root]), 0..counts[0], y, 0),
        Op::AllToAll | Op::Send { .. } | Op::Recv { .. } | Op::Barrier => Ok(()),
    }
}
