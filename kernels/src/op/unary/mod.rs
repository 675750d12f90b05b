//! Elementwise functions of one operand, and gradients of some of them.
//!
//! - in: x, any float, any strides; the gradients also take the cotangent dy of the function's result
//! - out: y, same dtype and shape, contiguous
//!
//! 16-bit operands are widened, computed in f32 and rounded once. An exponential, a logarithm, a root, a tanh and a division count one
//! operation each.

use crate::cpu::Pool;
use crate::cpu::math::Maths;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::LaunchPlan;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::op::formula::{choose, erf_slope, gate_slope, gelu_exact_slope, gelu_gate, gelu_slope, sigmoid};
use crate::op::pointwise::{Formula, gpu, map, map_as, names, plain, plain_as, pointwise, two_reals};
use crate::op::rows::operands;

pointwise! {
    /// y = -x, of i64 too (the smallest stays).
    NEG "neg" 1 0.0 |[x], _| -x, x.wrapping_neg();
    /// y = e^x.
    EXP "exp" 1 2.0 |[x], _| x.exp();
    /// y = ln x: negative infinity at 0, NaN below.
    LOG "log" 1 2.0 |[x], _| x.ln();
    /// y = the square root of x: NaN below 0.
    SQRT "sqrt" 1 1.0 |[x], _| x.root();
    /// y = tanh x.
    TANH "tanh" 1 2.0 |[x], _| x.tanh();
    /// y = x where x > 0, else 0; NaN stays.
    RELU "relu" 1 0.0 |[x], _| choose(x <= R::ZERO, R::ZERO, x);
    /// y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    GELU "gelu" 8 4.0 |[x], _| x * gelu_gate(x);
    /// y = x Phi(x), Phi being the distribution of normal numbers: 0.5 x (1 + erf(x / sqrt 2)).
    GELU_EXACT "gelu_exact" 12 4.0 |[x], _| x * (-x).tail();
    /// y = 1 / (1 + e^-x).
    SIGMOID "sigmoid" 3 4.0 |[x], _| sigmoid(x);
    /// y = (2 / sqrt(pi)) times the integral of e^(-t^2) from 0 to x.
    ERF "erf" 10 4.0 |[x], _| x.erf();
    /// y = x / (1 + e^-x).
    SILU "silu" 4 4.0 |[x], _| x * sigmoid(x);
    /// y = x^2, of i64 too (wrapping around).
    SQUARE "square" 1 1.0 |[x], _| x * x, x.wrapping_mul(x);
    /// y = 1 / x.
    RECIPROCAL "reciprocal" 1 1.0 |[x], _| R::ONE / x;
    /// y = c x; scalars: \[Real c\].
    SCALE "scale" 1 2.0 |[x], [c, _]| c * x;
    /// y = x + c; scalars: \[Real c\].
    ADD_SCALAR "add_scalar" 1 2.0 |[x], [c, _]| x + c;

    /// dx = dy where x > 0, else 0. In: x, dy.
    RELU_GRAD "relu_grad" 1 0.0 |[x, dy], _| choose(x <= R::ZERO, R::ZERO, dy);
    /// dx = dy times the derivative of [`GELU`] at x. In: x, dy.
    GELU_GRAD "gelu_grad" 16 8.0 |[x, dy], _| dy * gelu_slope(x);
    /// dx = dy times the derivative of [`GELU_EXACT`] at x. In: x, dy.
    GELU_EXACT_GRAD "gelu_exact_grad" 16 8.0 |[x, dy], _| dy * gelu_exact_slope(x);
    /// dx = dy y (1 - y) for y = 1 / (1 + e^-x). In: y, dy.
    SIGMOID_GRAD "sigmoid_grad" 3 4.0 |[y, dy], _| dy * (y * (R::ONE - y));
    /// dx = dy (2 / sqrt(pi)) e^(-x^2), the derivative of [`ERF`]. In: x, dy.
    ERF_GRAD "erf_grad" 5 8.0 |[x, dy], _| dy * erf_slope(x);
    /// dx = dy s (1 + x (1 - s)) with s = 1 / (1 + e^-x), the derivative of [`SILU`]. In: x, dy.
    SILU_GRAD "silu_grad" 8 8.0 |[x, dy], _| dy * gate_slope(x, sigmoid(x), R::ONE);
    /// dx = dy (1 - y^2) for y = tanh x. In: y, dy.
    TANH_GRAD "tanh_grad" 3 4.0 |[y, dy], _| dy * (-y).fma(y, R::ONE);
}

#[cfg(test)]
mod tests;
