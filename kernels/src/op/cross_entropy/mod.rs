//! The two sums that a cross-entropy over a (possibly split) vocabulary is made of, and their backward:
//! loss = max + ln(sum_exp) - picked, once sum_exp and picked are added up over the shards of the vocabulary.

mod cpu;
mod gpu;

use crate::cpu::Pool;
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{Bound, Gpu, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{check_indices, operands, read, width, write};

/// This shard's share of sum_exp = sum_j exp(z_j - max) and picked = z_target (0 on ranks that lack it).
///
/// - in: z `(rows.., v)`, any float, contiguous; max `(rows..)` in the accumulator of z (of the whole row, so
///   that the terms stay finite); target `(rows..)`, i64
/// - out: sum_exp `(rows..)` and picked `(rows..)` in the accumulator of z
/// - scalars: Int v_start, the global index of the first column here; Int v_global, the whole vocabulary
///
/// v may be 0. A target outside of `0..v_global` is [`KernelError::Index`]. A row of -inf only gives not-a-number.
/// Counted: 3 operations an element of z.
pub static TERMS: Kernel = Kernel {
    name: "cross_entropy",
    reference: terms,
    cpu: Some(cpu::terms),
    gpu: Some(Gpu { source: gpu::SOURCE, plan: gpu::terms }),
    flops: |launch| 3 * launch.inputs[0].view.numel() as u64,
    bound: Bound { ulps: 16.0 },
};

/// The cotangent of z: dz_j = exp(z_j - max) d_sum + (d_picked if j is the target). The max is a constant here, since
/// the loss does not depend on it.
///
/// - in: z, max, target as for [`TERMS`]; d_sum `(rows..)`, d_picked `(rows..)` in the accumulator of z
/// - out: dz like z
/// - scalars: as for [`TERMS`]
///
/// A target outside of `0..v_global` is [`KernelError::Index`]. Counted: 3 operations an element of z.
pub static BACKWARD: Kernel = Kernel {
    name: "cross_entropy_backward",
    reference: backward,
    cpu: Some(cpu::backward),
    gpu: Some(Gpu { source: gpu::SOURCE, plan: gpu::backward }),
    flops: |launch| 3 * launch.inputs[0].view.numel() as u64,
    bound: Bound { ulps: 16.0 },
};

/// Where a target stands among the columns that start at `v_start`; `None` if it stands on another rank.
fn local(target: i64, v_start: i64, v: usize) -> Option<usize> {
    usize::try_from(target - v_start).ok().filter(|&at| at < v)
}

fn terms(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([z, max, target], [sum_exp, picked], scalars) = operands(launch);
    let (v, v_start, target) = (width(z), scalars[0].int(), read::<i64>(target));
    check_indices(TERMS.name, target, scalars[1].int())?;
    match_float!(z.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (z, max) = (read::<T>(z), read::<Acc>(max));
        let outputs = write::<Acc>(sum_exp).iter_mut().zip(write::<Acc>(picked));
        for (row, (sum_exp, picked)) in outputs.enumerate() {
            let z = &z[row * v..][..v];
            *sum_exp = Acc::from_f64(z.iter().map(|z| (z.to_f64() - max[row].to_f64()).exp()).sum());
            *picked = Acc::from_f64(local(target[row], v_start, v).map_or(0.0, |at| z[at].to_f64()));
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: TERMS.name, dtype: z.dtype }))
}

