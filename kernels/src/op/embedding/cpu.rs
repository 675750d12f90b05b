//! Embedding on the CPU. The backward sorts the tokens by row, so that each row of the table is one sum.

use super::{BACKWARD, FORWARD, local};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{check_indices, operands, read, rows_per_task, width, write};

pub(super) fn forward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([table, index], [y], scalars) = operands(launch);
    let (v, d, v_start) = (table.view.shape[0], width(table), scalars[0].int());
    let index = read::<i64>(index);
    check_indices(FORWARD.name, index, scalars[1].int())?;
    if d == 0 {
        return Ok(());
    }
    match_float!(table.dtype, T => {
        let (table, rows) = (read::<T>(table), rows_per_task(d));
        pool.chunks(write::<T>(y), rows * d, |i, y| {
            for (y, &index) in y.chunks_exact_mut(d).zip(&index[i * rows..]) {
                match local(index, v_start, v) {
                    Some(row) => y.copy_from_slice(&table[row * d..][..d]),
                    None => y.fill(T::default()),
                }
            }
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: table.dtype }))
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([index, dy], [dtable], scalars) = operands(launch);
    let (v, d, v_start) = (dtable.view.shape[0], width(dy), scalars[0].int());
    let index = read::<i64>(index);
    check_indices(BACKWARD.name, index, scalars[1].int())?;
    if d == 0 {
        return Ok(());
    }
    let mut tokens: Vec<(usize, usize)> =
        index.iter().enumerate().filter_map(|(n, &i)| Some((local(i, v_start, v)?, n))).collect();
    tokens.sort_unstable();
    match_float!(dy.dtype, T => {
        let (dy, rows) = (read::<T>(dy), rows_per_task(d));
        pool.chunks(write::<T>(dtable), rows * d, |i, dtable| {
            let start = tokens.partition_point(|&(row, _)| row < i * rows);
            let mut sum = vec![<T as Float>::Acc::ZERO; d];
            vectorized(#[inline(always)] || sum_rows(&tokens[start..], i * rows, dy, &mut sum, dtable));
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: dy.dtype }))
}

/// Fills the rows from `first_row` on with the sums of their tokens, which stand in front of `tokens` by row.
#[inline(always)]
fn sum_rows<T: Float>(
    mut tokens: &[(usize, usize)],
    first_row: usize,
    dy: &[T],
    sum: &mut [T::Acc],
    dtable: &mut [T],
) {
    let d = sum.len();
    for (row, out) in dtable.chunks_exact_mut(d).enumerate() {
        if tokens.first().is_none_or(|token| token.0 != first_row + row) {
            out.fill(T::default());
            continue;
        }
        sum.fill(T::Acc::ZERO);
        while let Some((&(_, n), rest)) = tokens.split_first().filter(|(token, _)| token.0 == first_row + row)
        {
            for (sum, dy) in sum.iter_mut().zip(&dy[n * d..]) {
                *sum += dy.widen();
            }
            tokens = rest;
        }
        for (out, &sum) in out.iter_mut().zip(&*sum) {
            *out = T::narrow(sum);
        }
    }
}
