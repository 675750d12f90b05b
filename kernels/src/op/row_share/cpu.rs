//! The fast paths: rows in fixed tasks.

use super::{EXP_SHARE, EXP_SUM, TIE_SHARE, TIES, is_idle, no_float};
use crate::cpu::math::Maths;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{operands, read, rows_per_task, sum, write};

/// Terms that are added up in partial sums before these are: long rows lose fewer digits so.
const BLOCK: usize = 1024;

pub(super) fn ties(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, y], [c], scalars) = operands(launch);
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, y, n) = (read::<T>(x), read::<T>(y), scalars[0].int() as usize);
        let rows = rows_per_task(n);
        pool.chunks(write::<Acc>(c), rows, |task, c| {
            vectorized(#[inline(always)] || {
                for (j, c) in c.iter_mut().enumerate() {
                    let row = task * rows + j;
                    *c = count(&x[row * n..][..n], y[row].widen());
                }
            });
        });
        Ok(())
    }, else no_float(TIES.name, x.dtype))
}

#[inline(always)]
fn count<T: Float>(x: &[T], y: T::Acc) -> T::Acc {
    // Whole blocks are counted in integers: a float counts up to 2^24 only, one by one.
    let mut ties = 0u64;
    for x in x {
        ties += u64::from(x.widen() == y);
    }
    Element::from_f64(ties as f64)
}

pub(super) fn tie_share(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    if is_idle(launch) {
        return Ok(());
    }
    let ([x, y, c, dy], [dx], scalars) = operands(launch);
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, y, n) = (read::<T>(x), read::<T>(y), scalars[0].int() as usize);
        let (c, dy) = (read::<Acc>(c), read::<T>(dy));
        let rows = rows_per_task(n);
        pool.chunks(write::<T>(dx), rows * n, |task, dx| {
            for (j, dx) in dx.chunks_exact_mut(n).enumerate() {
                let row = task * rows + j;
                let (y, share) = (y[row], T::narrow(dy[row].widen() / c[row]));
                let other = T::narrow(<Acc as Real>::ZERO / c[row]);
                let pairs = dx.iter_mut().zip(&x[row * n..][..n]);
                pairs.for_each(|(dx, x)| *dx = if *x == y { share } else { other });
            }
        });
        Ok(())
    }, else no_float(TIE_SHARE.name, x.dtype))
}

pub(super) fn exp_sum(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, m], [s], scalars) = operands(launch);
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, m, n) = (read::<T>(x), read::<Acc>(m), scalars[0].int() as usize);
        let rows = rows_per_task(n);
        pool.chunks(write::<Acc>(s), rows, |task, s| {
            vectorized(#[inline(always)] || {
                for (j, s) in s.iter_mut().enumerate() {
                    let row = task * rows + j;
                    *s = exp_sum_row(&x[row * n..][..n], m[row]);
                }
            });
        });
        Ok(())
    }, else no_float(EXP_SUM.name, x.dtype))
}

// The elementary functions are reached through generic code only: on a plain f32, `exp` would be that of std.

#[inline(always)]
fn exp_sum_row<T: Float<Acc: Maths>>(x: &[T], m: T::Acc) -> T::Acc {
    if m == <T::Acc as Real>::NEG_INFINITY {
        return <T::Acc as Real>::ZERO;
    }
    let mut total = <T::Acc as Real>::ZERO;
    for block in x.chunks(BLOCK) {
        total += sum(block, |x| (x.widen() - m).exp());
    }
    total
}

pub(super) fn exp_share(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    if is_idle(launch) {
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
                    exp_share_row(&x[row * n..][..n], y[row], dy[row].widen(), dx);
                }
            });
        });
        Ok(())
    }, else no_float(EXP_SHARE.name, x.dtype))
}

#[inline(always)]
fn exp_share_row<T: Float<Acc: Maths>>(x: &[T], y: T::Acc, dy: T::Acc, dx: &mut [T]) {
    if y == <T::Acc as Real>::NEG_INFINITY {
        return dx.fill(T::default());
    }
    for (dx, x) in dx.iter_mut().zip(x) {
        *dx = T::narrow(dy * (x.widen() - y).exp());
    }
}
