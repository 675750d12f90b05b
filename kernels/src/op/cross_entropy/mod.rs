//! The terms of a cross-entropy over a (possibly sharded) vocabulary, and its backward: loss = lse - picked, once both are reduced over the
//! shards of the vocabulary.

mod cpu;
mod gpu;

use crate::cpu::Pool;
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{check_indices, operands, read, row_len, width, write};

/// This shard's lse = ln(sum_j exp(z_j)) and picked = z_target (0 if the target is on another rank).
///
/// - in: z `(rows.., v)`, any float, contiguous; target `(rows..)`, i64
/// - out: lse `(rows..)` and picked `(rows..)` in the accumulator of z
/// - scalars: Int v_start, the global index of the first local column; Int v_global, the whole vocabulary
///
/// The sum is that of exp(z - max z), so lse is finite for every finite z; it is negative infinity where every z is and where
/// v is 0; NaN where a z is infinity. A target outside of `0..v_global` is [`KernelError::Index`].
/// Counted: 4 operations per element of z.
#[doc(alias = "vocab_parallel_cross_entropy")]
pub static FORWARD: Kernel = Kernel {
    name: "cross_entropy",
    reference: terms,
    cpu: Some(cpu::terms),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::terms }),
    flops: |launch| 4 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 16.0 },
};

/// Computes the cotangent of z in place: dz_j = exp(z_j - lse) d_lse + (d_picked if j is the target), for the lse of the whole row.
///
/// - in: target as for [`FORWARD`]; lse `(rows..)`, d_lse `(rows..)`, d_picked `(rows..)` in the accumulator of z
/// - out: z as for [`FORWARD`], which becomes dz
/// - scalars: as for [`FORWARD`]
///
/// A target outside of `0..v_global` is [`KernelError::Index`]. Counted: 3 operations per element of z.
pub static BACKWARD: Kernel = Kernel {
    name: "cross_entropy_backward",
    reference: backward,
    cpu: Some(cpu::backward),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::backward }),
    flops: |launch| 3 * launch.outputs[0].view.numel() as u64,
    bytes: Some(|launch| launch.updated_bytes()),
    bound: Bound { ulps: 16.0 },
};

/// Returns the local column of a target, of those that start at `v_start`; `None` if the target is on another rank.
fn local(target: i64, v_start: i64, v: usize) -> Option<usize> {
    usize::try_from(target - v_start).ok().filter(|&at| at < v)
}

fn terms(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([z, target], [lse, picked], scalars) = operands(launch);
    let (v, v_start, target) = (width(z), scalars[0].int(), read::<i64>(target));
    check_indices(FORWARD.name, target, scalars[1].int())?;
    match_float!(z.dtype, T => {
        type Acc = <T as Float>::Acc;
        let z = read::<T>(z);
        let outputs = write::<Acc>(lse).iter_mut().zip(write::<Acc>(picked));
        for (row, (lse, picked)) in outputs.enumerate() {
            let z = &z[row * v..][..v];
            let most = z.iter().fold(f64::NEG_INFINITY, |m, z| m.max(z.to_f64()));
            let base = if most == f64::NEG_INFINITY { 0.0 } else { most };
            let sum: f64 = z.iter().map(|z| (z.to_f64() - base).exp()).sum();
            *lse = Acc::from_f64(base + sum.ln());
            *picked = Acc::from_f64(local(target[row], v_start, v).map_or(0.0, |at| z[at].to_f64()));
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: z.dtype }))
}

