//! Layer normalisation on the CPU: tasks of whole rows; sums over rows in fixed blocks, combined in order.

use super::{BACKWARD, FORWARD};
use crate::cpu::simd::{prefetch, prefetch_after};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{
    ROWS_PER_SUM, add_blocks, leaves_of_rows, operands, operands_and_last, read, rows_per_task, sum,
    sum_prefetching, sum_rows_of_leaves, width, write,
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
        if !leaf_scalars.is_empty() {
            let leaves = leaves_of_rows(leaf_scalars, dx.len() / d);
            let rows = rows_per_task(d);
            pool.chunks(dx, rows * d, |i, dx| vectorized(#[inline(always)] || {
                for (row, dx) in dx.chunks_exact_mut(d).enumerate().map(|(row, dx)| (i * rows + row, dx)) {
                    let at = row * d..(row + 1) * d;
                    let r = r.map(|r| &r[at.clone()]);
                    input_grad((&x[at.clone()], w, &dy[at]), (mean[row], rstd[row]), (dx, r));
                }
            }));
            sum_rows_of_leaves::<T, 2>(pool, &leaves, #[inline(always)] |row, [dw, db]: [&mut [Acc]; 2]| {
                let at = row * d..(row + 1) * d;
                add_parameter_grads((&x[at.clone()], &dy[at]), (mean[row], rstd[row]), (dw, db));
            }, [write(dw), write(db)]);
            return Ok(());
        }
        let task = ROWS_PER_SUM * d;
        let num_blocks = dx.len().div_ceil(task);
        let (mut dw_blocks, mut db_blocks) = (filled_or_unwind(Acc::ZERO, num_blocks * d), filled_or_unwind(Acc::ZERO, num_blocks * d));
        let sums = dw_blocks.chunks_mut(d).zip(db_blocks.chunks_mut(d));
        let mut tasks: Vec<_> = dx.chunks_mut(task).zip(sums).collect();
        pool.chunks(&mut tasks, 1, |i, part| {
            let (dx, (dw, db)) = &mut part[0];
            let (x, dy) = (&x[i * task..][..dx.len()], &dy[i * task..][..dx.len()]);
            let (mean, rstd) = (&mean[i * ROWS_PER_SUM..], &rstd[i * ROWS_PER_SUM..]);
            let r = r.map(|r| &r[i * task..]);
            vectorized(#[inline(always)] || {
                for (row, dx) in dx.chunks_exact_mut(d).enumerate() {
                    let (x, dy) = (&x[row * d..][..d], &dy[row * d..][..d]);
                    let r = r.map(|r| &r[row * d..][..d]);
                    backward_row((x, w, dy), (mean[row], rstd[row]), (dx, r), (&mut *dw, &mut *db));
                }
            });
        });
        for (out, blocks) in [(dw, dw_blocks), (db, db_blocks)] {
            match out.dtype {
                T::DTYPE => add_blocks::<T>(pool, &blocks, write(out)),
                _ => add_blocks::<Acc>(pool, &blocks, write(out)),
            }
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: x.dtype }))
}

#[inline(always)]
fn backward_row<T: Float>(
    (x, w, dy): (&[T], &[T], &[T]),
    (mean, rstd): (T::Acc, T::Acc),
    (dx, r): (&mut [T], Option<&[T]>),
    (dw, db): (&mut [T::Acc], &mut [T::Acc]),
) {
    add_parameter_grads((x, dy), (mean, rstd), (dw, db));
    input_grad((x, w, dy), (mean, rstd), (dx, r));
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
    let slope = |x: &T, w: &T, dy: &T| {
        let h = (x.widen() - mean) * rstd;
        rstd * (dy.widen() * w.widen() - g_mean - h * gh_mean)
    };
    let places = dx.iter_mut().zip(x).zip(w).zip(dy);
    match r {
        None => {
            for (((dx, x), w), dy) in places {
                *dx = T::narrow(slope(x, w, dy));
            }
        }
        Some(r) => {
            for ((((dx, x), w), dy), r) in places.zip(r) {
                *dx = T::narrow(slope(x, w, dy) + r.widen());
            }
        }
    }
}
