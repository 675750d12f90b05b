//! Embedding on the CPU. The backward sorts tokens by row, so that each row of the table is one sum.

use super::{ABSENT, BACKWARD, FORWARD, local};
use crate::cpu::simd::stream::StreamingStores;
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{check_indices, operands, read, rows_per_task, width, write};

/// Terms per sum, and sums per sum of the next level: a long f32 sum would lose its last terms.
const TOGETHER: usize = 32;
/// Levels of sums, the first of terms.
pub(super) const LEVELS: usize = 4;

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
                    None => y.fill(T::from_f64(ABSENT)),
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
    let mut tokens: Vec<(usize, usize)> = filled_or_unwind((0, 0), index.len());
    tokens.clear();
    tokens.extend(index.iter().enumerate().filter_map(|(n, &i)| Some((local(i, v_start, v)?, n))));
    tokens.sort_unstable();
    match_float!(dy.dtype, T => {
        let (dy, rows) = (read::<T>(dy), rows_per_task(d));
        pool.chunks(write::<T>(dtable), rows * d, |i, dtable| {
            let start = tokens.partition_point(|&(row, _)| row < i * rows);
            let mut sums = filled_or_unwind(<T as Float>::Acc::ZERO, LEVELS * d);
            let (tokens, first_row) = (&tokens[start..], i * rows);
            let Some(stream) = StreamingStores::of::<T>(v * d) else {
                return vectorized(#[inline(always)] || {
                    sum_rows(tokens, first_row, dy, &mut sums, dtable, take_sums);
                });
            };
            let mut whole = filled_or_unwind(T::default(), d);
            vectorized(#[inline(always)] || {
                sum_rows(tokens, first_row, dy, &mut sums, dtable, |sums, out| {
                    take_sums(sums, &mut whole);
                    stream.copy(out, &whole);
                });
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: dy.dtype }))
}

/// Fills the rows from `first_row` on with the sums of their tokens, which are at the front of `tokens`, sorted by row. `sums` has one row
/// per level, zeros before and after. `put` stores a row's sums and zeroes them, or stores zeros if a row has no tokens.
#[inline(always)]
fn sum_rows<T: Float>(
    mut tokens: &[(usize, usize)],
    first_row: usize,
    dy: &[T],
    sums: &mut [T::Acc],
    dtable: &mut [T],
    mut put: impl FnMut(Option<&mut [T::Acc]>, &mut [T]),
) {
    let d = sums.len() / LEVELS;
    for (row, out) in dtable.chunks_exact_mut(d).enumerate() {
        if tokens.first().is_none_or(|token| token.0 != first_row + row) {
            put(None, out);
            continue;
        }
        let count = tokens.iter().take_while(|token| token.0 == first_row + row).count();
        let (of_row, rest) = tokens.split_at(count);
        sum_tokens(of_row.iter().map(|(_, n)| *n), dy, sums);
        tokens = rest;
        put(Some(&mut sums[..d]), out);
    }
}

/// Sums the rows of dy of some tokens, in order, to the first level of `sums`, which has zeros in all levels before, and in the others after.
#[inline(always)]
pub(super) fn sum_tokens<T: Float>(tokens: impl Iterator<Item = usize>, dy: &[T], sums: &mut [T::Acc]) {
    let d = sums.len() / LEVELS;
    let mut count = 0;
    for n in tokens {
        for (sum, dy) in sums[..d].iter_mut().zip(&dy[n * d..]) {
            *sum += dy.widen();
        }
        count += 1;
        carry(sums, d, count);
    }
    if count >= TOGETHER {
        for level in (1..LEVELS).rev() {
            raise(sums, d, level, level - 1);
        }
    }
}

/// Rounds and stores the sums of a row, and zeroes them.
#[inline(always)]
fn take_sums<T: Float>(sums: Option<&mut [T::Acc]>, out: &mut [T]) {
    let Some(sums) = sums else {
        return out.fill(T::default());
    };
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = T::narrow(std::mem::replace(sum, T::Acc::ZERO));
    }
}

/// Carries full sums to the next level, after the term of this number, counted from 1.
#[inline(always)]
fn carry<R: Real>(sums: &mut [R], d: usize, count: usize) {
    let mut terms = TOGETHER;
    for level in 1..LEVELS {
        if !count.is_multiple_of(terms) {
            return;
        }
        raise(sums, d, level - 1, level);
        terms *= TOGETHER;
    }
}

/// Adds the sums of a level to the next level and zeroes them.
#[inline(always)]
fn raise<R: Real>(sums: &mut [R], d: usize, from: usize, to: usize) {
    let (low, high) = sums[from.min(to) * d..].split_at_mut(d);
    let (from, to) = if from < to { (low, &mut high[..d]) } else { (&mut high[..d], low) };
    for (to, from) in to.iter_mut().zip(from) {
        *to += std::mem::replace(from, R::ZERO);
    }
}
