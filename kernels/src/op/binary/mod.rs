//! Elementwise arithmetic of two operands of one shape (broadcast by strides of 0), and in-place accumulation.

use crate::cpu::Pool;
use crate::cpu::math::Maths;
use crate::dtype::{DType, Element};
use crate::error::KernelError;
use crate::gpu::LaunchPlan;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::formula::{choose, is_nan, pow_exponent_slope, pow_slope};
use crate::op::pointwise::{
    Formula, gpu, map, map_as, names, plain, plain_as, pointwise, two_reals, update, update_as,
};
use crate::op::rows::{operands, write};
use crate::op::strided_iter::element_offset;

pointwise! {
    ///
    /// - in: a, b: one dtype (float or i64) and shape, any strides
    /// - out: y, same dtype and shape, contiguous
    ///
    /// Integers wrap around; 16-bit floats are computed in f32 and rounded once.
    ADD "add" 1 1.0 |[a, b], _| a + b, a.wrapping_add(b);
    /// Operands as in [`ADD`].
    SUB "sub" 1 1.0 |[a, b], _| a - b, a.wrapping_sub(b);
    /// Operands as in [`ADD`].
    MUL "mul" 1 1.0 |[a, b], _| a * b, a.wrapping_mul(b);
    /// Operands as in [`ADD`], floats only.
    DIV "div" 1 1.0 |[a, b], _| a / b;
    /// As IEEE 754 `pow`: 1 where b is 0 or a is 1, NaN where a < 0 and b is not an integer. Floats only.
    POW "pow" 1 2.0 |[a, b], _| a.pow(b);
    /// NaN propagates. Operands as in [`ADD`].
    MAXIMUM "maximum" 1 0.0 |[a, b], _| choose(a > b || is_nan(a), a, b), a.max(b);
    /// NaN propagates. Operands as in [`ADD`].
    MINIMUM "minimum" 1 0.0 |[a, b], _| choose(a < b || is_nan(a), a, b), a.min(b);

    /// The gradient of [`POW`] for a, 0 where b is 0. Floats only.
    POW_BASE_GRAD "pow_base_grad" 3 8.0 |[a, b, dy], _| pow_slope(a, b) * dy;
    /// The gradient of [`POW`] for b, 0 where a is 0 and b is not negative. Floats only.
    POW_EXPONENT_GRAD "pow_exponent_grad" 4 8.0 |[a, b, dy], _| dy * pow_exponent_slope(a, b);
    /// The gradient of [`MAXIMUM`] for a, dy for NaN; that for b is the same with a and b exchanged.
    MAXIMUM_GRAD "maximum_grad" 2 0.0 |[a, b, dy], _| choose(a == b, R::lit(0.5) * dy, choose(a < b, R::ZERO, dy));
    /// The gradient of [`MINIMUM`] for a, dy for NaN; that for b is the same with a and b exchanged.
    MINIMUM_GRAD "minimum_grad" 2 0.0 |[a, b, dy], _| choose(a == b, R::lit(0.5) * dy, choose(a > b, R::ZERO, dy));
}

/// The formula y + x of [`ACCUMULATE`].
struct Sum;

impl Formula<2> for Sum {
    #[inline(always)]
    fn at<R: Maths>(&self, [y, x]: [R; 2]) -> R {
        y + x
    }
}

