//! The processor's way: the product, and one pass over what came of it while caches still hold some.

use super::{LINEAR, LINEAR_GELU, PRODUCT_GELU_GRAD, PRODUCT_SUMS};
use crate::cpu::Pool;
use crate::dtype::Float;
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Kernel, Launch, Scalar};
use crate::match_float;
use crate::op::contract::CONTRACT;
use crate::op::formula::{gelu_gate, gelu_slope};
use crate::op::pointwise::{map, update};
use crate::op::reduce::SUM;
use crate::op::rows::operands;
use crate::strides::Strides;

pub(super) fn linear(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b, bias], [c], _) = operands(launch);
    product(pool, [*a, *b], c)?;
    add(pool, &LINEAR, bias, c)
}

pub(super) fn linear_gelu(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b, bias], [c, z], _) = operands(launch);
    product(pool, [*a, *b], z)?;
    add(pool, &LINEAR_GELU, bias, z)?;
    let z = seen(z);
    match_float!(c.dtype, T => map::<1, T, T>(
        pool,
        [&z],
        c,
        #[inline(always)]
        |[x]| {
            let x = x.widen();
            T::narrow(x * gelu_gate(x))
        },
    ), else return Err(KernelError::DType { kernel: LINEAR_GELU.name, dtype: c.dtype }));
    Ok(())
}

pub(super) fn product_gelu_grad(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b, z], [c, sums], _) = operands(launch);
    product(pool, [*a, *b], c)?;
    match_float!(c.dtype, T => update::<1, T, T>(
        pool,
        [z],
        c,
        #[inline(always)]
        |y, [z]| T::narrow(y.widen() * gelu_slope(z.widen())),
    ), else return Err(KernelError::DType { kernel: PRODUCT_GELU_GRAD.name, dtype: c.dtype }));
    column_sums(pool, &seen(c), sums)
}

pub(super) fn product_sums(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b], [c, sums], _) = operands(launch);
    if !a.dtype.is_float() {
        return Err(KernelError::DType { kernel: PRODUCT_SUMS.name, dtype: a.dtype });
    }
    product(pool, [*a, *b], c)?;
    column_sums(pool, b, sums)
}

fn run(pool: &Pool, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    (kernel.cpu.unwrap_or(kernel.reference))(pool, launch)
}

fn product(pool: &Pool, factors: [Arg<'_>; 2], to: &mut ArgMut<'_>) -> Result<(), KernelError> {
    let to = ArgMut { buffer: &mut *to.buffer, dtype: to.dtype, view: to.view };
    run(pool, &CONTRACT, &mut Launch { inputs: &factors, outputs: &mut [to], scalars: &[] })
}

/// Adds the bias to every row.
fn add(pool: &Pool, kernel: &Kernel, bias: &Arg<'_>, to: &mut ArgMut<'_>) -> Result<(), KernelError> {
    let spread = bias.view.broadcast(&to.view.shape).expect("a row is one of many");
    let bias = Arg { view: &spread, ..*bias };
    match_float!(to.dtype, T => update::<1, T, T>(
        pool,
        [&bias],
        to,
        #[inline(always)]
        |y, [b]| T::narrow(y.widen() + b.widen()),
    ), else return Err(KernelError::DType { kernel: kernel.name, dtype: to.dtype }));
    Ok(())
}

/// sums_j = the sum of x_gij over g and i.
fn column_sums(pool: &Pool, x: &Arg<'_>, sums: &mut ArgMut<'_>) -> Result<(), KernelError> {
    let view: Strides = x.view.permute(&[2, 0, 1]);
    let to = ArgMut { buffer: &mut *sums.buffer, dtype: sums.dtype, view: sums.view };
    let scalars = [Scalar::Int(2), Scalar::Real(1.0)];
    let inputs = [Arg { view: &view, ..*x }];
    run(pool, &SUM, &mut Launch { inputs: &inputs, outputs: &mut [to], scalars: &scalars })
}

/// What was written, to be read.
fn seen<'a>(x: &'a ArgMut<'_>) -> Arg<'a> {
    Arg { buffer: x.buffer, dtype: x.dtype, view: x.view }
}
