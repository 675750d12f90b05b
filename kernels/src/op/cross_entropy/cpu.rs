//! Cross-entropy on the CPU: rows in fixed tasks; a row stays in the cache for the two passes of the way there.

use super::{BACKWARD, TERMS, local};
use crate::cpu::math::Maths;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{check_indices, largest, operands, read, row_len, rows_per_task, sum, width, write};

/// Terms that are added up in partial sums before these are: long rows lose fewer digits so.
const BLOCK: usize = 1024;

pub(super) fn terms(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([z, target], [lse, picked], scalars) = operands(launch);
    let (v, v_start, target) = (width(z), scalars[0].int(), read::<i64>(target));
    check_indices(TERMS.name, target, scalars[1].int())?;
    match_float!(z.dtype, T => {
        type Acc = <T as Float>::Acc;
        let z = read::<T>(z);
        let rows = rows_per_task(v);
        pool.chunks2((write::<Acc>(lse), rows), (write::<Acc>(picked), rows), |i, lse, picked| {
            vectorized(#[inline(always)] || {
                for (j, (lse, picked)) in lse.iter_mut().zip(picked).enumerate() {
                    let row = i * rows + j;
                    let z = &z[row * v..][..v];
                    *lse = lse_row(z);
                    *picked = local(target[row], v_start, v).map_or(Acc::ZERO, |at| z[at].widen());
                }
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: TERMS.name, dtype: z.dtype }))
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([target, lse, d_lse, d_picked], [z], scalars) = operands(launch);
    let (v, v_start, target) = (row_len(z.view), scalars[0].int(), read::<i64>(target));
    check_indices(BACKWARD.name, target, scalars[1].int())?;
    if v == 0 {
        return Ok(());
    }
    match_float!(z.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (lse, d_lse, d_picked) = (read::<Acc>(lse), read::<Acc>(d_lse), read::<Acc>(d_picked));
        let rows = rows_per_task(v);
        pool.chunks(write::<T>(z), rows * v, |i, z| {
            vectorized(#[inline(always)] || {
                for (j, z) in z.chunks_exact_mut(v).enumerate() {
                    let row = i * rows + j;
                    let picked = local(target[row], v_start, v).map(|at| (at, d_picked[row]));
                    backward_row(z, lse[row], d_lse[row], picked);
                }
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: z.dtype }))
}

// The elementary functions are reached through generic code only: on a plain f32, `exp` would be that of std.

#[inline(always)]
fn lse_row<T: Float<Acc: Maths>>(z: &[T]) -> T::Acc {
    let most = largest(z, T::widen);
    // Where there is nothing above negative infinity, the terms are 0 and not exp(-inf + inf).
    let base = if most == <T::Acc as Real>::NEG_INFINITY { <T::Acc as Real>::ZERO } else { most };
    let mut total = <T::Acc as Real>::ZERO;
    for block in z.chunks(BLOCK) {
        total += sum(block, |z| (z.widen() - base).exp());
    }
    base + total.ln()
}

#[inline(always)]
fn backward_row<T: Float<Acc: Maths>>(
    z: &mut [T],
    lse: T::Acc,
    d_lse: T::Acc,
    picked: Option<(usize, T::Acc)>,
) {
    let picked =
        picked.map(|(at, d_picked)| (at, T::narrow((z[at].widen() - lse).exp().fma(d_lse, d_picked))));
    for z in &mut *z {
        *z = T::narrow((z.widen() - lse).exp() * d_lse);
    }
    if let Some((at, dz)) = picked {
        z[at] = dz;
    }
}
