//! Elementwise functions of one operand, and gradients of most of them.
//!
//! - in: x, any float, any strides; the gradients also take the cotangent dy of the function's result
//! - out: y, same dtype and shape, contiguous
//!
//! 16-bit operands are widened, computed in f32 and rounded once. An exponential, a logarithm, a root, a tanh, a sine, a power and a
//! division count one operation each. NaN propagates, except in gradients of functions that are not differentiable everywhere.

use crate::cpu::Pool;
use crate::cpu::math::Maths;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::LaunchPlan;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::op::formula::{
    by_sign, choose, erf_slope, gate_slope, gelu_exact_slope, gelu_gate, gelu_slope, pow_slope, sigmoid,
    sign, softplus,
};
use crate::op::pointwise::{Formula, gpu, map, map_as, names, plain, plain_as, pointwise, two_reals};
use crate::op::rows::operands;

pointwise! {
    /// The smallest i64 stays.
    NEG "neg" 1 0.0 |[x], _| -x, x.wrapping_neg();
    EXP "exp" 1 2.0 |[x], _| x.exp();
    /// Negative infinity at 0, NaN below.
    LOG "log" 1 2.0 |[x], _| x.ln();
    /// NaN below 0.
    SQRT "sqrt" 1 1.0 |[x], _| x.root();
    TANH "tanh" 1 2.0 |[x], _| x.tanh();
    RELU "relu" 1 0.0 |[x], _| choose(x <= R::ZERO, R::ZERO, x);
    /// GELU in its tanh form.
    GELU "gelu" 8 4.0 |[x], _| x * gelu_gate(x);
    /// GELU: x times the distribution of normal numbers at x.
    GELU_EXACT "gelu_exact" 12 4.0 |[x], _| x * (-x).tail();
    SIGMOID "sigmoid" 3 4.0 |[x], _| sigmoid(x);
    ERF "erf" 10 4.0 |[x], _| x.erf();
    SILU "silu" 4 4.0 |[x], _| x * sigmoid(x);
    SQUARE "square" 1 1.0 |[x], _| x * x, x.wrapping_mul(x);
    RECIPROCAL "reciprocal" 1 1.0 |[x], _| R::ONE / x;
    SCALE "scale" 1 2.0 |[x], [c, _]| c * x;
    ADD_SCALAR "add_scalar" 1 2.0 |[x], [c, _]| x + c;
    /// The smallest i64 stays.
    ABS "abs" 1 0.0 |[x], _| x.abs(), x.wrapping_abs();
    /// A zero keeps its sign.
    SIGN "sign" 1 0.0 |[x], _| sign(x), x.signum();
    /// Infinity at 0, NaN below.
    RSQRT "rsqrt" 2 2.0 |[x], _| R::ONE / x.root();
    SIN "sin" 1 1.0 |[x], _| x.sin();
    COS "cos" 1 1.0 |[x], _| x.cos();
    EXPM1 "expm1" 1 2.0 |[x], _| x.expm1();
    /// Negative infinity at -1, NaN below.
    LOG1P "log1p" 1 2.0 |[x], _| x.ln_1p();
    SOFTPLUS "softplus" 4 4.0 |[x], _| softplus(x);
    ELU "elu" 3 4.0 |[x], [c, _]| choose(x > R::ZERO, x, c * x.expm1());
    LEAKY_RELU "leaky_relu" 1 2.0 |[x], [c, _]| choose(x > R::ZERO, x, c * x);
    FLOOR "floor" 1 0.0 |[x], _| x.floor();
    CEIL "ceil" 1 0.0 |[x], _| x.ceil();
    ROUND "round" 1 0.0 |[x], _| x.round_even();
    /// 1 for c = 0, NaN for x < 0 and fractional c.
    POW_SCALAR "pow_scalar" 1 64.0 |[x], [c, _]| x.pow(c);
    /// The scalars satisfy a <= b.
    CLAMP "clamp" 2 1.0 |[x], [a, b]| choose(x < a, a, choose(x > b, b, x));

    /// The gradient of [`RELU`].
    RELU_GRAD "relu_grad" 1 0.0 |[x, dy], _| choose(x <= R::ZERO, R::ZERO, dy);
    /// The gradient of [`GELU`].
    GELU_GRAD "gelu_grad" 16 8.0 |[x, dy], _| dy * gelu_slope(x);
    /// The gradient of [`GELU_EXACT`].
    GELU_EXACT_GRAD "gelu_exact_grad" 16 8.0 |[x, dy], _| dy * gelu_exact_slope(x);
    /// The gradient of [`SIGMOID`] at its result y.
    SIGMOID_GRAD "sigmoid_grad" 3 4.0 |[y, dy], _| dy * (y * (R::ONE - y));
    /// The gradient of [`ERF`].
    ERF_GRAD "erf_grad" 5 8.0 |[x, dy], _| dy * erf_slope(x);
    /// The gradient of [`SILU`].
    SILU_GRAD "silu_grad" 8 8.0 |[x, dy], _| dy * gate_slope(x, sigmoid(x), R::ONE);
    /// The gradient of [`TANH`] at its result y.
    TANH_GRAD "tanh_grad" 3 4.0 |[y, dy], _| dy * (-y).fma(y, R::ONE);
    /// The gradient of [`ABS`], 0 where x is 0.
    ABS_GRAD "abs_grad" 1 0.0 |[x, dy], _| by_sign(x, dy);
    /// The gradient of [`RSQRT`] at its result y.
    RSQRT_GRAD "rsqrt_grad" 4 4.0 |[y, dy], _| dy * (R::lit(-0.5) * (y * y * y));
    /// The gradient of [`SIN`].
    SIN_GRAD "sin_grad" 2 2.0 |[x, dy], _| dy * x.cos();
    /// The gradient of [`COS`].
    COS_GRAD "cos_grad" 2 2.0 |[x, dy], _| -(dy * x.sin());
    /// The gradient of [`EXPM1`] at its result y.
    EXPM1_GRAD "expm1_grad" 2 2.0 |[y, dy], _| dy * (y + R::ONE);
    /// The gradient of [`LOG1P`].
    LOG1P_GRAD "log1p_grad" 2 2.0 |[x, dy], _| dy / (R::ONE + x);
    /// The gradient of [`SOFTPLUS`].
    SOFTPLUS_GRAD "softplus_grad" 4 4.0 |[x, dy], _| dy * sigmoid(x);
    /// The gradient of [`ELU`].
    ELU_GRAD "elu_grad" 3 4.0 |[x, dy], [c, _]| choose(x > R::ZERO, dy, dy * (c * x.exp()));
    /// The gradient of [`LEAKY_RELU`].
    LEAKY_RELU_GRAD "leaky_relu_grad" 1 2.0 |[x, dy], [c, _]| choose(x > R::ZERO, dy, c * dy);
    /// The gradient of [`POW_SCALAR`], 0 for c = 0.
    POW_SCALAR_GRAD "pow_scalar_grad" 3 8.0 |[x, dy], [c, _]| pow_slope(x, c) * dy;
    /// The gradient of [`CLAMP`], also 0 for NaN.
    CLAMP_GRAD "clamp_grad" 2 0.0 |[x, dy], [a, b]| choose(x >= a && x <= b, dy, R::ZERO);
}

#[cfg(test)]
mod tests;
