//! Cross-entropy on the CPU: tasks of whole rows; a row stays in the cache for the two passes of the forward, of which the second
//! prefetches the next row.

use super::{BACKWARD, FORWARD, local};
use crate::cpu::math::Maths;
use crate::cpu::simd::prefetch_ahead;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{
    check_indices, largest, operands, read, row_len, rows_per_task, sum_before, width, write,
};

/// Terms summed in partial sums before these are added up: long rows lose fewer digits.
const BLOCK: usize = 1024;
/// Rows per task, if there are enough for all threads: the first row of a task is not prefetched.
const ROWS: usize = 8;
/// Tasks per thread, so that all threads end together.
const TASKS: usize = 4;
/// Elements prefetched at a time.
const RUN: usize = 64;

pub(super) fn terms(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([z, target], [lse, picked], scalars) = operands(launch);
    let (v, v_start, target) = (width(z), scalars[0].int(), read::<i64>(target));
    check_indices(FORWARD.name, target, scalars[1].int())?;
    match_float!(z.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (z, lse) = (read::<T>(z), write::<Acc>(lse));
        let rows = rows_per_task(v).max(ROWS.min(lse.len() / (TASKS * pool.num_threads())));
        pool.chunks2((lse, rows), (write::<Acc>(picked), rows), |i, lse, picked| {
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
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: z.dtype }))
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

// `exp` is called in generic code only: on a plain f32 it would be that of std.

#[inline(always)]
fn lse_row<T: Float<Acc: Maths>>(z: &[T]) -> T::Acc {
    let most = largest(z, T::widen);
    // If all are negative infinity, the terms are 0 and not exp(-inf + inf).
    let base = if most == <T::Acc as Real>::NEG_INFINITY { <T::Acc as Real>::ZERO } else { most };
    let mut total = <T::Acc as Real>::ZERO;
    for block in z.chunks(BLOCK) {
        total += sum_before(block, size_of_val(z), |z| (z.widen() - base).decay());
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
        picked.map(|(at, d_picked)| (at, T::narrow((z[at].widen() - lse).decay().fma(d_lse, d_picked))));
    for z in z.chunks_mut(RUN) {
        // A run of exponentials is longer than the hardware prefetcher looks ahead.
        prefetch_ahead(z);
        for z in z {
            *z = T::narrow((z.widen() - lse).decay() * d_lse);
        }
    }
    if let Some((at, dz)) = picked {
        z[at] = dz;
    }
}
