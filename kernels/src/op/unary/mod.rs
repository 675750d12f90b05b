//! Functions of one element, and the gradients of some of them.
//!
//! - in: x, any float, any strides; the gradients take the cotangent dy of the function's result beside x or y
//! - out: y, same dtype and shape, contiguous
//!
//! 16-bit operands are widened, computed in f32 and rounded once. An exponential, a logarithm, a root, a tanh and a
//! division count one operation each.

use crate::cpu::Pool;
use crate::cpu::math::Maths;
use crate::dtype::{DType, Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::{Bound, Kernel, Launch};
use crate::match_float;
use crate::op::pointwise::{map, plain, pointwise, two_reals};
use crate::op::rows::operands;

pointwise! {
    /// y = -x, of i64 too (the smallest stays).
    NEG "neg" 1 0.0 |[x], _| -x, Some(|[x]| x.wrapping_neg());
    /// y = e^x.
    EXP "exp" 1 2.0 |[x], _| x.exp(), None;
    /// y = ln x: negative infinity at 0, not a number below.
    LOG "log" 1 2.0 |[x], _| x.ln(), None;
    /// y = the square root of x: not a number below 0.
    SQRT "sqrt" 1 1.0 |[x], _| x.root(), None;
    /// y = tanh x.
    TANH "tanh" 1 2.0 |[x], _| x.tanh(), None;
    /// y = x where x > 0, else 0; not-a-number stays.
    RELU "relu" 1 0.0 |[x], _| if x <= R::ZERO { R::ZERO } else { x }, None;
    /// y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    GELU "gelu" 8 4.0 |[x], _| x * gelu_gate(x), None;
    /// y = x Phi(x), Phi being the distribution of normal numbers: 0.5 x (1 + erf(x / sqrt 2)).
    GELU_EXACT "gelu_exact" 12 4.0 |[x], _| x * (-x).normal().0, None;
    /// y = 1 / (1 + e^-x).
    SIGMOID "sigmoid" 3 4.0 |[x], _| sigmoid(x), None;
    /// y = (2 / sqrt(pi)) times the integral of e^(-t^2) from 0 to x.
    ERF "erf" 10 4.0 |[x], _| x.erf(), None;
    /// y = x / (1 + e^-x).
    SILU "silu" 4 4.0 |[x], _| x * sigmoid(x), None;
    /// y = x^2, of i64 too (wrapping around).
    SQUARE "square" 1 1.0 |[x], _| x * x, Some(|[x]| x.wrapping_mul(x));
    /// y = 1 / x.
    RECIPROCAL "reciprocal" 1 1.0 |[x], _| R::ONE / x, None;
    /// y = c x; scalars: \[Real c\].
    SCALE "scale" 1 2.0 |[x], [c, _]| c * x, None;
    /// y = x + c; scalars: \[Real c\].
    ADD_SCALAR "add_scalar" 1 2.0 |[x], [c, _]| x + c, None;

    /// dx = dy where x > 0, else 0. In: x, dy.
    RELU_GRAD "relu_grad" 1 0.0 |[x, dy], _| if x <= R::ZERO { R::ZERO } else { dy }, None;
    /// dx = dy times the derivative of [`GELU`] at x. In: x, dy.
    GELU_GRAD "gelu_grad" 16 8.0 |[x, dy], _| dy * gelu_slope(x), None;
    /// dx = dy times the derivative of [`GELU_EXACT`] at x. In: x, dy.
    GELU_EXACT_GRAD "gelu_exact_grad" 16 8.0 |[x, dy], _| dy * gelu_exact_slope(x), None;
    /// dx = dy y (1 - y) for y = 1 / (1 + e^-x). In: y, dy.
    SIGMOID_GRAD "sigmoid_grad" 3 4.0 |[y, dy], _| dy * (y * (R::ONE - y)), None;
    /// dx = dy (2 / sqrt(pi)) e^(-x^2), the derivative of [`ERF`]. In: x, dy.
    ERF_GRAD "erf_grad" 5 8.0 |[x, dy], _| dy * (R::lit(std::f64::consts::FRAC_2_SQRT_PI) * (-(x * x)).exp()), None;
    /// dx = dy s (1 + x (1 - s)) with s = 1 / (1 + e^-x), the derivative of [`SILU`]. In: x, dy.
    SILU_GRAD "silu_grad" 8 8.0 |[x, dy], _| dy * gate_slope(x, sigmoid(x), R::ONE), None;
    /// dx = dy (1 - y^2) for y = tanh x. In: y, dy.
    TANH_GRAD "tanh_grad" 3 4.0 |[y, dy], _| dy * (-y).fma(y, R::ONE), None;
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(in crate::op) fn sigmoid<R: Maths>(x: R) -> R {
    R::ONE / (R::ONE + (-x).exp())
}

/// sqrt(2 / pi), of the tanh form of GELU.
const SQRT_2_PI: f64 = 0.797_884_560_802_865_4;
/// The cubic coefficient of the tanh form of GELU (Hendrycks and Gimpel, arXiv 1606.08415).
const CUBIC: f64 = 0.044715;

/// 0.5 (1 + tanh u) = sigmoid(2 u) with u = sqrt(2/pi) (x + 0.044715 x^3): exact in both tails, where 1 + tanh cancels.
#[inline(always)]
fn gelu_gate<R: Maths>(x: R) -> R {
    sigmoid(x * (x * x).fma(R::lit(2.0 * SQRT_2_PI * CUBIC), R::lit(2.0 * SQRT_2_PI)))
}

/// The derivative of x s(g(x)), where s is the sigmoid with value `s` and `slope` is the derivative of g.
#[inline(always)]
pub(super) fn gate_slope<R: Maths>(x: R, s: R, slope: R) -> R {
    x.fma(slope * (s * (R::ONE - s)), s)
}

/// Phi(x) + x e^(-x^2 / 2) / sqrt(2 pi).
#[inline(always)]
fn gelu_exact_slope<R: Maths>(x: R) -> R {
    // Beyond 40 the exponential is 0 in f64 too; without the limit it would be multiplied by infinity.
    let limit = R::lit(40.0);
    let x = if x > limit { limit } else { x };
    let x = if x < -limit { -limit } else { x };
    let (share, bell) = (-x).normal();
    (x * R::lit(INVERSE_SQRT_2_PI)).fma(bell, share)
}

/// 1 / sqrt(2 pi).
const INVERSE_SQRT_2_PI: f64 = 0.398_942_280_401_432_7;

#[inline(always)]
fn gelu_slope<R: Maths>(x: R) -> R {
    // Beyond 16 the gate is 0 or 1 in f64 too; without the limit its slope would be infinity times 0.
    let limit = R::lit(16.0);
    let x = if x > limit { limit } else { x };
    let x = if x < -limit { -limit } else { x };
    let slope = (x * x).fma(R::lit(6.0 * SQRT_2_PI * CUBIC), R::lit(2.0 * SQRT_2_PI));
    gate_slope(x, gelu_gate(x), slope)
}

#[cfg(test)]
mod tests;
