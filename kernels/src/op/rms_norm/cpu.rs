//! RMS normalisation on the CPU: tasks of whole rows; sums over rows in fixed blocks, combined in order.

use super::{BACKWARD, FORWARD};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{
    operands, operands_and_last, read, rows_per_task, sum, sum_triples, width, write, write_and_sum_rows,
    write_input_grad,
};

pub(super) fn forward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, w], [y, rstd], scalars) = operands(launch);
    let d = width(x);
    if d == 0 {
        return super::forward(pool, launch);
    }
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, w, eps) = (read::<T>(x), read::<T>(w), Acc::lit(scalars[0].real()));
        let rows = rows_per_task(d);
        pool.chunks2((write::<T>(y), rows * d), (write::<Acc>(rstd), rows), |i, y, rstd| {
            let x = &x[i * rows * d..][..y.len()];
            vectorized(#[inline(always)] || {
                for ((x, y), rstd) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(rstd) {
                    *rstd = forward_row(x, w, eps, y);
                }
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: x.dtype }))
}

#[inline(always)]
fn forward_row<T: Float>(x: &[T], w: &[T], eps: T::Acc, y: &mut [T]) -> T::Acc {
    let count = T::Acc::lit(x.len() as f64);
    let rstd = T::Acc::ONE / (sum(x, |v| v.widen() * v.widen()) / count + eps).root();
    for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
        *y = T::narrow(x.widen() * rstd * w.widen());
    }
    rstd
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let leaf_scalars = launch.scalars;
    let ([x, w, rstd, dy], r, [dx, dw]) = operands_and_last(launch);
    let d = width(x);
    if d == 0 {
        return Ok(());
    }
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, w, dy, rstd, dx) = (read::<T>(x), read::<T>(w), read::<T>(dy), read::<Acc>(rstd), write::<T>(dx));
        let r = r.map(read::<T>);
        write_and_sum_rows(pool, (dx, d), leaf_scalars, #[inline(always)] |row, dx: &mut [T]| {
            let at = row * d..(row + 1) * d;
            let r = r.map(|r| &r[at.clone()]);
            input_grad((&x[at.clone()], w, &dy[at]), rstd[row], (dx, r));
        }, #[inline(always)] |row, [dw]: [&mut [Acc]; 1]| {
            let at = row * d..(row + 1) * d;
            add_weight_grad((&x[at.clone()], &dy[at]), rstd[row], dw);
        }, [dw]);
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: x.dtype }))
}

/// Adds the terms of a row to dw.
#[inline(always)]
fn add_weight_grad<T: Float>((x, dy): (&[T], &[T]), rstd: T::Acc, dw: &mut [T::Acc]) {
    for ((dw, x), dy) in dw.iter_mut().zip(x).zip(dy) {
        *dw = (x.widen() * rstd).fma(dy.widen(), *dw);
    }
}

/// Writes a row of dx.
#[inline(always)]
fn input_grad<T: Float>((x, w, dy): (&[T], &[T], &[T]), rstd: T::Acc, (dx, r): (&mut [T], Option<&[T]>)) {
    let count = T::Acc::lit(x.len() as f64);
    let gh_mean = sum_triples(dy, w, x, |dy, w, x| dy.widen() * w.widen() * (x.widen() * rstd)) / count;
    write_input_grad((x, w, dy), (dx, r), |x, w, dy| {
        rstd * (dy.widen() * w.widen() - x.widen() * rstd * gh_mean)
    });
}