/// y = y + x, in place.
///
/// - in: x: float or i64, any strides
/// - out: y: same dtype and shape, contiguous, updated
pub static ACCUMULATE: Kernel = Kernel {
    name: "accumulate",
    reference: |_, launch| {
        let ([x], [y], _) = operands(launch);
        match x.dtype {
            DType::I64 => {
                let from = x.buffer.as_slice::<i64>();
                let sums = write::<i64>(y).iter_mut().enumerate();
                sums.for_each(|(i, y)| *y = y.wrapping_add(from[element_offset(x.view, i)]));
            }
            dtype => match_float!(dtype, T => {
                let from = x.buffer.as_slice::<T>();
                let sums = write::<T>(y).iter_mut().enumerate();
                sums.for_each(|(i, y)| *y = T::from_f64(y.to_f64() + from[element_offset(x.view, i)].to_f64()));
            }, else return Err(KernelError::DType { kernel: ACCUMULATE.name, dtype })),
        }
        Ok(())
    },
    cpu: Some(|pool, launch| {
        let ([x], [y], _) = operands(launch);
        match x.dtype {
            DType::I64 => update_as::<i64>(pool, x, y, i64::wrapping_add),
            _ => update(ACCUMULATE.name, pool, x, y, &Sum)?,
        }
        Ok(())
    }),
    gpu: Some(GpuCode {
        source: gpu::SOURCE,
        plan: |launch, plan| {
            let dtype = launch.inputs[0].dtype;
            let text = match dtype {
                DType::I64 => "y.wrapping_add(x)",
                dtype if dtype.is_float() => "y + x",
                dtype => return Err(KernelError::DType { kernel: ACCUMULATE.name, dtype }),
            };
            gpu::update(plan, launch, gpu::Formula { args: "[y, x]", scalars: "_", text });
            Ok(())
        },
    }),
    flops: |launch| launch.outputs[0].view.numel() as u64,
    bytes: Some(|launch| launch.updated_bytes()),
    bound: Bound { ulps: 1.0 },
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, Kind, values};
    use crate::strides::Strides;
    use approx::assert_abs_diff_eq;

    const ALL: [&Kernel; 6] = [&ADD, &SUB, &MUL, &DIV, &MAXIMUM, &MINIMUM];

    #[test]
    fn matches_known_values() {
        let (a, b) = (Value::real(&[3], &[1.0, -2.0, 3.0]), Value::real(&[3], &[4.0, 5.0, -0.5]));
        let run = |kernel| evaluate(kernel, &[a.clone(), b.clone()], &[&[3]], &[]).remove(0);
        assert_eq!(run(&ADD), [5.0, 3.0, 2.5]);
        assert_eq!(run(&SUB), [-3.0, -7.0, 3.5]);
        assert_eq!(run(&MUL), [4.0, -10.0, -1.5]);
        assert_eq!(run(&DIV), [0.25, -0.4, -6.0]);
        assert_eq!(run(&MAXIMUM), [4.0, 5.0, 3.0]);
        assert_eq!(run(&MINIMUM), [1.0, -2.0, -0.5]);
        assert_eq!(run(&POW)[..2], [1.0, -32.0]);
        let nan = Value::real(&[2], &[f64::NAN, 1.0]);
        let other = Value::real(&[2], &[1.0, f64::NAN]);
        let both = evaluate(&MAXIMUM, &[nan, other], &[&[2]], &[]).remove(0);
        assert!(both.iter().all(|y| y.is_nan()), "{both:?}");
    }

    #[test]
    fn gradients_match_known_values_and_the_reference() {
        let at = |kernel, a: f64, b: f64| {
            let inputs = [a, b, 2.0].map(|x| Value::real(&[1], &[x]));
            evaluate(kernel, &inputs, &[&[1]], &[]).remove(0)[0]
        };
        assert_eq!(
            [at(&MAXIMUM_GRAD, 1.0, 0.0), at(&MAXIMUM_GRAD, 1.0, 1.0), at(&MAXIMUM_GRAD, 0.0, 1.0)],
            [2.0, 1.0, 0.0]
        );
        assert_eq!(
            [at(&MINIMUM_GRAD, 1.0, 0.0), at(&MINIMUM_GRAD, 1.0, 1.0), at(&MINIMUM_GRAD, 0.0, 1.0)],
            [0.0, 1.0, 2.0]
        );
        for (a, b) in [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::NAN, f64::NAN)] {
            assert_eq!([at(&MAXIMUM_GRAD, a, b), at(&MINIMUM_GRAD, a, b)], [2.0, 2.0], "{a} and {b}");
        }
        assert_eq!([at(&POW_BASE_GRAD, 3.0, 2.0), at(&POW_BASE_GRAD, 0.0, 0.0)], [12.0, 0.0]);
        assert_eq!([at(&POW_EXPONENT_GRAD, 1.0, 5.0), at(&POW_EXPONENT_GRAD, 0.0, 0.0)], [0.0, 0.0]);
        let exact = 16.0 * std::f64::consts::LN_2;
        assert_abs_diff_eq!(at(&POW_EXPONENT_GRAD, 2.0, 3.0), exact, epsilon = 1e-14);
        for kernel in [&POW_BASE_GRAD, &POW_EXPONENT_GRAD, &MAXIMUM_GRAD, &MINIMUM_GRAD] {
            let a: Vec<f64> = values(1, 210).iter().map(|x| x.abs() + 0.1).collect();
            let case = Case::new(kernel).input(&[6, 35], &a).input(&[6, 35], &values(2, 210));
            case.input(&[6, 35], &values(3, 210)).output(&[6, 35]).strided().run();
        }
        for kernel in [&MAXIMUM_GRAD, &MINIMUM_GRAD] {
            let number =
                |i: usize, nan: usize| if i % 4 == nan || i % 4 == 3 { f64::NAN } else { (i % 5) as f64 };
            let [a, b] =
                [0, 1].map(|nan| (0..210).map(|i| number(i + i / 7 * nan, nan)).collect::<Vec<f64>>());
            let case = Case::new(kernel).input(&[6, 35], &a).input(&[6, 35], &b);
            case.input(&[6, 35], &values(3, 210)).output(&[6, 35]).strided().run();
        }
        let a: Vec<f64> = values(1, 210).iter().map(|x| x.abs() + 0.1).collect();
        let case = Case::new(&POW).input(&[6, 35], &a).input(&[6, 35], &values(2, 210));
        case.output(&[6, 35]).strided().run();
    }

    #[test]
    fn fast_paths_match_the_reference_on_all_strides() {
        let shape = [3, 5, 33];
        let (a, b) = (values(1, 495), values(2, 495));
        let views = |memory: &[f64]| {
            let full = Strides::contiguous(&shape);
            let bias = Strides::contiguous(&[33]).broadcast(&shape).unwrap();
            let column = Strides::contiguous(&[3, 5, 1]).broadcast(&shape).unwrap();
            let transposed = Strides::contiguous(&[33, 3, 5]).permute(&[1, 2, 0]);
            [full, bias, column, transposed].map(|view| (view, memory.to_vec()))
        };
        for kernel in ALL {
            for (view_a, memory_a) in views(&a) {
                for (view_b, memory_b) in views(&b) {
                    let case = Case::new(kernel).input_view(Kind::Tested, view_a.clone(), &memory_a);
                    case.input_view(Kind::Tested, view_b, &memory_b).output(&shape).run();
                }
            }
        }
    }

    #[test]
    fn fast_paths_match_the_reference_over_many_tasks() {
        let (x, y, n) = (values(1, 50_000), values(2, 50_000), 50_000);
        Case::new(&ADD).input(&[n], &x).input(&[n], &y).output(&[n]).run();
        let view = Strides::contiguous(&[100, 500]);
        let case = Case::new(&ACCUMULATE).input(&[100, 500], &x).output_view(Kind::Tested, view, &y);
        case.strided().run();
    }

    #[test]
    fn integers_wrap_and_other_dtypes_are_errors() {
        let (a, b) = ([i64::MAX as f64, 7.0, -3.0], [1.0, -9.0, 2.0]);
        for kernel in [&ADD, &SUB, &MUL, &MAXIMUM, &MINIMUM] {
            Case::new(kernel).input(&[3], &a).input(&[3], &b).output(&[3]).run_for(&[DType::I64]);
        }
        let view = Strides::contiguous(&[3]);
        let case = Case::new(&ACCUMULATE).input(&[3], &b).output_view(Kind::Tested, view, &b);
        case.run_for(&[DType::I64]);
        let refused = Case::new(&DIV).input(&[3], &a).input(&[3], &b).output(&[3]).verify(&[DType::I64]);
        assert!(refused.unwrap_err().contains("no kernel for dtype i64"));
    }
}
