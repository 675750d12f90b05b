//! Softmax over the last dim: y_i = exp(x_i - max x) / sum_j exp(x_j - max x), and its backward.

mod cpu;
mod gpu;

use crate::cpu::Pool;
use crate::dtype::Element;
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{operands, read, width, write};

/// Softmax of rows.
///
/// - in: x `(rows.., n)`, any float, contiguous
/// - out: y like x
///
/// A row with +inf or NaN, and a row of -inf only, gives NaN in all elements, as in PyTorch.
/// Sums are formed in the accumulator. Counted: 5 operations per element (compare, subtract, exp, add, multiply).
pub static FORWARD: Kernel = Kernel {
    name: "softmax",
    reference: forward,
    cpu: Some(cpu::forward),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::forward }),
    flops: |launch| 5 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 8.0 },
};

/// The cotangent of softmax's argument: dx = y (dy - sum_j y_j dy_j).
///
/// - in: y `(rows.., n)`, dy like y, any float, contiguous
/// - out: dx like y
///
/// Counted: 4 operations per element.
pub static BACKWARD: Kernel = Kernel {
    name: "softmax_backward",
    reference: backward,
    cpu: Some(cpu::backward),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::backward }),
    flops: |launch| 4 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

fn forward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], _) = operands(launch);
    let n = width(x).max(1);
    match_float!(x.dtype, T => {
        for (x, y) in read::<T>(x).chunks(n).zip(write::<T>(y).chunks_mut(n)) {
            let max = x.iter().fold(f64::NEG_INFINITY, |m, v| m.max(v.to_f64()));
            let sum: f64 = x.iter().map(|v| (v.to_f64() - max).exp()).sum();
            y.iter_mut().zip(x).for_each(|(y, x)| *y = T::from_f64((x.to_f64() - max).exp() / sum));
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: x.dtype }))
}

fn backward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([y, dy], [dx], _) = operands(launch);
    let n = width(y).max(1);
    match_float!(y.dtype, T => {
        let rows = read::<T>(y).chunks(n).zip(read::<T>(dy).chunks(n));
        for ((y, dy), dx) in rows.zip(write::<T>(dx).chunks_mut(n)) {
            let dot: f64 = y.iter().zip(dy).map(|(y, dy)| y.to_f64() * dy.to_f64()).sum();
            for i in 0..y.len() {
                dx[i] = T::from_f64(y[i].to_f64() * (dy[i].to_f64() - dot));
            }
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: y.dtype }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::op::finite_difference::{Value, check_gradients, dot, evaluate};
    use crate::op::kernel_check::{Case, values};
    use crate::strides::Strides;
    use approx::assert_abs_diff_eq;

    fn softmax(x: &[Value]) -> Vec<f64> {
        evaluate(&FORWARD, x, &[&x[0].shape], &[]).remove(0)
    }

    #[test]
    fn matches_known_values() {
        let x = Value::real(&[2, 3], &[0.0, 2f64.ln(), 5f64.ln(), 700.0, 700.0, f64::NEG_INFINITY]);
        let y = softmax(&[x]);
        let expected = [0.125, 0.25, 0.625, 0.5, 0.5, 0.0];
        assert_abs_diff_eq!(y[..], expected[..], epsilon = 1e-15);
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for (rows, n) in [(1, 1), (1, 7), (5, 16), (3, 33), (40, 100), (2, 3000), (2, 17_000), (4, 0), (0, 4)]
        {
            let shape = [rows, n];
            // In f64 long sums of the reference are no more exact than those under test.
            let dtypes = &DType::FLOATS[usize::from(n > 10_000)..];
            let x: Vec<f64> = values(1, rows * n).iter().map(|v| 4.0 * v).collect();
            Case::new(&FORWARD).input(&shape, &x).output(&shape).run_for(dtypes);
            let y = values(2, rows * n).iter().map(|v| v.abs() / 8.0).collect::<Vec<_>>();
            Case::new(&BACKWARD)
                .input(&shape, &y)
                .input(&shape, &values(3, rows * n))
                .output(&shape)
                .scale(2.0)
                .run_for(dtypes);
        }
    }

    #[test]
    fn special_values_and_offsets() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let x = [-inf, -inf, -inf, 1.0, inf, 2.0, 0.0, nan, 1.0, -inf, 0.0, -inf];
        Case::new(&FORWARD).input(&[4, 3], &x).output(&[4, 3]).run();
        let view = Strides::contiguous(&[4, 5]).narrow(0, 1, 3);
        Case::new(&FORWARD)
            .input_view(crate::op::kernel_check::Kind::Tested, view.clone(), &values(4, 20))
            .output_view(crate::op::kernel_check::Kind::Tested, view, &[9.0; 20])
            .run();
    }

    #[test]
    fn backward_matches_finite_differences() {
        let (x, dy) = (Value::real(&[2, 4], &values(5, 8)), Value::real(&[2, 4], &values(6, 8)));
        let y = Value::real(&[2, 4], &softmax(std::slice::from_ref(&x)));
        let dx = evaluate(&BACKWARD, &[y, dy.clone()], &[&[2, 4]], &[]).remove(0);
        check_gradients(&[x], &[(0, dx)], |x| dot(&softmax(x), &dy.data)).unwrap();
    }
}
