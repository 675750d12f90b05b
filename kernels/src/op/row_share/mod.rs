//! What maxima and sums of exponentials over rows need, and how their cotangents are shared out over a row.
//!
//! Rows lie one after another, contiguous: x holds r rows of n elements, whatever its dims are, and a value of a row is
//! one of r. Sums are formed in the accumulator: blocks of 1024
//! elements one after another, in each of them element i in partial sum i mod 16; on GPUs each thread of a row (a warp of
//! them up to 1024 elements, else a block) adds up every so many, and these sums join in a tree. Scalars: \[Int n\].

mod cpu;
mod gpu;

use crate::dtype::{DType, Element, Float};
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{operands, read, write};

/// c = how many elements of a row equal y.
///
/// - in: x (r n), any float; y (r), same dtype
/// - out: c (r), the accumulator of x
pub static TIES: Kernel = Kernel {
    name: "ties",
    reference: |_, launch| {
        let ([x, y], [c], scalars) = operands(launch);
        match_float!(x.dtype, T => {
            let (x, y, n) = (read::<T>(x), read::<T>(y), scalars[0].int() as usize);
            for (i, c) in write::<<T as Float>::Acc>(c).iter_mut().enumerate() {
                let ties = x[i * n..][..n].iter().filter(|x| **x == y[i]).count();
                *c = Element::from_f64(ties as f64);
            }
            Ok(())
        }, else no_float(TIES.name, x.dtype))
    },
    cpu: Some(cpu::ties),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: |launch, plan| gpu::row_value(launch, plan, "0") }),
    flops: |launch| launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

/// dx = dy / c where x equals y, else 0: a cotangent shared equally by those who tie.
///
/// - in: x (r n), any float; y (r), same dtype; c (r), the accumulator of x; dy (r), the dtype of x
/// - out: dx (r n), the dtype of x
pub static TIE_SHARE: Kernel = Kernel {
    name: "tie_share",
    reference: |_, launch| {
        let ([x, y, c, dy], [dx], scalars) = operands(launch);
        match_float!(x.dtype, T => {
            let (x, y, n) = (read::<T>(x), read::<T>(y), scalars[0].int() as usize);
            let (c, dy) = (read::<<T as Float>::Acc>(c), read::<T>(dy));
            for (i, dx) in write::<T>(dx).iter_mut().enumerate() {
                let share = dy[i / n].to_f64() / c[i / n].to_f64();
                *dx = if x[i] == y[i / n] { T::from_f64(share) } else { T::default() };
            }
            Ok(())
        }, else no_float(TIE_SHARE.name, x.dtype))
    },
    cpu: Some(cpu::tie_share),
    gpu: Some(GpuCode {
        source: gpu::FORMULA_SOURCE,
        plan: |launch, plan| {
            gpu::shares(TIE_SHARE.name, launch, plan, "[x, y, c, dy]", "choose(x == y, dy / c, R::ZERO)")
        },
    }),
    flops: |launch| 2 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 1.0 },
};

/// s = the sum of exp(x - m) over a row, 0 where m is negative infinity.
///
/// - in: x (r n), any float; m (r), its accumulator, not below any x of its row
/// - out: s (r), the accumulator
pub static EXP_SUM: Kernel = Kernel {
    name: "exp_sum",
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
        }, else no_float(EXP_SUM.name, x.dtype))
    },
    cpu: Some(cpu::exp_sum),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: |launch, plan| gpu::row_value(launch, plan, "1") }),
    flops: |launch| 3 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

