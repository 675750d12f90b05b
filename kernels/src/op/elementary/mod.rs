//! Further elementwise functions, and gradients of most of them.
//!
//! - in: x, any float, any strides; the gradients also take the cotangent dy of the function's result
//! - out: y, same dtype and shape, contiguous
//!
//! 16-bit operands are widened, computed in f32 and rounded once. NaN propagates, except in gradients of functions that are not
//! differentiable everywhere.

use crate::cpu::Pool;
use crate::cpu::math::Maths;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::LaunchPlan;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::op::formula::{by_sign, choose, pow_slope, sigmoid, sign, softplus};
use crate::op::pointwise::{Formula, gpu, map, map_as, names, plain, plain_as, pointwise, two_reals};
use crate::op::rows::operands;

pointwise! {
    /// y = |x|, for i64 too (i64::MIN wraps to itself).
    ABS "abs" 1 0.0 |[x], _| x.abs(), x.wrapping_abs();
    /// y = -1, 0 or 1; a zero keeps its sign.
    SIGN "sign" 1 0.0 |[x], _| sign(x), x.signum();
    /// y = 1 / sqrt x: infinity at 0, NaN below.
    RSQRT "rsqrt" 2 2.0 |[x], _| R::ONE / x.root();
    /// y = sin x, x in radians.
    SIN "sin" 1 1.0 |[x], _| x.sin();
    /// y = cos x, x in radians.
    COS "cos" 1 1.0 |[x], _| x.cos();
    /// y = e^x - 1.
    EXPM1 "expm1" 1 2.0 |[x], _| x.expm1();
    /// y = ln(1 + x): negative infinity at -1, NaN below.
    LOG1P "log1p" 1 2.0 |[x], _| x.ln_1p();
    /// y = ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|).
    SOFTPLUS "softplus" 4 4.0 |[x], _| softplus(x);
    /// y = x where x > 0, else c (e^x - 1); scalars: \[Real c\].
    ELU "elu" 3 4.0 |[x], [c, _]| choose(x > R::ZERO, x, c * x.expm1());
    /// y = x where x > 0, else c x; scalars: \[Real c\].
    LEAKY_RELU "leaky_relu" 1 2.0 |[x], [c, _]| choose(x > R::ZERO, x, c * x);
    /// y = the largest integer not above x.
    FLOOR "floor" 1 0.0 |[x], _| x.floor();
    /// y = the smallest integer not below x.
    CEIL "ceil" 1 0.0 |[x], _| x.ceil();
    /// y = the nearest integer, ties to even.
    ROUND "round" 1 0.0 |[x], _| x.round_even();
    /// y = x^c: 1 for c = 0, NaN for x < 0 and fractional c; scalars: \[Real c\].
    POW_SCALAR "pow_scalar" 1 64.0 |[x], [c, _]| x.pow(c);
    /// y = a where x < a, b where x > b, else x; scalars: \[Real a, Real b\], a <= b.
    CLAMP "clamp" 2 1.0 |[x], [a, b]| choose(x < a, a, choose(x > b, b, x));

    /// dx = dy times the sign of x, 0 where x is 0. In: x, dy.
    ABS_GRAD "abs_grad" 1 0.0 |[x, dy], _| by_sign(x, dy);
    /// dx = -dy y^3 / 2 for y = 1 / sqrt x. In: y, dy.
    RSQRT_GRAD "rsqrt_grad" 4 4.0 |[y, dy], _| dy * (R::lit(-0.5) * (y * y * y));
    /// dx = dy cos x. In: x, dy.
    SIN_GRAD "sin_grad" 2 2.0 |[x, dy], _| dy * x.cos();
    /// dx = -dy sin x. In: x, dy.
    COS_GRAD "cos_grad" 2 2.0 |[x, dy], _| -(dy * x.sin());
    /// dx = dy (y + 1) for y = e^x - 1. In: y, dy.
    EXPM1_GRAD "expm1_grad" 2 2.0 |[y, dy], _| dy * (y + R::ONE);
    /// dx = dy / (1 + x). In: x, dy.
    LOG1P_GRAD "log1p_grad" 2 2.0 |[x, dy], _| dy / (R::ONE + x);
    /// dx = dy / (1 + e^-x). In: x, dy.
    SOFTPLUS_GRAD "softplus_grad" 4 4.0 |[x, dy], _| dy * sigmoid(x);
    /// dx = dy where x > 0, else c e^x dy. In: x, dy; scalars: \[Real c\].
    ELU_GRAD "elu_grad" 3 4.0 |[x, dy], [c, _]| choose(x > R::ZERO, dy, dy * (c * x.exp()));
    /// dx = dy where x > 0, else c dy. In: x, dy; scalars: \[Real c\].
    LEAKY_RELU_GRAD "leaky_relu_grad" 1 2.0 |[x, dy], [c, _]| choose(x > R::ZERO, dy, c * dy);
    /// dx = dy c x^(c - 1), 0 for c = 0. In: x, dy; scalars: \[Real c\].
    POW_SCALAR_GRAD "pow_scalar_grad" 3 8.0 |[x, dy], [c, _]| pow_slope(x, c) * dy;
    /// dx = dy where a <= x <= b, else 0 (also for NaN). In: x, dy; scalars: \[Real a, Real b\].
    CLAMP_GRAD "clamp_grad" 2 0.0 |[x, dy], [a, b]| choose(x >= a && x <= b, dy, R::ZERO);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, values};

    const C: [Scalar; 2] = [Scalar::Real(0.25), Scalar::Real(0.75)];
    const ALL: [&Kernel; 15] = [
        &ABS,
        &SIGN,
        &RSQRT,
        &SIN,
        &COS,
        &EXPM1,
        &LOG1P,
        &SOFTPLUS,
        &ELU,
        &LEAKY_RELU,
        &FLOOR,
        &CEIL,
        &ROUND,
        &POW_SCALAR,
        &CLAMP,
    ];
    /// A gradient kernel, its function, and whether it takes the function's result instead of the argument.
    const GRADIENTS: [(&Kernel, &Kernel, bool); 11] = [
        (&ABS_GRAD, &ABS, false),
        (&RSQRT_GRAD, &RSQRT, true),
        (&SIN_GRAD, &SIN, false),
        (&COS_GRAD, &COS, false),
        (&EXPM1_GRAD, &EXPM1, true),
        (&LOG1P_GRAD, &LOG1P, false),
        (&SOFTPLUS_GRAD, &SOFTPLUS, false),
        (&ELU_GRAD, &ELU, false),
        (&LEAKY_RELU_GRAD, &LEAKY_RELU, false),
        (&POW_SCALAR_GRAD, &POW_SCALAR, false),
        (&CLAMP_GRAD, &CLAMP, false),
    ];

    /// Returns whether a function has no real value for negative arguments.
    fn is_one_sided(kernel: &Kernel) -> bool {
        ["rsqrt", "log1p", "pow_scalar"].iter().any(|name| kernel.name.starts_with(name))
    }

    fn at(kernel: &Kernel, x: &[f64]) -> Vec<f64> {
        evaluate(kernel, &[Value::real(&[x.len()], x)], &[&[x.len()]], &C).remove(0)
    }

    #[test]
    fn matches_known_values() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        for (kernel, x, y) in [
            (&ABS, -2.5, 2.5),
            (&SIGN, -2.5, -1.0),
            (&SIGN, 0.0, 0.0),
            (&RSQRT, 4.0, 0.5),
            (&RSQRT, 0.0, inf),
            (&RSQRT, -1.0, nan),
            (&SIN, 1.0, 0.841_470_984_807_896_5),
            (&SIN, inf, nan),
            (&COS, 1.0, 0.540_302_305_868_139_8),
            (&EXPM1, 1e-9, 1.000_000_000_5e-9),
            (&LOG1P, 1e-9, 9.999_999_995e-10),
            (&LOG1P, -1.0, -inf),
            (&SOFTPLUS, 0.0, std::f64::consts::LN_2),
            (&SOFTPLUS, 1000.0, 1000.0),
            (&SOFTPLUS, -inf, 0.0),
            (&ELU, 2.0, 2.0),
            (&ELU, -inf, -0.25),
            (&LEAKY_RELU, -2.0, -0.5),
            (&FLOOR, -1.5, -2.0),
            (&CEIL, -1.5, -1.0),
            (&ROUND, 2.5, 2.0),
            (&ROUND, -1.5, -2.0),
            (&POW_SCALAR, 1.0, 1.0),
            (&CLAMP, -1.0, 0.25),
            (&CLAMP, 0.5, 0.5),
            (&CLAMP, 9.0, 0.75),
            (&CLAMP, nan, nan),
        ] {
            let got = at(kernel, &[x])[0];
            let same = got == y || (got.is_nan() && y.is_nan()) || (got - y).abs() <= 1e-15 * y.abs();
            assert!(same, "{} {x}: {got}", kernel.name);
        }
    }

    #[test]
    fn fast_paths_match_the_reference() {
        for kernel in ALL {
            let spread = values(1, 3 * 5 * 67).into_iter().map(|x| 5.0 * x);
            let x: Vec<f64> = spread.map(|x| if is_one_sided(kernel) { x.abs() } else { x }).collect();
            Case::new(kernel).input(&[3, 5, 67], &x).output(&[3, 5, 67]).scalars(&C).strided().run();
            Case::new(kernel).input(&[0, 2], &[]).output(&[0, 2]).scalars(&C).run();
        }
        for (kernel, ..) in GRADIENTS {
            let x: Vec<f64> = values(3, 6 * 35).iter().map(|x| x.abs() + 0.1).collect();
            let case = Case::new(kernel).input(&[6, 35], &x).input(&[6, 35], &values(4, 6 * 35));
            case.output(&[6, 35]).scalars(&C).strided().run();
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        for (gradient, kernel, reads_result) in GRADIENTS {
            let start = if is_one_sided(kernel) { 1 } else { -40 };
            let x: Vec<f64> = (start..40).map(|i| f64::from(i) * 0.17 + 0.03).collect();
            let shape = [x.len()];
            let shifted = |h: f64| at(kernel, &x.iter().map(|x| x + h).collect::<Vec<_>>());
            let first = if reads_result { at(kernel, &x) } else { x.clone() };
            let inputs = [Value::real(&shape, &first), Value::real(&shape, &vec![2.0; x.len()])];
            let got = evaluate(gradient, &inputs, &[&shape], &C).remove(0);
            for (i, (up, down)) in shifted(1e-5).into_iter().zip(shifted(-1e-5)).enumerate() {
                let slope = (up - down) / 1e-5;
                let near = (got[i] - slope).abs() < 1e-7 * (1.0 + slope.abs());
                assert!(near, "{} at {}: {} {slope}", gradient.name, x[i], got[i]);
            }
        }
    }

    #[test]
    fn large_arguments_and_special_values() {
        let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1e30, -1e30];
        for kernel in ALL {
            Case::new(kernel)
                .input(&[7], &special)
                .output(&[7])
                .scalars(&C)
                .run_for(&[DType::F64, DType::F32]);
            assert!(at(kernel, &special)[0].is_nan(), "{}", kernel.name);
        }
    }

    #[test]
    fn gradients_at_non_differentiable_points_match_known_values() {
        let grad = |kernel: &Kernel, x: f64| {
            let inputs = [Value::real(&[1], &[x]), Value::real(&[1], &[2.0])];
            evaluate(kernel, &inputs, &[&[1]], &C).remove(0)[0]
        };
        assert_eq!(
            [grad(&ABS_GRAD, 0.0), grad(&LEAKY_RELU_GRAD, 0.0), grad(&ELU_GRAD, 0.0)],
            [0.0, 0.5, 0.5]
        );
        assert_eq!([0.25, 0.75, 0.8, 0.2, f64::NAN].map(|x| grad(&CLAMP_GRAD, x)), [2.0, 2.0, 0.0, 0.0, 0.0]);
    }
}
