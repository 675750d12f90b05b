//! The gradient of the maximum over a row (amax): the cotangent is shared equally by the elements that tie for the maximum.
//!
//! Rows are contiguous: x holds r rows of n elements, whatever its dims are, and per-row values are r elements. Scalars: \[Int n\].

mod cpu;

use crate::dtype::{Element, Float};
use crate::kernel::{Bound, GpuCode, Kernel};
use crate::match_float;
use crate::op::gpu_row_values::{self, RowValue};
use crate::op::rows::{no_float, operands, read, write};

/// c = the number of elements of a row that equal y.
///
/// - in: x (r n), any float; y (r), same dtype
/// - out: c (r), the accumulator of x
pub static COUNT_TIES: Kernel = Kernel {
    name: "count_ties",
    reference: |_, launch| {
        let ([x, y], [c], scalars) = operands(launch);
        match_float!(x.dtype, T => {
            let (x, y, n) = (read::<T>(x), read::<T>(y), scalars[0].int() as usize);
            for (i, c) in write::<<T as Float>::Acc>(c).iter_mut().enumerate() {
                let ties = x[i * n..][..n].iter().filter(|x| **x == y[i]).count();
                *c = Element::from_f64(ties as f64);
            }
            Ok(())
        }, else no_float(COUNT_TIES.name, x.dtype))
    },
    cpu: Some(cpu::count_ties),
    gpu: Some(GpuCode {
        source: gpu_row_values::SOURCE,
        plan: |launch, plan| gpu_row_values::row_value(COUNT_TIES.name, launch, plan, RowValue::Ties),
    }),
    flops: |launch| launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

/// dx = dy / c where x equals y, else 0 / c: shares the cotangent of a maximum y equally among the c elements that tie. Where y is NaN,
/// no element equals y, c is 0, and dx is NaN.
///
/// - in: x (r n), any float; y (r), same dtype; c (r), the accumulator of x; dy (r), the dtype of x
/// - out: dx (r n), the dtype of x
pub static BACKWARD: Kernel = Kernel {
    name: "amax_backward",
    reference: |_, launch| {
        let ([x, y, c, dy], [dx], scalars) = operands(launch);
        match_float!(x.dtype, T => {
            let (x, y, n) = (read::<T>(x), read::<T>(y), scalars[0].int() as usize);
            let (c, dy) = (read::<<T as Float>::Acc>(c), read::<T>(dy));
            for (i, dx) in write::<T>(dx).iter_mut().enumerate() {
                let dy = if x[i] == y[i / n] { dy[i / n].to_f64() } else { 0.0 };
                *dx = T::from_f64(dy / c[i / n].to_f64());
            }
            Ok(())
        }, else no_float(BACKWARD.name, x.dtype))
    },
    cpu: Some(cpu::backward),
    gpu: Some(GpuCode {
        source: gpu_row_values::FORMULA_SOURCE,
        plan: |launch, plan| {
            gpu_row_values::row_formula(
                BACKWARD.name,
                launch,
                plan,
                "[x, y, c, dy]",
                "choose(x == y, dy / c, R::ZERO / c)",
            )
        },
    }),
    flops: |launch| 2 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 1.0 },
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, Kind, values};

    #[test]
    fn matches_known_values() {
        let inf = f64::INFINITY;
        let x = Value::real(&[2, 3], &[1.0, 3.0, 3.0, -inf, -inf, -inf]);
        let of = |data: &[f64]| Value::real(&[2], data);
        let n = [Scalar::Int(3)];
        let ties = evaluate(&COUNT_TIES, &[x.clone(), of(&[3.0, -inf])], &[&[2]], &n).remove(0);
        assert_eq!(ties, [2.0, 3.0]);
        let inputs = [x, of(&[3.0, -inf]), of(&ties), of(&[4.0, 6.0])];
        let dx = evaluate(&BACKWARD, &inputs, &[&[2, 3]], &n).remove(0);
        assert_eq!(dx, [0.0, 2.0, 2.0, 2.0, 2.0, 2.0]);
        let inputs = [Value::real(&[1, 2], &[1.0, f64::NAN]), Value::real(&[1], &[f64::NAN])];
        let none = evaluate(&COUNT_TIES, &inputs, &[&[1]], &[Scalar::Int(2)]).remove(0);
        assert_eq!(none, [0.0]);
        let [x, y] = inputs;
        let inputs = [x, y, Value::real(&[1], &none), Value::real(&[1], &[1.0])];
        let dx = evaluate(&BACKWARD, &inputs, &[&[1, 2]], &[Scalar::Int(2)]).remove(0);
        assert!(dx.iter().all(|dx| dx.is_nan()), "{dx:?}");
    }

    #[test]
    fn fast_paths_match_the_reference() {
        for [r, n] in [[7, 33], [1, 40_000], [3000, 5], [4, 1], [0, 3]] {
            let x: Vec<f64> = values(1, r * n).iter().map(|x| (4.0 * x).round() / 4.0).collect();
            let largest = |i: usize| x[i * n..][..n].iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let (y, dy) = ((0..r).map(largest).collect::<Vec<_>>(), values(2, r));
            let scalars = [Scalar::Int(n as i64)];
            let case = Case::new(&COUNT_TIES).input(&[r, n], &x).input(&[r], &y).scalars(&scalars);
            case.output_as(Kind::Accumulator, &[r]).run();
            let c: Vec<f64> = (0..r).map(|i| (i % 4) as f64).collect();
            let case = Case::new(&BACKWARD).input(&[r, n], &x).input(&[r], &y).scalars(&scalars);
            case.input_as(Kind::Accumulator, &[r], &c).input(&[r], &dy).output(&[r, n]).run();
        }
    }
}
