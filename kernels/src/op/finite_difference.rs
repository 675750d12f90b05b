//! Gradient checks of backward kernels: the f64 reference is compared with finite differences of the forward kernel.

use crate::buffer::{Allocator, Buffer};
use crate::cpu::Pool;
use crate::dtype::DType;
use crate::kernel::{Arg, ArgMut, CpuKernelFn, Kernel, Launch, Scalar};
use crate::op::kernel_check::{load, store};
use crate::strides::Strides;
use approx::abs_diff_ne;

/// A contiguous operand with its contents.
#[derive(Clone, Debug)]
pub(crate) struct Value {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<f64>,
}

impl Value {
    /// Creates an f64 operand.
    pub(crate) fn real(shape: &[usize], data: &[f64]) -> Value {
        Value { dtype: DType::F64, shape: shape.to_vec(), data: data.to_vec() }
    }

    /// Creates an operand of indices.
    pub(crate) fn index(shape: &[usize], data: &[f64]) -> Value {
        Value { dtype: DType::I64, ..Value::real(shape, data) }
    }
}

/// Returns the outputs (all f64) of a kernel's reference.
pub(crate) fn evaluate(
    kernel: &Kernel,
    inputs: &[Value],
    outputs: &[&[usize]],
    scalars: &[Scalar],
) -> Vec<Vec<f64>> {
    evaluate_as(kernel.reference, DType::F64, inputs, outputs, scalars)
}

/// Returns the outputs (all of one dtype) of a CPU implementation.
pub(crate) fn evaluate_as(
    code: CpuKernelFn,
    dtype: DType,
    inputs: &[Value],
    outputs: &[&[usize]],
    scalars: &[Scalar],
) -> Vec<Vec<f64>> {
    let allocator = Allocator::default();
    let written = outputs.iter().map(|s| store(&allocator, dtype, &vec![55.0; s.iter().product()])).collect();
    let shapes: Vec<Strides> = outputs.iter().map(|s| Strides::contiguous(s)).collect();
    evaluate_over(code, dtype, inputs, (written, &shapes), scalars)
}

/// Returns an f64 operand after a kernel's reference has updated it in place.
pub(crate) fn update(kernel: &Kernel, inputs: &[Value], output: &Value, scalars: &[Scalar]) -> Vec<f64> {
    let written = vec![store(&Allocator::default(), DType::F64, &output.data)];
    let shape = [Strides::contiguous(&output.shape)];
    evaluate_over(kernel.reference, DType::F64, inputs, (written, &shape), scalars).remove(0)
}

/// Returns f64 operands of these shapes and contents after a kernel's reference has updated them in place.
pub(crate) fn update_all<const N: usize>(
    kernel: &Kernel,
    inputs: &[Value],
    shapes: [&[usize]; N],
    before: [Vec<f64>; N],
) -> [Vec<f64>; N] {
    let written = before.iter().map(|data| store(&Allocator::default(), DType::F64, data)).collect();
    let views = shapes.map(Strides::contiguous);
    let after = evaluate_over(kernel.reference, DType::F64, inputs, (written, &views), &[]);
    after.try_into().expect("as many results as operands")
}

/// Returns the outputs (all of one dtype) of a CPU implementation that may read their old contents.
fn evaluate_over(
    code: CpuKernelFn,
    dtype: DType,
    inputs: &[Value],
    (mut written, written_views): (Vec<Buffer>, &[Strides]),
    scalars: &[Scalar],
) -> Vec<Vec<f64>> {
    let allocator = Allocator::default();
    let read: Vec<Buffer> = inputs.iter().map(|v| store(&allocator, v.dtype, &v.data)).collect();
    let views: Vec<Strides> = inputs.iter().map(|v| Strides::contiguous(&v.shape)).collect();
    let args: Vec<Arg<'_>> = (inputs.iter().zip(&read).zip(&views))
        .map(|((v, buffer), view)| Arg { buffer, dtype: v.dtype, view })
        .collect();
    let mut outs: Vec<ArgMut<'_>> = (written.iter_mut().zip(written_views))
        .map(|(buffer, view)| ArgMut { buffer, dtype, view })
        .collect();
    let mut launch = Launch { inputs: &args, outputs: &mut outs, scalars };
    code(&Pool::new(1), &mut launch).expect("the kernel runs");
    written.iter().map(|b| load(b, dtype)).collect()
}

/// Compares gradients with central differences of `loss`. `gradients` lists, per checked input, its number and the backward kernel's
/// result.
pub(crate) fn check_gradients(
    inputs: &[Value],
    gradients: &[(usize, Vec<f64>)],
    loss: impl Fn(&[Value]) -> f64,
) -> Result<(), String> {
    let step = 1e-5;
    for (number, gradient) in gradients {
        assert_eq!(gradient.len(), inputs[*number].data.len(), "a gradient has the shape of its value");
        for (place, &claimed) in gradient.iter().enumerate() {
            let at = |shift: f64| {
                let mut moved = inputs.to_vec();
                moved[*number].data[place] += shift;
                loss(&moved)
            };
            let difference = (at(step) - at(-step)) / (2.0 * step);
            // NaN differs from everything.
            if abs_diff_ne!(difference, claimed, epsilon = 1e-7 * (1.0 + difference.abs())) {
                return Err(format!(
                    "input {number}, element {place}: {claimed} but finite differences give {difference}"
                ));
            }
        }
    }
    Ok(())
}

/// Returns the dot product of values and weights: a loss whose cotangent is `weights`.
pub(crate) fn dot(values: &[f64], weights: &[f64]) -> f64 {
    values.iter().zip(weights).map(|(v, w)| v * w).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn correct_gradients_pass_and_wrong_ones_are_found() {
        let x = [Value::real(&[3], &[0.5, -1.0, 2.0])];
        let loss = |x: &[Value]| x[0].data.iter().map(|v| v * v * v).sum();
        check_gradients(&x, &[(0, vec![0.75, 3.0, 12.0])], loss).unwrap();
        let wrong = check_gradients(&x, &[(0, vec![0.75, 3.0, 12.001])], loss).unwrap_err();
        assert!(wrong.contains("element 2"), "{wrong}");
        let none = check_gradients(&x, &[(0, vec![0.75, f64::NAN, 12.0])], loss).unwrap_err();
        assert!(none.contains("element 1: NaN"), "{none}");
        let bare = check_gradients(&x, &[(0, vec![0.75, 3.0, 12.0])], |_| f64::NAN).unwrap_err();
        assert!(bare.contains("differences give NaN"), "{bare}");
    }
}
