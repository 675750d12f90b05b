//! Layer normalisation over the last dim: y = (x - mean) rstd w + b with rstd = 1 / sqrt(var + eps), where mean and
//! var = mean((x - mean)^2) are those of the row.

mod cpu;
pub(super) mod gpu;

use crate::cpu::Pool;
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{operands, operands_and_last, read, width, write};

/// Layer normalisation of rows.
///
/// - in: x `(rows.., d)`, w `(d)`, b `(d)`, one float dtype, contiguous
/// - out: y like x; mean `(rows..)` and rstd `(rows..)` in the accumulator of x, for the backward
/// - scalars: Real eps
///
/// The mean is rounded to the accumulator, so for a row far from zero, |mean| rstd > |y|, the error bound applies at the magnitude of the
/// mean times rstd.
/// Counted: 8 operations per element. d = 0 gives NaN as the mean.
pub static FORWARD: Kernel = Kernel {
    name: "layer_norm",
    reference: forward,
    cpu: Some(cpu::forward),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::forward }),
    flops: |launch| 8 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

/// The cotangents of layer normalisation. With h = (x - mean) rstd and g = dy w:
/// dx = rstd (g - mean(g) - h mean(g h)) + r, dw = sum over rows of dy h, db = sum over rows of dy.
///
/// - in: x `(rows.., d)`, w `(d)`, mean `(rows..)`, rstd `(rows..)` from the forward, dy like x; optionally r like x, the residual
///   gradient, which is added to dx
/// - out: dx like x, dw `(d)`, db `(d)`, both in the dtype of x or both in its accumulator
/// - scalars, on a CPU: none, or the leaves of the last dim of rows, as for [`LEAF_SUM`](crate::op::reduce::LEAF_SUM) from their number
///   on: dw and db, in the dtype of x, are then sums of the sums of leaves, each rounded, in the order of the tree
///
/// dx is rounded once. Rows are summed in blocks of 32, 64 blocks in order, then these; on a GPU in blocks that depend on the shape, the
/// dtype, the alignment of operands and the presence of r. Counted: 14 operations per element, and one more with r.
pub static BACKWARD: Kernel = Kernel {
    name: "layer_norm_backward",
    reference: backward,
    cpu: Some(cpu::backward),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::backward }),
    flops: |launch| (14 + u64::from(launch.inputs.len() > 5)) * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// Returns mean and 1 / sqrt(var + eps) of a row.
fn statistics<T: Float>(x: &[T], eps: f64) -> (f64, f64) {
    let count = x.len() as f64;
    let mean = x.iter().map(|v| v.to_f64()).sum::<f64>() / count;
    let var = x.iter().map(|v| (v.to_f64() - mean).powi(2)).sum::<f64>() / count;
    (mean, 1.0 / (var + eps).sqrt())
}

fn forward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, w, b], [y, mean, rstd], scalars) = operands(launch);
    let (d, eps) = (width(x), scalars[0].real());
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, w, b, y) = (read::<T>(x), read::<T>(w), read::<T>(b), write::<T>(y));
        for (row, (mean, rstd)) in write::<Acc>(mean).iter_mut().zip(write::<Acc>(rstd)).enumerate() {
            let x = &x[row * d..][..d];
            let (m, r) = statistics(x, eps);
            for i in 0..d {
                y[row * d + i] = T::from_f64((x[i].to_f64() - m) * r * w[i].to_f64() + b[i].to_f64());
            }
            (*mean, *rstd) = (Acc::from_f64(m), Acc::from_f64(r));
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: x.dtype }))
}

