//! Fast paths on the CPU: tasks of whole rows.

use super::{BACKWARD, SUM_EXP};
use crate::cpu::math::Maths;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{no_float, operands, read, rows_per_task, sum, write};

/// Terms summed in partial sums before these are added up: long rows lose fewer digits.
const BLOCK: usize = 1024;

pub(super) fn sum_exp(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, m], [s], scalars) = operands(launch);
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, m, n) = (read::<T>(x), read::<Acc>(m), scalars[0].int() as usize);
        let rows = rows_per_task(n);
        pool.chunks(write::<Acc>(s), rows, |task, s| {
            vectorized(#[inline(always)] || {
                for (j, s) in s.iter_mut().enumerate() {
                    let row = task * rows + j;
                    *s = sum_exp_row(&x[row * n..][..n], m[row]);
                }
            });
        });
        Ok(())
    }, else no_float(SUM_EXP.name, x.dtype))
}

// `exp` is called in generic code only: on a plain f32 it would be that of std.

#[inline(always)]
fn sum_exp_row<T: Float<Acc: Maths>>(x: &[T], m: T::Acc) -> T::Acc {
    if m == <T::Acc as Real>::NEG_INFINITY {
        return <T::Acc as Real>::ZERO;
    }
    let mut total = <T::Acc as Real>::ZERO;
    for block in x.chunks(BLOCK) {
        total += sum(block, |x| (x.widen() - m).exp());
    }
    total
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    if launch.inputs[0].view.numel() == 0 {
        return Ok(());
    }
    let ([x, y, dy], [dx], scalars) = operands(launch);
    match_float!(x.dtype, T => {
        let (x, y, n) = (read::<T>(x), read::<<T as Float>::Acc>(y), scalars[0].int() as usize);
        let dy = read::<T>(dy);
        let rows = rows_per_task(n);
        pool.chunks(write::<T>(dx), rows * n, |task, dx| {
            vectorized(#[inline(always)] || {
                for (j, dx) in dx.chunks_exact_mut(n).enumerate() {
                    let row = task * rows + j;
                    backward_row(&x[row * n..][..n], y[row], dy[row].widen(), dx);
                }
            });
        });
        Ok(())
    }, else no_float(BACKWARD.name, x.dtype))
}

#[inline(always)]
fn backward_row<T: Float<Acc: Maths>>(x: &[T], y: T::Acc, dy: T::Acc, dx: &mut [T]) {
    if y == <T::Acc as Real>::NEG_INFINITY {
        return dx.fill(T::default());
    }
    for (dx, x) in dx.iter_mut().zip(x) {
        *dx = T::narrow(dy * (x.widen() - y).exp());
    }
}
