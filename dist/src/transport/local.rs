//! The kernels that collectives are made of: copies and combinations of flat ranges.

use crate::call::{Op, ReduceOp, Request};
use crate::error::Result;
use shardgrad_kernels::op::{copy, tree_reduce};
use shardgrad_kernels::{Arg, ArgMut, Backend, Buffer, DType, Launch, Strides};
use smallvec::SmallVec;
use std::ops::Range;

/// The view of a range of a flat buffer.
fn flat(range: &Range<usize>) -> Strides {
    Strides::contiguous(&[range.len()]).at(range.start)
}

/// Copies elements `from` of `x` to the place `at` in `y`.
pub(super) fn copy(
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

/// Combines elements `from` of every operand, in the order of the operands, into the start of `y`.
pub(super) fn combine<'a>(
    backend: &dyn Backend,
    dtype: DType,
    how: ReduceOp,
    operands: impl Iterator<Item = &'a Buffer>,
    from: &Range<usize>,
    y: &mut Buffer,
) -> Result<()> {
    if from.is_empty() {
        return Ok(());
    }
    let (read, written) = (flat(from), flat(&(0..from.len())));
    let inputs: SmallVec<[Arg<'_>; 8]> = operands.map(|buffer| Arg { buffer, dtype, view: &read }).collect();
    let mut outputs = [ArgMut { buffer: y, dtype, view: &written }];
    let kernel = match how {
        ReduceOp::Sum => &tree_reduce::SUM,
        ReduceOp::Max => &tree_reduce::MAX,
        ReduceOp::Min => &tree_reduce::MIN,
    };
    backend.launch(kernel, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] })?;
    Ok(())
}

/// Where part `i` begins.
pub(super) fn before(counts: &[usize], i: usize) -> usize {
    counts[..i].iter().sum()
}

fn of<'a>(shown: &Option<&'a Buffer>) -> &'a Buffer {
    shown.expect("every member of a reduction or a gathering shows a buffer")
}

/// Forms the result of the member that asks from the buffers that members show, by place: all of them, or the root. An exchange
/// and a large all-reduce are formed elsewhere.
pub(super) fn form(
    backend: &dyn Backend,
    request: &Request<'_>,
    shown: &[Option<&Buffer>],
    y: &mut Buffer,
) -> Result<()> {
    let (dtype, place, counts) = (request.call.dtype, request.seat.place, request.counts);
    match request.op {
        Op::AllReduce(how) => combine(backend, dtype, how, shown.iter().map(of), &(0..counts[0]), y),
        Op::ReduceScatter => {
            let start = before(counts, place);
            let mine = start..start + counts[place];
            combine(backend, dtype, ReduceOp::Sum, shown.iter().map(of), &mine, y)
        }
        Op::AllGather => shown
            .iter()
            .map(of)
            .enumerate()
            .try_for_each(|(i, x)| copy(backend, dtype, x, 0..counts[i], y, before(counts, i))),
        Op::Broadcast { root } => copy(backend, dtype, of(&shown[root]), 0..counts[0], y, 0),
        Op::AllToAll | Op::Send { .. } | Op::Recv { .. } | Op::Barrier => Ok(()),
    }
}