fn backward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, w, mean, rstd, dy], r, [dx, dw, db]) = operands_and_last(launch);
    let d = width(x);
    match_float!(x.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (x, w, dy, dx) = (read::<T>(x), read::<T>(w), read::<T>(dy), write::<T>(dx));
        let r_at = |i: usize| r.map_or(0.0, |r| read::<T>(r)[i].to_f64());
        let (mut dw_sum, mut db_sum) = (vec![0.0; d], vec![0.0; d]);
        for (row, (mean, rstd)) in read::<Acc>(mean).iter().zip(read::<Acc>(rstd)).enumerate() {
            let (mean, rstd, at) = (mean.to_f64(), rstd.to_f64(), row * d);
            let h: Vec<f64> = (0..d).map(|i| (x[at + i].to_f64() - mean) * rstd).collect();
            let g: Vec<f64> = (0..d).map(|i| dy[at + i].to_f64() * w[i].to_f64()).collect();
            let g_mean = g.iter().sum::<f64>() / d as f64;
            let gh_mean = g.iter().zip(&h).map(|(g, h)| g * h).sum::<f64>() / d as f64;
            for i in 0..d {
                dx[at + i] = T::from_f64(rstd * (g[i] - g_mean - h[i] * gh_mean) + r_at(at + i));
                dw_sum[i] += dy[at + i].to_f64() * h[i];
                db_sum[i] += dy[at + i].to_f64();
            }
        }
        for (out, sums) in [(dw, dw_sum), (db, db_sum)] {
            match out.dtype {
                T::DTYPE => write::<T>(out).iter_mut().zip(sums).for_each(|(o, s)| *o = T::from_f64(s)),
                _ => write::<Acc>(out).iter_mut().zip(sums).for_each(|(o, s)| *o = Acc::from_f64(s)),
            }
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

    fn layer_norm(inputs: &[Value]) -> Vec<Vec<f64>> {
        let shape = &inputs[0].shape;
        let rows = &shape[..shape.len() - 1];
        evaluate(&FORWARD, inputs, &[shape, rows, rows], &EPS)
    }

    #[test]
    fn matches_known_values() {
        // The row 1, 2, 3, 6 has mean 3 and variance 3.5; with eps = 0.5 its rstd is 1/2.
        let inputs = [
            Value::real(&[1, 4], &[1.0, 2.0, 3.0, 6.0]),
            Value::real(&[4], &[1.0, 2.0, 3.0, 4.0]),
            Value::real(&[4], &[10.0, 20.0, 30.0, 40.0]),
        ];
        let outputs = evaluate(&FORWARD, &inputs, &[&[1, 4], &[1], &[1]], &[Scalar::Real(0.5)]);
        assert_eq!(outputs, [vec![9.0, 19.0, 30.0, 46.0], vec![3.0], vec![0.5]]);
        // dy = 1, 0, 0, 0: g = (1, 0, 0, 0), h = (-1, -1/2, 0, 3/2), mean(g) = 1/4, mean(g h) = -1/4.
        let [x, w, _] = inputs;
        let backward_inputs = [
            x,
            w,
            Value::real(&[1], &[3.0]),
            Value::real(&[1], &[0.5]),
            Value::real(&[1, 4], &[1.0, 0.0, 0.0, 0.0]),
        ];
        let cotangents = evaluate(&BACKWARD, &backward_inputs, &[&[1, 4], &[4], &[4]], &[]);
        assert_eq!(cotangents[0], [0.25, -0.1875, -0.125, 0.0625]);
        assert_eq!(cotangents[1..], [vec![-1.0, 0.0, 0.0, 0.0], vec![1.0, 0.0, 0.0, 0.0]]);
        // The residual gradient is added to dx only.
        let residual = Value::real(&[1, 4], &[1.0, -2.0, 4.0, 8.0]);
        let more = [backward_inputs.to_vec(), vec![residual]].concat();
        let added = evaluate(&BACKWARD, &more, &[&[1, 4], &[4], &[4]], &[]);
        assert_eq!(added[0], [1.25, -2.1875, 3.875, 8.0625]);
        assert_eq!(added[1..], cotangents[1..]);
    }

    fn check_fast_path(rows: usize, d: usize, shift: f64) {
        let shape = [rows, d];
        // For f64, long sums of the reference are no more accurate than those under test.
        let dtypes = &DType::FLOATS[usize::from(rows * d > 10_000)..];
        let x: Vec<f64> = values(1, rows * d).iter().map(|v| v + shift).collect();
        Case::new(&FORWARD)
            .input(&shape, &x)
            .input(&[d], &values(2, d))
            .input(&[d], &values(3, d))
            .output(&shape)
            .output_as(Kind::Accumulator, &[rows])
            .output_as(Kind::Accumulator, &[rows])
            .scalars(&EPS)
            .run_for(dtypes);
        for kind in [Kind::Tested, Kind::Accumulator] {
            let backward = Case::new(&BACKWARD)
                .input(&shape, &values(4, rows * d))
                .input(&[d], &values(5, d))
                .input_as(Kind::Accumulator, &[rows], &values(6, rows))
                .input_as(Kind::Accumulator, &[rows], &values(7, rows))
                .input(&shape, &values(8, rows * d))
                .output(&shape)
                .output_as(kind, &[d])
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
            (2, 17_000),
            (5000, 8),
            (300, 520),
        ] {
            check_fast_path(rows, d, if d > 1 { 0.0 } else { 1.0 });
        }
        let empty = Case::new(&BACKWARD).input(&[2, 0], &[]).input(&[0], &[]);
        let statistics =
            empty.input_as(Kind::Accumulator, &[2], &[0.0; 2]).input_as(Kind::Accumulator, &[2], &[1.0; 2]);
        let backward = statistics.input(&[2, 0], &[]).output(&[2, 0]).output(&[0]).output(&[0]);
        backward.run();
        backward.input(&[2, 0], &[]).run();
    }

    /// Summing squares before subtracting the mean would lose all of the variance.
    #[test]
    fn error_of_rows_far_from_zero_is_as_documented() {
        for (d, mean) in [(64, 1e3), (768, 1e4), (5000, -1e5)] {
            let x: Vec<f64> = values(1, 3 * d).iter().map(|v| v * 0.75f64.sqrt() + mean).collect();
            let case = Case::new(&FORWARD)
                .input(&[3, d], &x)
                .input(&[d], &vec![1.0; d])
                .input(&[d], &vec![0.0; d])
                .output(&[3, d])
                .output_as(Kind::Accumulator, &[3])
                .output_as(Kind::Accumulator, &[3])
                .scalars(&EPS);
            case.clone().scale(mean.abs()).run_for(&[DType::F32]);
            assert!(case.verify(&[DType::F32]).is_err(), "{mean} is within the bound of y");
        }
    }

    #[test]
    fn parameter_gradients_over_leaves_have_the_bits_of_launches_for_each_leaf() {
        check_sums_over_leaves(&BACKWARD, 2);
    }

    #[test]
    fn backward_matches_finite_differences() {
        let inputs = [
            Value::real(&[2, 2, 5], &values(5, 20)),
            Value::real(&[5], &values(6, 5)),
            Value::real(&[5], &values(7, 5)),
        ];
        let dy = Value::real(&[2, 2, 5], &values(8, 20));
        let saved = layer_norm(&inputs);
        let statistic = |i: usize| Value::real(&[2, 2], &saved[i]);
        let backward_inputs = [inputs[0].clone(), inputs[1].clone(), statistic(1), statistic(2), dy.clone()];
        let gradients = evaluate(&BACKWARD, &backward_inputs, &[&[2, 2, 5], &[5], &[5]], &[]);
        let gradients: Vec<_> = gradients.into_iter().enumerate().collect();
        check_gradients(&inputs, &gradients, |x| dot(&layer_norm(x)[0], &dy.data)).unwrap();
    }
}
