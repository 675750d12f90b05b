//! Elementwise methods of every [`Value`] beyond the basic ones: activations, rounding, comparisons, logic, where.

use crate::op::unwind;
use crate::ops::abs::Abs;
use crate::ops::ceil::Ceil;
use crate::ops::clamp::Clamp;
use crate::ops::compare::{Compare, CompareScalar, Relation};
use crate::ops::cos::Cos;
use crate::ops::elu::Elu;
use crate::ops::erf::Erf;
use crate::ops::expm1::Expm1;
use crate::ops::floor::Floor;
use crate::ops::gelu_exact::GeluExact;
use crate::ops::leaky_relu::LeakyRelu;
use crate::ops::log1p::Log1p;
use crate::ops::logical::{Connective, Logical, Not};
use crate::ops::masked_fill::MaskedFill;
use crate::ops::maximum::Maximum;
use crate::ops::pow::Pow;
use crate::ops::pow_scalar::PowScalar;
use crate::ops::round::Round;
use crate::ops::rsqrt::Rsqrt;
use crate::ops::sigmoid::Sigmoid;
use crate::ops::sign::Sign;
use crate::ops::sin::Sin;
use crate::ops::softplus::Softplus;
use crate::ops::where_cond::WhereCond;
use crate::value::Value;
use std::rc::Rc;

/// Elementwise functions beyond those of [`Value`]. Two arguments broadcast, aligned at the last dim. A scalar compared
/// with floats is rounded to their dtype; integers are compared with the exact scalar, so that none equals 0.5. A misuse
/// unwinds with the error that names op, layouts and source line.
pub trait Elementwise: Value {
    /// Exact GELU x (1 + erf(x / sqrt 2)) / 2; [`Value::gelu`] is the tanh form.
    #[track_caller]
    #[must_use]
    fn gelu_exact(&self) -> Self {
        Self::apply_one(Rc::new(GeluExact), &[self])
    }

    /// Sigmoid 1 / (1 + exp(-x)).
    #[doc(alias = "expit")]
    #[track_caller]
    #[must_use]
    fn sigmoid(&self) -> Self {
        Self::apply_one(Rc::new(Sigmoid), &[self])
    }

    /// Error function (2 / sqrt(pi)) times the integral of exp(-t^2) from 0 to x.
    #[track_caller]
    #[must_use]
    fn erf(&self) -> Self {
        Self::apply_one(Rc::new(Erf), &[self])
    }

    /// Absolute value |x|.
    #[track_caller]
    #[must_use]
    fn abs(&self) -> Self {
        Self::apply_one(Rc::new(Abs), &[self])
    }

    /// Sign of x, -1, 0 or 1, without gradient.
    #[track_caller]
    #[must_use]
    fn sign(&self) -> Self {
        Self::apply_one(Rc::new(Sign), &[self])
    }

    /// Reciprocal square root 1 / sqrt(x).
    #[track_caller]
    #[must_use]
    fn rsqrt(&self) -> Self {
        Self::apply_one(Rc::new(Rsqrt), &[self])
    }

    /// Sine of x in radians.
    #[track_caller]
    #[must_use]
    fn sin(&self) -> Self {
        Self::apply_one(Rc::new(Sin), &[self])
    }

    /// Cosine of x in radians.
    #[track_caller]
    #[must_use]
    fn cos(&self) -> Self {
        Self::apply_one(Rc::new(Cos), &[self])
    }

    /// exp(x) - 1, exact near 0.
    #[track_caller]
    #[must_use]
    fn expm1(&self) -> Self {
        Self::apply_one(Rc::new(Expm1), &[self])
    }

    /// ln(1 + x), exact near 0.
    #[track_caller]
    #[must_use]
    fn log1p(&self) -> Self {
        Self::apply_one(Rc::new(Log1p), &[self])
    }

    /// Softplus ln(1 + exp(x)).
    #[track_caller]
    #[must_use]
    fn softplus(&self) -> Self {
        Self::apply_one(Rc::new(Softplus), &[self])
    }

    /// Floor: the largest integer not above x, without gradient.
    #[track_caller]
    #[must_use]
    fn floor(&self) -> Self {
        Self::apply_one(Rc::new(Floor), &[self])
    }

    /// Ceiling: the smallest integer not below x, without gradient.
    #[track_caller]
    #[must_use]
    fn ceil(&self) -> Self {
        Self::apply_one(Rc::new(Ceil), &[self])
    }

    /// Rounds to the nearest integer, ties to even, without gradient.
    #[track_caller]
    #[must_use]
    fn round(&self) -> Self {
        Self::apply_one(Rc::new(Round), &[self])
    }

    /// ELU: x where x > 0, else c (exp(x) - 1).
    #[track_caller]
    #[must_use]
    fn elu(&self, scale: f64) -> Self {
        Self::apply_one(Rc::new(Elu { scale }), &[self])
    }

    /// Leaky ReLU: x where x > 0, else `slope` x.
    #[track_caller]
    #[must_use]
    fn leaky_relu(&self, slope: f64) -> Self {
        Self::apply_one(Rc::new(LeakyRelu { slope }), &[self])
    }

    /// Mish: x tanh(ln(1 + exp(x))) (Misra, arXiv 1908.08681).
    #[track_caller]
    #[must_use]
    fn mish(&self) -> Self {
        self.mul(&self.softplus().tanh())
    }