/// The sum of numbers of one sign, with what each addition rounds off kept aside (Kahan 1965): a plain sum of a long
/// row would be further off than the kernel that it is to judge.
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
pub static JOIN: Kernel = Kernel {
    name: "log_sum_exp_join",
    reference: |_, launch| {
        let ([m, s], [y], _) = operands(launch);
        match_float!(m.dtype, T => {
            let (m, s) = (read::<T>(m), read::<T>(s));
            for (i, y) in write::<T>(y).iter_mut().enumerate() {
                let m = m[i].to_f64();
                *y = T::from_f64(if m.is_infinite() { m } else { m + s[i].to_f64().ln() });
            }
            Ok(())
        }, else no_float(JOIN.name, m.dtype))
    },
    cpu: None,
    gpu: Some(GpuCode {
        source: gpu::FORMULA_SOURCE,
        plan: |launch, plan| {
            gpu::shares(JOIN.name, launch, plan, "[m, s]", "choose(is_nan(m - m), m, m + s.ln())")
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
pub static EXP_SHARE: Kernel = Kernel {
    name: "exp_share",
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
        }, else no_float(EXP_SHARE.name, x.dtype))
    },
    cpu: Some(cpu::exp_share),
    gpu: Some(GpuCode {
        source: gpu::FORMULA_SOURCE,
        plan: |launch, plan| {
            gpu::shares(
                EXP_SHARE.name,
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

fn no_float(kernel: &'static str, dtype: DType) -> Result<(), KernelError> {
    Err(KernelError::DType { kernel, dtype })
}

/// Whether a launch has nothing to do: no rows, or rows without elements.
fn is_idle(launch: &Launch<'_>) -> bool {
    launch.inputs[0].view.numel() == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Scalar;
    use crate::op::check::{Case, Kind, values};
    use crate::op::differences::{Value, evaluate};

    const SHAPES: [[usize; 2]; 5] = [[7, 33], [1, 40_000], [3000, 5], [4, 1], [0, 3]];

    #[test]
    fn by_hand() {
        let inf = f64::INFINITY;
        let x = Value::real(&[2, 3], &[1.0, 3.0, 3.0, -inf, -inf, -inf]);
        let of = |data: &[f64]| Value::real(&[2], data);
        let n = [Scalar::Int(3)];
        let ties = evaluate(&TIES, &[x.clone(), of(&[3.0, -inf])], &[&[2]], &n).remove(0);
        assert_eq!(ties, [2.0, 3.0]);
        let inputs = [x.clone(), of(&[3.0, -inf]), of(&ties), of(&[4.0, 6.0])];
        let share = evaluate(&TIE_SHARE, &inputs, &[&[2, 3]], &n).remove(0);
        assert_eq!(share, [0.0, 2.0, 2.0, 2.0, 2.0, 2.0]);
        let sums = evaluate(&EXP_SUM, &[x.clone(), of(&[3.0, -inf])], &[&[2]], &n).remove(0);
        assert_eq!(sums, [2.0 + (-2f64).exp(), 0.0]);
        let joined = evaluate(&JOIN, &[of(&[3.0, -inf]), of(&sums)], &[&[2]], &[]).remove(0);
        assert_eq!(joined, [3.0 + sums[0].ln(), -inf]);
        assert_eq!(evaluate(&JOIN, &[of(&[inf, 0.0]), of(&[1.0, 1.0])], &[&[2]], &[])[0], [inf, 0.0]);
        let share = evaluate(&EXP_SHARE, &[x, of(&joined), of(&[1.0, 1.0])], &[&[2, 3]], &n).remove(0);
        assert!((share[..3].iter().sum::<f64>() - 1.0).abs() < 1e-15 && share[3..] == [0.0; 3], "{share:?}");
    }

    #[test]
    fn fast_paths_agree() {
        for [r, n] in SHAPES {
            let x: Vec<f64> = values(1, r * n).iter().map(|x| (4.0 * x).round() / 4.0).collect();
            let largest = |i: usize| x[i * n..][..n].iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let (y, dy) = ((0..r).map(largest).collect::<Vec<_>>(), values(2, r));
            let scalars = [Scalar::Int(n as i64)];
            let case = Case::new(&TIES).input(&[r, n], &x).input(&[r], &y).scalars(&scalars);
            case.output_as(Kind::Accumulator, &[r]).run();
            let c: Vec<f64> = (0..r).map(|i| 1.0 + (i % 3) as f64).collect();
            let case = Case::new(&TIE_SHARE).input(&[r, n], &x).input(&[r], &y).scalars(&scalars);
            case.input_as(Kind::Accumulator, &[r], &c).input(&[r], &dy).output(&[r, n]).run();
            let case = Case::new(&EXP_SUM).input(&[r, n], &x).input_as(Kind::Accumulator, &[r], &y);
            case.output_as(Kind::Accumulator, &[r]).scalars(&scalars).run();
            let case = Case::new(&EXP_SHARE).input(&[r, n], &x).input_as(Kind::Accumulator, &[r], &y);
            case.input(&[r], &dy).output(&[r, n]).scalars(&scalars).run();
        }
        let s: Vec<f64> = values(2, 90).iter().map(|x| x.abs()).collect();
        let case = Case::new(&JOIN).input(&[90], &values(1, 90)).input(&[90], &s).output(&[90]);
        case.run_for(&[DType::F64, DType::F32]);
    }
}
