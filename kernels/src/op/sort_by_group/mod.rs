//! Stable sort of rows by group, where some groups may be on other ranks: tokens by expert.

mod gpu;

use crate::cpu::Pool;
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::op::rows::{check_indices, operands, read, write};

/// Sorts rows by group: the rows of each local group, one group after the other, each in its original order; then the rows of groups that
/// are not local.
///
/// - in: index `(n)`, i64, contiguous: the group of each row
/// - out: order `(n)`, the rows in sorted order; owner `(n)`, those numbers divided by `share`; place `(n)`, the position of each row in
///   the sorted order; starts `(v + 1)`, the first position of each local group, and the end of the last; all i64, contiguous
/// - scalars: Int v_start, the global number of the first local group; Int v_global, the number of all groups; Int share, the number of
///   consecutive rows with one owner (a token has `share` rows, one for each of its experts)
///
/// An index outside of `0..v_global` is [`KernelError::Index`]. Exact. Counted: no operations.
pub static SORT_BY_GROUP: Kernel = Kernel {
    name: "sort_by_group",
    reference: plain,
    cpu: Some(fast),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::plan }),
    flops: |_| 0,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

/// Returns the local number of a row's group; `v` if the group is not local.
fn local(index: i64, v_start: i64, v: usize) -> usize {
    usize::try_from(index - v_start).map_or(v, |at| at.min(v))
}

fn plain(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([index], [order, owner, place, starts], scalars) = operands(launch);
    let [v_start, v_global, share] = [0, 1, 2].map(|i| scalars[i].int());
    let index = read::<i64>(index);
    check_indices(SORT_BY_GROUP.name, index, v_global)?;
    let (order, owner, place, starts) =
        (write::<i64>(order), write::<i64>(owner), write::<i64>(place), write::<i64>(starts));
    let v = starts.len() - 1;
    let mut rows: Vec<usize> = (0..index.len()).collect();
    rows.sort_by_key(|&row| local(index[row], v_start, v));
    for (at, &row) in rows.iter().enumerate() {
        (order[at], owner[at], place[row]) = (row as i64, row as i64 / share, at as i64);
    }
    for (group, start) in starts.iter_mut().enumerate() {
        *start = index.iter().filter(|i| local(**i, v_start, v) < group).count() as i64;
    }
    Ok(())
}

/// Counting sort: one pass for the counts, one for the positions.
fn fast(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([index], [order, owner, place, starts], scalars) = operands(launch);
    let [v_start, v_global, share] = [0, 1, 2].map(|i| scalars[i].int());
    let index = read::<i64>(index);
    check_indices(SORT_BY_GROUP.name, index, v_global)?;
    let (order, owner, place, starts) =
        (write::<i64>(order), write::<i64>(owner), write::<i64>(place), write::<i64>(starts));
    let v = starts.len() - 1;
    let mut next = filled_or_unwind(0, v + 2);
    index.iter().for_each(|i| next[local(*i, v_start, v) + 1] += 1);
    for group in 0..=v {
        next[group + 1] += next[group];
    }
    starts.iter_mut().zip(&next).for_each(|(start, at)| *start = *at as i64);
    for (row, i) in index.iter().enumerate() {
        let at = &mut next[local(*i, v_start, v)];
        (order[*at], owner[*at], place[row]) = (row as i64, row as i64 / share, *at as i64);
        *at += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::kernel_check::{Case, Kind};

    const WHOLE: Kind = Kind::Fixed(DType::I64);

    fn case(index: &[f64], v: usize, [v_start, v_global, share]: [i64; 3]) -> Case<'static> {
        let case = Case::new(&SORT_BY_GROUP).input_as(WHOLE, &[index.len()], index);
        let case = [index.len(); 3].iter().fold(case, |case, n| case.output_as(WHOLE, &[*n]));
        case.output_as(WHOLE, &[v + 1]).scalars(&[v_start, v_global, share].map(Scalar::Int))
    }

    #[test]
    fn matches_known_values() {
        // Groups 1 and 2 of four; of two rows each one owner.
        let made = case(&[2.0, 0.0, 1.0, 2.0, 3.0, 1.0], 2, [1, 4, 2]).fast(DType::F32);
        assert_eq!(made[0], [2.0, 5.0, 0.0, 3.0, 1.0, 4.0]);
        assert_eq!(made[1], [1.0, 2.0, 0.0, 1.0, 0.0, 2.0]);
        assert_eq!(made[2], [2.0, 4.0, 0.0, 3.0, 5.0, 1.0]);
        assert_eq!(made[3], [0.0, 2.0, 4.0]);
    }

    #[test]
    fn fast_path_matches_the_reference() {
        // No rows, groups without rows, groups elsewhere, no local group; beyond one tile, and beyond two.
        for (n, v, v_start, v_global) in [
            (0, 3, 0, 3),
            (1, 1, 0, 1),
            (9, 4, 0, 40),
            (40, 3, 2, 8),
            (7, 0, 3, 8),
            (300, 8, 0, 8),
            (2500, 5, 1, 7),
            (9000, 100, 20, 128),
        ] {
            let index: Vec<f64> = (0..n).map(|i: usize| ((i * i + 3 * i) % 1009 % v_global) as f64).collect();
            case(&index, v, [v_start, v_global as i64, 2]).run_for(&[DType::F32]);
        }
    }

    #[test]
    fn group_index_out_of_range_is_an_error() {
        for bad in [-1.0, 4.0] {
            let error = case(&[0.0, bad], 2, [1, 4, 1]).verify(&[DType::F32]).unwrap_err();
            assert!(error.contains(&format!("index {bad} at position 1 is outside of 0..4")), "{error}");
        }
    }
}
