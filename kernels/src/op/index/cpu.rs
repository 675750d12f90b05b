//! Gather and scatter-add on the CPU. Each task owns a part of the result, so that no two tasks add to the same sum.

use super::{GATHER, LaunchPlan, SCATTER_ADD};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element, Float, Real};
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::Launch;
use crate::match_dtype;
use crate::op::rows::{operands, read, rows_per_task, write};
use half::{bf16, f16};

/// Parts into which a single long dim is cut if one list of indices serves all; each part scans the whole list.
const PARTS: usize = 16;
/// The number of parts if every element has an index.
const PARTS_OF_MANY: usize = 2;

pub(super) fn gather(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, index], [y], scalars) = operands(launch);
    let starts = [scalars[0].int(), scalars[1].int()];
    let plan = LaunchPlan::new(GATHER.name, index, [&y.view.shape, &x.view.shape], starts)?;
    if plan.c == 0 {
        return Ok(());
    }
    match_dtype!(x.dtype, T => {
        let (x, rows) = (read::<T>(x), rows_per_task(plan.c));
        pool.chunks(write::<T>(y), rows * plan.c, |i, y| match plan.c {
            1 => vectorized(#[inline(always)] || pick_single(&plan, i * rows, x, y)),
            _ => pick(&plan, i * rows, x, y),
        });
    });
    Ok(())
}

/// Fills the rows from `first` on.
fn pick<T: Element>(plan: &LaunchPlan<'_>, first: usize, x: &[T], y: &mut [T]) {
    let (mut a, mut n) = (first / plan.n, first % plan.n);
    for (row, y) in (first..).zip(y.chunks_exact_mut(plan.c)) {
        let x = &x[a * plan.v * plan.c..][..plan.v * plan.c];
        if plan.is_shared {
            match plan.local(row, n, 0) {
                Some(v) => y.copy_from_slice(&x[v * plan.c..][..plan.c]),
                None => y.fill(T::default()),
            }
        } else {
            for (c, y) in y.iter_mut().enumerate() {
                *y = plan.local(row, n, c).map_or(T::default(), |v| x[v * plan.c + c]);
            }
        }
        n += 1;
        if n == plan.n {
            (a, n) = (a + 1, 0);
        }
    }
}

/// Fills the elements from `first` on, where a row is one element.
#[inline(always)]
fn pick_single<T: Element>(plan: &LaunchPlan<'_>, first: usize, x: &[T], y: &mut [T]) {
    let mut done = 0;
    while done < y.len() {
        let (a, n) = ((first + done) / plan.n, (first + done) % plan.n);
        let length = (plan.n - n).min(y.len() - done);
        let index = &plan.index[if plan.is_shared { n } else { first + done }..][..length];
        let x = &x[a * plan.v..][..plan.v];
        for (y, &index) in y[done..done + length].iter_mut().zip(index) {
            *y = x.get(index.wrapping_sub(plan.v_start) as usize).copied().unwrap_or_default();
        }
        done += length;
    }
}

pub(super) fn scatter_add(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([index, dy], [dx], scalars) = operands(launch);
    let starts = [scalars[0].int(), scalars[1].int()];
    let plan = LaunchPlan::new(SCATTER_ADD.name, index, [&dy.view.shape, &dx.view.shape], starts)?;
    macro_rules! sums {
        ($t:ty) => {
            each(pool, &plan, read::<$t>(dy), write::<$t>(dx), |dx, dy| {
                add_part(&plan, dx, dy, |sum, x| *sum += x)
            })
        };
        ($t:ty, short) => {
            each(pool, &plan, read::<$t>(dy), write::<$t>(dx), |dx, dy| {
                let mut sums = filled_or_unwind(f32::ZERO, dx.1.len());
                add_part(&plan, (dx.0, &mut sums), dy, |sum, x: $t| *sum += x.widen());
                dx.1.iter_mut().zip(sums).for_each(|(dx, sum)| *dx = <$t>::narrow(sum));
            })
        };
    }
    match dy.dtype {
        DType::F64 => sums!(f64),
        DType::F32 => sums!(f32),
        DType::BF16 => sums!(bf16, short),
        DType::F16 => sums!(f16, short),
        DType::I64 => each(pool, &plan, read::<i64>(dy), write::<i64>(dx), |dx, dy| {
            add_part(&plan, dx, dy, |sum: &mut i64, x| *sum = sum.wrapping_add(x));
        }),
        dtype => return Err(KernelError::DType { kernel: SCATTER_ADD.name, dtype }),
    }
    Ok(())
}

/// A part of the result and the (a, v) with which it begins.
type Part<'a, S> = ([usize; 2], &'a mut [S]);

/// Splits the result into whole a, or a single one into ranges of v, and zeroes it; `task` sums a part from dy.
fn each<T: Element>(
    pool: &Pool,
    plan: &LaunchPlan<'_>,
    dy: &[T],
    dx: &mut [T],
    task: impl Fn(Part<'_, T>, &[T]) + Sync,
) {
    let size = plan.v * plan.c;
    if size == 0 {
        return;
    }
    let parts = if plan.is_shared { PARTS } else { PARTS_OF_MANY };
    let per_part = if plan.a == 1 { plan.v.div_ceil(parts) } else { plan.v };
    let parts_per_task = if plan.a == 1 { 1 } else { rows_per_task(size) };
    pool.chunks(dx, parts_per_task * per_part * plan.c, |i, dx| {
        for (j, dx) in dx.chunks_mut(per_part * plan.c).enumerate() {
            let part = i * parts_per_task + j;
            dx.fill(T::default());
            task((if plan.a == 1 { [0, part * per_part] } else { [part, 0] }, dx), dy);
        }
    });
}

/// Sums the terms of a part, in the order of n.
fn add_part<T: Element, S: Copy>(
    plan: &LaunchPlan<'_>,
    ([a, first], sums): Part<'_, S>,
    dy: &[T],
    add: impl Fn(&mut S, T),
) {
    let (c, rows) = (plan.c, sums.len() / plan.c);
    let place =
        |index: i64| Some(index.wrapping_sub(plan.v_start + first as i64) as usize).filter(|&v| v < rows);
    let dy = &dy[a * plan.n * c..][..plan.n * c];
    let index = if plan.is_shared { plan.index } else { &plan.index[a * plan.n * c..][..plan.n * c] };
    vectorized(
        #[inline(always)]
        || {
            if c == 1 {
                for (&dy, &index) in dy.iter().zip(index) {
                    if let Some(v) = place(index) {
                        add(&mut sums[v], dy);
                    }
                }
            } else if plan.is_shared {
                for (dy, &index) in dy.chunks_exact(c).zip(index) {
                    if let Some(v) = place(index) {
                        sums[v * c..][..c].iter_mut().zip(dy).for_each(|(sum, &dy)| add(sum, dy));
                    }
                }
            } else {
                for (dy, index) in dy.chunks_exact(c).zip(index.chunks_exact(c)) {
                    for (at, (&dy, &index)) in dy.iter().zip(index).enumerate() {
                        if let Some(v) = place(index) {
                            add(&mut sums[v * c + at], dy);
                        }
                    }
                }
            }
        },
    );
}
