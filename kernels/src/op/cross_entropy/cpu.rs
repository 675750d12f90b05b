//! Cross-entropy on the CPU: rows in fixed tasks, one pass over z each way.

use super::{BACKWARD, TERMS, local};
use crate::cpu::math::Maths;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{check_indices, operands, read, rows_per_task, sum, width, write};

pub(super) fn terms(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([z, max, target], [sum_exp, picked], scalars) = operands(launch);
    let (v, v_start, target) = (width(z), scalars[0].int(), read::<i64>(target));
    check_indices(TERMS.name, target, scalars[1].int())?;
    match_float!(z.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (z, max) = (read::<T>(z), read::<Acc>(max));
        let rows = rows_per_task(v);
        pool.chunks2((write::<Acc>(sum_exp), rows), (write::<Acc>(picked), rows), |i, sum_exp, picked| {
            vectorized(#[inline(always)] || {
                for (j, (sum_exp, picked)) in sum_exp.iter_mut().zip(picked).enumerate() {
                    let row = i * rows + j;
                    let z = &z[row * v..][..v];
                    *sum_exp = terms_row(z, max[row]);
                    *picked = local(target[row], v_start, v).map_or(Acc::ZERO, |at| z[at].widen());
                }
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: TERMS.name, dtype: z.dtype }))
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([z, max, target, d_sum, d_picked], [dz], scalars) = operands(launch);
    let (v, v_start, target) = (width(z), scalars[0].int(), read::<i64>(target));
    check_indices(BACKWARD.name, target, scalars[1].int())?;
    if v == 0 {
        return Ok(());
    }
    match_float!(z.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (z, max) = (read::<T>(z), read::<Acc>(max));
        let (d_sum, d_picked) = (read::<Acc>(d_sum), read::<Acc>(d_picked));
        let rows = rows_per_task(v);
        pool.chunks(write::<T>(dz), rows * v, |i, dz| {
            vectorized(#[inline(always)] || {
                for (j, dz) in dz.chunks_exact_mut(v).enumerate() {
                    let row = i * rows + j;
                    let z = &z[row * v..][..v];
                    let picked = local(target[row], v_start, v).map(|at| (at, d_picked[row]));
                    backward_row(z, max[row], d_sum[row], picked, dz);
                }
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: z.dtype }))
}

// The elementary functions are reached through generic code only: on a plain f32, `exp` would be that of std.

#[inline(always)]
fn terms_row<T: Float<Acc: Maths>>(z: &[T], max: T::Acc) -> T::Acc {
    sum(z, |z| (z.widen() - max).exp())
}

#[inline(always)]
fn backward_row<T: Float<Acc: Maths>>(
    z: &[T],
    max: T::Acc,
    d_sum: T::Acc,
    picked: Option<(usize, T::Acc)>,
    dz: &mut [T],
) {
    for (dz, z) in dz.iter_mut().zip(z) {
        *dz = T::narrow((z.widen() - max).exp() * d_sum);
    }
    if let Some((at, d_picked)) = picked {
        dz[at] = T::narrow((z[at].widen() - max).exp().fma(d_sum, d_picked));
    }
}
