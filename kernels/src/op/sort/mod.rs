//! Sort and top-k of rows: values and indices.

mod cpu;
mod gpu;

use crate::cpu::Pool;
use crate::dtype::{DType, Element};
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{operands, read, width, write};
use std::cmp::Ordering;

/// The first k elements of each row in ascending or descending order, and their indices in the row.
///
/// - in: x `(.., n)`, any float, i64, u8 or bool, contiguous
/// - out: values `(.., k)` like x and indices `(.., k)`, i64, contiguous; k is at most n
/// - scalars: Int 1 for descending order, 0 for ascending order
///
/// The sort is stable in both directions; 0 and -0 are equal. NaN is larger than all numbers and equal to itself: NaN comes last in
/// ascending and first in descending order. Exact. Counted: log2(n), rounded up, operations per element of x.
#[doc(alias = "topk")]
#[doc(alias = "argsort")]
pub static SORT: Kernel = Kernel {
    name: "sort",
    reference: plain,
    cpu: Some(cpu::sort),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::plan }),
    flops: |launch| {
        let x = launch.inputs[0].view;
        let n = x.shape.last().copied().unwrap_or(1);
        x.numel() as u64 * u64::from(n.next_power_of_two().ilog2())
    },
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

/// Compares two numbers, NaN above all.
fn compare(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

fn plain(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x], [values, places], scalars) = operands(launch);
    let (n, descending) = (width(x), scalars[0].int() == 1);
    let places = write::<i64>(places);
    match x.dtype {
        DType::I64 => rows(read::<i64>(x), n, write(values), places, descending, |a, b| a.cmp(&b)),
        DType::U8 | DType::Bool => {
            rows(read::<u8>(x), n, write(values), places, descending, |a, b| a.cmp(&b))
        }
        dtype => match_float!(dtype, T => {
            rows(read::<T>(x), n, write(values), places, descending, |a, b| compare(a.to_f64(), b.to_f64()));
        }, else return Err(KernelError::DType { kernel: SORT.name, dtype })),
    }
    Ok(())
}

fn rows<T: Element>(
    x: &[T],
    n: usize,
    values: &mut [T],
    places: &mut [i64],
    descending: bool,
    compare: fn(T, T) -> Ordering,
) {
    if n == 0 {
        return;
    }
    let (num_rows, count) = (x.len() / n, values.len());
    for row in 0..num_rows {
        let (x, k) = (&x[row * n..][..n], count / num_rows);
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|&i, &j| if descending { compare(x[j], x[i]) } else { compare(x[i], x[j]) });
        for (at, &place) in order[..k].iter().enumerate() {
            (values[row * k + at], places[row * k + at]) = (x[place], place as i64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Allocator;
    use crate::kernel::Scalar;
    use crate::kernel::{Arg, ArgMut};
    use crate::op::kernel_check::{Case, Kind, load, store, values};
    use crate::strides::Strides;

    const PLACES: Kind = Kind::Fixed(DType::I64);

    /// Returns values and indices of one row, by the reference and by the fast path.
    fn both(dtype: DType, x: &[f64], k: usize, descending: i64) -> [[Vec<f64>; 2]; 2] {
        let memory = Allocator::default();
        let (from, to) = (Strides::contiguous(&[x.len()]), Strides::contiguous(&[k]));
        [SORT.reference, cpu::sort].map(|code| {
            let input = store(&memory, dtype, x);
            let (mut values, mut places) =
                (store(&memory, dtype, &vec![0.0; k]), store(&memory, DType::I64, &vec![0.0; k]));
            let inputs = [Arg { buffer: &input, dtype, view: &from }];
            let mut outputs = [
                ArgMut { buffer: &mut values, dtype, view: &to },
                ArgMut { buffer: &mut places, dtype: DType::I64, view: &to },
            ];
            let scalars = [Scalar::Int(descending)];
            let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &scalars };
            code(&Pool::new(1), &mut launch).unwrap();
            [load(&values, dtype), load(&places, DType::I64)]
        })
    }

    #[test]
    fn ties_and_special_values_match_known_values() {
        let x = [2.0, f64::NAN, -0.0, 2.0, f64::NEG_INFINITY, 0.0, f64::INFINITY, f64::NAN];
        for dtype in DType::FLOATS {
            for [_, places] in both(dtype, &x, 8, 0) {
                assert_eq!(places, [4.0, 2.0, 5.0, 0.0, 3.0, 6.0, 1.0, 7.0]);
            }
            for [values, places] in both(dtype, &x, 4, 1) {
                assert_eq!(places, [1.0, 7.0, 6.0, 0.0]);
                assert!(values[0].is_nan() && values[1].is_nan());
                assert_eq!(values[2..], [f64::INFINITY, 2.0]);
            }
        }
        for [values, places] in both(DType::I64, &[3.0, -7.0, 3.0], 2, 1) {
            assert_eq!((values, places), (vec![3.0, 3.0], vec![0.0, 2.0]));
        }
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for (rows, n, k) in [
            (1, 1, 1),
            (5, 40, 40),
            (3, 300, 7),
            (70, 3, 2),
            (2, 5, 0),
            (0, 4, 2),
            (3, 0, 0),
            (2, 9000, 20),
            (2, 9000, 9000),
            (1, 4097, 3000),
        ] {
            // Few different values, so that there are ties.
            let x: Vec<f64> = values(1, rows * n).iter().map(|x| (4.0 * x).round()).collect();
            for descending in [0, 1] {
                let case =
                    Case::new(&SORT).input(&[rows, n], &x).output(&[rows, k]).output_as(PLACES, &[rows, k]);
                case.scalars(&[Scalar::Int(descending)]).run_for(&DType::ALL);
            }
        }
    }
}
