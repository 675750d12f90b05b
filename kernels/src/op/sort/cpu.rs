//! Sorting on the CPU: elements become integers of the same order, with the index in the low bits, so that all keys differ and any sort is
//! stable.

use super::SORT;
use crate::cpu::Pool;
use crate::dtype::{DType, Float};
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::Launch;
use crate::op::rows::{operands, read, rows_per_task, width, write};
use half::{bf16, f16};

pub(super) fn sort(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [values, places], scalars) = operands(launch);
    let (n, k, descending) = (width(x), *values.view.shape.last().expect("as for x"), scalars[0].int() == 1);
    if n == 0 || k == 0 {
        return Ok(());
    }
    macro_rules! rows {
        ($t:ty, $key:expr, $pack:ty) => {{
            let (x, places, per_task) = (read::<$t>(x), write::<i64>(places), rows_per_task(n));
            pool.chunks2((write::<$t>(values), per_task * k), (places, per_task * k), |i, values, places| {
                let mut keys: Vec<$pack> = filled_or_unwind(0, n);
                let rows = values.chunks_exact_mut(k).zip(places.chunks_exact_mut(k));
                for (row, (values, places)) in (i * per_task..).zip(rows) {
                    let x = &x[row * n..][..n];
                    let flip = if descending { !0 } else { 0 };
                    keys.clear();
                    keys.extend(x.iter().zip(0..).map(|(&x, at): (_, $pack)| {
                        <$pack>::from($key(x) ^ flip) << (<$pack>::BITS / 2) | at
                    }));
                    if k < n {
                        keys.select_nth_unstable(k);
                    }
                    keys[..k].sort_unstable();
                    for ((key, value), place) in keys.iter().zip(values).zip(places) {
                        let at = (key & (<$pack>::MAX >> (<$pack>::BITS / 2))) as usize;
                        (*value, *place) = (x[at], at as i64);
                    }
                }
            });
        }};
    }
    if u32::try_from(n).is_err() {
        return (SORT.reference)(pool, launch);
    }
    match x.dtype {
        DType::F64 => rows!(f64, of_f64, u128),
        DType::F32 => rows!(f32, of_f32, u64),
        DType::BF16 => rows!(bf16, of_short, u64),
        DType::F16 => rows!(f16, of_short, u64),
        DType::I64 => rows!(i64, of_i64, u128),
        DType::U8 | DType::Bool => rows!(u8, u32::from, u64),
    }
    Ok(())
}

/// Returns an integer whose order is that of the numbers; -0 becomes 0, and every NaN the largest.
fn of_f64(x: f64) -> u64 {
    if x.is_nan() {
        return u64::MAX;
    }
    let bits = (x + 0.0).to_bits();
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}

fn of_f32(x: f32) -> u32 {
    if x.is_nan() {
        return u32::MAX;
    }
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

fn of_short<T: Float<Acc = f32>>(x: T) -> u32 {
    of_f32(x.widen())
}

fn of_i64(x: i64) -> u64 {
    x.cast_unsigned() ^ 1 << 63
}
