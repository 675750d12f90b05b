//! Sums and maxima over the trailing dims of a view, in an order that depends on the extents only.

use super::rows::{self, LANES, operands, write};
use super::runs::Walk;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, Kernel, Launch};
use crate::match_float;
use crate::strides::{Dims, Strides};

/// y = scale * sum over the trailing dims of x. In: x (kept dims.., reduced dims..; any strides, float). Out: y (kept
/// dims, contiguous, same dtype). Scalars: Int number of reduced dims, Real scale. Summed in the accumulator type.
pub static SUM: Kernel = Kernel {
    name: "sum",
    reference: |_, launch| reduce_reference("sum", launch, 0.0, |a, b| a + b),
    cpu: Some(|pool, launch| {
        match_float!(launch.inputs[0].dtype, T => sum::<T>(pool, launch),
            else return Err(KernelError::DType { kernel: "sum", dtype: launch.inputs[0].dtype }));
        Ok(())
    }),
    flops: |l| l.inputs[0].view.numel() as u64,
    bound: Bound { ulps: 64.0 },
};

/// The largest element over the trailing dims of x; negative infinity over nothing. In and out as [`SUM`], but y may
/// also have the accumulator dtype. Scalars: Int number of reduced dims. Not-a-number wins.
pub static MAX: Kernel = Kernel {
    name: "max",
    reference: |_, launch| reduce_reference("max", launch, f64::NEG_INFINITY, greatest),
    cpu: Some(|pool, launch| {
        match_float!(launch.inputs[0].dtype, T => max::<T>(pool, launch),
            else return Err(KernelError::DType { kernel: "max", dtype: launch.inputs[0].dtype }));
        Ok(())
    }),
    flops: |l| l.inputs[0].view.numel() as u64,
    bound: Bound { ulps: 0.0 },
};

/// y = sum of x^2 over everything, in f64. In: x (float, any strides). Out: y (f64, no dims).
pub static SUM_SQUARES: Kernel = Kernel {
    name: "sum_squares",
    reference: sum_squares,
    cpu: None,
    flops: |l| 2 * l.inputs[0].view.numel() as u64,
    bound: Bound { ulps: 64.0 },
};

