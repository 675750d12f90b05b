//! AdamW on the CPU: one pass over gradient, parameter and both moments.

use super::{Rates, STEP};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{operands, read, rows_per_task, write};

pub(super) fn step(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([grad], [param, m, v], scalars) = operands(launch);
    match_float!(grad.dtype, T => {
        type Acc = <T as Float>::Acc;
        let rates: Rates<Acc> = Rates::new(scalars);
        let task = rows_per_task(1);
        let moments = write::<Acc>(m).chunks_mut(task).zip(write::<Acc>(v).chunks_mut(task));
        let grads = read::<T>(grad).chunks(task);
        let mut tasks: Vec<_> = write::<T>(param).chunks_mut(task).zip(moments).zip(grads).collect();
        pool.chunks(&mut tasks, 1, |_, part| {
            let ((param, (m, v)), grad) = &mut part[0];
            vectorized(#[inline(always)] || step_run(rates, grad, param, m, v));
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: STEP.name, dtype: grad.dtype }))
}

#[inline(always)]
fn step_run<T: Float>(rates: Rates<T::Acc>, grad: &[T], param: &mut [T], m: &mut [T::Acc], v: &mut [T::Acc]) {
    for (((grad, param), m), v) in grad.iter().zip(param).zip(m).zip(v) {
        let g = rates.grad_scale * grad.widen();
        *m = rates.beta1.fma(*m, rates.rest1 * g);
        *v = rates.beta2.fma(*v, rates.rest2 * g * g);
        let update = *m / rates.correction1 / ((*v / rates.correction2).root() + rates.eps);
        *param = T::narrow(param.widen().fma(rates.keep, -(rates.lr * update)));
    }
}
