//! log-sum-exp over rows in three steps: sums of exponentials, the logarithm, and the gradient.
//!
//! Rows are contiguous: x holds r rows of n elements, whatever its dims are, and per-row values are r elements. Sums are formed in the
//! accumulator: blocks of 1024 elements one after another, in each of them element i in partial sum i mod 16; on GPUs each thread of a
//! row (a warp up to 1024 elements, else a block) sums a strided subset, and these sums are reduced in a tree. Scalars: \[Int n\].

mod cpu;

use crate::dtype::{Element, Float};
use crate::kernel::{Bound, GpuCode, Kernel};
use crate::match_float;
use crate::op::gpu_row_values::{self, RowValue};
use crate::op::rows::{no_float, operands, read, write};

/// s = the sum of exp(x - m) over a row, 0 where m is negative infinity.
///
/// - in: x (r n), any float; m (r), its accumulator, not below any x of its row
/// - out: s (r), the accumulator
pub static SUM_EXP: Kernel = Kernel {
    name: "sum_exp",
    reference: |_, launch| {
        let ([x, m], [s], scalars) = operands(launch);
        match_float!(x.dtype, T => {
            type Acc = <T as Float>::Acc;
            let (x, m, n) = (read::<T>(x), read::<Acc>(m), scalars[0].int() as usize);
            for (i, s) in write::<Acc>(s).iter_mut().enumerate() {
                let m = m[i].to_f64();
                let terms = x[i * n..][..n].iter().map(|x| (x.to_f64() - m).exp());
                *s = Element::from_f64(if m == f64::NEG_INFINITY { 0.0 } else { compensated(terms) });
            }
            Ok(())
        }, else no_float(SUM_EXP.name, x.dtype))
    },
    cpu: Some(cpu::sum_exp),
    gpu: Some(GpuCode {
        source: gpu_row_values::SOURCE,
        plan: |launch, plan| gpu_row_values::row_value(SUM_EXP.name, launch, plan, RowValue::SumExp),
    }),
    flops: |launch| 3 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

/// Returns the compensated sum of numbers of one sign (Kahan 1965): a plain sum of a long row would be less exact than the kernel under
/// test.
fn compensated(terms: impl Iterator<Item = f64>) -> f64 {
    let (sum, lost) = terms.fold((0.0, 0.0), |(sum, lost): (f64, f64), term| {
        let (large, small) = if sum >= term { (sum, term) } else { (term, sum) };
        (sum + term, lost + (small - ((sum + term) - large)))
    });
    sum + lost
}

/// y = m + ln s; m where m is infinite.
///
/// - in: m (r), s (r), f32 or f64
/// - out: y (r), same dtype
pub static FINISH: Kernel = Kernel {
    name: "log_sum_exp_finish",
    reference: |_, launch| {
        let ([m, s], [y], _) = operands(launch);
        match_float!(m.dtype, T => {
            let (m, s) = (read::<T>(m), read::<T>(s));
            for (i, y) in write::<T>(y).iter_mut().enumerate() {
                let m = m[i].to_f64();
                *y = T::from_f64(if m.is_infinite() { m } else { m + s[i].to_f64().ln() });
            }
            Ok(())
        }, else no_float(FINISH.name, m.dtype))
    },
    cpu: None,
    gpu: Some(GpuCode {
        source: gpu_row_values::FORMULA_SOURCE,
        plan: |launch, plan| {
            gpu_row_values::row_formula(
                FINISH.name,
                launch,
                plan,
                "[m, s]",
                "choose(is_nan(m - m), m, m + s.ln())",
            )
        },
    }),
    flops: |launch| 2 * launch.outputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 2.0 },
};

/// dx = dy exp(x - y), 0 where y is negative infinity: the gradient of y = ln(sum of exp(x) over a row).
///
/// - in: x (r n), any float; y (r), its accumulator; dy (r), the dtype of x
/// - out: dx (r n), the dtype of x
pub static BACKWARD: Kernel = Kernel {
    name: "log_sum_exp_backward",
    reference: |_, launch| {
        let ([x, y, dy], [dx], scalars) = operands(launch);
        match_float!(x.dtype, T => {
            let (x, y, n) = (read::<T>(x), read::<<T as Float>::Acc>(y), scalars[0].int() as usize);
            let dy = read::<T>(dy);
            for (i, dx) in write::<T>(dx).iter_mut().enumerate() {
                let y = y[i / n].to_f64();
                let share = dy[i / n].to_f64() * (x[i].to_f64() - y).exp();
                *dx = T::from_f64(if y == f64::NEG_INFINITY { 0.0 } else { share });
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
                "[x, y, dy]",
                "choose(y < R::ZERO && is_nan(y - y), R::ZERO, dy * (x - y).exp())",
            )
        },
    }),
    flops: |launch| 3 * launch.inputs[0].view.numel() as u64,
    // The difference is rounded at the size of y before the exponential.
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, Kind, values};
    use approx::assert_abs_diff_eq;

    const SHAPES: [[usize; 2]; 5] = [[7, 33], [1, 40_000], [3000, 5], [4, 1], [0, 3]];

    #[test]
    fn matches_known_values() {
        let inf = f64::INFINITY;
        let x = Value::real(&[2, 3], &[1.0, 3.0, 3.0, -inf, -inf, -inf]);
        let of = |data: &[f64]| Value::real(&[2], data);
        let n = [Scalar::Int(3)];
        let sums = evaluate(&SUM_EXP, &[x.clone(), of(&[3.0, -inf])], &[&[2]], &n).remove(0);
        assert_eq!(sums, [2.0 + (-2f64).exp(), 0.0]);
        let lse = evaluate(&FINISH, &[of(&[3.0, -inf]), of(&sums)], &[&[2]], &[]).remove(0);
        assert_eq!(lse, [3.0 + sums[0].ln(), -inf]);
        assert_eq!(evaluate(&FINISH, &[of(&[inf, 0.0]), of(&[1.0, 1.0])], &[&[2]], &[])[0], [inf, 0.0]);
        let share = evaluate(&BACKWARD, &[x, of(&lse), of(&[1.0, 1.0])], &[&[2, 3]], &n).remove(0);
        assert_abs_diff_eq!(share[..3].iter().sum::<f64>(), 1.0, epsilon = 1e-15);
        assert_eq!(share[3..], [0.0; 3]);
    }

    #[test]
    fn fast_paths_match_the_reference() {
        for [r, n] in SHAPES {
            let x: Vec<f64> = values(1, r * n).iter().map(|x| (4.0 * x).round() / 4.0).collect();
            let largest = |i: usize| x[i * n..][..n].iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let (y, dy) = ((0..r).map(largest).collect::<Vec<_>>(), values(2, r));
            let scalars = [Scalar::Int(n as i64)];
            let case = Case::new(&SUM_EXP).input(&[r, n], &x).input_as(Kind::Accumulator, &[r], &y);
            case.output_as(Kind::Accumulator, &[r]).scalars(&scalars).run();
            let case = Case::new(&BACKWARD).input(&[r, n], &x).input_as(Kind::Accumulator, &[r], &y);
            case.input(&[r], &dy).output(&[r, n]).scalars(&scalars).run();
        }
        let s: Vec<f64> = values(2, 90).iter().map(|x| x.abs()).collect();
        let case = Case::new(&FINISH).input(&[90], &values(1, 90)).input(&[90], &s).output(&[90]);
        case.run_for(&[DType::F64, DType::F32]);
    }
}
