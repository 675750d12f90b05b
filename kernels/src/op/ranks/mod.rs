//! One result from the operands of several ranks, in a fixed balanced tree over the operand index.
//!
//! tree(lo, hi) = tree(lo, mid) op tree(mid, hi) with mid = lo + the largest power of two below hi - lo. In: k operands,
//! contiguous, one shape and dtype. Out: y, contiguous. 16-bit floats are combined in f32 and rounded once.

use super::rows::{read, write};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, Kernel, Launch};
use crate::match_float;

/// Elements combined at a time: the partial results of a tree over 16 ranks stay in the first cache.
const BLOCK: usize = 512;
/// Elements of one task.
const TASK: usize = 1 << 14;

macro_rules! combine {
    ($($(#[$doc:meta])* $static:ident $name:literal $float:expr, $int:expr;)*) => {$(
        $(#[$doc])*
        pub static $static: Kernel = Kernel {
            name: $name,
            reference: |pool, launch| {
                match_float!(launch.outputs[0].dtype, T => floats::<T>(pool, launch, $float),
                    else integers(pool, launch, $int));
                Ok(())
            },
            cpu: None,
            flops: |l| (l.inputs.len().saturating_sub(1) * l.outputs[0].view.numel()) as u64,
            bound: Bound { ulps: 0.0 },
        };
    )*};
}

combine! {
    /// The sum over ranks.
    SUM "ranks_sum" |a, b| a + b, i64::wrapping_add;
    /// The largest over ranks; not-a-number wins over nothing.
    MAX "ranks_max" |a, b| a.greater(b), i64::max;
    /// The smallest over ranks.
    MIN "ranks_min" |a, b| -((-a).greater(-b)), i64::min;
}

fn floats<T: Float>(pool: &Pool, launch: &mut Launch<'_>, join: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync + Copy) {
    let operands: Vec<&[T]> = launch.inputs.iter().map(read).collect();
    pool.chunks(write::<T>(&mut launch.outputs[0]), TASK, |task, out| {
        let mut at = task * TASK;
        for part in out.chunks_mut(BLOCK) {
            vectorized(|| {
                let mut sums = [<T::Acc as Real>::ZERO; BLOCK];
                tree(&operands, at, &mut sums[..part.len()], T::widen, join);
                part.iter_mut().zip(&sums).for_each(|(y, s)| *y = T::narrow(*s));
            });
            at += part.len();
        }
    });
}

/// The tree over the elements from `at` on of some operands.
fn tree<T: Copy, R: Copy + Default>(
    operands: &[&[T]],
    at: usize,
    out: &mut [R],
    widen: impl Fn(T) -> R + Copy,
    join: impl Fn(R, R) -> R + Copy,
) {
    if let [one] = operands {
        out.iter_mut().zip(&one[at..]).for_each(|(o, x)| *o = widen(*x));
        return;
    }
    let (low, high) = operands.split_at(operands.len().next_power_of_two() / 2);
    let mut right = [R::default(); BLOCK];
    let right = &mut right[..out.len()];
    tree(low, at, out, widen, join);
    tree(high, at, right, widen, join);
    out.iter_mut().zip(right).for_each(|(a, b)| *a = join(*a, *b));
}

fn integers(pool: &Pool, launch: &mut Launch<'_>, join: fn(i64, i64) -> i64) {
    if launch.outputs[0].dtype == DType::I64 {
        return integers_of::<i64>(pool, launch, |x| x, |x| x, join);
    }
    integers_of::<u8>(pool, launch, i64::from, |x| x as u8, join);
}

fn integers_of<T: Element>(pool: &Pool, launch: &mut Launch<'_>, widen: fn(T) -> i64, narrow: fn(i64) -> T, join: fn(i64, i64) -> i64) {
    let operands: Vec<&[T]> = launch.inputs.iter().map(|a: &Arg<'_>| a.buffer.as_slice::<T>()).collect();
    let starts: Vec<usize> = launch.inputs.iter().map(|a| a.view.offset).collect();
    let out = &mut launch.outputs[0];
    let (offset, numel) = (out.view.offset, out.view.numel());
    if numel == 0 {
        return;
    }
    let memory = out.buffer.as_mut::<T>().expect("an output has one handle");
    let operands: Vec<&[T]> = operands.iter().zip(starts).map(|(o, s)| &o[s..]).collect();
    pool.chunks(&mut memory[offset..offset + numel], TASK, |task, out| {
        let mut at = task * TASK;
        for part in out.chunks_mut(BLOCK) {
            let mut sums = [0i64; BLOCK];
            tree(&operands, at, &mut sums[..part.len()], widen, join);
            part.iter_mut().zip(&sums).for_each(|(y, s)| *y = narrow(*s));
            at += part.len();
        }
    });
}
