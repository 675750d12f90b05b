//! One AdamW step (decoupled weight decay) on a flat run of parameters, or on many of them.

mod cpu;
mod gpu;

use crate::cpu::Pool;
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{ArgMut, Bound, Gpu, Kernel, Launch, Scalar};
use crate::match_float;
use crate::op::rows::{operands, read, write};

/// One step, in place. With g = grad_scale grad:
/// m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, and
/// param = param - lr weight_decay param - lr (m / correction1) / (sqrt(v / correction2) + eps).
///
/// - in: grad `(n)`, any float, contiguous
/// - out: param `(n)` in the dtype of grad, m `(n)` and v `(n)` in its accumulator; contiguous, updated
/// - scalars: Real lr, beta1, beta2, eps, weight_decay, correction1 = 1 - beta1^t, correction2 = 1 - beta2^t,
///   grad_scale (the factor of a gradient clip, or 1)
///
/// Everything is computed in the accumulator; 1 - beta1, 1 - beta2 and 1 - lr weight_decay are formed in f64 and
/// rounded once. A parameter in a 16-bit float loses updates below half its last place: keep a wider copy of it if
/// that matters. Counted: 16 operations an element.
pub static STEP: Kernel = Kernel {
    name: "adamw",
    reference: step,
    cpu: Some(cpu::step),
    gpu: Some(Gpu { source: gpu::SOURCE, plan: gpu::step }),
    flops: |launch| 16 * launch.inputs[0].view.numel() as u64,
    bound: Bound { ulps: 8.0 },
};

/// One step of each of k parameters, as by [`STEP`] and with the same bits.
///
/// - in: grad_1 `(n_1)` .. grad_k `(n_k)`, of one float dtype, contiguous
/// - out: param_1, m_1, v_1, param_2, ..: for each gradient as in [`STEP`], updated
/// - scalars: Real beta1, beta2, eps, correction1, correction2, grad_scale, then lr and weight_decay of each parameter
///
/// Counted: 16 operations an element.
pub static STEP_MANY: Kernel = Kernel {
    name: "adamw_many",
    reference: step_many,
    cpu: Some(cpu::step_many),
    gpu: Some(Gpu { source: gpu::SOURCE, plan: gpu::step_many }),
    flops: |launch| launch.inputs.iter().map(|grad| 16 * grad.view.numel() as u64).sum(),
    bound: Bound { ulps: 8.0 },
};

/// The scalars of a step as the accumulator needs them.
#[derive(Clone, Copy, Debug)]
struct Rates<R> {
    /// 1 - lr weight_decay.
    keep: R,
    lr: R,
    beta1: R,
    rest1: R,
    beta2: R,
    rest2: R,
    eps: R,
    correction1: R,
    correction2: R,
    grad_scale: R,
}

/// The scalars of [`STEP`] for one of the parameters of [`STEP_MANY`].
fn scalars_of(scalars: &[Scalar], param: usize) -> [Scalar; 8] {
    let (common, own) = (&scalars[..6], &scalars[6 + 2 * param..][..2]);
    [own[0], common[0], common[1], common[2], own[1], common[3], common[4], common[5]]
}

impl Rates<f64> {
    /// Of one of the parameters of [`STEP_MANY`].
    fn of_many(scalars: &[Scalar], param: usize) -> Rates<f64> {
        Rates::new(&scalars_of(scalars, param))
    }

    /// Each number rounded once.
    fn rounded<R: Element>(self) -> Rates<R> {
        let Rates { keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, grad_scale } = self;
        let numbers = [keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, grad_scale];
        let [keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, grad_scale] =
            numbers.map(R::from_f64);
        Rates { keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, grad_scale }
    }

    fn new(scalars: &[Scalar]) -> Rates<f64> {
        let scalars: [Scalar; 8] = scalars.try_into().expect("a launch has the scalars of its contract");
        let [lr, beta1, beta2, eps, weight_decay, correction1, correction2, grad_scale] =
            scalars.map(Scalar::real);
        Rates {
            keep: 1.0 - lr * weight_decay,
            lr,
            beta1,
            rest1: 1.0 - beta1,
            beta2,
            rest2: 1.0 - beta2,
            eps,
            correction1,
            correction2,
            grad_scale,
        }
    }
}

