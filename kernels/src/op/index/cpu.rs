//! Picking and adding by index on the CPU. Tasks own whole parts of the result, so that no sum is shared.

use super::{GATHER, Plan, SCATTER_ADD};
use crate::cpu::Pool;
use crate::dtype::{DType, Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::op::rows::{operands, read, rows_per_task, write};
use crate::{match_dtype, match_float};

/// Into so many parts a single long dim is cut, each of which looks at every index.
const PARTS: usize = 4;

pub(super) fn gather(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, index], [y], scalars) = operands(launch);
    let starts = [scalars[0].int(), scalars[1].int()];
    let plan = Plan::new(GATHER.name, index, [&y.view.shape, &x.view.shape], starts)?;
    if plan.c == 0 {
        return Ok(());
    }
    match_dtype!(x.dtype, T => {
        let (x, rows) = (read::<T>(x), rows_per_task(plan.c));
        pool.chunks(write::<T>(y), rows * plan.c, |i, y| pick(&plan, i * rows, x, y));
    });
    Ok(())
}

/// Fills the rows from `first` on.
fn pick<T: Element>(plan: &Plan<'_>, first: usize, x: &[T], y: &mut [T]) {
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

pub(super) fn scatter_add(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([index, dy], [dx], scalars) = operands(launch);
    let starts = [scalars[0].int(), scalars[1].int()];
    let plan = Plan::new(SCATTER_ADD.name, index, [&dy.view.shape, &dx.view.shape], starts)?;
    match dy.dtype {
        DType::I64 => each(
            pool,
            &plan,
            read::<i64>(dy),
            write::<i64>(dx),
            0i64,
            |sum, x| *sum = sum.wrapping_add(x),
            |sum| sum,
        ),
        dtype => match_float!(dtype, T => each(
            pool,
            &plan,
            read::<T>(dy),
            write::<T>(dx),
            <T as Float>::Acc::ZERO,
            #[inline(always)]
            |sum, x: T| *sum += x.widen(),
            T::narrow,
        ), else return Err(KernelError::DType { kernel: SCATTER_ADD.name, dtype })),
    }
    Ok(())
}

/// Cuts the result into whole a, or a single one into [`PARTS`] ranges of v.
fn each<T: Element, S: Copy + Send + Sync>(
    pool: &Pool,
    plan: &Plan<'_>,
    dy: &[T],
    dx: &mut [T],
    zero: S,
    add: impl Fn(&mut S, T) + Sync,
    store: impl Fn(S) -> T + Sync,
) {
    let size = plan.v * plan.c;
    if size == 0 {
        return;
    }
    let per_part = if plan.a == 1 { plan.v.div_ceil(PARTS) } else { plan.v };
    let parts_per_task = if plan.a == 1 { 1 } else { rows_per_task(size) };
    pool.chunks(dx, parts_per_task * per_part * plan.c, |i, dx| {
        let mut sums = vec![zero; per_part * plan.c];
        for (j, dx) in dx.chunks_mut(per_part * plan.c).enumerate() {
            let part = i * parts_per_task + j;
            let (a, first) = if plan.a == 1 { (0, part * per_part) } else { (part, 0) };
            sums.fill(zero);
            for n in 0..plan.n {
                let row = a * plan.n + n;
                let dy = &dy[row * plan.c..][..plan.c];
                let place = |c| plan.local(row, n, c)?.checked_sub(first).filter(|&v| v < per_part);
                if plan.is_shared {
                    let Some(v) = place(0) else { continue };
                    sums[v * plan.c..].iter_mut().zip(dy).for_each(|(sum, &dy)| add(sum, dy));
                } else {
                    for (c, &dy) in dy.iter().enumerate() {
                        if let Some(v) = place(c) {
                            add(&mut sums[v * plan.c + c], dy);
                        }
                    }
                }
            }
            dx.iter_mut().zip(&sums).for_each(|(dx, &sum)| *dx = store(sum));
        }
    });
}
