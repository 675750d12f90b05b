//! The merge of partial results of attention, over disjoint sets of keys.

use crate::cpu::math::Maths;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element};
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::op::rows::{no_float, operands, read, rows_per_task, width, write};

/// Merges a partial result of attention into another one, in place: with l = ln(e^lse + e^lse'), o = e^(lse - l) o + e^(lse' - l) o' and
/// lse = l.
///
/// - in: o' `(.., c)`, lse' `(..)`, f32 or f64, contiguous
/// - out: o and lse like them, contiguous, updated
///
/// A result without keys (lse = -inf) changes no bit of the other one, which it may be replaced by.
#[doc(alias = "flash_decoding")]
#[doc(alias = "ring attention")]
pub static MERGE: Kernel = Kernel {
    name: "attention_merge",
    reference: |_, launch| match launch.inputs[0].dtype {
        DType::F64 => reference::<f64>(launch),
        DType::F32 => reference::<f32>(launch),
        dtype => no_float(MERGE.name, dtype),
    },
    cpu: Some(|pool, launch| match launch.inputs[0].dtype {
        DType::F64 => merge::<f64>(pool, launch),
        DType::F32 => merge::<f32>(pool, launch),
        dtype => no_float(MERGE.name, dtype),
    }),
    gpu: Some(GpuCode { source: include_str!("gpu/merge.cu"), plan }),
    flops: |launch| 3 * launch.outputs[0].view.numel() as u64,
    bytes: Some(|launch| launch.updated_bytes()),
    bound: Bound { ulps: 16.0 },
};

/// Threads of a block on a GPU; a warp has one row.
const THREADS: usize = 256;

fn reference<T: Element>(launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([part, part_lse], [o, lse], _) = operands(launch);
    let c = width(part);
    let (part, part_lse, o) = (read::<T>(part), read::<T>(part_lse), write::<T>(o));
    for (row, lse) in write::<T>(lse).iter_mut().enumerate() {
        let (own, other, of_row) = (lse.to_f64(), part_lse[row].to_f64(), row * c..(row + 1) * c);
        if other == f64::NEG_INFINITY {
            continue;
        }
        if own == f64::NEG_INFINITY {
            o[of_row.clone()].copy_from_slice(&part[of_row]);
            *lse = part_lse[row];
            continue;
        }
        let top = if other > own { other } else { own };
        let [keep, add] = [own, other].map(|x| (x - top).exp());
        for i in of_row {
            o[i] = T::from_f64((keep * o[i].to_f64() + add * part[i].to_f64()) / (keep + add));
        }
        *lse = T::from_f64(top + (keep + add).ln());
    }
    Ok(())
}

fn merge<R: Maths>(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([part, part_lse], [o, lse], _) = operands(launch);
    let c = width(part);
    let (part, part_lse) = (read::<R>(part), read::<R>(part_lse));
    let rows = rows_per_task(c);
    if c == 0 {
        write::<R>(lse).iter_mut().zip(part_lse).for_each(|(own, &other)| *own = weights(*own, other)[2]);
        return Ok(());
    }
    pool.chunks2((write::<R>(o), rows * c), (write::<R>(lse), rows), |task, o, lse| {
        let (part, part_lse) = (&part[task * rows * c..], &part_lse[task * rows..]);
        vectorized(
            #[inline(always)]
            || {
                let pairs = o.chunks_exact_mut(c).zip(part.chunks_exact(c));
                for ((o, part), (lse, &other)) in pairs.zip(lse.iter_mut().zip(part_lse)) {
                    if other == R::NEG_INFINITY {
                        continue;
                    }
                    if *lse == R::NEG_INFINITY {
                        o.copy_from_slice(part);
                        *lse = other;
                        continue;
                    }
                    let [keep, add, joint] = weights(*lse, other);
                    for (o, &part) in o.iter_mut().zip(part) {
                        *o = keep * *o + add * part;
                    }
                    *lse = joint;
                }
            },
        );
    });
    Ok(())
}

