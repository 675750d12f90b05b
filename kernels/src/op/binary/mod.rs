//! Arithmetic of two operands, element by element.
//!
//! In: a, b of one shape after broadcasting (stride 0 repeats), any strides, one dtype. Out: y, contiguous, same shape
//! and dtype. Floats are computed in the accumulator type and rounded once; i64 wraps.

use super::rows::write;
use super::runs::{Walk, each_run};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element, Float};
use crate::error::KernelError;
use crate::kernel::{Bound, Kernel, Launch};
use crate::match_float;

macro_rules! arithmetic {
    ($($(#[$doc:meta])* $static:ident $name:literal $op:tt $wrapping:expr;)*) => {$(
        $(#[$doc])*
        pub static $static: Kernel = Kernel {
            name: $name,
            reference: |_, launch| {
                let one = &Pool::new(1);
                match_float!(launch.inputs[0].dtype,
                    T => zip_runs::<T, T>(one, launch, |a, b| T::from_f64(a.to_f64() $op b.to_f64())),
                    else return integers($name, one, launch, $wrapping));
                Ok(())
            },
            cpu: Some(|pool, launch| {
                match_float!(launch.inputs[0].dtype,
                    T => zip_runs::<T, T>(pool, launch, |a, b| T::narrow(a.widen() $op b.widen())),
                    else return integers($name, pool, launch, $wrapping));
                Ok(())
            }),
            flops: |l| l.outputs[0].view.numel() as u64,
            bound: Bound { ulps: 1.0 },
        };
    )*};
}

arithmetic! {
    /// y = a + b.
    ADD "add" + Some(i64::wrapping_add);
    /// y = a - b.
    SUB "sub" - Some(i64::wrapping_sub);
    /// y = a * b.
    MUL "mul" * Some(i64::wrapping_mul);
    /// y = a / b; floats only.
    DIV "div" / None;
}

/// y += x. In: x (any strides). Out: y (contiguous, same shape and float dtype), updated.
pub static ACCUMULATE: Kernel = Kernel {
    name: "accumulate",
    reference: accumulate,
    cpu: None,
    flops: |l| l.inputs[0].view.numel() as u64,
    bound: Bound { ulps: 1.0 },
};

type Wrapping = Option<fn(i64, i64) -> i64>;

fn integers(
    kernel: &'static str,
    pool: &Pool,
    launch: &mut Launch<'_>,
    f: Wrapping,
) -> Result<(), KernelError> {
    match (launch.inputs[0].dtype, f) {
        (DType::I64, Some(f)) => {
            zip_runs::<i64, i64>(pool, launch, f);
            Ok(())
        }
        (dtype, _) => Err(KernelError::DType { kernel, dtype }),
    }
}

/// Writes f(a, b) for every element.
#[inline(always)]
pub(crate) fn zip_runs<T: Element, U: Element>(
    pool: &Pool,
    launch: &mut Launch<'_>,
    f: impl Fn(T, T) -> U + Sync + Copy,
) {
    let (a, b) = (&launch.inputs[0], &launch.inputs[1]);
    let walk = Walk::new([a.view, b.view]);
    let (a, b) = (a.buffer.as_slice::<T>(), b.buffer.as_slice::<T>());
    each_run(pool, &walk, write(&mut launch.outputs[0]), |[i, j], out: &mut [U], steps| {
        let n = out.len();
        vectorized(
            #[inline(always)]
            || match steps {
                [1, 1] => {
                    let pairs = a[i..i + n].iter().zip(&b[j..j + n]);
                    out.iter_mut().zip(pairs).for_each(|(y, (a, b))| *y = f(*a, *b));
                }
                [1, 0] => {
                    let b = b[j];
                    out.iter_mut().zip(&a[i..i + n]).for_each(|(y, a)| *y = f(*a, b));
                }
                [sa, sb] => {
                    out.iter_mut().enumerate().for_each(|(n, y)| *y = f(a[i + n * sa], b[j + n * sb]))
                }
            },
        );
    });
}

fn accumulate(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let x = &launch.inputs[0];
    match_float!(x.dtype, T => {
        let (walk, x) = (Walk::new([x.view]), x.buffer.as_slice::<T>());
        each_run(pool, &walk, write(&mut launch.outputs[0]), |[at], sum: &mut [T], [step]| {
            vectorized(#[inline(always)] || match step {
                1 => {
                    let x = &x[at..at + sum.len()];
                    sum.iter_mut().zip(x).for_each(|(s, x)| *s = T::narrow(s.widen() + x.widen()));
                }
                _ => sum.iter_mut().enumerate().for_each(|(i, s)| *s = T::narrow(s.widen() + x[at + i * step].widen())),
            });
        });
    }, else return Err(KernelError::DType { kernel: "accumulate", dtype: x.dtype }));
    Ok(())
}
