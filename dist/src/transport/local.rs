//! The kernels that collectives are made of: copies and combinations of flat ranges.

use crate::call::ReduceOp;
use crate::error::Result;
use shardgrad_kernels::op::{copy, ranks};
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
        ReduceOp::Sum => &ranks::SUM,
        ReduceOp::Max => &ranks::MAX,
        ReduceOp::Min => &ranks::MIN,
    };
    backend.launch(kernel, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] })?;
    Ok(())
}