fn step_many(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    for (i, outputs) in launch.outputs.chunks_exact_mut(3).enumerate() {
        let scalars = scalars_of(launch.scalars, i);
        let own = outputs.iter_mut();
        let own = own.map(|y| ArgMut { buffer: &mut *y.buffer, dtype: y.dtype, view: y.view });
        let mut outputs: Vec<ArgMut<'_>> = own.collect();
        let (inputs, outputs) = (&launch.inputs[i..=i], &mut outputs[..]);
        step(pool, &mut Launch { inputs, outputs, scalars: &scalars })?;
    }
    Ok(())
}

fn step(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([grad], [param, m, v], scalars) = operands(launch);
    let rates = Rates::new(scalars);
    match_float!(grad.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (grad, param) = (read::<T>(grad), write::<T>(param));
        let (m, v) = (write::<Acc>(m), write::<Acc>(v));
        for i in 0..grad.len() {
            let g = rates.grad_scale * grad[i].to_f64();
            let new_m = rates.beta1 * m[i].to_f64() + rates.rest1 * g;
            let new_v = rates.beta2 * v[i].to_f64() + rates.rest2 * g * g;
            let update = new_m / rates.correction1 / ((new_v / rates.correction2).sqrt() + rates.eps);
            param[i] = T::from_f64(param[i].to_f64() * rates.keep - rates.lr * update);
            (m[i], v[i]) = (Acc::from_f64(new_m), Acc::from_f64(new_v));
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: STEP.name, dtype: grad.dtype }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Allocator;
    use crate::dtype::DType;
    use crate::kernel::Arg;
    use crate::op::check::{Case, Kind, load, store, values};
    use crate::strides::Strides;

    fn scalars(reals: [f64; 8]) -> [Scalar; 8] {
        reals.map(Scalar::Real)
    }

    /// Runs the reference in f64: param, m, v afterwards.
    fn stepped(grad: f64, state: [f64; 3], reals: [f64; 8]) -> [f64; 3] {
        let allocator = Allocator::default();
        let view = Strides::contiguous(&[1]);
        let grad = store(&allocator, DType::F64, &[grad]);
        let mut buffers = state.map(|x| store(&allocator, DType::F64, &[x]));
        let mut outputs = buffers.each_mut().map(|buffer| ArgMut { buffer, dtype: DType::F64, view: &view });
        let inputs = [Arg { buffer: &grad, dtype: DType::F64, view: &view }];
        let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &scalars(reals) };
        (STEP.reference)(&Pool::new(1), &mut launch).unwrap();
        buffers.map(|b| load(&b, DType::F64)[0])
    }

    #[test]
    fn by_hand() {
        // g = 2: m = 4/2 + 2/2 = 3, v = 3/4 * 4 + 4/4 = 4; m / 0.5 = 6, sqrt(4 / 0.25) = 4, + 2 = 6: an update of 1;
        // param = 8 - 0.1 * 0.5 * 8 - 0.1 * 1.
        let [param, m, v] = stepped(4.0, [8.0, 4.0, 4.0], [0.1, 0.5, 0.75, 2.0, 0.5, 0.5, 0.25, 0.5]);
        assert_eq!([m, v], [3.0, 4.0]);
        assert!((param - 7.5).abs() < 1e-15, "{param}");
    }

    #[test]
    fn the_first_step_has_the_size_of_the_rate() {
        // With t = 1 the corrections undo the averages, so the update is g / |g|.
        for g in [1e-3, -5.0] {
            let [param, ..] = stepped(g, [1.0, 0.0, 0.0], [0.01, 0.9, 0.999, 0.0, 0.0, 0.1, 0.001, 1.0]);
            assert!((param - (1.0 - 0.01 * f64::signum(g))).abs() < 1e-12, "{param}");
        }
    }

    #[test]
    fn the_fast_path_agrees() {
        let reals = [3e-3, 0.9, 0.95, 1e-8, 0.1, 1.0 - 0.9f64.powi(3), 1.0 - 0.95f64.powi(3), 0.7];
        for n in [0, 1, 33, 1000, 40_000] {
            let view = Strides::contiguous(&[n]);
            let v: Vec<f64> = values(4, n).iter().map(|v| v * v).collect();
            Case::new(&STEP)
                .input(&[n], &values(1, n))
                .output_view(Kind::Tested, view.clone(), &values(2, n))
                .output_view(Kind::Accumulator, view.clone(), &values(3, n))
                .output_view(Kind::Accumulator, view, &v)
                .scalars(&scalars(reals))
                .run();
        }
    }

    #[test]
    fn many_parameters_are_stepped_as_one_by_one() {
        let common = [0.9, 0.95, 1e-8, 1.0 - 0.9f64.powi(3), 1.0 - 0.95f64.powi(3), 0.7];
        // More than one launch takes, empty ones and such as end in part of a vector among them.
        let sizes: Vec<usize> = (0..60).map(|i| [64, 0, 1, 4096, 37, 8][i % 6]).chain([40_000]).collect();
        for k in [0, 1, 5, sizes.len()] {
            let sizes = &sizes[sizes.len() - k..];
            let own = (0..k).flat_map(|i| [3e-3 + 1e-4 * i as f64, 0.1 * (i % 2) as f64]);
            let scalars: Vec<Scalar> = common.into_iter().chain(own).map(Scalar::Real).collect();
            let case = sizes.iter().enumerate().fold(Case::new(&STEP_MANY), |case, (i, &n)| {
                let view = |offset| Strides::contiguous(&[n]).at(offset);
                let squares: Vec<f64> = values(i as u64 + 4, n).iter().map(|v| v * v).collect();
                let [grad, param, m] = [1, 2, 3].map(|seed| values(i as u64 + seed, n + 5));
                case.input_view(Kind::Tested, view(if i % 5 == 4 { 5 } else { 0 }), &grad)
                    .output_view(Kind::Tested, view(0), &param)
                    .output_view(Kind::Accumulator, view(if i % 7 == 6 { 3 } else { 0 }), &m)
                    .output_view(Kind::Accumulator, view(0), &squares)
            });
            case.scalars(&scalars).run();
        }
    }

    #[test]
    fn the_bits_of_many_are_those_of_each() {
        let (common, own) = ([0.9, 0.95, 1e-8, 0.1, 0.2, 0.7], [[1e-3, 0.1], [2e-3, 0.0]]);
        let allocator = Allocator::default();
        let view = Strides::contiguous(&[100]);
        let memory = |i: u64| values(i, 100).iter().map(|x| x.abs()).collect::<Vec<f64>>();
        let new = || [2, 3, 4, 5, 6, 7].map(|i| store(&allocator, DType::F32, &memory(i)));
        let grads = [0, 1].map(|i| store(&allocator, DType::F32, &memory(i)));
        let inputs = grads.each_ref().map(|buffer| Arg { buffer, dtype: DType::F32, view: &view });
        let run =
            |kernel: &Kernel, inputs: &[Arg<'_>], buffers: &mut [crate::buffer::Buffer], scalars: &[f64]| {
                let outputs =
                    buffers.iter_mut().map(|buffer| ArgMut { buffer, dtype: DType::F32, view: &view });
                let mut outputs: Vec<ArgMut<'_>> = outputs.collect();
                let scalars: Vec<Scalar> = scalars.iter().map(|x| Scalar::Real(*x)).collect();
                let mut launch = Launch { inputs, outputs: &mut outputs, scalars: &scalars };
                (kernel.cpu.unwrap())(&Pool::new(2), &mut launch).unwrap();
            };
        let (mut many, mut each) = (new(), new());
        run(&STEP_MANY, &inputs, &mut many, &[&common[..], &own.concat()].concat());
        for (i, [lr, decay]) in own.into_iter().enumerate() {
            let [beta1, beta2, eps, c1, c2, scale] = common;
            let scalars = [lr, beta1, beta2, eps, decay, c1, c2, scale];
            run(&STEP, &inputs[i..=i], &mut each[3 * i..3 * i + 3], &scalars);
        }
        for (a, b) in many.iter().zip(&each) {
            assert_eq!(load(a, DType::F32), load(b, DType::F32));
        }
    }
}
