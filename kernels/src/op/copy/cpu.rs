//! Copies on the CPU, in runs: contiguous, strided, or transposed in tiles.

use super::{convert, nonzero};
use crate::cpu::simd::stream::StreamingStores;
use crate::cpu::simd::transpose::{StridedRows, transpose};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element, Float};
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Launch};
use crate::match_dtype;
use crate::op::pointwise::scatter;
use crate::op::rows::operands;
use crate::op::strided_iter::StridedIter;
use half::{bf16, f16};
use std::ops::Range;

/// Rows and columns of a transposed tile: a few cache lines of both sides, which stay in the L1 cache.
const TILE: usize = 64;
/// Rows of y per transposing task, if there are enough for all threads: a page of f32 in each column of x.
const ROWS: usize = 1024;
/// Columns of y that are transposed for all rows of a task before the next columns: as many pages of x as the TLB holds.
const COLS: usize = 512;
/// Elements converted at a time before streaming stores.
const RUN: usize = 256;

pub(super) fn copy(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], _) = operands(launch);
    // Each line is one loop in machine code; the 16-bit floats go through f32, which is exact or rounds once. Other pairs are
    // too rare, and too many, for loops of their own in each order and instruction set.
    macro_rules! pairs {
        ($($from:ident $s:ty => $to:ident $d:ty, $x:ident: $value:expr;)*) => {
            match (x.dtype, y.dtype) {
                $((DType::$from, DType::$to) => each::<$s, $d, _>(pool, x, y, #[inline(always)] |$x| $value, tiles),)*
                (from, to) if from == to => match from.size() {
                    1 => each::<u8, u8, _>(pool, x, y, #[inline(always)] |x| x, tiles),
                    2 => each::<bf16, bf16, _>(pool, x, y, #[inline(always)] |x| x, tiles),
                    4 => each::<f32, f32, _>(pool, x, y, #[inline(always)] |x| x, squares),
                    _ => each::<i64, i64, _>(pool, x, y, #[inline(always)] |x| x, tiles),
                },
                (_, DType::Bool) => match_dtype!(x.dtype, S => copy_elements::<S, u8>(pool, x, y, nonzero)),
                _ => match_dtype!(x.dtype, S => match_dtype!(y.dtype, D => copy_elements::<S, D>(pool, x, y, convert))),
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

/// Two matrices of one shape: x with contiguous columns, y with contiguous rows.
struct TransposedCopy<'m, S, D> {
    x: StridedRows<&'m [S]>,
    y: StridedRows<&'m mut [D]>,
    extents: [usize; 2],
}

/// Calls `matrix` to transpose each matrix whose rows are contiguous in x and whose columns are contiguous in y.
fn each<S: Element, D: Element, F: Fn(S) -> D + Sync>(
    pool: &Pool,
    x: &Arg<'_>,
    y: &mut ArgMut<'_>,
    f: F,
    matrix: impl Fn(TransposedCopy<'_, S, D>, Option<&StreamingStores>, &F) + Sync,
) {
    let from = x.buffer.as_slice::<S>();
    let iter = StridedIter::in_memory_order([y.view, x.view]);
    let (dims, inner) = (iter.dims(), iter.dims().len() - 1);
    let contiguous_in_x = dims[..inner].iter().position(|&(_, [_, step])| step == 1);
    let transposed = contiguous_in_x.filter(|_| matches!(iter.steps(), [1, step] if step > 1));
    let numel = iter.numel();
    let rows_min = match transposed {
        Some(0) => (dims[0].0 / pool.num_threads()).clamp(1, ROWS).next_multiple_of(TILE),
        _ => 1,
    };
    scatter::<2, D>(pool, &iter, y, rows_min, |iter, to, start| {
        let stream = StreamingStores::of::<D>(numel);
        match transposed {
            Some(transposed) => transpose_matrices(iter, transposed, from, to, start, |transposed| {
                matrix(transposed, stream.as_ref(), &f)
            }),
            None => runs(iter, from, to, start, stream.as_ref(), &f),
        }
    });
}

fn copy_elements<S: Element, D: Element>(pool: &Pool, x: &Arg<'_>, y: &mut ArgMut<'_>, f: fn(S) -> D) {
    let from = x.buffer.as_slice::<S>();
    let iter = StridedIter::in_memory_order([y.view, x.view]);
    let [to_step, from_step] = iter.steps();
    scatter::<2, D>(pool, &iter, y, 1, |iter, to, start| {
        iter.for_each_run(0..iter.numel(), |[to_at, from_at], length| {
            (0..length).for_each(|i| to[to_at - start + i * to_step] = f(from[from_at + i * from_step]));
        });
    });
}

/// Copies run after run.
fn runs<S: Element, D: Element>(
    iter: &StridedIter<2>,
    from: &[S],
    to: &mut [D],
    start: usize,
    stream: Option<&StreamingStores>,
    f: &impl Fn(S) -> D,
) {
    let [to_step, from_step] = iter.steps();
    iter.for_each_run(0..iter.numel(), |[to_at, from_at], length| {
        let (from, to) = (&from[from_at..], &mut to[to_at - start..]);
        match (to_step, from_step) {
            (1, 1) => {
                let (from, to) = (&from[..length], &mut to[..length]);
                vectorized(
                    #[inline(always)]
                    || match stream {
                        Some(stream) if length >= RUN => copy_nontemporal(from, to, stream, f),
                        _ => to.iter_mut().zip(from).for_each(|(to, from)| *to = f(*from)),
                    },
                );
            }
            (1, 0) => to[..length].fill(f(from[0])),
            _ => (0..length).for_each(|i| to[i * to_step] = f(from[i * from_step])),
        }
    });
}

/// Converts a long run, piece by piece.
#[inline(always)]
fn copy_nontemporal<S: Element, D: Element>(
    from: &[S],
    to: &mut [D],
    stream: &StreamingStores,
    f: &impl Fn(S) -> D,
) {
    let mut piece = [D::default(); RUN];
    for (to, from) in to.chunks_mut(RUN).zip(from.chunks(RUN)) {
        piece.iter_mut().zip(from).for_each(|(to, from)| *to = f(*from));
        stream.copy(to, &piece[..from.len()]);
    }
}

/// Transposes matrix after matrix: the innermost dim is contiguous in y, the dim `transposed` in x.
fn transpose_matrices<S: Element, D: Element>(
    iter: &StridedIter<2>,
    transposed: usize,
    from: &[S],
    to: &mut [D],
    start: usize,
    matrix: impl Fn(TransposedCopy<'_, S, D>),
) {
    let (rows, [row_step, _]) = iter.dims()[transposed];
    let (cols, [_, col_step]) = iter.dims()[iter.dims().len() - 1];
    let others = iter.without_dim_and_innermost(transposed);
    let [to_step, from_step] = others.steps();
    others.for_each_run(0..others.numel(), |[to_at, from_at], length| {
        for other in 0..length {
            let x = StridedRows { memory: &from[from_at + other * from_step..], step: col_step };
            let y = StridedRows { memory: &mut to[to_at + other * to_step - start..], step: row_step };
            matrix(TransposedCopy { x, y, extents: [rows, cols] });
        }
    });
}

/// Transposes 32-bit elements of one dtype in registers.
fn squares(
    TransposedCopy { x, y, extents }: TransposedCopy<'_, f32, f32>,
    stream: Option<&StreamingStores>,
    _: &impl Fn(f32) -> f32,
) {
    transpose(x, y, extents, stream);
}

/// Transposes tile after tile, so that whole cache lines of both sides are used.
fn tiles<S: Element, D: Element, F: Fn(S) -> D>(
    TransposedCopy { x, y, extents: [rows, cols] }: TransposedCopy<'_, S, D>,
    _: Option<&StreamingStores>,
    f: &F,
) {
    let mut tile = [[S::default(); TILE]; TILE];
    let rows_of = |cols: Range<usize>| (0..rows).step_by(TILE).map(move |row| (row, cols.clone()));
    let cols_of = (0..cols).step_by(COLS).map(|col| col..cols.min(col + COLS));
    for (row, cols) in cols_of.flat_map(rows_of) {
        let height = TILE.min(rows - row);
        for col in cols.clone().step_by(TILE) {
            let width = TILE.min(cols.end - col);
            for (j, tile) in tile[..width].iter_mut().enumerate() {
                tile[..height].copy_from_slice(&x.memory[row + (col + j) * x.step..][..height]);
            }
            for i in 0..height {
                let to = &mut y.memory[(row + i) * y.step + col..][..width];
                to.iter_mut().zip(&tile).for_each(|(to, tile)| *to = f(tile[i]));
            }
        }
    }
}
