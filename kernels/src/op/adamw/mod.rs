//! One AdamW step (decoupled weight decay) of many parameters. Hyperparameters are operands in device memory, so that a captured step can
//! be replayed with other values.

mod cpu;
mod gpu;

use crate::cpu::Pool;
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, GpuCode, Kernel, Launch, Scalar};
use crate::match_float;
use crate::op::rows::{read, write};

/// One step of each of k parameters, in place. With g = factor grad:
/// m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, and
/// param = param - lr weight_decay param - lr (m / correction1) / (sqrt(v / correction2) + eps).
///
/// - in: grad_1 `(n_1)` .. grad_k `(n_k)`, of one float dtype, contiguous; rates f64 `(p, 7)`, contiguous, whose rows are lr, beta1,
///   beta2, eps, weight_decay, correction1 = 1 - beta1^t, correction2 = 1 - beta2^t; check f64, contiguous: the factor (of a
///   gradient clip, or 1), and 0 to skip the step, as [`OVERFLOW_CHECK`](super::overflow_check::OVERFLOW_CHECK) computes them
/// - out: param_1 `(n_1)` in the dtype of grad, m_1 `(n_1)` and v_1 `(n_1)` in its accumulator, param_2, ..; contiguous, updated
/// - scalars: Int row of the rates, for each parameter
///
/// Everything is computed in the accumulator; 1 - beta1, 1 - beta2 and 1 - lr weight_decay are formed in f64 and
/// rounded once. A parameter in a 16-bit float loses updates below half its last place: keep a wider copy of it if
/// that matters. Counted: 16 operations per element.
pub static STEP: Kernel = Kernel {
    name: "adamw",
    reference,
    cpu: Some(cpu::step),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::step }),
    flops: |launch| grads(launch.inputs).iter().map(|grad| 16 * grad.view.numel() as u64).sum(),
    bytes: Some(|launch| launch.updated_bytes()),
    bound: Bound { ulps: 8.0 },
};

/// Hyperparameters per row of the rates.
pub const NUM_RATES: usize = 7;

/// The hyperparameters of a step, rounded to the accumulator.
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
    factor: R,
}

impl Rates<f64> {
    fn new(row: &[f64], factor: f64) -> Rates<f64> {
        let row: [f64; NUM_RATES] = row.try_into().expect("a row is as long as the contract says");
        let [lr, beta1, beta2, eps, weight_decay, correction1, correction2] = row;
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
            factor,
        }
    }

    /// Rounds each number once.
    fn rounded<R: Element>(self) -> Rates<R> {
        let Rates { keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, factor } = self;
        let numbers = [keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, factor];
        let [keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, factor] =
            numbers.map(R::from_f64);
        Rates { keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, factor }
    }
}

/// Returns the gradients among the inputs.
fn grads<'s, 'a>(inputs: &'s [Arg<'a>]) -> &'s [Arg<'a>] {
    &inputs[..inputs.len() - 2]
}

/// The rates of each parameter of a launch; `None` if the step is skipped.
fn rates_of(launch: &Launch<'_>) -> Option<Vec<Rates<f64>>> {
    let [.., rates, gate] = launch.inputs else { unreachable!("the contract ends with rates and gate") };
    let (rates, gate) = (read::<f64>(rates), read::<f64>(gate));
    let row = |row: &Scalar| Rates::new(&rates[row.int() as usize * NUM_RATES..][..NUM_RATES], gate[0]);
    (gate[1] != 0.0).then(|| launch.scalars.iter().map(row).collect())
}