fn backward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([target, lse, d_lse, d_picked], [z], scalars) = operands(launch);
    let (v, v_start, target) = (row_len(z.view), scalars[0].int(), read::<i64>(target));
    check_indices(BACKWARD.name, target, scalars[1].int())?;
    match_float!(z.dtype, T => {
        type Acc = <T as Float>::Acc;
        let (z, lse) = (write::<T>(z), read::<Acc>(lse));
        let (d_lse, d_picked) = (read::<Acc>(d_lse), read::<Acc>(d_picked));
        for row in 0..target.len() {
            let hit = local(target[row], v_start, v);
            for j in 0..v {
                let share = (z[row * v + j].to_f64() - lse[row].to_f64()).exp() * d_lse[row].to_f64();
                let pick = if hit == Some(j) { d_picked[row].to_f64() } else { 0.0 };
                z[row * v + j] = T::from_f64(share + pick);
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
    use crate::op::finite_difference::{Value, check_gradients, dot, evaluate, update};
    use crate::op::kernel_check::{Case, Kind, values};
    use crate::strides::Strides;
    use approx::assert_abs_diff_eq;

    const INDEX: Kind = Kind::Fixed(DType::I64);

    fn shard(v_start: i64, v_global: i64) -> [Scalar; 2] {
        [Scalar::Int(v_start), Scalar::Int(v_global)]
    }

    #[test]
    fn matches_known_values() {
        // Columns 2 and 3 of a vocabulary of 5; the second row's target is on another rank.
        let z = Value::real(&[2, 2], &[0.0, 2f64.ln(), 3f64.ln(), 5f64.ln()]);
        let target = Value::index(&[2], &[3.0, 4.0]);
        let outputs = evaluate(&FORWARD, &[z.clone(), target.clone()], &[&[2], &[2]], &shard(2, 5));
        assert_abs_diff_eq!(outputs[0][..], [3f64.ln(), 8f64.ln()][..], epsilon = 5e-15);
        assert_eq!(outputs[1], [2f64.ln(), 0.0]);
        let of = |data: &[f64]| Value::real(&[2], data);
        let inputs = [target, of(&[6f64.ln(), 8f64.ln()]), of(&[12.0, 8.0]), of(&[-1.0, -1.0])];
        let dz = update(&BACKWARD, &inputs, &z, &shard(2, 5));
        assert_abs_diff_eq!(dz[..], [2.0, 3.0, 3.0, 5.0][..], epsilon = 1e-14);
    }

    fn logits(rows: usize, v: usize) -> Vec<f64> {
        values(1, rows * v).iter().map(|z| 4.0 * z).collect()
    }

    fn case(rows: usize, v: usize, target: &[f64]) -> Case<'static> {
        let case = Case::new(&FORWARD).input(&[rows, v], &logits(rows, v)).scale(1.0);
        case.input_as(INDEX, &[rows], target).scalars(&shard(3, 5000))
    }

    #[test]
    fn fast_path_matches_the_reference() {
        let shapes =
            [(1, 1), (1, 7), (5, 16), (3, 33), (90, 40), (2, 3000), (1, 17_000), (1, 25_608), (4, 0), (0, 4)];
        for (rows, v) in shapes {
            let target: Vec<f64> = (0..rows).map(|i| ((i * 7 + 2) % (v + 5)).min(4999) as f64).collect();
            // In f64 long sums of the reference are no more exact than those under test.
            let dtypes = &DType::FLOATS[usize::from(v > 10_000)..];
            case(rows, v, &target)
                .output_as(Kind::Accumulator, &[rows])
                .output_as(Kind::Accumulator, &[rows])
                .run_for(dtypes);
            let lse: Vec<f64> = values(2, rows).iter().map(|l| l + 8.0).collect();
            Case::new(&BACKWARD)
                .input_as(INDEX, &[rows], &target)
                .input_as(Kind::Accumulator, &[rows], &lse)
                .input_as(Kind::Accumulator, &[rows], &values(3, rows))
                .input_as(Kind::Accumulator, &[rows], &values(4, rows))
                .output_view(Kind::Tested, Strides::contiguous(&[rows, v]), &logits(rows, v))
                .scalars(&shard(3, 5000))
                .scale(1.0)
                .run();
        }
    }

    #[test]
    fn large_arguments_and_special_values() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        // A maximum that comes late, rows with some and only -inf, NaN.
        for special in [[-inf, 80.0], [-80.0, -inf], [inf, 1.0], [nan, 2.0], [-inf, nan], [inf, nan]] {
            for v in [2, 40, 5000] {
                let mut z = vec![special[0]; 2 * v];
                (z[v - 1], z[v]) = (special[1], special[1]);
                let case = Case::new(&FORWARD).input(&[2, v], &z).input_as(INDEX, &[2], &[0.0, 1.0]);
                let case = case.scalars(&shard(0, v as i64)).scale(1.0);
                case.output_as(Kind::Accumulator, &[2]).output_as(Kind::Accumulator, &[2]).run();
            }
        }
        let case = Case::new(&FORWARD).input(&[1, 3], &[-inf; 3]).input_as(INDEX, &[1], &[4.0]);
        let case = case.output_as(Kind::Accumulator, &[1]).output_as(Kind::Accumulator, &[1]);
        assert_eq!(case.scalars(&shard(0, 5)).fast(DType::F32), [[-inf], [0.0]]);
    }

    #[test]
    fn target_out_of_range_is_an_error() {
        for (bad, text) in
            [(-1.0, "index -1 at position 2"), (5000.0, "index 5000 at position 2 is outside of 0..5000")]
        {
            let case = case(4, 6, &[0.0, 4999.0, bad, -7.0]);
            let case = case.output_as(Kind::Accumulator, &[4]).output_as(Kind::Accumulator, &[4]);
            let error = case.verify(&[DType::F32]).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn backward_matches_finite_differences() {
        let inputs = [Value::real(&[3, 4], &values(5, 12)), Value::index(&[3], &[2.0, 6.0, 1.0])];
        let terms = |x: &[Value]| evaluate(&FORWARD, x, &[&[3], &[3]], &shard(2, 9));
        let (d_lse, d_picked) = (values(6, 3), values(7, 3));
        let of_rows = [&terms(&inputs)[0], &d_lse, &d_picked].map(|data| Value::real(&[3], data));
        let dz = update(&BACKWARD, &[&inputs[1..], &of_rows].concat(), &inputs[0], &shard(2, 9));
        let loss = |x: &[Value]| {
            let outputs = terms(x);
            dot(&outputs[0], &d_lse) + dot(&outputs[1], &d_picked)
        };
        check_gradients(&inputs, &[(0, dz)], loss).unwrap();
    }
}
