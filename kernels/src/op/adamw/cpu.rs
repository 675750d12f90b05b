//! AdamW on the CPU: one pass over gradients, parameters and moments.

use super::{Rates, STEP, grads, rates_of};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{read, rows_per_task, write};

/// A run of a parameter: its rates, then parameter, moments and gradient.
struct Run<'a, T: Float> {
    rates: Rates<T::Acc>,
    param: &'a mut [T],
    moments: [&'a mut [T::Acc]; 2],
    grad: &'a [T],
}

/// Updates all parameters in one call of the pool, in which each run is a task.
pub(super) fn step(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let grads = grads(launch.inputs);
    let (Some(first), Some(all)) = (grads.first(), rates_of(launch)) else { return Ok(()) };
    match_float!(first.dtype, T => {
        let mut runs: Vec<Run<'_, T>> = Vec::new();
        for ((grad, outputs), rates) in grads.iter().zip(launch.outputs.chunks_exact_mut(3)).zip(all) {
            let [param, m, v] = outputs else { unreachable!("chunks of three") };
            let (task, rates) = (rows_per_task(1), rates.rounded());
            let moments = write(m).chunks_mut(task).zip(write(v).chunks_mut(task));
            let parts = write(param).chunks_mut(task).zip(moments).zip(read(grad).chunks(task));
            runs.extend(parts.map(|((param, (m, v)), grad)| Run { rates, param, moments: [m, v], grad }));
        }
        pool.chunks(&mut runs, 1, |_, part| {
            let Run { rates, param, moments: [m, v], grad } = &mut part[0];
            vectorized(#[inline(always)] || step_run(*rates, grad, param, m, v));
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: STEP.name, dtype: first.dtype }))
}

#[inline(always)]
fn step_run<T: Float>(rates: Rates<T::Acc>, grad: &[T], param: &mut [T], m: &mut [T::Acc], v: &mut [T::Acc]) {
    for (((grad, param), m), v) in grad.iter().zip(param).zip(m).zip(v) {
        let g = rates.factor * grad.widen();
        *m = rates.beta1.fma(*m, rates.rest1 * g);
        *v = rates.beta2.fma(*v, rates.rest2 * g * g);
        let update = *m / rates.correction1 / ((*v / rates.correction2).root() + rates.eps);
        *param = T::narrow(param.widen().fma(rates.keep, -(rates.lr * update)));
    }
}