fn reference(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let Some(all) = rates_of(launch) else { return Ok(()) };
    let operands = grads(launch.inputs).iter().zip(launch.outputs.chunks_exact_mut(3));
    for ((grad, outputs), rates) in operands.zip(all) {
        let [param, m, v] = outputs else { unreachable!("chunks of three") };
        match_float!(grad.dtype, T => {
            type Acc = <T as Float>::Acc;
            let (grad, param) = (read::<T>(grad), write::<T>(param));
            let (m, v) = (write::<Acc>(m), write::<Acc>(v));
            for i in 0..grad.len() {
                let g = rates.factor * grad[i].to_f64();
                let new_m = rates.beta1 * m[i].to_f64() + rates.rest1 * g;
                let new_v = rates.beta2 * v[i].to_f64() + rates.rest2 * g * g;
                let update = new_m / rates.correction1 / ((new_v / rates.correction2).sqrt() + rates.eps);
                param[i] = T::from_f64(param[i].to_f64() * rates.keep - rates.lr * update);
                (m[i], v[i]) = (Acc::from_f64(new_m), Acc::from_f64(new_v));
            }
        }, else return Err(KernelError::DType { kernel: STEP.name, dtype: grad.dtype }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{Allocator, Buffer};
    use crate::dtype::DType;
    use crate::kernel::ArgMut;
    use crate::op::kernel_check::{Case, Kind, load, store, values};
    use crate::strides::Strides;
    use approx::assert_abs_diff_eq;

    const F64: Kind = Kind::Fixed(DType::F64);

    /// Runs the reference in f64 on one element; returns param, m, v afterwards.
    fn stepped(grad: f64, state: [f64; 3], rates: [f64; 7], gate: [f64; 2]) -> [f64; 3] {
        let allocator = Allocator::default();
        let [one, row, two] = [1, 7, 2].map(|n| Strides::contiguous(&[n]));
        let inputs = [&[grad][..], &rates, &gate].map(|data| store(&allocator, DType::F64, data));
        let mut buffers = state.map(|x| store(&allocator, DType::F64, &[x]));
        let mut outputs = buffers.each_mut().map(|buffer| ArgMut { buffer, dtype: DType::F64, view: &one });
        let inputs: Vec<Arg<'_>> = (inputs.iter().zip([&one, &row, &two]))
            .map(|(buffer, view)| Arg { buffer, dtype: DType::F64, view })
            .collect();
        let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[Scalar::Int(0)] };
        (STEP.reference)(&Pool::new(1), &mut launch).unwrap();
        buffers.map(|b| load(&b, DType::F64)[0])
    }

    #[test]
    fn matches_known_values() {
        // g = 2: m = 4/2 + 2/2 = 3, v = 3/4 * 4 + 4/4 = 4; m / 0.5 = 6, sqrt(4 / 0.25) = 4, + 2 = 6: an update of 1;
        // param = 8 - 0.1 * 0.5 * 8 - 0.1 * 1.
        let rates = [0.1, 0.5, 0.75, 2.0, 0.5, 0.5, 0.25];
        let [param, m, v] = stepped(4.0, [8.0, 4.0, 4.0], rates, [0.5, 1.0]);
        assert_eq!([m, v], [3.0, 4.0]);
        assert_abs_diff_eq!(param, 7.5, epsilon = 1e-15);
        assert_eq!(stepped(4.0, [8.0, 4.0, 4.0], rates, [0.5, 0.0]), [8.0, 4.0, 4.0], "the gate is shut");
    }

    #[test]
    fn first_step_has_the_size_of_the_learning_rate() {
        // With t = 1 the corrections undo the averages, so the update is g / |g|.
        for g in [1e-3, -5.0] {
            let rates = [0.01, 0.9, 0.999, 0.0, 0.0, 0.1, 0.001];
            let [param, ..] = stepped(g, [1.0, 0.0, 0.0], rates, [1.0, 1.0]);
            assert_abs_diff_eq!(param, 1.0 - 0.01 * f64::signum(g), epsilon = 1e-12);
        }
    }

    /// Returns the rates of some parameters, each at another step, and their row numbers from the last to the first.
    fn rates(count: usize) -> (Vec<f64>, Vec<Scalar>) {
        let row = |i: usize| {
            let (t, i) = (i as i32 % 4 + 1, i as f64);
            let correction = |beta: f64| 1.0 - beta.powi(t);
            [3e-3 + 1e-4 * i, 0.9, 0.95, 1e-8, 0.1 * (i % 2.0), correction(0.9), correction(0.95)]
        };
        let rows = (0..count).rev().map(|i| Scalar::Int(i as i64));
        ((0..count).flat_map(row).collect(), rows.collect())
    }

    #[test]
    fn fast_path_matches_the_reference_on_many_parameters() {
        // More parameters than one launch takes, some empty, some ending in part of a vector.
        let sizes: Vec<usize> = (0..80).map(|i| [64, 0, 1, 4096, 37, 8][i % 6]).chain([40_000]).collect();
        for (k, gate) in [(0, 1.0), (1, 1.0), (5, 1.0), (sizes.len(), 1.0), (sizes.len(), 0.0)] {
            let sizes = &sizes[sizes.len() - k..];
            let (rates, rows) = rates(k);
            let case = sizes.iter().enumerate().fold(Case::new(&STEP), |case, (i, &n)| {
                let view = |offset| Strides::contiguous(&[n]).at(offset);
                let squares: Vec<f64> = values(i as u64 + 4, n).iter().map(|v| v * v).collect();
                let [grad, param, m] = [1, 2, 3].map(|seed| values(i as u64 + seed, n + 5));
                case.input_view(Kind::Tested, view(if i % 5 == 4 { 5 } else { 0 }), &grad)
                    .output_view(Kind::Tested, view(0), &param)
                    .output_view(Kind::Accumulator, view(if i % 7 == 6 { 3 } else { 0 }), &m)
                    .output_view(Kind::Accumulator, view(0), &squares)
            });
            let case = case.input_as(F64, &[k, NUM_RATES], &rates);
            // The kernel ignores the rest of the check. A parameter of one element may nearly cancel.
            case.input_as(F64, &[3], &[0.7, gate, f64::NAN]).scalars(&rows).scale(1.0).run();
        }
    }

    #[test]
    fn sums_of_squares_of_many_operands_have_the_bits_of_single_ones() {
        let allocator = Allocator::default();
        let views = [&[100][..], &[2, 7], &[2]].map(Strides::contiguous);
        let memory = |i: u64| values(i, 100).iter().map(|x| x.abs()).collect::<Vec<f64>>();
        let new = || [2, 3, 4, 5, 6, 7].map(|i| store(&allocator, DType::F32, &memory(i)));
        let grads = [0, 1].map(|i| store(&allocator, DType::F32, &memory(i)));
        let (rates, rows) = rates(2);
        let numbers = [&rates[..], &[0.7, 1.0]].map(|data| store(&allocator, DType::F64, data));
        let run = |grads: &[Buffer], buffers: &mut [Buffer], rows: &[Scalar]| {
            let grads = grads.iter().map(|buffer| Arg { buffer, dtype: DType::F32, view: &views[0] });
            let numbers = numbers.iter().zip(&views[1..]);
            let numbers = numbers.map(|(buffer, view)| Arg { buffer, dtype: DType::F64, view });
            let inputs: Vec<Arg<'_>> = grads.chain(numbers).collect();
            let outputs = buffers.iter_mut();
            let outputs = outputs.map(|buffer| ArgMut { buffer, dtype: DType::F32, view: &views[0] });
            let mut outputs: Vec<ArgMut<'_>> = outputs.collect();
            let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: rows };
            (STEP.cpu.unwrap())(&Pool::new(2), &mut launch).unwrap();
        };
        let (mut many, mut each) = (new(), new());
        run(&grads, &mut many, &rows);
        for i in 0..2 {
            run(&grads[i..=i], &mut each[3 * i..3 * i + 3], &rows[i..=i]);
        }
        for (a, b) in many.iter().zip(&each) {
            assert_eq!(load(a, DType::F32), load(b, DType::F32));
        }
    }
}
