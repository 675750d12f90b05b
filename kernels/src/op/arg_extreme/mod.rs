//! argmax and argmin of rows.

use crate::cpu::Pool;
use crate::dtype::Float;
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::gpu_rows;
use crate::op::rows::{operands, read, rows_per_task, width, write};

/// i = the index of the largest (or smallest) element along the last dim: the first of those that tie; the first NaN, if there is one.
///
/// - in: x (.., n), any float, contiguous; n is at least 1
/// - out: i (..), i64, contiguous
/// - scalars: \[Int largest (1) or smallest (0)\]
#[doc(alias = "argmax")]
#[doc(alias = "argmin")]
pub static ARG_EXTREME: Kernel = Kernel {
    name: "arg_extreme",
    reference: |_, launch| {
        let ([x], [y], scalars) = operands(launch);
        let (n, largest) = (width(x).max(1), scalars[0].int() != 0);
        match_float!(x.dtype, T => {
            for (x, y) in read::<T>(x).chunks_exact(n).zip(write::<i64>(y)) {
                *y = first::<T>(x, largest);
            }
            Ok(())
        }, else Err(KernelError::DType { kernel: ARG_EXTREME.name, dtype: x.dtype }))
    },
    cpu: Some(arg_extreme),
    gpu: Some(GpuCode {
        source: include_str!("gpu.cu"),
        plan: |launch, plan| gpu_rows::plan_along_rows("arg_extreme", "LARGEST", 1024, launch, plan),
    }),
    flops: |launch| launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

fn arg_extreme(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], scalars) = operands(launch);
    let (n, largest) = (width(x).max(1), scalars[0].int() != 0);
    match_float!(x.dtype, T => {
        let (x, rows) = (read::<T>(x), rows_per_task(n));
        pool.chunks(write::<i64>(y), rows, |task, y| {
            for (x, y) in x[task * rows * n..].chunks_exact(n).zip(y) {
                *y = first::<T>(x, largest);
            }
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: ARG_EXTREME.name, dtype: x.dtype }))
}

#[expect(clippy::eq_op, reason = "only not-a-number differs from itself")]
fn first<T: Float>(x: &[T], largest: bool) -> i64 {
    let (mut at, mut best) = (0, x[0].widen());
    for (i, x) in x.iter().enumerate().skip(1) {
        let x = x.widen();
        let is_better = if largest { x > best } else { x < best };
        if best == best && (is_better || x != x) {
            (at, best) = (i, x);
        }
    }
    at as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, evaluate_as};
    use crate::op::kernel_check::{Case, Kind, values};

    #[test]
    fn matches_known_values() {
        let x = Value::real(&[3, 3], &[1.0, 3.0, 3.0, -1.0, -1.0, 2.0, 0.0, f64::NAN, 5.0]);
        let run = |largest| {
            let scalars = [Scalar::Int(largest)];
            evaluate_as(ARG_EXTREME.reference, DType::I64, std::slice::from_ref(&x), &[&[3]], &scalars)
                .remove(0)
        };
        assert_eq!(run(1), [1.0, 2.0, 1.0]);
        assert_eq!(run(0), [0.0, 0.0, 1.0]);
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for shape in [[7, 33], [1, 3000], [5000, 5], [4, 1], [0, 3]] {
            let x: Vec<f64> =
                values(1, shape[0] * shape[1]).iter().map(|x| (8.0 * x).round() / 8.0).collect();
            for largest in [0, 1] {
                let case = Case::new(&ARG_EXTREME).input(&shape, &x);
                let case = case.output_as(Kind::Fixed(DType::I64), &shape[..1]);
                case.scalars(&[Scalar::Int(largest)]).run();
            }
        }
    }
}
