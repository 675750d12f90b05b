//! Layer normalisation on the CPU: tasks of whole rows; sums over rows in fixed blocks, combined in order.

use super::{BACKWARD, FORWARD};
use crate::cpu::simd::{prefetch, prefetch_after};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{
    operands, operands_and_last, read, rows_per_task, sum, sum_prefetching, width, write, write_and_sum_rows,
    write_input_grad,
};

pub(super) fn forward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, w, b], [y, mean, rstd], scalars) = operands(launch);
    let d = width(x);
    if d == 0 {
        return super::forward(pool, launch);
    }
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, w, b, eps) = (read::<T>(x), read::<T>(w), read::<T>(b), Acc::lit(scalars[0].real()));
        let rows = rows_per_task(d);
        let statistics = write::<Acc>(mean).chunks_mut(rows).zip(write::<Acc>(rstd).chunks_mut(rows));
        let mut tasks: Vec<_> = write::<T>(y).chunks_mut(rows * d).zip(statistics).collect();
        pool.chunks(&mut tasks, 1, |i, task| {
            let (y, (mean, rstd)) = &mut task[0];
            let x = &x[i * rows * d..][..y.len()];
            vectorized(#[inline(always)] || {
                let statistics = mean.iter_mut().zip(rstd.iter_mut());
                for ((x, y), (mean, rstd)) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(statistics) {
                    (*mean, *rstd) = forward_row(x, w, b, eps, y);
                }
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: x.dtype }))
}

#[inline(always)]
fn forward_row<T: Float>(x: &[T], w: &[T], b: &[T], eps: T::Acc, y: &mut [T]) -> (T::Acc, T::Acc) {
    let count = T::Acc::lit(x.len() as f64);
    let mean = sum(x, T::widen) / count;
    let var = sum(x, |v| (v.widen() - mean) * (v.widen() - mean)) / count;
    let rstd = T::Acc::ONE / (var + eps).root();
    for (((y, x), w), b) in y.iter_mut().zip(x).zip(w).zip(b) {
        *y = T::narrow(((x.widen() - mean) * rstd).fma(w.widen(), b.widen()));
    }
    (mean, rstd)
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let leaf_scalars = launch.scalars;
    let ([x, w, mean, rstd, dy], r, [dx, dw, db]) = operands_and_last(launch);
    let d = width(x);
    if d == 0 {
        return Ok(());
    }
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, w, dy, dx) = (read::<T>(x), read::<T>(w), read::<T>(dy), write::<T>(dx));
        let (mean, rstd, r) = (read::<Acc>(mean), read::<Acc>(rstd), r.map(read::<T>));
        write_and_sum_rows(pool, (dx, d), leaf_scalars, #[inline(always)] |row, dx: &mut [T]| {
            let at = row * d..(row + 1) * d;
            let r = r.map(|r| &r[at.clone()]);
            input_grad((&x[at.clone()], w, &dy[at]), (mean[row], rstd[row]), (dx, r));
        }, #[inline(always)] |row, [dw, db]: [&mut [Acc]; 2]| {
            let at = row * d..(row + 1) * d;
            add_parameter_grads((&x[at.clone()], &dy[at]), (mean[row], rstd[row]), (dw, db));
        }, [dw, db]);
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: x.dtype }))
}

/// Adds the terms of a row to dw and db.
#[inline(always)]
fn add_parameter_grads<T: Float>(
    (x, dy): (&[T], &[T]),
    (mean, rstd): (T::Acc, T::Acc),
    (dw, db): (&mut [T::Acc], &mut [T::Acc]),
) {
    for (((dw, db), x), dy) in dw.iter_mut().zip(db.iter_mut()).zip(x).zip(dy) {
        *dw = ((x.widen() - mean) * rstd).fma(dy.widen(), *dw);
        *db += dy.widen();
    }
}

/// Writes a row of dx.
#[inline(always)]
fn input_grad<T: Float>(
    (x, w, dy): (&[T], &[T], &[T]),
    (mean, rstd): (T::Acc, T::Acc),
    (dx, r): (&mut [T], Option<&[T]>),
) {
    let count = T::Acc::lit(x.len() as f64);
    // The sums read cached rows; meanwhile the outputs, then the next rows, are prefetched.
    let g_mean =
        sum_prefetching(dy, w, &*dx, |_, dx| prefetch(dx), |dy, w, _| dy.widen() * w.widen()) / count;
    let row_bytes = size_of_val(x);
    let next = |dy: &[T], x: &[T]| {
        prefetch_after(dy, row_bytes);
        prefetch_after(x, row_bytes);
    };
    let term = |dy: T, w: T, x: T| dy.widen() * w.widen() * ((x.widen() - mean) * rstd);
    let gh_mean = sum_prefetching(dy, w, x, next, term) / count;
    write_input_grad((x, w, dy), (dx, r), |x, w, dy| {
        let h = (x.widen() - mean) * rstd;
        rstd * (dy.widen() * w.widen() - g_mean - h * gh_mean)
    });
}