fn greatest(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// The views of the kept and of the reduced dims, the first with the offset.
fn halves(x: &Arg<'_>, reduced: usize) -> (Strides, Strides) {
    let kept = x.view.ndim() - reduced;
    let part = |dims: std::ops::Range<usize>, offset| Strides {
        shape: Dims::from_slice(&x.view.shape[dims.clone()]),
        strides: Dims::from_slice(&x.view.strides[dims]),
        offset,
    };
    (part(0..kept, x.view.offset), part(kept..x.view.ndim(), 0))
}

fn reduce_reference(
    kernel: &'static str,
    launch: &mut Launch<'_>,
    empty: f64,
    join: fn(f64, f64) -> f64,
) -> Result<(), KernelError> {
    let ([x], [y], scalars) = operands(launch);
    let (kept, reduced) = halves(x, scalars[0].int() as usize);
    let scale = scalars.get(1).map_or(1.0, |s| s.real());
    let mut results = Vec::with_capacity(kept.numel());
    match_float!(x.dtype, T => {
        let memory = x.buffer.as_slice::<T>();
        let (outer, inner) = (Walk::new([&kept]), Walk::new([&reduced]));
        outer.runs(0..outer.num_runs(), |[at]| for i in 0..outer.run {
            let base = at + i * outer.steps[0];
            let mut total = empty;
            inner.runs(0..inner.num_runs(), |[from]| for j in 0..inner.run {
                total = join(total, memory[base + from + j * inner.steps[0]].to_f64());
            });
            results.push(if scale == 1.0 { total } else { total * scale });
        });
    }, else return Err(KernelError::DType { kernel, dtype: x.dtype }));
    match_float!(y.dtype, U => write::<U>(y).iter_mut().zip(results).for_each(|(y, r)| *y = U::from_f64(r)), else {});
    Ok(())
}

fn sum<T: Float>(pool: &Pool, launch: &mut Launch<'_>) {
    let ([x], [y], scalars) = operands(launch);
    let (kept, reduced) = halves(x, scalars[0].int() as usize);
    let scale = <T::Acc as Real>::lit(scalars[1].real());
    let memory = x.buffer.as_slice::<T>();
    let out = write::<T>(y);
    let (outer, inner) = (Walk::new([&kept]), Walk::new([&reduced]));
    // With neighbours in memory along a kept dim, whole rows are added to a row of sums.
    if outer.steps == [1] && inner.steps != [1] && outer.num_runs() == 1 && outer.run > 1 {
        return columns(pool, memory, out, (kept.offset, &inner), scale);
    }
    let per_task = (1 << 14) / reduced.numel().max(1) + 1;
    pool.chunks(out, per_task, |task, part| {
        let starts = starts(&kept, task * per_task, part.len());
        for (y, base) in part.iter_mut().zip(starts) {
            let mut total = T::Acc::ZERO;
            inner.runs(0..inner.num_runs(), |[from]| {
                total += vectorized(|| match inner.steps[0] {
                    1 => rows::sum(&memory[base + from..][..inner.run], T::widen),
                    step => strided_sum::<T>(&memory[base + from..], inner.run, step),
                });
            });
            *y = T::narrow(total * scale);
        }
    });
}

/// Where the kept elements `first..first + count` begin in memory.
fn starts(kept: &Strides, first: usize, count: usize) -> impl Iterator<Item = usize> {
    let (kept, ndim) = (kept.clone(), kept.ndim());
    (first..first + count).map(move |mut rest| {
        let mut at = kept.offset;
        for d in (0..ndim).rev() {
            at += rest % kept.shape[d] * kept.strides[d];
            rest /= kept.shape[d];
        }
        at
    })
}

#[inline(always)]
fn strided_sum<T: Float>(x: &[T], count: usize, step: usize) -> T::Acc {
    let mut lanes = [T::Acc::ZERO; LANES];
    for i in 0..count {
        lanes[i % LANES] += x[i * step].widen();
    }
    lanes.into_iter().fold(T::Acc::ZERO, |a, b| a + b)
}

/// Rows in one block of sums.
const ROWS: usize = 64;
/// Columns of one task.
const COLUMNS: usize = 256;

/// Sums over rows that lie `inner` apart, for columns that are neighbours: blocks of rows, added up in order.
fn columns<T: Float>(pool: &Pool, memory: &[T], out: &mut [T], (offset, inner): (usize, &Walk<1>), scale: T::Acc) {
    pool.chunks(out, COLUMNS, |task, out| {
        let (first, width) = (offset + task * COLUMNS, out.len());
        let (mut total, mut block) = ([T::Acc::ZERO; COLUMNS], [T::Acc::ZERO; COLUMNS]);
        let mut filled = 0;
        let mut flush = |block: &mut [T::Acc; COLUMNS], total: &mut [T::Acc; COLUMNS]| {
            total[..width].iter_mut().zip(&mut block[..width]).for_each(|(t, b)| *t += std::mem::replace(b, T::Acc::ZERO));
        };
        inner.runs(0..inner.num_runs(), |[from]| {
            for i in 0..inner.run {
                let row = &memory[first + from + i * inner.steps[0]..][..width];
                vectorized(#[inline(always)] || block.iter_mut().zip(row).for_each(|(b, x)| *b += x.widen()));
                filled += 1;
                if filled % ROWS == 0 {
                    flush(&mut block, &mut total);
                }
            }
        });
        flush(&mut block, &mut total);
        out.iter_mut().zip(total).for_each(|(y, t)| *y = T::narrow(t * scale));
    });
}

fn max<T: Float>(pool: &Pool, launch: &mut Launch<'_>) {
    let ([x], [y], scalars) = operands(launch);
    let (kept, reduced) = halves(x, scalars[0].int() as usize);
    let memory = x.buffer.as_slice::<T>();
    let inner = Walk::new([&reduced]);
    let one = |base: usize| {
        let mut best = T::Acc::NEG_INFINITY;
        let mut nan = false;
        inner.runs(0..inner.num_runs(), |[from]| match inner.steps[0] {
            1 => vectorized(|| {
                let row = &memory[base + from..][..inner.run];
                nan |= row.iter().fold(false, |n, x| n | (*x != *x));
                best = best.greater(rows::largest(row, T::widen));
            }),
            step => (0..inner.run).for_each(|i| {
                let x = memory[base + from + i * step].widen();
                nan |= x != x;
                best = best.greater(x);
            }),
        });
        if nan { T::Acc::ZERO / T::Acc::ZERO } else { best }
    };
    let per_task = (1 << 14) / reduced.numel().max(1) + 1;
    if y.dtype == T::DTYPE {
        pool.chunks(write::<T>(y), per_task, |task, part| {
            let starts = starts(&kept, task * per_task, part.len());
            part.iter_mut().zip(starts).for_each(|(y, base)| *y = T::narrow(one(base)));
        });
    } else {
        pool.chunks(write::<T::Acc>(y), per_task, |task, part| {
            let starts = starts(&kept, task * per_task, part.len());
            part.iter_mut().zip(starts).for_each(|(y, base)| *y = one(base));
        });
    }
}

fn sum_squares(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    const TASK: usize = 1 << 14;
    let ([x], [y], _) = operands(launch);
    let total = match_float!(x.dtype, T => {
        let memory = x.buffer.as_slice::<T>();
        let square = |x: T| x.to_f64() * x.to_f64();
        if x.view.is_contiguous() {
            let row = if x.view.numel() == 0 { &memory[..0] } else { &memory[x.view.offset..][..x.view.numel()] };
            let mut parts = vec![0.0; row.len().div_ceil(TASK)];
            pool.chunks(&mut parts, 1, |i, part| {
                part[0] = vectorized(|| rows::sum(&row[i * TASK..row.len().min((i + 1) * TASK)], square));
            });
            parts.iter().sum::<f64>()
        } else {
            let walk = Walk::new([x.view]);
            let mut total = 0.0;
            walk.runs(0..walk.num_runs(), |[at]| total += (0..walk.run).map(|i| square(memory[at + i * walk.steps[0]])).sum::<f64>());
            total
        }
    }, else return Err(KernelError::DType { kernel: "sum_squares", dtype: x.dtype }));
    debug_assert_eq!(y.dtype, DType::F64, "sums of squares are f64");
    write::<f64>(y)[0] = total;
    Ok(())
}
