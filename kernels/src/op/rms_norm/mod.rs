//! Root-mean-square normalisation over the last dim: y = x rstd w with rstd = 1 / sqrt(mean(x^2) + eps).

mod cpu;
mod gpu;

use crate::cpu::Pool;
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{operands, operands_and_last, read, width, write};

/// Root-mean-square normalisation of rows.
///
/// - in: x `(rows.., d)`, w `(d)`, one float dtype, contiguous
/// - out: y like x; rstd `(rows..)` in the accumulator of x, for the backward
/// - scalars: Real eps
///
/// Counted: 4 operations per element. d = 0 gives NaN as rstd.
pub static FORWARD: Kernel = Kernel {
    name: "rms_norm",
    reference: forward,
    cpu: Some(cpu::forward),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::forward }),
    flops: |launch| 4 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

/// The cotangents of root-mean-square normalisation. With h = x rstd and g = dy w:
/// dx = rstd (g - h mean(g h)) + r, dw = sum over rows of dy h.
///
/// - in: x `(rows.., d)`, w `(d)`, rstd `(rows..)` from the forward, dy like x; optionally r like x, the residual gradient, which is
///   added to dx
/// - out: dx like x, dw `(d)` in the dtype of x or its accumulator
/// - scalars, on a CPU: none, or leaves as for [`layer_norm::BACKWARD`](super::layer_norm::BACKWARD)
///
/// dx is rounded once. Rows are summed in blocks of 32, 64 blocks in order, then these; on a GPU in blocks that depend on the shape, the
/// dtype, the alignment of operands and the presence of r. Counted: 10 operations per element, and one more with r.
pub static BACKWARD: Kernel = Kernel {
    name: "rms_norm_backward",
    reference: backward,
    cpu: Some(cpu::backward),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::backward }),
    flops: |launch| (10 + u64::from(launch.inputs.len() > 4)) * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

fn forward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, w], [y, rstd], scalars) = operands(launch);
    let (d, eps) = (width(x), scalars[0].real());
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, w, y) = (read::<T>(x), read::<T>(w), write::<T>(y));
        for (row, rstd) in write::<Acc>(rstd).iter_mut().enumerate() {
            let x = &x[row * d..][..d];
            let r = 1.0 / (x.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / d as f64 + eps).sqrt();
            for i in 0..d {
                y[row * d + i] = T::from_f64(x[i].to_f64() * r * w[i].to_f64());
            }
            *rstd = Acc::from_f64(r);
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: x.dtype }))
}

