//! Reductions over the trailing dims: sum, max, min; and the sum of all squares.
//!
//! The order is part of the contract and depends on the extents only, neither on strides nor on threads nor on the kept dims: the reduced
//! elements, row-major, form blocks of 256; within a block, element i joins partial result i mod 16; these are combined at half distance
//! (i with i + 8, then i + 4, ...); blocks are combined in a balanced tree, whose left branch holds the largest power of two of blocks
//! that leaves some for the right.

mod cpu;
mod gpu;
mod squares;
mod leaves;

use crate::cpu::Pool;
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::gpu::LaunchPlan;
use crate::kernel::{Arg, ArgMut, Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{operands, write};
use crate::op::strided_iter::element_offset;

pub use leaves::LEAF_SUM;

/// y = c (sum of x over the trailing dims), formed in the accumulator and rounded once.
///
/// - in: x (kept dims.., reduced dims..), any float, any strides
/// - out: y (kept dims), contiguous, the dtype of x or its accumulator
/// - scalars: \[Int number of reduced dims, Real c\]
///
/// An empty sum is 0.
pub static SUM: Kernel = Kernel {
    name: "sum",
    reference: |_, launch| plain("sum", launch, total),
    cpu: Some(|pool, launch| {
        let ([x], [y], scalars) = operands(launch);
        match_float!(x.dtype, T => {
            type Acc = <T as Float>::Acc;
            let c = Acc::lit(scalars[1].real());
            let num_reduced = scalars[0].int() as usize;
            if y.dtype == x.dtype {
                cpu::reduce::<cpu::Sum<Acc>, T, T>(pool, x, num_reduced, write(y), &|sum| T::narrow(c * sum));
            } else {
                cpu::reduce::<cpu::Sum<Acc>, T, Acc>(pool, x, num_reduced, write(y), &|sum| c * sum);
            }
        }, else return Err(KernelError::DType { kernel: SUM.name, dtype: x.dtype }));
        Ok(())
    }),
    gpu: Some(GpuCode {
        source: gpu::SOURCE,
        plan: |launch, plan| {
            described(
                "sum",
                launch,
                plan,
                launch.scalars[0].int() as usize,
                gpu::Fold::Sum(launch.scalars[1].real()),
            )
        },
    }),
    flops: |launch| launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

/// y = the largest of x over the trailing dims; negative infinity for no elements; NaN propagates.
///
/// - in: x (kept dims.., reduced dims..), any float, any strides
/// - out: y (kept dims), contiguous, the dtype of x or its accumulator
/// - scalars: \[Int number of reduced dims\]
#[doc(alias = "amax")]
pub static MAX: Kernel = Kernel {
    name: "max",
    reference: |_, launch| plain("max", launch, largest),
    cpu: Some(|pool, launch| {
        let ([x], [y], scalars) = operands(launch);
        match_float!(x.dtype, T => {
            type Acc = <T as Float>::Acc;
            let num_reduced = scalars[0].int() as usize;
            if y.dtype == x.dtype {
                cpu::reduce::<cpu::Max<Acc>, T, T>(pool, x, num_reduced, write(y), &T::narrow);
            } else {
                cpu::reduce::<cpu::Max<Acc>, T, Acc>(pool, x, num_reduced, write(y), &|max| max);
            }
        }, else return Err(KernelError::DType { kernel: MAX.name, dtype: x.dtype }));
        Ok(())
    }),
    gpu: Some(GpuCode {
        source: gpu::SOURCE,
        plan: |launch, plan| described("max", launch, plan, launch.scalars[0].int() as usize, gpu::Fold::Max),
    }),
    flops: |launch| launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

/// y = the smallest of x over the trailing dims; infinity for no elements; NaN propagates. Operands as in [`MAX`].
#[doc(alias = "amin")]
pub static MIN: Kernel = Kernel {
    name: "min",
    reference: |_, launch| plain("min", launch, smallest),
    cpu: Some(|pool, launch| {
        let ([x], [y], scalars) = operands(launch);
        match_float!(x.dtype, T => {
            type Acc = <T as Float>::Acc;
            let num_reduced = scalars[0].int() as usize;
            if y.dtype == x.dtype {
                cpu::reduce::<cpu::Min<Acc>, T, T>(pool, x, num_reduced, write(y), &T::narrow);
            } else {
                cpu::reduce::<cpu::Min<Acc>, T, Acc>(pool, x, num_reduced, write(y), &|min| min);
            }
        }, else return Err(KernelError::DType { kernel: MIN.name, dtype: x.dtype }));
        Ok(())
    }),
    gpu: Some(GpuCode {
        source: gpu::SOURCE,
        plan: |launch, plan| described("min", launch, plan, launch.scalars[0].int() as usize, gpu::Fold::Min),
    }),
    flops: |launch| launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

/// y = the sum of the squares of all elements, in f64.
///
/// - in: x, any float, any strides
/// - out: y, f64, no dims
pub static SUM_SQUARES: Kernel = Kernel {
    name: "sum_squares",
    reference: |_, launch| plain_squares(&SUM_SQUARES, launch),
    cpu: Some(|pool, launch| squares(&SUM_SQUARES, pool, launch)),
    gpu: Some(GpuCode {
        source: gpu::SOURCE,
        plan: |launch, plan| {
            described("sum_squares", launch, plan, launch.inputs[0].view.ndim(), gpu::Fold::Squares)
        },
    }),
    flops: |launch| 2 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

/// The sum of the squares of each of k operands, with the same bits as by [`SUM_SQUARES`].
///
/// - in: x_1 .. x_k of any shapes, of one float dtype, contiguous
/// - out: y `(k)`, f64
#[doc(alias = "foreach_norm")]
pub static SUM_SQUARES_MANY: Kernel = Kernel {
    name: "sum_squares_many",
    reference: |_, launch| plain_squares(&SUM_SQUARES_MANY, launch),
    cpu: Some(|pool, launch| squares(&SUM_SQUARES_MANY, pool, launch)),
    gpu: Some(GpuCode { source: squares::SOURCE, plan: squares::plan }),
    flops: |launch| launch.inputs.iter().map(|x| 2 * x.view.numel() as u64).sum(),
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

fn plain_squares(kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let inputs = launch.inputs;
    for (x, y) in inputs.iter().zip(write::<f64>(&mut launch.outputs[0])) {
        match_float!(x.dtype, T => {
            let memory = x.buffer.as_slice::<T>();
            let mut squares = (0..x.view.numel()).map(|i| memory[element_offset(x.view, i)].to_f64().powi(2));
            *y = total(&mut squares);
        }, else return Err(KernelError::DType { kernel: kernel.name, dtype: x.dtype }));
    }
    Ok(())
}

fn squares(kernel: &Kernel, pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let inputs = launch.inputs;
    for (x, y) in inputs.iter().zip(write::<f64>(&mut launch.outputs[0]).chunks_mut(1)) {
        match_float!(x.dtype, T => {
            type Acc = <T as Float>::Acc;
            cpu::reduce::<cpu::Squares<Acc>, T, f64>(pool, x, x.view.ndim(), y, &|sum| sum);
        }, else return Err(KernelError::DType { kernel: kernel.name, dtype: x.dtype }));
    }
    Ok(())
}

fn described(
    kernel: &'static str,
    launch: &Launch<'_>,
    plan: &mut LaunchPlan,
    num_reduced: usize,
    fold: gpu::Fold,
) -> Result<(), KernelError> {
    let (x, y) = (&launch.inputs[0], &launch.outputs[0]);
    if !x.dtype.is_float() {
        return Err(KernelError::DType { kernel, dtype: x.dtype });
    }
    gpu::plan(plan, x, num_reduced, y, fold);
    Ok(())
}

/// Sums from the first term to the last with compensation, so that the order does not matter (Neumaier).
fn total(terms: &mut dyn Iterator<Item = f64>) -> f64 {
    let (mut sum, mut lost) = (0.0f64, 0.0);
    for x in terms {
        let next = sum + x;
        lost += if sum.abs() >= x.abs() { (sum - next) + x } else { (x - next) + sum };
        sum = next;
    }
    if sum.is_finite() { sum + lost } else { sum }
}

fn smallest(elements: &mut dyn Iterator<Item = f64>) -> f64 {
    elements.fold(f64::INFINITY, |min, x| if min < x || min.is_nan() { min } else { x })
}

fn largest(elements: &mut dyn Iterator<Item = f64>) -> f64 {
    elements.fold(f64::NEG_INFINITY, |max, x| if max > x || max.is_nan() { max } else { x })
}

type Plain = fn(&mut dyn Iterator<Item = f64>) -> f64;

/// Computes one result after the other, in f64; the second scalar is a factor.
fn plain(kernel: &'static str, launch: &mut Launch<'_>, fold: Plain) -> Result<(), KernelError> {
    fn each<T: Element, U: Element>(x: &Arg<'_>, y: &mut ArgMut<'_>, c: f64, fold: Plain) {
        let (memory, kept) = (x.buffer.as_slice::<T>(), y.view.numel());
        let reduced = x.view.numel().checked_div(kept).unwrap_or(0);
        for (i, y) in write::<U>(y).iter_mut().enumerate() {
            let mut elements = (0..reduced).map(|j| memory[element_offset(x.view, i * reduced + j)].to_f64());
            let result = fold(&mut elements);
            *y = U::from_f64(if c == 1.0 { result } else { c * result });
        }
    }
    let ([x], [y], scalars) = operands(launch);
    let c = scalars.get(1).map_or(1.0, |c| c.real());
    match_float!(x.dtype, T => if y.dtype == x.dtype {
        each::<T, T>(x, y, c, fold);
    } else {
        each::<T, <T as Float>::Acc>(x, y, c, fold);
    }, else return Err(KernelError::DType { kernel, dtype: x.dtype }));
    Ok(())
}

#[cfg(test)]
mod tests;