fn backward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([z, max, target, d_sum, d_picked], [dz], scalars) = operands(launch);
    let (v, v_start, target) = (width(z), scalars[0].int(), read::<i64>(target));
    check_indices(BACKWARD.name, target, scalars[1].int())?;
    match_float!(z.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (z, dz, max) = (read::<T>(z), write::<T>(dz), read::<Acc>(max));
        let (d_sum, d_picked) = (read::<Acc>(d_sum), read::<Acc>(d_picked));
        for row in 0..target.len() {
            let hit = local(target[row], v_start, v);
            for j in 0..v {
                let share = (z[row * v + j].to_f64() - max[row].to_f64()).exp() * d_sum[row].to_f64();
                let pick = if hit == Some(j) { d_picked[row].to_f64() } else { 0.0 };
                dz[row * v + j] = T::from_f64(share + pick);
            }
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: z.dtype }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::check::{Case, Kind, values};
    use crate::op::differences::{Value, compare, dot, evaluate};

    const INDEX: Kind = Kind::Fixed(DType::I64);

    fn shard(v_start: i64, v_global: i64) -> [Scalar; 2] {
        [Scalar::Int(v_start), Scalar::Int(v_global)]
    }

    #[test]
    fn by_hand() {
        // Columns 2 and 3 of a vocabulary of 5; the second row's target stands on another rank.
        let z = Value::real(&[2, 2], &[0.0, 2f64.ln(), 3f64.ln(), 5f64.ln()]);
        let max = Value::real(&[2], &[0.0, 0.0]);
        let target = Value::index(&[2], &[3.0, 4.0]);
        let outputs =
            evaluate(&TERMS, &[z.clone(), max.clone(), target.clone()], &[&[2], &[2]], &shard(2, 5));
        assert!((outputs[0][0] - 3.0).abs() + (outputs[0][1] - 8.0).abs() < 1e-14, "{outputs:?}");
        assert_eq!(outputs[1], [2f64.ln(), 0.0]);
        let (d_sum, d_picked) = (Value::real(&[2], &[10.0, 1.0]), Value::real(&[2], &[-1.0, -1.0]));
        let dz = evaluate(&BACKWARD, &[z, max, target, d_sum, d_picked], &[&[2, 2]], &shard(2, 5)).remove(0);
        assert!(dz.iter().zip([10.0, 19.0, 3.0, 5.0]).all(|(d, e)| (d - e).abs() < 1e-14), "{dz:?}");
    }

    fn case<'a>(kernel: &'a Kernel, rows: usize, v: usize, target: &[f64]) -> Case<'a> {
        let z: Vec<f64> = values(1, rows * v).iter().map(|z| 4.0 * z).collect();
        let max: Vec<f64> = values(2, rows).iter().map(|m| m + 8.0).collect();
        let case = Case::new(kernel).input(&[rows, v], &z).input_as(Kind::Accumulator, &[rows], &max);
        case.input_as(INDEX, &[rows], target).scalars(&shard(3, 5000))
    }

    #[test]
    fn the_fast_path_agrees() {
        for (rows, v) in [(1, 1), (1, 7), (5, 16), (3, 33), (90, 40), (2, 3000), (4, 0), (0, 4)] {
            let target: Vec<f64> = (0..rows).map(|i| ((i * 7 + 2) % (v + 5)) as f64).collect();
            case(&TERMS, rows, v, &target)
                .output_as(Kind::Accumulator, &[rows])
                .output_as(Kind::Accumulator, &[rows])
                .run();
            case(&BACKWARD, rows, v, &target)
                .input_as(Kind::Accumulator, &[rows], &values(3, rows))
                .input_as(Kind::Accumulator, &[rows], &values(4, rows))
                .output(&[rows, v])
                .run();
        }
    }

    #[test]
    fn a_target_outside_of_the_vocabulary_is_an_error() {
        for (bad, text) in
            [(-1.0, "index -1 at position 2"), (5000.0, "index 5000 at position 2 is outside of 0..5000")]
        {
            let case = case(&TERMS, 4, 6, &[0.0, 4999.0, bad, -7.0]);
            let case = case.output_as(Kind::Accumulator, &[4]).output_as(Kind::Accumulator, &[4]);
            let error = case.verify(&[DType::F32]).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn backward_agrees_with_finite_differences() {
        let max = Value::real(&[3], &[2.0; 3]);
        let inputs = [Value::real(&[3, 4], &values(5, 12)), max, Value::index(&[3], &[2.0, 6.0, 1.0])];
        let (d_sum, d_picked) = (values(6, 3), values(7, 3));
        let cotangents = [Value::real(&[3], &d_sum), Value::real(&[3], &d_picked)];
        let dz =
            evaluate(&BACKWARD, &[&inputs[..], &cotangents].concat(), &[&[3, 4]], &shard(2, 9)).remove(0);
        let loss = |x: &[Value]| {
            let outputs = evaluate(&TERMS, x, &[&[3], &[3]], &shard(2, 9));
            dot(&outputs[0], &d_sum) + dot(&outputs[1], &d_picked)
        };
        compare(&inputs, &[(0, dz)], loss).unwrap();
    }
}
