//! Random numbers on the CPU: many Philox blocks at a time.

use super::normal::normal_pair;
use super::philox::{philox_rounds, unit_interval, words};
use super::{DROPOUT, NORMAL, Place, UNIFORM, seed};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{operands, read, rows_per_task, write};
use std::ops::Range;

/// The most and the fewest Philox blocks computed together.
const BLOCKS: usize = 64;
const BLOCKS_MIN: usize = 16;
/// The most elements that they serve.
const BATCH: usize = 4 * BLOCKS;

/// Random bits of consecutive global indices, from a block on; `count` determines how many are filled in.
fn batch((key, stream): (u64, u64), first_block: u64, count: usize, bits: &mut [u32; BATCH]) {
    vectorized(
        #[inline(always)]
        || {
            let num_blocks = count.div_ceil(4).next_multiple_of(BLOCKS_MIN);
            let [stream_low, stream_high] = words(stream);
            let mut words_of_blocks = [[0; BLOCKS], [0; BLOCKS], [stream_low; BLOCKS], [stream_high; BLOCKS]];
            let [c0, c1, c2, c3] = words_of_blocks.each_mut().map(|word| &mut word[..num_blocks]);
            for (n, (c0, c1)) in c0.iter_mut().zip(&mut *c1).enumerate() {
                [*c0, *c1] = words(first_block.wrapping_add(n as u64));
            }
            philox_rounds([&mut *c0, &mut *c1, &mut *c2, &mut *c3], words(key));
            let blocks = c0.iter().zip(&*c1).zip(&*c2).zip(&*c3);
            for (to, (((&c0, &c1), &c2), &c3)) in bits.as_chunks_mut::<4>().0.iter_mut().zip(blocks) {
                *to = [c0, c1, c2, c3];
            }
        },
    );
}

/// Pairs of standard normal numbers, as many as fit.
fn normal_pairs(bits: &[u32], numbers: &mut [f64]) {
    vectorized(
        #[inline(always)]
        || {
            let pairs = numbers.as_chunks_mut::<2>().0.iter_mut().zip(bits.as_chunks::<2>().0);
            for (pair, bits) in pairs {
                (pair[0], pair[1]) = normal_pair(bits[0], bits[1]);
            }
        },
    );
}

/// Receives the bits of a batch, how many of them to skip, and the elements that the next ones are for.
type Fill<'f> = dyn FnMut(&[u32; BATCH], usize, Range<usize>) + 'f;

/// Iterates over the local elements that `count` counts, from `start` on: hands out the bits of a batch, how many of them to skip, and the
/// elements (counted from `start`) that the next ones are for. Compiled once for all dtypes.
fn each_batch(place: &Place, seed: (u64, u64), start: usize, count: usize, fill: &mut Fill<'_>) {
    let mut bits = [0; BATCH];
    let mut at = 0;
    while at < count {
        let run = (place.run - (start + at) % place.run).min(count - at);
        let (mut index, end) = (place.global(start + at), at + run);
        while at < end {
            let skip = (index % 4) as usize;
            let taken = (BATCH - skip).min(end - at);
            batch(seed, index / 4, skip + taken, &mut bits);
            fill(&bits, skip, at..at + taken);
            at += taken;
            index += taken as u64;
        }
    }
}

pub(super) fn uniform(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([], [y], scalars) = operands(launch);
    let (seed, place) = (seed(scalars), Place::new(&y.view.shape, &scalars[4..]));
    let (a, b) = (scalars[2].real(), scalars[3].real());
    let task = rows_per_task(1);
    match_float!(y.dtype, T => {
        pool.chunks(write::<T>(y), task, |i, y| {
            each_batch(&place, seed, i * task, y.len(), &mut |bits, skip, range| {
                vectorized(#[inline(always)] || {
                    for (y, &bits) in y[range].iter_mut().zip(&bits[skip..]) {
                        *y = T::from_f64(a + (b - a) * unit_interval(bits));
                    }
                });
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: UNIFORM.name, dtype: y.dtype }))
}

pub(super) fn normal(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([], [y], scalars) = operands(launch);
    let (seed, place) = (seed(scalars), Place::new(&y.view.shape, &scalars[4..]));
    let (a, b) = (scalars[2].real(), scalars[3].real());
    let task = rows_per_task(1);
    match_float!(y.dtype, T => {
        pool.chunks(write::<T>(y), task, |i, y| {
            each_batch(&place, seed, i * task, y.len(), &mut |bits, skip, range| {
                let mut numbers = [0.0; BATCH];
                let used = (skip + range.len()).next_multiple_of(2);
                normal_pairs(bits, &mut numbers[..used]);
                vectorized(#[inline(always)] || {
                    for (y, &number) in y[range].iter_mut().zip(&numbers[skip..]) {
                        *y = T::from_f64(a + b * number);
                    }
                });
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: NORMAL.name, dtype: y.dtype }))
}

pub(super) fn dropout(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [y], scalars) = operands(launch);
    let (p, seed, place) = (scalars[0].real(), seed(&scalars[1..]), Place::new(&x.view.shape, &scalars[3..]));
    let task = rows_per_task(1);
    // A uniform number is k / 2^24, so that it is at least p exactly if k is at least this.
    let threshold = (p * 16_777_216.0).ceil() as u32;
    match_float!(x.dtype, T => {
        let (x, keep_prob) = (read::<T>(x), <T as Float>::Acc::lit(1.0 - p));
        pool.chunks(write::<T>(y), task, |i, y| {
            each_batch(&place, seed, i * task, y.len(), &mut |bits, skip, range| {
                let x = &x[i * task..][range.clone()];
                vectorized(#[inline(always)] || {
                    for ((y, x), &bits) in y[range].iter_mut().zip(x).zip(&bits[skip..]) {
                        *y = if bits >> 8 >= threshold { T::narrow(x.widen() / keep_prob) } else { T::default() };
                    }
                });
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: DROPOUT.name, dtype: x.dtype }))
}
