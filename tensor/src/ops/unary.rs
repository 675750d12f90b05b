//! Elementwise functions of one argument, as a table: formula, kernel, derivative, cases, and values computed by hand.
//!
//! A row is an op, which a macro in `unary_row.rs` generates. Its name is the name of its kernel; the formula in code is the
//! kernel's row in [`shardgrad_kernels::op::unary`]. `neg` and `scale` have files of their own, because ops that derivatives are composed
//! of use them; so has `clamp`, which checks its limits.

use super::div::div;
use super::mul::mul;
use super::neg::neg;
use super::scale::scale;
use super::unary_row::{SIGNATURE, UnaryBackward, unary_ops};
use super::{Case, Input, OpModule};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, PlanKey, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::unary as kernels;
use std::rc::Rc;

/// Defines the methods of rows, inside of a trait over [`Value`](crate::Value).
macro_rules! unary_methods {
    ($(
        $(#[doc = $doc:literal])+
        $(#[doc(alias = $alias:literal)])*
        $name:ident $(($($method:tt)+))? => $Op:ident {
            $(fields: { $($(#[doc = $field_doc:literal])+ $field:ident,)+ },)?
            kernel: $($rest:tt)+
        }
    )+) => {$(
        $crate::ops::unary::unary_methods! {
            @method [
                $(#[doc = $doc])+
                $($(
                    #[doc = ""]
                    #[doc = concat!("- `", stringify!($field), "`:")]
                    $(#[doc = $field_doc])+
                )+)?
            ]
            [$(#[doc(alias = $alias)])* $name] [$($($method)+)?] $Op [$($($field)+)?]
        }
    )+};
    (@method $docs:tt $name:tt [$($method:tt)+] $Op:ident $fields:tt) => {
        $crate::ops::unary::unary_methods! { @method $docs [$($method)+] [] $Op $fields }
    };
    (@method [$($docs:tt)+] [$(#[$alias:meta])* $name:ident] [] $Op:ident [$($field:ident)*]) => {
        $($docs)+
        $(#[$alias])*
        #[track_caller]
        #[must_use]
        fn $name(&self $(, $field: f64)*) -> Self {
            Self::apply_one($crate::ops::unary::$Op { $($field),* }, &[self])
        }
    };
}
pub(crate) use unary_methods;

/// The rows whose methods are in [`Value`](crate::Value).
macro_rules! ops_of_value {
    ($consumer:ident) => {
        $consumer! {
        /// Elementwise addition of a number: y = x + c.
        ///
        /// Gradient: dx = g. Declared not linear: each rank of a partial sum would add c, so a partial x is reduced
        /// first.
        #[doc(alias = "add")]
        add_scalar => AddScalar {
            fields: {
                /// c, rounded to the accumulator of the dtype.
                term,
            },
            kernel: ADD_SCALAR,
            derivative: { g },
            cases: [AddScalar { term: 0.75 } => real exact],
            worked: [AddScalar { term: 0.5 } => [1.0 => 1.5, -2.0 => -1.5]],
        }
        /// Elementwise exponential: y = exp(x).
        ///
        /// Gradient: dx = g y.
        exp => Exp {
            kernel: EXP,
            derivative: { |g, y| mul(g, y) },
            cases: [Exp => real],
            worked: [Exp => [0.0 => 1.0, 1.0 => std::f64::consts::E]],
        }
        /// Elementwise natural logarithm: y = ln(x).
        ///
        /// Gradient: dx = g / x. Not finite where x <= 0.
        #[doc(alias = "ln")]
        log => Log {
            kernel: LOG,
            derivative: { |g, x| div(g, x) },
            cases: [Log => positive],
            worked: [Log => [1.0 => 0.0, 2.0 => std::f64::consts::LN_2, std::f64::consts::E => 1.0]],
        }
        /// Elementwise square root: y = sqrt(x).
        ///
        /// Gradient: dx = g / (2 y). NaN where x < 0.
        sqrt => Sqrt {
            kernel: SQRT,
            derivative: { |g, y| scale(&div(g, y), 0.5) },
            cases: [Sqrt => positive],
            worked: [Sqrt => [4.0 => 2.0, 2.25 => 1.5, 2.0 => std::f64::consts::SQRT_2]],
        }
        /// Elementwise square: y = x^2.
        ///
        /// Gradient: dx = 2 g x.
        square => Square {
            kernel: SQUARE,
            derivative: { |g, x| scale(&mul(g, x), 2.0) },
            cases: [Square => real exact],
            worked: [Square => [3.0 => 9.0, -0.5 => 0.25]],
        }
        /// Elementwise reciprocal: y = 1 / x.
        ///
        /// Gradient: dx = -g y^2.
        #[doc(alias = "recip")]
        reciprocal => Reciprocal {
            kernel: RECIPROCAL,
            derivative: { |g, y| neg(&mul(&mul(g, y), y)) },
            cases: [Reciprocal => positive],
            worked: [Reciprocal => [4.0 => 0.25, -0.5 => -2.0]],
        }
        /// Elementwise hyperbolic tangent: y = tanh(x).
        ///
        /// Gradient: dx = g (1 - y^2).
        tanh => Tanh {
            kernel: TANH,
            derivative: { TANH_GRAD(y, g) },
            cases: [Tanh => real],
            worked: [Tanh => [0.0 => 0.0, 1.0 => 0.761_594_155_955_764_9]],
        }
        /// Elementwise rectified linear unit: y = max(x, 0).
        ///
        /// Gradient: dx = g where x > 0, else 0.
        relu => Relu {
            kernel: RELU,
            derivative: { RELU_GRAD(x, g) },
            cases: [Relu => real],
            worked: [Relu => [0.0 => 0.0, 1.0 => 1.0, -1.0 => 0.0]],
        }
        /// Elementwise GELU in its tanh form: y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as GPT-2 uses it.
        ///
        /// Gaussian error linear unit: `torch.nn.functional.gelu(x, approximate="tanh")`, `jax.nn.gelu`. Gradient:
        /// dx = g y'(x). [`gelu_exact`](crate::Elementwise::gelu_exact) is the form with erf.
        #[doc(alias = "gelu_tanh")]
        #[doc(alias = "gelu_new")]
        gelu => Gelu {
            kernel: GELU,
            derivative: { GELU_GRAD(x, g) },
            cases: [Gelu => real],
            worked: [Gelu => [0.0 => 0.0, 1.0 => 0.841_191_990_608_276_7, -2.0 => -0.045_402_305_912_224_98]],
        }
        /// Elementwise SiLU (swish): y = x / (1 + exp(-x)) = x sigmoid(x).
        ///
        /// Sigmoid linear unit. Gradient: dx = g y'(x).
        #[doc(alias = "swish")]
        silu => Silu {
            kernel: SILU,
            derivative: { SILU_GRAD(x, g) },
            cases: [Silu => real],
            worked: [Silu => [0.0 => 0.0, 1.0 => 0.731_058_578_630_004_9]],
        }
        }
    };
}
pub(crate) use ops_of_value;

/// The rows whose methods are in [`Elementwise`](crate::Elementwise).
macro_rules! ops_of_elementwise {
    ($consumer:ident) => {
        $consumer! {
        /// Elementwise GELU with erf: y = x Phi(x) = x (1 + erf(x / sqrt 2)) / 2, as BERT and the default of PyTorch use
        /// it.
        ///
        /// Gradient: dx = g (Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)). NaN at -infinity. [`gelu`](crate::Value::gelu) is the
        /// tanh approximation.
        #[doc(alias = "gelu")]
        gelu_exact => GeluExact {
            kernel: GELU_EXACT,
            derivative: { GELU_EXACT_GRAD(x, g) },
            cases: [GeluExact => real],
            worked: [GeluExact => [
                0.0 => 0.0,
                1.0 => 0.841_344_746_068_542_9,
                -2.0 => -0.045_500_263_896_358_41,
                50.0 => 50.0,
            ]],
        }
        /// Elementwise logistic sigmoid: y = 1 / (1 + exp(-x)).
        ///
        /// Gradient: dx = g y (1 - y). 0 and 1 at -infinity and infinity.
        #[doc(alias = "logistic")]
        #[doc(alias = "expit")]
        sigmoid => Sigmoid {
            kernel: SIGMOID,
            derivative: { SIGMOID_GRAD(y, g) },
            cases: [Sigmoid => real],
            worked: [Sigmoid => [
                0.0 => 0.5,
                1.0 => 0.731_058_578_630_004_9,
                f64::NEG_INFINITY => 0.0,
                f64::INFINITY => 1.0,
            ]],
        }
        /// Elementwise error function: y = (2 / sqrt(pi)) times the integral of exp(-t^2) from 0 to x.
        ///
        /// Gradient: dx = g (2 / sqrt(pi)) exp(-x^2). -1 and 1 at -infinity and infinity.
        erf => Erf {
            kernel: ERF,
            derivative: { ERF_GRAD(x, g) },
            cases: [Erf => real],
            worked: [Erf => [
                0.0 => 0.0,
                0.5 => 0.520_499_877_813_046_5,
                f64::NEG_INFINITY => -1.0,
                f64::INFINITY => 1.0,
            ]],
        }
        /// Elementwise absolute value: y = |x|.
        ///
        /// Gradient: dx = g sign(x), 0 where x = 0.
        abs => Abs {
            kernel: ABS,
            derivative: { ABS_GRAD(x, g) },
            cases: [Abs => real exact],
            worked: [Abs => [-2.5 => 2.5, 0.0 => 0.0, 3.0 => 3.0]],
        }
        /// Elementwise sign: y = -1, 0 or 1.
        ///
        /// Not differentiable. A zero keeps its sign bit and NaN stays NaN.
        #[doc(alias = "signum")]
        sign => Sign {
            kernel: SIGN,
            derivative: { none },
            cases: [Sign => real exact],
            worked: [Sign => [-2.5 => -1.0, 0.0 => 0.0, 3.0 => 1.0, f64::NAN => f64::NAN]],
        }
        /// Elementwise reciprocal square root: y = 1 / sqrt(x).
        ///
        /// Gradient: dx = -g y^3 / 2. Infinity at 0, NaN below.
        rsqrt => Rsqrt {
            kernel: RSQRT,
            derivative: { RSQRT_GRAD(y, g) },
            cases: [Rsqrt => positive],
            worked: [Rsqrt => [4.0 => 0.5, 0.0 => f64::INFINITY, -1.0 => f64::NAN, f64::INFINITY => 0.0]],
        }
        /// Elementwise sine: y = sin(x), x in radians.
        ///
        /// Gradient: dx = g cos(x). NaN at +-infinity.
        sin => Sin {
            kernel: SIN,
            derivative: { SIN_GRAD(x, g) },
            cases: [Sin => real],
            worked: [Sin => [0.0 => 0.0, 1.0 => 0.841_470_984_807_896_5, f64::INFINITY => f64::NAN]],
        }
        /// Elementwise cosine: y = cos(x), x in radians.
        ///
        /// Gradient: dx = -g sin(x). NaN at +-infinity.
        cos => Cos {
            kernel: COS,
            derivative: { COS_GRAD(x, g) },
            cases: [Cos => real],
            worked: [Cos => [0.0 => 1.0, 1.0 => 0.540_302_305_868_139_8, f64::INFINITY => f64::NAN]],
        }
        /// Elementwise y = exp(x) - 1, accurate near 0.
        ///
        /// Gradient: dx = g (y + 1). -1 and infinity at -infinity and infinity.
        expm1 => Expm1 {
            kernel: EXPM1,
            derivative: { EXPM1_GRAD(y, g) },
            cases: [Expm1 => real],
            worked: [Expm1 => [
                0.0 => 0.0,
                1e-9 => 1.000_000_000_5e-9,
                f64::NEG_INFINITY => -1.0,
                f64::INFINITY => f64::INFINITY,
            ]],
        }
        /// Elementwise y = ln(1 + x), accurate near 0.
        ///
        /// Gradient: dx = g / (1 + x). -infinity at x = -1, NaN below.
        #[doc(alias = "ln_1p")]
        log1p => Log1p {
            kernel: LOG1P,
            derivative: { LOG1P_GRAD(x, g) },
            cases: [Log1p => positive],
            worked: [Log1p => [
                0.0 => 0.0,
                1e-9 => 9.999_999_995e-10,
                -1.0 => f64::NEG_INFINITY,
                -2.0 => f64::NAN,
                f64::INFINITY => f64::INFINITY,
            ]],
        }
        /// Elementwise softplus: y = ln(1 + exp(x)), finite for every finite x.
        ///
        /// Gradient: dx = g / (1 + exp(-x)). 0 and infinity at -infinity and infinity.
        softplus => Softplus {
            kernel: SOFTPLUS,
            derivative: { SOFTPLUS_GRAD(x, g) },
            cases: [Softplus => real],
            worked: [Softplus => [
                0.0 => std::f64::consts::LN_2,
                1000.0 => 1000.0,
                -1000.0 => 0.0,
                f64::NEG_INFINITY => 0.0,
            ]],
        }
        /// Elementwise rounding down: y = the largest integer <= x.
        ///
        /// Not differentiable: the slope is 0 wherever it exists.
        floor => Floor {
            kernel: FLOOR,
            derivative: { none },
            cases: [Floor => real exact],
            worked: [Floor => [-1.5 => -2.0, 1.5 => 1.0, 2.0 => 2.0, f64::INFINITY => f64::INFINITY]],
        }
        /// Elementwise rounding up: y = the smallest integer >= x.
        ///
        /// Not differentiable: the slope is 0 wherever it exists.
        ceil => Ceil {
            kernel: CEIL,
            derivative: { none },
            cases: [Ceil => real exact],
            worked: [Ceil => [-1.5 => -1.0, 1.5 => 2.0, 2.0 => 2.0, f64::INFINITY => f64::INFINITY]],
        }
        /// Elementwise rounding to the nearest integer, halves to the even one.
        ///
        /// As `torch.round`, not as `f64::round`. Not differentiable: the slope is 0 wherever it exists.
        #[doc(alias = "round_ties_even")]
        round => Round {
            kernel: ROUND,
            derivative: { none },
            cases: [Round => real exact],
            worked: [Round => [-1.5 => -2.0, 0.5 => 0.0, 2.5 => 2.0, 2.6 => 3.0, f64::NAN => f64::NAN]],
        }
        /// Elementwise exponential linear unit: y = x where x > 0, else c (exp(x) - 1).
        ///
        /// Gradient: dx = g where x > 0, else g c exp(x), also at x = 0.
        elu => Elu {
            fields: {
                /// c (`alpha` in PyTorch): y approaches -c for x far below 0. Rounded to the accumulator of the dtype.
                scale,
            },
            kernel: ELU,
            derivative: { ELU_GRAD(x, g) },
            cases: [Elu { scale: 0.75 } => real],
            worked: [Elu { scale: 0.5 } => [2.0 => 2.0, -1.0 => -0.316_060_279_414_278_83, f64::NEG_INFINITY => -0.5]],
        }
        /// Elementwise leaky ReLU: y = x where x > 0, else c x.
        ///
        /// Gradient: dx = g where x > 0, else c g, also at x = 0.
        leaky_relu => LeakyRelu {
            fields: {
                /// c (`negative_slope` in PyTorch): the slope below 0, rounded to the accumulator of the dtype.
                slope,
            },
            kernel: LEAKY_RELU,
            derivative: { LEAKY_RELU_GRAD(x, g) },
            cases: [LeakyRelu { slope: 0.25 } => real exact],
            worked: [LeakyRelu { slope: 0.25 } => [2.0 => 2.0, -2.0 => -0.5, 0.0 => 0.0]],
        }
        /// Elementwise power with a number as exponent: y = x^c.
        ///
        /// Gradient: dx = g c x^(c - 1), 0 for c = 0; infinite at x = 0 for 0 < c < 1. As IEEE 754 `pow`: 1 for c = 0, NaN
        /// where x < 0 and c is not an integer.
        #[doc(alias = "powf")]
        #[doc(alias = "pow")]
        pow_scalar (#[doc(alias = "pow_scalar")] powf) => PowScalar {
            fields: {
                /// c (the exponent), rounded to the accumulator of the dtype.
                exponent,
            },
            kernel: POW_SCALAR,
            derivative: { POW_SCALAR_GRAD(x, g) },
            cases: [
                PowScalar { exponent: 1.5 } => positive,
                PowScalar { exponent: -2.0 } => positive,
                PowScalar { exponent: 0.0 } => positive,
            ],
            worked: [
                PowScalar { exponent: 1.5 } => [4.0 => 8.0, 0.0 => 0.0, 2.25 => 3.375, -1.0 => f64::NAN],
                PowScalar { exponent: 2.0 } => [-2.0 => 4.0, 0.0 => 0.0, 3.0 => 9.0],
                PowScalar { exponent: 0.0 } => [-2.0 => 1.0, 0.0 => 1.0, 3.0 => 1.0],
            ],
        }
        }
    };
}
pub(crate) use ops_of_elementwise;

ops_of_value!(unary_ops);
ops_of_elementwise!(unary_ops);

#[cfg(test)]
mod tests {
    use crate::op::Op;
    use crate::tensor::Tensor;
    use approx::relative_eq;
    use shardgrad_dist::{Mesh, World};
    use std::rc::Rc;

    /// Compares an op with values x => y, up to a few roundings.
    pub(super) fn check_values(op: fn() -> Rc<dyn Op>, values: &[(f64, f64)]) {
        World::run(Mesh::single(), |rank| {
            let x: Vec<f64> = values.iter().map(|(x, _)| *x).collect();
            let x = Tensor::from_host(rank, &[x.len()], &x)?;
            for (got, (x, y)) in Tensor::apply_one(op(), &[&x]).to_host::<f64>()?.into_iter().zip(values) {
                let is_near = relative_eq!(got, *y, epsilon = 0.0, max_relative = 1e-15);
                assert!(is_near || (got.is_nan() && y.is_nan()), "{x} => {got}, not {y}");
            }
            Ok(())
        })
        .unwrap();
    }
}
