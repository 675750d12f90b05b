//! RoPE on the CPU: a table of cosines and sines, then products row by row.

use super::{BLOCK, Problem, ROPE, joined};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{operands_and_last, read, rows_per_task, write};

/// Computes cosines and sines of all positions: `c` numbers a position, the cosines of all pairs first.
///
/// Positions share summands of angles, so that a table of n positions costs about n / 64 + 64 evaluations per pair. An entry depends on its
/// own position only.
fn table<R: Real>(p: &Problem<'_>) -> Vec<R> {
    let count = p.num_positions();
    let (first, last) = match p.positions {
        None => (p.first, p.first + p.t as i64 - 1),
        Some(positions) => positions.iter().fold((i64::MAX, i64::MIN), |(a, b), &n| (a.min(n), b.max(n))),
    };
    let half = p.c / 2;
    let blocks = first.div_euclid(BLOCK)..last.div_euclid(BLOCK) + 1;
    if blocks.end - blocks.start > count as i64 {
        return scattered_table(p);
    }
    let one_block = blocks.end - blocks.start == 1;
    let rest = if one_block { first.rem_euclid(BLOCK)..last.rem_euclid(BLOCK) + 1 } else { 0..BLOCK };
    let cos_sin = |positions: &mut dyn Iterator<Item = i64>| -> Vec<(f64, f64)> {
        positions.flat_map(|n| p.frequencies.iter().map(move |f| (n as f64 * f.real()).sin_cos())).collect()
    };
    let coarse = cos_sin(&mut blocks.clone().map(|block| block * BLOCK));
    let fine = cos_sin(&mut rest.clone());
    let mut table = filled_or_unwind(R::ZERO, count * p.c);
    for (n, row) in table.chunks_exact_mut(p.c).enumerate() {
        let position = p.position(n);
        let a = &coarse[(position.div_euclid(BLOCK) - blocks.start) as usize * half..][..half];
        let b = &fine[(position.rem_euclid(BLOCK) - rest.start) as usize * half..][..half];
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            let (cos, sin) = joined(*a, *b);
            (row[i], row[half + i]) = (R::lit(cos), R::lit(sin));
        }
    }
    table
}

/// [`table`] of positions that share few summands.
fn scattered_table<R: Real>(p: &Problem<'_>) -> Vec<R> {
    let mut table = filled_or_unwind(R::ZERO, p.num_positions() * p.c);
    for (n, row) in table.chunks_exact_mut(p.c).enumerate() {
        let (position, half) = (p.position(n), p.c / 2);
        let rest = position.rem_euclid(BLOCK);
        for (i, f) in p.frequencies.iter().enumerate() {
            let part = |n: i64| (n as f64 * f.real()).sin_cos();
            let (cos, sin) = joined(part(position - rest), part(rest));
            (row[i], row[half + i]) = (R::lit(cos), R::lit(sin));
        }
    }
    table
}

pub(super) fn rotate(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let scalars = launch.scalars;
    let ([x], positions, [y]) = operands_and_last(launch);
    let p = Problem::new(x, positions, scalars);
    match_float!(x.dtype, T => {
        let (x, y) = (read::<T>(x), write::<T>(y));
        if x.is_empty() {
            return Ok(());
        }
        let (table, count): (Vec<<T as Float>::Acc>, _) = (table(&p), p.num_positions());
        let rows = rows_per_task(p.per_position);
        pool.chunks(y, rows * p.per_position, |i, y| {
            let x = &x[i * rows * p.per_position..][..y.len()];
            vectorized(#[inline(always)] || {
                let positions = x.chunks_exact(p.per_position).zip(y.chunks_exact_mut(p.per_position));
                for (n, (x, y)) in positions.enumerate() {
                    let cos_sin = &table[(i * rows + n) % count * p.c..][..p.c];
                    for (x, y) in x.chunks_exact(p.c).zip(y.chunks_exact_mut(p.c)) {
                        rotate_row(cos_sin, x, y);
                    }
                }
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: ROPE.name, dtype: x.dtype }))
}

#[inline(always)]
fn rotate_row<T: Float>(cos_sin: &[T::Acc], x: &[T], y: &mut [T]) {
    let half = x.len() / 2;
    let ((cos, sin), (low, high)) = (cos_sin.split_at(half), x.split_at(half));
    let (y_low, y_high) = y.split_at_mut(half);
    let cos_sin = cos.iter().zip(sin);
    for (((&cos, &sin), (low, high)), (y_low, y_high)) in
        cos_sin.zip(low.iter().zip(high)).zip(y_low.iter_mut().zip(y_high))
    {
        let (low, high) = (low.widen(), high.widen());
        *y_low = T::narrow(low * cos - high * sin);
        *y_high = T::narrow(high * cos + low * sin);
    }
}
