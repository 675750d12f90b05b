//! Formulas shared by the tables of elementwise kernels, compiled as Rust and, from the same text, as CUDA C++.
//!
//! A formula is an expression valid in both languages: methods of [`Maths`], `R::lit`, `R::ZERO`, `R::ONE`, operators, comparisons,
//! [`choose`] and [`is_nan`], other formulas, and constants that pointwise/gpu.cu defines too.

use crate::cpu::math::Maths;
use crate::dtype::Real;
use std::f64::consts::FRAC_2_SQRT_PI;

/// Returns a if `is_first`, else b; both are computed.
#[inline(always)]
pub(in crate::op) fn choose<V>(is_first: bool, a: V, b: V) -> V {
    if is_first { a } else { b }
}

/// Returns whether x is NaN.
#[inline(always)]
#[expect(clippy::eq_op, reason = "only NaN differs from itself")]
pub(in crate::op) fn is_nan<R: Real>(x: R) -> bool {
    x != x
}

/// Defines constants and functions, and their CUDA C++ text `FORMULAS`. Constants are literals without underscores.
macro_rules! formulas {
    (
        $(const $constant:ident = $value:literal;)*
        $($(#[$doc:meta])* fn $name:ident($first:ident $(, $rest:ident)*) { $formula:expr })*
    ) => {
        $(const $constant: f64 = $value;)*
        $(
            $(#[$doc])*
            #[inline(always)]
            pub(in crate::op) fn $name<R: Maths>($first: R, $($rest: R),*) -> R {
                $formula
            }
        )*
        /// The constants and functions above in CUDA C++, in one line.
        pub(in crate::op) const FORMULAS: &str = concat!(
            $("constexpr double ", stringify!($constant), " = ", stringify!($value), "; ",)*
            $(
                "__device__ __forceinline__ R ", stringify!($name),
                "(R ", stringify!($first), $(", R ", stringify!($rest),)* ") { return ", stringify!($formula), "; } ",
            )*
        );
    };
}

formulas! {
    // 1 / sqrt(2 pi).
    const ONE_BY_ROOT_2_PI = 0.3989422804014327;
    // sqrt(2 / pi), of the tanh form of GELU.
    const ROOT_2_BY_PI = 0.7978845608028654;
    // The cubic coefficient of the tanh form of GELU (Hendrycks and Gimpel, arXiv 1606.08415).
    const CUBIC = 0.044715;

    /// 1 / (1 + e^-x).
    fn sigmoid(x) { R::ONE / (R::ONE + (-x).exp()) }

    /// x clamped to -limit .. limit; NaN stays.
    fn within(x, limit) { choose(x > limit, limit, choose(x < -limit, -limit, x)) }

    /// 0.5 (1 + tanh u) = sigmoid(2 u) with u = sqrt(2/pi) (x + 0.044715 x^3): exact in both tails, where 1 + tanh cancels.
    fn gelu_gate(x) { sigmoid(x * (x * x).fma(R::lit(2.0 * ROOT_2_BY_PI * CUBIC), R::lit(2.0 * ROOT_2_BY_PI))) }

    /// The derivative of x s(g(x)), where s is the sigmoid with value `s` and `slope` is the derivative of g.
    fn gate_slope(x, s, slope) { x.fma(slope * (s * (R::ONE - s)), s) }

    /// The derivative of x gelu_gate(x), for x with a finite slope of the gate.
    fn gelu_slope_near(x) {
        gate_slope(x, gelu_gate(x), (x * x).fma(R::lit(6.0 * ROOT_2_BY_PI * CUBIC), R::lit(2.0 * ROOT_2_BY_PI)))
    }

    /// The derivative of gelu for all x. Beyond 16 the gate is 0 or 1 in f64 too; without the limit its slope would be infinity times 0.
    fn gelu_slope(x) { gelu_slope_near(within(x, R::lit(16.0))) }

    /// Phi(x) + x e^(-x^2 / 2) / sqrt(2 pi), for finite x.
    fn gelu_exact_slope_near(x) { (x * R::lit(ONE_BY_ROOT_2_PI)).fma((-x).bell(), (-x).tail()) }

    /// The derivative of exact gelu for all x. Beyond 40 the exponential is 0 in f64 too; without the limit it would be multiplied by
    /// infinity.
    fn gelu_exact_slope(x) { gelu_exact_slope_near(within(x, R::lit(40.0))) }

    /// The derivative of the error function.
    fn erf_slope(x) { R::lit(FRAC_2_SQRT_PI) * (-(x * x)).exp() }

    /// -1, 0 or 1; zeros and NaN are their own sign.
    fn sign(x) { choose(x < R::ZERO, -R::ONE, choose(x > R::ZERO, R::ONE, x)) }

    /// dy times the sign of x.
    fn by_sign(x, dy) { choose(x < R::ZERO, -dy, choose(x > R::ZERO, dy, R::ZERO)) }

    /// max(x, 0) + ln(1 + e^-|x|).
    fn softplus(x) { choose(x > R::ZERO, x, R::ZERO) + (-x.abs()).exp().ln_1p() }

    /// y x^(y - 1), 0 for y = 0 whatever x is.
    fn pow_slope(x, y) { choose(y == R::ZERO, R::ZERO, y * x.pow(y - R::ONE)) }

    /// a^b ln a, 0 where a is 0 and b is not negative.
    fn pow_exponent_slope(a, b) { choose(a == R::ZERO && b >= R::ZERO, R::ZERO, a.pow(b) * a.ln()) }
}
