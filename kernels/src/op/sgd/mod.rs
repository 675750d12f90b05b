//! One step of stochastic gradient descent with momentum on a flat run of parameters.

mod gpu;

use crate::cpu::{Pool, vectorized};
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, GpuCode, Kernel, Launch, Scalar};
use crate::match_float;
use crate::op::rows::{operands, read, rows_per_task, write};

/// One step, in place. With g = factor grad + weight_decay param: v = momentum v + g, and
/// param = param - lr v, or param - lr (g + momentum v) after Nesterov (the form of Sutskever and others 2013).
///
/// - in: grad `(n)`, any float, contiguous; rates f64 `(3)`: lr, momentum, weight_decay; check f64, contiguous: the factor (of a
///   gradient clip, or 1), and 0 to skip the step, as [`OVERFLOW_CHECK`](super::overflow_check::OVERFLOW_CHECK) computes them
/// - out: param `(n)` in the dtype of grad, v `(n)` in its accumulator; contiguous, updated
/// - scalars: Int nesterov (1 or 0)
///
/// Everything is computed in the accumulator. A parameter in a 16-bit float loses updates below half its last place.
/// Counted: 8 operations per element.
pub static STEP: Kernel = Kernel {
    name: "sgd",
    reference,
    cpu: Some(cpu),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::step }),
    flops: |launch| 8 * launch.inputs[0].view.numel() as u64,
    bytes: Some(|launch| launch.updated_bytes()),
    bound: Bound { ulps: 8.0 },
};

/// The number of rates.
pub const NUM_RATES: usize = 3;

/// The hyperparameters of a step, rounded to the accumulator.
#[derive(Clone, Copy, Debug)]
struct Rates<R> {
    lr: R,
    momentum: R,
    weight_decay: R,
    factor: R,
    nesterov: bool,
}

impl<R: Element> Rates<R> {
    /// `None` if the step is skipped.
    fn new(rates: &Arg<'_>, gate: &Arg<'_>, scalars: &[Scalar]) -> Option<Rates<R>> {
        let rates: [f64; NUM_RATES] = read(rates).try_into().expect("as many rates as the contract says");
        let ([lr, momentum, weight_decay], gate) = (rates.map(R::from_f64), read::<f64>(gate));
        let (factor, nesterov) = (R::from_f64(gate[0]), scalars[0].int() != 0);
        (gate[1] != 0.0).then_some(Rates { lr, momentum, weight_decay, factor, nesterov })
    }
}

fn reference(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([grad, rates, gate], [param, v], scalars) = operands(launch);
    let Some(rates) = Rates::<f64>::new(rates, gate, scalars) else { return Ok(()) };
    match_float!(grad.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (grad, param, v) = (read::<T>(grad), write::<T>(param), write::<Acc>(v));
        for i in 0..grad.len() {
            let p = param[i].to_f64();
            let g = rates.factor * grad[i].to_f64() + rates.weight_decay * p;
            let new_v = rates.momentum * v[i].to_f64() + g;
            let update = if rates.nesterov { g + rates.momentum * new_v } else { new_v };
            (param[i], v[i]) = (T::from_f64(p - rates.lr * update), Acc::from_f64(new_v));
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: STEP.name, dtype: grad.dtype }))
}

fn cpu(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([grad, rates, gate], [param, v], scalars) = operands(launch);
    match_float!(grad.dtype, T => {
        type Acc = <T as Float>::Acc;
        let Some(rates) = Rates::<Acc>::new(rates, gate, scalars) else { return Ok(()) };
        let task = rows_per_task(1);
        let grad = read::<T>(grad);
        pool.chunks2((write::<T>(param), task), (write::<Acc>(v), task), |i, param, v| {
            let grad = &grad[i * task..][..param.len()];
            vectorized(#[inline(always)] || run(rates, grad, param, v));
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: STEP.name, dtype: grad.dtype }))
}

#[inline(always)]
fn run<T: Float>(rates: Rates<T::Acc>, grad: &[T], param: &mut [T], v: &mut [T::Acc]) {
    let Rates { lr, momentum, weight_decay, factor, nesterov } = rates;
    for ((grad, param), v) in grad.iter().zip(param).zip(v) {
        let p = param.widen();
        let g = weight_decay.fma(p, factor * grad.widen());
        *v = momentum.fma(*v, g);
        let update = if nesterov { momentum.fma(*v, g) } else { *v };
        *param = T::narrow((-lr).fma(update, p));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Allocator;
    use crate::dtype::DType;
    use crate::kernel::ArgMut;
    use crate::op::kernel_check::{Case, Kind, load, store, values};
    use crate::strides::Strides;

    const F64: Kind = Kind::Fixed(DType::F64);

    /// Runs the reference in f64 on one element; returns param and v afterwards.
    fn stepped(grad: f64, state: [f64; 2], rates: [f64; 3], gate: [f64; 2], nesterov: i64) -> [f64; 2] {
        let allocator = Allocator::default();
        let [one, three, two] = [1, 3, 2].map(|n| Strides::contiguous(&[n]));
        let inputs = [&[grad][..], &rates, &gate].map(|data| store(&allocator, DType::F64, data));
        let mut buffers = state.map(|x| store(&allocator, DType::F64, &[x]));
        let mut outputs = buffers.each_mut().map(|buffer| ArgMut { buffer, dtype: DType::F64, view: &one });
        let inputs: Vec<Arg<'_>> = (inputs.iter().zip([&one, &three, &two]))
            .map(|(buffer, view)| Arg { buffer, dtype: DType::F64, view })
            .collect();
        let scalars = [Scalar::Int(nesterov)];
        let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &scalars };
        (STEP.reference)(&Pool::new(1), &mut launch).unwrap();
        buffers.map(|b| load(&b, DType::F64)[0])
    }

    #[test]
    fn matches_known_values() {
        // g = 0.5 * 4 + 0.25 * 8 = 4; v = 0.5 * 2 + 4 = 5; plain 8 - 0.1 * 5; Nesterov 8 - 0.1 * (4 + 0.5 * 5).
        let of = |gate, nesterov| stepped(4.0, [8.0, 2.0], [0.1, 0.5, 0.25], gate, nesterov);
        assert_eq!(of([0.5, 1.0], 0), [7.5, 5.0]);
        assert_eq!(of([0.5, 1.0], 1), [8.0 - 0.1 * 6.5, 5.0]);
        assert_eq!(of([0.5, 0.0], 1), [8.0, 2.0], "the gate is shut");
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for n in [0, 1, 33, 1000, 40_000] {
            let view = Strides::contiguous(&[n]);
            for (nesterov, open) in [(0, 1.0), (1, 1.0), (1, 0.0)] {
                Case::new(&STEP)
                    .input(&[n], &values(1, n))
                    .input_as(F64, &[3], &[0.03, 0.9, 0.1])
                    .input_as(F64, &[2], &[0.7, open])
                    .output_view(Kind::Tested, view.clone(), &values(2, n))
                    .output_view(Kind::Accumulator, view.clone(), &values(3, n))
                    .scalars(&[Scalar::Int(nesterov)])
                    .run();
            }
        }
    }
}
