//! Cumulative sums along rows.

use crate::cpu::Pool;
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::gpu_rows;
use crate::op::rows::{operands, read, rows_per_task, width, write};

/// y_i = x_0 + x_1 + .. + x_i over the last dim, or x_i + x_i+1 + .. to the end (torch.cumsum). Summed in order in f64, each result
/// rounded once. On GPUs runs of adjacent elements are summed in the accumulator and the sums of earlier runs in f64, in an order that
/// depends on n.
///
/// - in: x (.., n), any float, contiguous
/// - out: y, same dtype and shape, contiguous
/// - scalars: \[Int backward (1 or 0)\]
pub static CUMSUM: Kernel = Kernel {
    name: "cumsum",
    reference: |_, launch| {
        let ([x], [y], scalars) = operands(launch);
        let (n, backward) = (width(x).max(1), scalars[0].int() != 0);
        match_float!(x.dtype, T => {
            for (x, y) in read::<T>(x).chunks_exact(n).zip(write::<T>(y).chunks_exact_mut(n)) {
                let mut sum = 0.0;
                for i in 0..n {
                    let at = if backward { n - 1 - i } else { i };
                    sum += x[at].to_f64();
                    y[at] = T::from_f64(sum);
                }
            }
            Ok(())
        }, else Err(KernelError::DType { kernel: CUMSUM.name, dtype: x.dtype }))
    },
    cpu: Some(cumsum),
    gpu: Some(GpuCode {
        source: include_str!("gpu.cu"),
        plan: |launch, plan| gpu_rows::plan_along_rows("cumsum", "BACKWARD", 512, launch, plan),
    }),
    flops: |launch| launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

fn cumsum(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], scalars) = operands(launch);
    let (n, backward) = (width(x).max(1), scalars[0].int() != 0);
    match_float!(x.dtype, T => {
        let (x, task) = (read::<T>(x), n * rows_per_task(n));
        pool.chunks(write::<T>(y), task, |i, y| {
            let rows = x[i * task..][..y.len()].chunks_exact(n).zip(y.chunks_exact_mut(n));
            for (x, y) in rows {
                let pairs = x.iter().zip(y);
                if backward { run::<T>(pairs.rev()) } else { run::<T>(pairs) }
            }
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: CUMSUM.name, dtype: x.dtype }))
}

fn run<'a, T: Float>(pairs: impl Iterator<Item = (&'a T, &'a mut T)>) {
    // A long f32 sum loses its last terms: of a million equal terms one percent.
    let mut sum = 0.0;
    for (x, y) in pairs {
        sum += x.to_f64();
        *y = T::from_f64(sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, values};

    #[test]
    fn matches_known_values() {
        let x = Value::real(&[2, 3], &[1.0, 2.0, 3.0, -1.0, 0.5, 4.0]);
        let run = |backward| {
            evaluate(&CUMSUM, std::slice::from_ref(&x), &[&[2, 3]], &[Scalar::Int(backward)]).remove(0)
        };
        assert_eq!(run(0), [1.0, 3.0, 6.0, -1.0, -0.5, 3.5]);
        assert_eq!(run(1), [6.0, 5.0, 3.0, 3.5, 4.5, 4.0]);
    }

    #[test]
    fn long_rows_of_equal_terms_are_exact() {
        // Of 24 bits, so that sums in f64 are exact.
        let x = vec![f64::from(0.1f32); 100_000];
        for backward in [0, 1] {
            let case = Case::new(&CUMSUM).input(&[1, 100_000], &x).output(&[1, 100_000]).scale(1.0);
            case.scalars(&[Scalar::Int(backward)]).run();
        }
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for shape in [[7, 33], [1, 3000], [3000, 5], [4, 1], [0, 3], [3, 0]] {
            let x = values(1, shape[0] * shape[1]);
            for backward in [0, 1] {
                let case = Case::new(&CUMSUM).input(&shape, &x).output(&shape).scale(1.0);
                case.scalars(&[Scalar::Int(backward)]).run();
            }
        }
    }
}
