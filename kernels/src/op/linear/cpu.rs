//! Linear layers on the CPU: a product with an epilogue on rows in the cache.

use super::{LINEAR, LINEAR_ADD, LINEAR_GELU, MATMUL_ADD, MATMUL_BIAS_GRAD, MATMUL_GELU_GRAD};
use crate::cpu::{Pool, vectorized};
use crate::dtype::Float;
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Kernel, Launch, Scalar};
use crate::match_float;
use crate::op::batched_matmul::{BATCHED_MATMUL, ended};
use crate::op::formula::{gelu_gate, gelu_slope};
use crate::op::reduce::SUM;
use crate::op::rows::{operands, read};
use crate::strides::Strides;

pub(super) fn linear(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b, bias], [c], _) = operands(launch);
    match_float!(c.dtype, T => {
        let bias = read::<T>(bias);
        ended::<T>(pool, [a, b], c, None, &|[_, col], c, _| vectorized(#[inline(always)] || {
            c.iter_mut().zip(&bias[col..]).for_each(|(c, bias)| *c = T::narrow(c.widen() + bias.widen()));
        }));
    }, else return Err(KernelError::DType { kernel: LINEAR.name, dtype: c.dtype }));
    Ok(())
}

pub(super) fn linear_add(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b, bias, r], [c], _) = operands(launch);
    match_float!(c.dtype, T => {
        let (bias, r, columns) = (read::<T>(bias), read::<T>(r), c.view.shape[2]);
        ended::<T>(pool, [a, b], c, None, &|[row, col], c, _| vectorized(#[inline(always)] || {
            for ((c, bias), r) in c.iter_mut().zip(&bias[col..]).zip(&r[row * columns + col..]) {
                *c = T::narrow(c.widen() + bias.widen() + r.widen());
            }
        }));
    }, else return Err(KernelError::DType { kernel: LINEAR_ADD.name, dtype: c.dtype }));
    Ok(())
}

pub(super) fn product_add(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b, r], [c], _) = operands(launch);
    match_float!(c.dtype, T => {
        let (r, columns) = (read::<T>(r), c.view.shape[2]);
        ended::<T>(pool, [a, b], c, None, &|[row, col], c, _| vectorized(#[inline(always)] || {
            let r = &r[row * columns + col..];
            c.iter_mut().zip(r).for_each(|(c, r)| *c = T::narrow(c.widen() + r.widen()));
        }));
    }, else return Err(KernelError::DType { kernel: MATMUL_ADD.name, dtype: c.dtype }));
    Ok(())
}

pub(super) fn linear_gelu(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b, bias], [c, z], _) = operands(launch);
    match_float!(z.dtype, T => {
        let bias = read::<T>(bias);
        ended::<T>(pool, [a, b], z, Some(c), &|[_, col], z, c| vectorized(#[inline(always)] || {
            for ((z, c), bias) in z.iter_mut().zip(c).zip(&bias[col..]) {
                *z = T::narrow(z.widen() + bias.widen());
                let x = z.widen();
                *c = T::narrow(x * gelu_gate(x));
            }
        }));
    }, else return Err(KernelError::DType { kernel: LINEAR_GELU.name, dtype: z.dtype }));
    Ok(())
}

pub(super) fn product_gelu_grad(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b, z], [c, sums], _) = operands(launch);
    match_float!(c.dtype, T => {
        let (z, columns) = (read::<T>(z), c.view.shape[2]);
        ended::<T>(pool, [a, b], c, None, &|[row, col], c, _| vectorized(#[inline(always)] || {
            let z = &z[row * columns + col..];
            c.iter_mut().zip(z).for_each(|(c, z)| *c = T::narrow(c.widen() * gelu_slope(z.widen())));
        }));
    }, else return Err(KernelError::DType { kernel: MATMUL_GELU_GRAD.name, dtype: c.dtype }));
    column_sums(pool, &seen(c), sums)
}

pub(super) fn product_sums(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b], [c, sums], _) = operands(launch);
    if !a.dtype.is_float() {
        return Err(KernelError::DType { kernel: MATMUL_BIAS_GRAD.name, dtype: a.dtype });
    }
    product(pool, [*a, *b], c)?;
    column_sums(pool, b, sums)
}

fn run(pool: &Pool, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    (kernel.cpu.unwrap_or(kernel.reference))(pool, launch)
}

fn product(pool: &Pool, factors: [Arg<'_>; 2], to: &mut ArgMut<'_>) -> Result<(), KernelError> {
    let to = ArgMut { buffer: &mut *to.buffer, dtype: to.dtype, view: to.view };
    run(pool, &BATCHED_MATMUL, &mut Launch { inputs: &factors, outputs: &mut [to], scalars: &[] })
}

/// sums_j = the sum of x_gij over g and i.
fn column_sums(pool: &Pool, x: &Arg<'_>, sums: &mut ArgMut<'_>) -> Result<(), KernelError> {
    let view: Strides = x.view.permute(&[2, 0, 1]);
    let to = ArgMut { buffer: &mut *sums.buffer, dtype: sums.dtype, view: sums.view };
    let scalars = [Scalar::Int(2), Scalar::Real(1.0)];
    let inputs = [Arg { view: &view, ..*x }];
    run(pool, &SUM, &mut Launch { inputs: &inputs, outputs: &mut [to], scalars: &scalars })
}

/// Returns an output as an input.
fn seen<'a>(x: &'a ArgMut<'_>) -> Arg<'a> {
    Arg { buffer: x.buffer, dtype: x.dtype, view: x.view }
}
