//! Comparisons, logical operations, and selection by a boolean mask.
//!
//! Booleans are bytes (bool or u8): 0 is false, anything else is true; results are 0 or 1. Operands have one shape and any strides,
//! results are contiguous.

mod gpu;

use crate::cpu::Pool;
use crate::dtype::Element;
use crate::error::KernelError;
use crate::gpu::LaunchPlan;
use crate::kernel::{Arg, ArgMut, Bound, CpuKernelFn, GpuCode, Kernel, Launch};
use crate::match_dtype;
use crate::op::pointwise::{TASK, gpu::SOURCE, map_as, names, plain_as};
use crate::op::rows::{holds, operands, write};
use crate::op::strided_iter::{StridedIter, element_offset};

type LaunchPlanFn = fn(&Launch<'_>, &mut LaunchPlan) -> Result<(), KernelError>;

/// A kernel that is exact and counts one operation per element.
const fn exact(name: &'static str, reference: CpuKernelFn, cpu: CpuKernelFn, plan: LaunchPlanFn) -> Kernel {
    let flops = |launch: &Launch<'_>| launch.outputs[0].view.numel() as u64;
    let gpu = Some(GpuCode { source: SOURCE, plan });
    Kernel { name, reference, cpu: Some(cpu), gpu, flops, bytes: None, bound: Bound { ulps: 0.0 } }
}

macro_rules! comparisons {
    ($($(#[$doc:meta])* $name:ident $text:literal $sign:tt;)*) => {$(
        $(#[$doc])*
        pub static $name: Kernel = exact(
            $text,
            |_, launch| {
                let ([a, b], [y], _) = operands(launch);
                match_dtype!(a.dtype, T => plain_as([a, b], y, &|[a, b]: [T; 2]| u8::from(a $sign b)));
                Ok(())
            },
            |pool, launch| {
                let ([a, b], [y], _) = operands(launch);
                match_dtype!(a.dtype, T => map_as::<2, T, u8>(
                    pool,
                    [a, b],
                    y,
                    #[inline(always)]
                    |[a, b]| u8::from(a $sign b),
                ));
                Ok(())
            },
            |launch, plan| {
                gpu::compare(plan, launch, concat!("a ", stringify!($sign), " b"));
                Ok(())
            },
        );
    )*};
}

comparisons! {
    /// y = a == b. In: a, b: one dtype (any); out: y, bool. False if one is NaN.
    EQ "eq" ==;
    /// y = a != b; true if one is NaN. Operands as in [`EQ`].
    NE "ne" !=;
    /// y = a < b; false if one is NaN. Operands as in [`EQ`].
    LT "lt" <;
    /// y = a <= b; false if one is NaN. Operands as in [`EQ`].
    LE "le" <=;
    /// y = a > b; false if one is NaN. Operands as in [`EQ`].
    GT "gt" >;
    /// y = a >= b; false if one is NaN. Operands as in [`EQ`].
    GE "ge" >=;
}

macro_rules! tables {
    ($($(#[$doc:meta])* $name:ident $text:literal |$x:tt| $formula:expr;)*) => {$(
        $(#[$doc])*
        pub static $name: Kernel = {
            const INPUTS: usize = names(stringify!($x));
            #[inline(always)]
            fn formula(x: [u8; INPUTS]) -> bool {
                let $x = x.map(|x| x != 0);
                $formula
            }
            exact(
                $text,
                |_, launch| {
                    let (inputs, [y], _) = operands::<INPUTS, 1>(launch);
                    check($text, inputs.each_ref())?;
                    plain_as(inputs.each_ref(), y, &|x| u8::from(formula(x)));
                    Ok(())
                },
                |pool, launch| {
                    let (inputs, [y], _) = operands::<INPUTS, 1>(launch);
                    check($text, inputs.each_ref())?;
                    map_as::<INPUTS, u8, u8>(pool, inputs.each_ref(), y, #[inline(always)] |x| u8::from(formula(x)));
                    Ok(())
                },
                |launch, plan| {
                    launch.inputs.iter().try_for_each(|x| check($text, [x]))?;
                    gpu::table(plan, launch, stringify!($x), stringify!($formula));
                    Ok(())
                },
            )
        };
    )*};
}

tables! {
    /// y = a and b. In: a, b, booleans; out: y, bool.
    AND "logical_and" |[a, b]| a && b;
    /// y = a or b. In: a, b, booleans; out: y, bool.
    OR "logical_or" |[a, b]| a || b;
    /// y = a xor b. In: a, b, booleans; out: y, bool.
    XOR "logical_xor" |[a, b]| a != b;
    /// y = not a. In: a, booleans; out: y, bool.
    NOT "logical_not" |[a]| !a;
}

/// Returns an error if an operand is not boolean.
fn check<const N: usize>(kernel: &'static str, inputs: [&Arg<'_>; N]) -> Result<(), KernelError> {
    match inputs.iter().find(|x| !holds::<u8>(x.dtype)) {
        None => Ok(()),
        Some(x) => Err(KernelError::DType { kernel, dtype: x.dtype }),
    }
}

/// y = a where m is true, else b.
///
/// - in: m, booleans; a, b: one dtype (any)
/// - out: y, the dtype of a
#[doc(alias = "select")]
pub static WHERE: Kernel = exact(
    "where",
    |_, launch| {
        let ([m, a, b], [y], _) = operands(launch);
        check("where", [m])?;
        match_dtype!(a.dtype, T => {
            let (a_memory, b_memory) = (a.buffer.as_slice::<T>(), b.buffer.as_slice::<T>());
            for (i, y) in write::<T>(y).iter_mut().enumerate() {
                let (a, b) = (&a_memory[element_offset(a.view, i)..], &b_memory[element_offset(b.view, i)..]);
                *y = if m.buffer.as_slice::<u8>()[element_offset(m.view, i)] != 0 { a[0] } else { b[0] };
            }
        });
        Ok(())
    },
    |pool, launch| {
        let ([m, a, b], [y], _) = operands(launch);
        check("where", [m])?;
        match_dtype!(a.dtype, T => choose::<T>(pool, [m, a, b], y));
        Ok(())
    },
    |launch, plan| {
        check("where", [&launch.inputs[0]])?;
        gpu::choose(plan, launch);
        Ok(())
    },
);

fn choose<T: Element>(pool: &Pool, [m, a, b]: [&Arg<'_>; 3], y: &mut ArgMut<'_>) {
    let iter = StridedIter::new([m.view, a.view, b.view]);
    let (mask, yes, no) = (m.buffer.as_slice::<u8>(), a.buffer.as_slice::<T>(), b.buffer.as_slice::<T>());
    let steps = iter.steps();
    pool.chunks(write::<T>(y), TASK, |i, y| {
        let mut done = 0;
        iter.for_each_run(i * TASK..i * TASK + y.len(), |at, length| {
            for (k, y) in y[done..done + length].iter_mut().enumerate() {
                let is_yes = mask[at[0] + k * steps[0]] != 0;
                *y = if is_yes { yes[at[1] + k * steps[1]] } else { no[at[2] + k * steps[2]] };
            }
            done += length;
        });
    });
}

/// y = c where m is true (if `on`) or false (if not), else x.
///
/// - in: x, any dtype; m, booleans
/// - out: y, the dtype of x
/// - scalars: \[Real c, Int on (1 or 0)\]
pub static MASKED_FILL: Kernel = exact(
    "masked_fill",
    |_, launch| {
        let ([x, m], [y], scalars) = operands(launch);
        check("masked_fill", [m])?;
        match_dtype!(x.dtype, T => {
            let (memory, mask) = (x.buffer.as_slice::<T>(), m.buffer.as_slice::<u8>());
            for (i, y) in write::<T>(y).iter_mut().enumerate() {
                let is_true = mask[element_offset(m.view, i)] != 0;
                let fills = is_true == (scalars[1].int() != 0);
                *y = if fills { T::from_f64(scalars[0].real()) } else { memory[element_offset(x.view, i)] };
            }
        });
        Ok(())
    },
    |pool, launch| {
        let ([x, m], [y], scalars) = operands(launch);
        check("masked_fill", [m])?;
        match_dtype!(x.dtype, T => {
            masked_fill::<T>(pool, [x, m], y, T::from_f64(scalars[0].real()), scalars[1].int() != 0);
        });
        Ok(())
    },
    |launch, plan| {
        check("masked_fill", [&launch.inputs[1]])?;
        gpu::masked_fill(plan, launch);
        Ok(())
    },
);

fn masked_fill<T: Element>(pool: &Pool, [x, m]: [&Arg<'_>; 2], y: &mut ArgMut<'_>, value: T, on: bool) {
    let iter = StridedIter::new([x.view, m.view]);
    let (memory, mask) = (x.buffer.as_slice::<T>(), m.buffer.as_slice::<u8>());
    let steps = iter.steps();
    pool.chunks(write::<T>(y), TASK, |i, y| {
        let mut done = 0;
        iter.for_each_run(i * TASK..i * TASK + y.len(), |at, length| {
            for (k, y) in y[done..done + length].iter_mut().enumerate() {
                let is_true = mask[at[1] + k * steps[1]] != 0;
                *y = if is_true == on { value } else { memory[at[0] + k * steps[0]] };
            }
            done += length;
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, evaluate_as};
    use crate::op::kernel_check::{Case, Kind, values};

    const BOOL: Kind = Kind::Fixed(DType::Bool);

    fn compare_select(shape: &[usize], data: &[f64]) -> Value {
        Value { dtype: DType::Bool, ..Value::real(shape, data) }
    }

    fn coarse(seed: u64, n: usize) -> Vec<f64> {
        values(seed, n).iter().map(|x| (4.0 * x).round()).collect()
    }

    #[test]
    fn comparisons_match_known_values() {
        let a = Value::real(&[4], &[1.0, 2.0, 3.0, f64::NAN]);
        let b = Value::real(&[4], &[2.0, 2.0, 2.0, 2.0]);
        for (kernel, right) in [
            (&EQ, [0.0, 1.0, 0.0, 0.0]),
            (&NE, [1.0, 0.0, 1.0, 1.0]),
            (&LT, [1.0, 0.0, 0.0, 0.0]),
            (&LE, [1.0, 1.0, 0.0, 0.0]),
            (&GT, [0.0, 0.0, 1.0, 0.0]),
            (&GE, [0.0, 1.0, 1.0, 0.0]),
        ] {
            let inputs = [a.clone(), b.clone()];
            let got = evaluate_as(kernel.reference, DType::Bool, &inputs, &[&[4]], &[]).remove(0);
            assert_eq!(got, right, "{}", kernel.name);
        }
    }

    #[test]
    fn logical_operations_match_known_values() {
        let (a, b) =
            (compare_select(&[4], &[0.0, 0.0, 1.0, 1.0]), compare_select(&[4], &[0.0, 1.0, 0.0, 1.0]));
        for (kernel, inputs, right) in [
            (&AND, vec![a.clone(), b.clone()], [0.0, 0.0, 0.0, 1.0]),
            (&OR, vec![a.clone(), b.clone()], [0.0, 1.0, 1.0, 1.0]),
            (&XOR, vec![a.clone(), b.clone()], [0.0, 1.0, 1.0, 0.0]),
            (&NOT, vec![a.clone()], [1.0, 1.0, 0.0, 0.0]),
        ] {
            let got = evaluate_as(kernel.reference, DType::Bool, &inputs, &[&[4]], &[]).remove(0);
            assert_eq!(got, right, "{}", kernel.name);
        }
    }

    #[test]
    fn fast_paths_match_the_reference() {
        let n = 3 * 5 * 67;
        let (a, b) = (coarse(1, n), coarse(2, n));
        let shape = [3, 5, 67];
        for kernel in [&EQ, &NE, &LT, &LE, &GT, &GE] {
            let case =
                Case::new(kernel).input(&shape, &a).input(&shape, &b).output_as(BOOL, &shape).strided();
            case.run();
            case.run_for(&[DType::I64]);
        }
        let mask: Vec<f64> = a.iter().map(|x| f64::from(u8::from(*x > 0.0))).collect();
        for kernel in [&AND, &OR, &XOR] {
            let case = Case::new(kernel).input_as(BOOL, &shape, &mask).input_as(BOOL, &shape, &mask);
            case.output_as(BOOL, &shape).strided().run();
        }
        Case::new(&NOT).input_as(BOOL, &shape, &mask).output_as(BOOL, &shape).strided().run();
        let case = Case::new(&WHERE).input_as(BOOL, &shape, &mask).input(&shape, &a).input(&shape, &b);
        case.output(&shape).strided().run();
        for on in [0, 1] {
            let case = Case::new(&MASKED_FILL).input(&shape, &a).input_as(BOOL, &shape, &mask);
            case.output(&shape).scalars(&[Scalar::Real(0.5), Scalar::Int(on)]).strided().run();
        }
        let empty = Case::new(&WHERE).input_as(BOOL, &[0], &[]).input(&[0], &[]).input(&[0], &[]);
        empty.output(&[0]).run();
    }

    #[test]
    fn masks_must_be_booleans() {
        let case = Case::new(&NOT).input(&[1], &[1.0]).output_as(BOOL, &[1]);
        assert!(case.verify(&[DType::F32]).unwrap_err().contains("no kernel for dtype"));
    }
}