fn backward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, w, rstd, dy], r, [dx, dw]) = operands_and_last(launch);
    let d = width(x);
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, w, dy, dx) = (read::<T>(x), read::<T>(w), read::<T>(dy), write::<T>(dx));
        let r_at = |i: usize| r.map_or(0.0, |r| read::<T>(r)[i].to_f64());
        let mut dw_sum = vec![0.0; d];
        for (row, rstd) in read::<Acc>(rstd).iter().enumerate() {
            let (rstd, at) = (rstd.to_f64(), row * d);
            let h: Vec<f64> = (0..d).map(|i| x[at + i].to_f64() * rstd).collect();
            let g: Vec<f64> = (0..d).map(|i| dy[at + i].to_f64() * w[i].to_f64()).collect();
            let gh_mean = g.iter().zip(&h).map(|(g, h)| g * h).sum::<f64>() / d as f64;
            for i in 0..d {
                dx[at + i] = T::from_f64(rstd * (g[i] - h[i] * gh_mean) + r_at(at + i));
                dw_sum[i] += dy[at + i].to_f64() * h[i];
            }
        }
        match dw.dtype {
            T::DTYPE => write::<T>(dw).iter_mut().zip(dw_sum).for_each(|(o, s)| *o = T::from_f64(s)),
            _ => write::<Acc>(dw).iter_mut().zip(dw_sum).for_each(|(o, s)| *o = Acc::from_f64(s)),
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: x.dtype }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, check_gradients, dot, evaluate};
    use crate::op::kernel_check::{Case, Kind, values};
    use crate::op::rows::tests::check_sums_over_leaves;

    const EPS: [Scalar; 1] = [Scalar::Real(1e-5)];

    fn rms_norm(inputs: &[Value]) -> Vec<Vec<f64>> {
        let shape = &inputs[0].shape;
        evaluate(&FORWARD, inputs, &[shape, &shape[..shape.len() - 1]], &EPS)
    }

    #[test]
    fn matches_known_values() {
        // The row 1, -1, 3, 1 has mean square 3; with eps = 1 its rstd is 1/2.
        let (x, w) = (Value::real(&[1, 4], &[1.0, -1.0, 3.0, 1.0]), Value::real(&[4], &[1.0, 2.0, 3.0, 4.0]));
        let outputs = evaluate(&FORWARD, &[x.clone(), w.clone()], &[&[1, 4], &[1]], &[Scalar::Real(1.0)]);
        assert_eq!(outputs, [vec![0.5, -1.0, 4.5, 2.0], vec![0.5]]);
        // dy = 1, 0, 0, 0: g = (1, 0, 0, 0), h = (1/2, -1/2, 3/2, 1/2), mean(g h) = 1/8.
        let backward_inputs = [x, w, Value::real(&[1], &[0.5]), Value::real(&[1, 4], &[1.0, 0.0, 0.0, 0.0])];
        let cotangents = evaluate(&BACKWARD, &backward_inputs, &[&[1, 4], &[4]], &[]);
        assert_eq!(cotangents, [vec![0.46875, 0.03125, -0.09375, -0.03125], vec![0.5, 0.0, 0.0, 0.0]]);
        // The residual gradient is added to dx only.
        let residual = Value::real(&[1, 4], &[1.0, -2.0, 4.0, 8.0]);
        let more = [backward_inputs.to_vec(), vec![residual]].concat();
        let added = evaluate(&BACKWARD, &more, &[&[1, 4], &[4]], &[]);
        assert_eq!(added, [vec![1.46875, -1.96875, 3.90625, 7.96875], vec![0.5, 0.0, 0.0, 0.0]]);
    }

    fn check_fast_path(rows: usize, d: usize) {
        let shape = [rows, d];
        // For f64, long sums of the reference are no more accurate than those under test.
        let dtypes = &DType::FLOATS[usize::from(rows * d > 10_000)..];
        Case::new(&FORWARD)
            .input(&shape, &values(1, rows * d))
            .input(&[d], &values(2, d))
            .output(&shape)
            .output_as(Kind::Accumulator, &[rows])
            .scalars(&EPS)
            .run_for(dtypes);
        for kind in [Kind::Tested, Kind::Accumulator] {
            let backward = Case::new(&BACKWARD)
                .input(&shape, &values(4, rows * d))
                .input(&[d], &values(5, d))
                .input_as(Kind::Accumulator, &[rows], &values(6, rows))
                .input(&shape, &values(8, rows * d))
                .output(&shape)
                .output_as(kind, &[d])
                .scale(4.0);
            backward.run_for(dtypes);
            backward.input(&shape, &values(9, rows * d)).run_for(dtypes);
        }
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for (rows, d) in [
            (1, 1),
            (1, 7),
            (5, 16),
            (3, 33),
            (70, 1000),
            (300, 24),
            (0, 5),
            (1, 2000),
            (2, 0),
            (2, 17_000),
            (5000, 8),
            (300, 520),
        ] {
            check_fast_path(rows, d);
        }
    }

    #[test]
    fn parameter_gradients_over_leaves_have_the_bits_of_launches_for_each_leaf() {
        check_sums_over_leaves(&BACKWARD, 1);
    }

    #[test]
    fn backward_matches_finite_differences() {
        let inputs = [Value::real(&[2, 2, 5], &values(5, 20)), Value::real(&[5], &values(6, 5))];
        let dy = Value::real(&[2, 2, 5], &values(8, 20));
        let rstd = Value::real(&[2, 2], &rms_norm(&inputs)[1]);
        let backward_inputs = [inputs[0].clone(), inputs[1].clone(), rstd, dy.clone()];
        let gradients = evaluate(&BACKWARD, &backward_inputs, &[&[2, 2, 5], &[5]], &[]);
        let gradients: Vec<_> = gradients.into_iter().enumerate().collect();
        check_gradients(&inputs, &gradients, |x| dot(&rms_norm(x)[0], &dy.data)).unwrap();
    }
}
