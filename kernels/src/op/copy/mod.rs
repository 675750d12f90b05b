//! Copies, with conversion of strides and dtype.

mod cpu;
mod gpu;

use crate::cpu::Pool;
use crate::dtype::{DType, Element};
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_dtype;
use crate::op::rows::operands;
use crate::op::strided_iter::element_offset;

/// y = x in the dtype of y.
///
/// - in: x: any dtype, any strides
/// - out: y: any dtype, same shape, any strides without overlap
///
/// Bits are copied between equal dtypes. Floats round to nearest, ties to even; to integers towards zero, saturating (NaN becomes 0); to
/// bool everything but 0 is true. i64 to float rounds to f64 first.
#[doc(alias = "cast")]
#[doc(alias = "contiguous")]
pub static COPY: Kernel = Kernel {
    name: "copy",
    reference: plain,
    cpu: Some(cpu::copy),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::plan }),
    flops: |_| 0,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

fn plain(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], _) = operands(launch);
    let places = (0..x.view.numel()).map(|i| (element_offset(x.view, i), element_offset(y.view, i)));
    if x.dtype == y.dtype {
        match_dtype!(x.dtype, T => {
            let (from, to) = (x.buffer.as_slice::<T>(), y.buffer.as_mut::<T>().expect("an output buffer has one handle"));
            places.for_each(|(at, to_at)| to[to_at] = from[at]);
        });
        return Ok(());
    }
    let is_bool = y.dtype == DType::Bool;
    match_dtype!(x.dtype, S => match_dtype!(y.dtype, D => {
        let (from, to) = (x.buffer.as_slice::<S>(), y.buffer.as_mut::<D>().expect("an output buffer has one handle"));
        places.for_each(|(at, to_at)| to[to_at] = if is_bool { nonzero(from[at]) } else { convert(from[at]) });
    }));
    Ok(())
}

/// Converts to the nearest value of another dtype.
#[inline(always)]
fn convert<S: Element, D: Element>(x: S) -> D {
    D::from_f64(x.to_f64())
}

/// Returns 0 for 0, 1 for everything else.
#[inline(always)]
fn nonzero<S: Element, D: Element>(x: S) -> D {
    D::from_f64(f64::from(u8::from(x.to_f64() != 0.0)))
}

#[cfg(test)]
mod tests;