/// Returns the weights of two partial results, and the logarithm of the sum of both denominators.
#[inline(always)]
fn weights<R: Maths>(own: R, other: R) -> [R; 3] {
    if other == R::NEG_INFINITY || own == R::NEG_INFINITY {
        return if other == R::NEG_INFINITY { [R::ONE, R::ZERO, own] } else { [R::ZERO, R::ONE, other] };
    }
    let top = if other > own { other } else { own };
    let (keep, add) = ((own - top).exp(), (other - top).exp());
    let sum = keep + add;
    [keep / sum, add / sum, top + sum.ln()]
}

fn plan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let part = &launch.inputs[0];
    if !matches!(part.dtype, DType::F32 | DType::F64) {
        return no_float(MERGE.name, part.dtype);
    }
    let (rows, c) = (launch.outputs[1].view.numel(), width(part));
    let blocks = rows.div_ceil(THREADS / 32);
    plan.grid(Grid {
        entry: "merge",
        defines: vec![("T", type_name(part.dtype).into())],
        blocks: [u32::try_from(blocks).expect("fewer than 2^31 rows fit a device"), 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: vec![
            GridArg::Input(0),
            GridArg::Input(1),
            GridArg::Output(0),
            GridArg::Output(1),
            GridArg::I64(rows as i64),
            GridArg::I64(c as i64),
        ],
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::finite_difference::{Value, update_all};
    use crate::op::kernel_check::{Case, Kind, values};
    use crate::strides::Strides;
    use approx::{assert_abs_diff_eq, assert_relative_eq};

    const DTYPES: [DType; 2] = [DType::F32, DType::F64];

    fn case(rows: usize, c: usize, lse: &[f64], part_lse: &[f64]) -> Case<'static> {
        let (of_rows, all) = (Strides::contiguous(&[rows]), Strides::contiguous(&[rows, c]));
        Case::new(&MERGE)
            .input(&[rows, c], &values(1, rows * c))
            .input(&[rows], part_lse)
            .output_view(Kind::Tested, all, &values(2, rows * c))
            .output_view(Kind::Tested, of_rows, lse)
            .scale(1.0)
    }

    #[test]
    fn known_values_are_merged() {
        // Denominators 1 and 3, 2 and none, none and 5, none and none.
        let (ln, none) = (f64::ln, f64::NEG_INFINITY);
        let part = Value::real(&[4, 1], &[8.0, 0.0, 7.0, 0.0]);
        let part_lse = Value::real(&[4], &[ln(3.0), none, ln(5.0), none]);
        let before = [vec![4.0, 6.0, 0.0, 0.0], vec![0.0, ln(2.0), none, none]];
        let [o, lse] = update_all(&MERGE, &[part, part_lse], [&[4, 1], &[4]], before);
        assert_abs_diff_eq!(o[..], [7.0, 6.0, 7.0, 0.0][..], epsilon = 1e-15);
        assert_relative_eq!(
            lse[..],
            [ln(4.0), ln(2.0), ln(5.0), none][..],
            epsilon = 1e-15,
            max_relative = 0.0
        );
    }

    #[test]
    fn fast_paths_match_the_reference() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        for (rows, c) in [(0, 4), (3, 0), (1, 1), (37, 5), (4000, 8), (70, 130)] {
            let (lse, part_lse) = (values(3, rows), values(4, rows));
            case(rows, c, &lse, &part_lse).run_for(&DTYPES);
            let far: Vec<f64> = lse.iter().map(|x| 100.0 * x).collect();
            case(rows, c, &far, &part_lse).run_for(&DTYPES);
        }
        for special in [-inf, inf, nan] {
            let lse = [special, 0.5, special, -inf, 0.25];
            let part_lse = [0.5, special, special, special, -inf];
            case(5, 3, &lse, &part_lse).run_for(&DTYPES);
        }
    }
}
