//! Softmax on the CPU: tasks of whole rows; a row stays in the L1 cache for its three passes.

use super::{BACKWARD, FORWARD};
use crate::cpu::math::Maths;
use crate::cpu::simd::{prefetch, prefetch_after};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{largest, operands, read, rows_per_task, sum, sum_pairs, width, write};

/// Elements prefetched at a time.
const RUN: usize = 64;

pub(super) fn forward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], _) = operands(launch);
    let n = width(x).max(1);
    match_float!(x.dtype, T => {
        let (x, task) = (read::<T>(x), n * rows_per_task(n));
        pool.chunks(write::<T>(y), task, |i, y| {
            let x = &x[i * task..][..y.len()];
            let mut scratch = filled_or_unwind(<T as Float>::Acc::ZERO, n);
            vectorized(#[inline(always)] || {
                for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
                    forward_row(x, &mut scratch, y);
                }
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: x.dtype }))
}

#[inline(always)]
fn forward_row<T: Float<Acc: Maths>>(x: &[T], e: &mut [T::Acc], y: &mut [T]) {
    let (max, row_bytes) = (largest(x, T::widen), size_of_val(x));
    for ((e, x), y) in e.chunks_mut(RUN).zip(x.chunks(RUN)).zip(y.chunks(RUN)) {
        // Prefetch the output, and then the next row: the exponentials leave time for that.
        prefetch(y);
        prefetch_after(x, row_bytes);
        for (e, x) in e.iter_mut().zip(x) {
            *e = (x.widen() - max).decay();
        }
    }
    let scale = T::Acc::ONE / sum(e, |v| v);
    for (y, &e) in y.iter_mut().zip(&*e) {
        *y = T::narrow(e * scale);
    }
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([y, dy], [dx], _) = operands(launch);
    let n = width(y).max(1);
    match_float!(y.dtype, T => {
        let (y, dy, task) = (read::<T>(y), read::<T>(dy), n * rows_per_task(n));
        pool.chunks(write::<T>(dx), task, |i, dx| {
            let (y, dy) = (&y[i * task..][..dx.len()], &dy[i * task..][..dx.len()]);
            vectorized(#[inline(always)] || {
                for ((y, dy), dx) in y.chunks_exact(n).zip(dy.chunks_exact(n)).zip(dx.chunks_exact_mut(n)) {
                    backward_row(y, dy, dx);
                }
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: y.dtype }))
}

#[inline(always)]
fn backward_row<T: Float>(y: &[T], dy: &[T], dx: &mut [T]) {
    let dot = sum_pairs(y, dy, |y, dy| y.widen() * dy.widen());
    for ((dx, y), dy) in dx.iter_mut().zip(y).zip(dy) {
        *dx = T::narrow(y.widen() * (dy.widen() - dot));
    }
}
