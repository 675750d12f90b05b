//! Fast paths on the CPU: tasks of whole rows.

use super::{BACKWARD, COUNT_TIES};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{no_float, operands, read, rows_per_task, write};

pub(super) fn count_ties(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
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
    }, else no_float(COUNT_TIES.name, x.dtype))
}

#[inline(always)]
fn count<T: Float>(x: &[T], y: T::Acc) -> T::Acc {
    // Counted in integers: an f32 counts up to 2^24 only.
    let mut ties = 0u64;
    for x in x {
        ties += u64::from(x.widen() == y);
    }
    Element::from_f64(ties as f64)
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    if launch.inputs[0].view.numel() == 0 {
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
    }, else no_float(BACKWARD.name, x.dtype))
}