    /// Hard swish: x clamp(x + 3, 0, 6) / 6 (Howard and others, arXiv 1905.02244).
    #[doc(alias = "hardswish")]
    #[track_caller]
    #[must_use]
    fn hard_swish(&self) -> Self {
        self.mul(&self.add_scalar(3.0).clamp(0.0, 6.0)).scale(1.0 / 6.0)
    }

    /// Power x^c for a scalar c.
    #[doc(alias = "pow_scalar")]
    #[track_caller]
    #[must_use]
    fn powf(&self, exponent: f64) -> Self {
        Self::apply_one(Rc::new(PowScalar { exponent }), &[self])
    }

    /// Power x^y elementwise.
    #[track_caller]
    #[must_use]
    fn pow(&self, other: &Self) -> Self {
        Self::apply_one(Pow::between(&self.shape(), &other.shape()), &[self, other])
    }

    /// Clamps x to `low..=high`. The gradient passes within the bounds, the bounds included.
    #[doc(alias = "clip")]
    #[track_caller]
    #[must_use]
    fn clamp(&self, low: f64, high: f64) -> Self {
        Self::apply_one(unwind(Clamp::between(low, high)), &[self])
    }

    /// Elementwise maximum of x and y; ties share the gradient. If one is NaN, the result is NaN, and both get the
    /// whole gradient.
    #[track_caller]
    #[must_use]
    fn maximum(&self, other: &Self) -> Self {
        Self::apply_one(Maximum::between(&self.shape(), &other.shape()), &[self, other])
    }

    /// Elementwise minimum of x and y; gradients as of [`Elementwise::maximum`].
    #[track_caller]
    #[must_use]
    fn minimum(&self, other: &Self) -> Self {
        Self::apply_one(Maximum::minimum(&self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x == y, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn eq(&self, other: &Self) -> Self {
        Self::apply_one(Compare::between(Relation::Eq, &self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x equals a scalar, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn eq_scalar(&self, number: f64) -> Self {
        Self::apply_one(Rc::new(CompareScalar { relation: Relation::Eq, number }), &[self])
    }

    /// Whether x != y, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn ne(&self, other: &Self) -> Self {
        Self::apply_one(Compare::between(Relation::Ne, &self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x differs from a scalar, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn ne_scalar(&self, number: f64) -> Self {
        Self::apply_one(Rc::new(CompareScalar { relation: Relation::Ne, number }), &[self])
    }

    /// Whether x < y, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn lt(&self, other: &Self) -> Self {
        Self::apply_one(Compare::between(Relation::Lt, &self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x < a scalar, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn lt_scalar(&self, number: f64) -> Self {
        Self::apply_one(Rc::new(CompareScalar { relation: Relation::Lt, number }), &[self])
    }

    /// Whether x <= y, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn le(&self, other: &Self) -> Self {
        Self::apply_one(Compare::between(Relation::Le, &self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x <= a scalar, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn le_scalar(&self, number: f64) -> Self {
        Self::apply_one(Rc::new(CompareScalar { relation: Relation::Le, number }), &[self])
    }

    /// Whether x > y, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn gt(&self, other: &Self) -> Self {
        Self::apply_one(Compare::between(Relation::Gt, &self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x > a scalar, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn gt_scalar(&self, number: f64) -> Self {
        Self::apply_one(Rc::new(CompareScalar { relation: Relation::Gt, number }), &[self])
    }

    /// Whether x >= y, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn ge(&self, other: &Self) -> Self {
        Self::apply_one(Compare::between(Relation::Ge, &self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x >= a scalar, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn ge_scalar(&self, number: f64) -> Self {
        Self::apply_one(Rc::new(CompareScalar { relation: Relation::Ge, number }), &[self])
    }

    /// Logical and (bool in and out).
    #[track_caller]
    #[must_use]
    fn logical_and(&self, other: &Self) -> Self {
        Self::apply_one(Logical::between(Connective::And, &self.shape(), &other.shape()), &[self, other])
    }

    /// Logical or (bool in and out).
    #[track_caller]
    #[must_use]
    fn logical_or(&self, other: &Self) -> Self {
        Self::apply_one(Logical::between(Connective::Or, &self.shape(), &other.shape()), &[self, other])
    }

    /// Logical exclusive or (bool in and out).
    #[track_caller]
    #[must_use]
    fn logical_xor(&self, other: &Self) -> Self {
        Self::apply_one(Logical::between(Connective::Xor, &self.shape(), &other.shape()), &[self, other])
    }

    /// Logical not (bool in and out).
    #[track_caller]
    #[must_use]
    fn logical_not(&self) -> Self {
        Self::apply_one(Rc::new(Not), &[self])
    }

    /// Selects x where this mask (bool) is true, else y.
    #[doc(alias = "where")]
    #[doc(alias = "select")]
    #[doc(alias = "torch.where")]
    #[doc(alias = "jnp.where")]
    #[track_caller]
    #[must_use]
    fn where_cond(&self, x: &Self, y: &Self) -> Self {
        Self::apply_one(WhereCond::among(&self.shape(), &x.shape(), &y.shape()), &[self, x, y])
    }

    /// Replaces x by `value` where a mask (bool) is true. Integer and bool tensors must be able to represent the
    /// value (`Kind::DType`); floats round it.
    #[track_caller]
    #[must_use]
    fn masked_fill(&self, mask: &Self, value: f64) -> Self {
        Self::apply_one(unwind(MaskedFill::of(&self.shape(), &mask.shape(), value)), &[self, mask])
    }
}

impl<V: Value> Elementwise for V {}
