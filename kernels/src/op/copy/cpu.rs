//! Copies by runs: side by side, spread out, or turned in tiles.

use super::{convert, truth_of};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element, Float};
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Launch};
use crate::match_dtype;
use crate::op::pointwise::scatter;
use crate::op::rows::operands;
use crate::op::walk::Walk;
use half::{bf16, f16};
use std::ops::Range;

/// Rows and columns of a tile that is turned: a few cache lines of both sides, which stay in the first-level cache.
const TILE: usize = 64;
/// Rows of y in a task that turns, if there are enough for all threads: a page of f32 in each column of x.
const ROWS: usize = 1024;
/// Columns of y that are turned for all rows of a task before the next ones: as many pages of x as have their translations at hand.
const COLS: usize = 512;

pub(super) fn copy(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], _) = operands(launch);
    // Each line is one loop in machine code; the 16-bit floats go through f32, which is exact or rounds once. Other pairs are
    // too rare, and too many, for loops of their own in each order and instruction set.
    macro_rules! pairs {
        ($($from:ident $s:ty => $to:ident $d:ty, $x:ident: $value:expr;)*) => {
            match (x.dtype, y.dtype) {
                $((DType::$from, DType::$to) => each::<$s, $d>(pool, x, y, #[inline(always)] |$x| $value),)*
                (from, to) if from == to => match from.size() {
                    1 => each::<u8, u8>(pool, x, y, #[inline(always)] |x| x),
                    2 => each::<bf16, bf16>(pool, x, y, #[inline(always)] |x| x),
                    4 => each::<f32, f32>(pool, x, y, #[inline(always)] |x| x),
                    _ => each::<i64, i64>(pool, x, y, #[inline(always)] |x| x),
                },
                (_, DType::Bool) => match_dtype!(x.dtype, S => one_by_one::<S, u8>(pool, x, y, truth_of)),
                _ => match_dtype!(x.dtype, S => match_dtype!(y.dtype, D => one_by_one::<S, D>(pool, x, y, convert))),
            }
        };
    }
    pairs! {
        F32 f32 => F64 f64, x: f64::from(x);
        F64 f64 => F32 f32, x: x as f32;
        F32 f32 => BF16 bf16, x: bf16::narrow(x);
        BF16 bf16 => F32 f32, x: x.widen();
        F32 f32 => F16 f16, x: f16::narrow(x);
        F16 f16 => F32 f32, x: x.widen();
        F16 f16 => BF16 bf16, x: bf16::narrow(x.widen());
        BF16 bf16 => F16 f16, x: f16::narrow(x.widen());
    }
    Ok(())
}

fn each<S: Element, D: Element>(pool: &Pool, x: &Arg<'_>, y: &mut ArgMut<'_>, f: impl Fn(S) -> D + Sync) {
    let from = x.buffer.as_slice::<S>();
    let walk = Walk::in_memory_order([y.view, x.view]);
    let (dims, inner) = (walk.dims(), walk.dims().len() - 1);
    let side_by_side = dims[..inner].iter().position(|&(_, [_, step])| step == 1);
    let turned = side_by_side.filter(|_| matches!(walk.steps(), [1, step] if step > 1));
    let rows_min = match turned {
        Some(0) => (dims[0].0 / pool.num_threads()).clamp(1, ROWS).next_multiple_of(TILE),
        _ => 1,
    };
    scatter::<2, D>(pool, &walk, y, rows_min, |walk, to, start| match turned {
        Some(turned) => turn(walk, turned, from, to, start, &f),
        None => runs(walk, from, to, start, &f),
    });
}

fn one_by_one<S: Element, D: Element>(pool: &Pool, x: &Arg<'_>, y: &mut ArgMut<'_>, f: fn(S) -> D) {
    let from = x.buffer.as_slice::<S>();
    let walk = Walk::in_memory_order([y.view, x.view]);
    let [to_step, from_step] = walk.steps();
    scatter::<2, D>(pool, &walk, y, 1, |walk, to, start| {
        walk.runs(0..walk.numel(), |[to_at, from_at], length| {
            (0..length).for_each(|i| to[to_at - start + i * to_step] = f(from[from_at + i * from_step]));
        });
    });
}

/// Run after run.
fn runs<S: Element, D: Element>(walk: &Walk<2>, from: &[S], to: &mut [D], start: usize, f: &impl Fn(S) -> D) {
    let [to_step, from_step] = walk.steps();
    walk.runs(0..walk.numel(), |[to_at, from_at], length| {
        let (from, to) = (&from[from_at..], &mut to[to_at - start..]);
        match (to_step, from_step) {
            (1, 1) => {
                let (from, to) = (&from[..length], &mut to[..length]);
                vectorized(
                    #[inline(always)]
                    || to.iter_mut().zip(from).for_each(|(to, from)| *to = f(*from)),
                );
            }
            (1, 0) => to[..length].fill(f(from[0])),
            _ => (0..length).for_each(|i| to[i * to_step] = f(from[i * from_step])),
        }
    });
}

/// The innermost dim lies side by side in y, the dim `turned` in x: tile after tile, so that whole cache lines of
/// both are used.
fn turn<S: Element, D: Element>(
    walk: &Walk<2>,
    turned: usize,
    from: &[S],
    to: &mut [D],
    start: usize,
    f: &impl Fn(S) -> D,
) {
    let (rows, [row_step, _]) = walk.dims()[turned];
    let (cols, [_, col_step]) = walk.dims()[walk.dims().len() - 1];
    let others = walk.without(turned);
    let [to_step, from_step] = others.steps();
    let mut tile = [[S::default(); TILE]; TILE];
    others.runs(0..others.numel(), |[to_at, from_at], length| {
        for other in 0..length {
            let (to, from) =
                (&mut to[to_at + other * to_step - start..], &from[from_at + other * from_step..]);
            let rows_of = |cols: Range<usize>| (0..rows).step_by(TILE).map(move |row| (row, cols.clone()));
            let cols_of = (0..cols).step_by(COLS).map(|col| col..cols.min(col + COLS));
            for (row, cols) in cols_of.flat_map(rows_of) {
                let height = TILE.min(rows - row);
                for col in cols.clone().step_by(TILE) {
                    let width = TILE.min(cols.end - col);
                    for (j, tile) in tile[..width].iter_mut().enumerate() {
                        tile[..height].copy_from_slice(&from[row + (col + j) * col_step..][..height]);
                    }
                    for i in 0..height {
                        let to = &mut to[(row + i) * row_step + col..][..width];
                        to.iter_mut().zip(&tile).for_each(|(to, tile)| *to = f(tile[i]));
                    }
                }
            }
        }
    });
}
