//! More elementwise methods of every [`Value`].

use crate::op::unwind;
use crate::ops::abs::Abs;
use crate::ops::ceil::Ceil;
use crate::ops::choose::Choose;
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
use crate::ops::logical::{Logical, Not, Table};
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
use crate::value::Value;
use std::rc::Rc;

/// Functions of single elements beyond those of [`Value`]. Where there are two arguments their shapes are aligned at the
/// last dim; missing dims and extents of 1 are repeated. A number that floats are compared with is rounded to their dtype;
/// integers are compared with the number itself, so that none equals 0.5. Misuse unwinds with the error that names op, layouts
/// and line.
pub trait Elementwise: Value {
    /// x (1 + erf(x / sqrt 2)) / 2, the exact form of GELU; [`Value::gelu`] is the tanh form.
    #[track_caller]
    #[must_use]
    fn gelu_exact(&self) -> Self {
        Self::apply_one(Rc::new(GeluExact), &[self])
    }

    /// 1 / (1 + exp(-x)).
    #[track_caller]
    #[must_use]
    fn sigmoid(&self) -> Self {
        Self::apply_one(Rc::new(Sigmoid), &[self])
    }

    /// (2 / sqrt(pi)) times the integral of exp(-t^2) from 0 to x.
    #[track_caller]
    #[must_use]
    fn erf(&self) -> Self {
        Self::apply_one(Rc::new(Erf), &[self])
    }

    /// |x|.
    #[track_caller]
    #[must_use]
    fn abs(&self) -> Self {
        Self::apply_one(Rc::new(Abs), &[self])
    }

    /// -1, 0 or 1: the sign of x, without gradient.
    #[track_caller]
    #[must_use]
    fn sign(&self) -> Self {
        Self::apply_one(Rc::new(Sign), &[self])
    }

    /// 1 / sqrt(x).
    #[track_caller]
    #[must_use]
    fn rsqrt(&self) -> Self {
        Self::apply_one(Rc::new(Rsqrt), &[self])
    }

    /// sin(x), x in radians.
    #[track_caller]
    #[must_use]
    fn sin(&self) -> Self {
        Self::apply_one(Rc::new(Sin), &[self])
    }

    /// cos(x), x in radians.
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

    /// ln(1 + exp(x)).
    #[track_caller]
    #[must_use]
    fn softplus(&self) -> Self {
        Self::apply_one(Rc::new(Softplus), &[self])
    }

    /// The largest integer that is not above x, without gradient.
    #[track_caller]
    #[must_use]
    fn floor(&self) -> Self {
        Self::apply_one(Rc::new(Floor), &[self])
    }

    /// The smallest integer that is not below x, without gradient.
    #[track_caller]
    #[must_use]
    fn ceil(&self) -> Self {
        Self::apply_one(Rc::new(Ceil), &[self])
    }

    /// The nearest integer, the even one of two, without gradient.
    #[track_caller]
    #[must_use]
    fn round(&self) -> Self {
        Self::apply_one(Rc::new(Round), &[self])
    }

    /// x where x > 0, else c (exp(x) - 1).
    #[track_caller]
    #[must_use]
    fn elu(&self, scale: f64) -> Self {
        Self::apply_one(Rc::new(Elu { scale }), &[self])
    }

    /// x where x > 0, else `slope` x.
    #[track_caller]
    #[must_use]
    fn leaky_relu(&self, slope: f64) -> Self {
        Self::apply_one(Rc::new(LeakyRelu { slope }), &[self])
    }

    /// x tanh(ln(1 + exp(x))) (Misra, arXiv 1908.08681).
    #[track_caller]
    #[must_use]
    fn mish(&self) -> Self {
        self.mul(&self.softplus().tanh())
    }

    /// x times x + 3 clamped to 0..6, over 6 (Howard and others, arXiv 1905.02244).
    #[track_caller]
    #[must_use]
    fn hard_swish(&self) -> Self {
        self.mul(&self.add_scalar(3.0).clamp(0.0, 6.0)).scale(1.0 / 6.0)
    }

    /// x^c for a number c.
    #[track_caller]
    #[must_use]
    fn powf(&self, exponent: f64) -> Self {
        Self::apply_one(Rc::new(PowScalar { exponent }), &[self])
    }

    /// x^y elementwise.
    #[track_caller]
    #[must_use]
    fn pow(&self, other: &Self) -> Self {
        Self::apply_one(Pow::between(&self.shape(), &other.shape()), &[self, other])
    }

    /// `low` where x is below, `high` where it is above, else x. The gradient is that of x within, edges included.
    #[track_caller]
    #[must_use]
    fn clamp(&self, low: f64, high: f64) -> Self {
        Self::apply_one(unwind(Clamp::between(low, high)), &[self])
    }

    /// The larger of x and y; two that tie share the gradient. Where one is not a number, the result is none, and both have the
    /// whole gradient.
    #[track_caller]
    #[must_use]
    fn maximum(&self, other: &Self) -> Self {
        Self::apply_one(Maximum::between(&self.shape(), &other.shape()), &[self, other])
    }

    /// The smaller of x and y; gradients as of [`Elementwise::maximum`].
    #[track_caller]
    #[must_use]
    fn minimum(&self, other: &Self) -> Self {
        Self::apply_one(Maximum::least(&self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x == y, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn eq(&self, other: &Self) -> Self {
        Self::apply_one(Compare::between(Relation::Eq, &self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x == a number, in bool, without gradient.
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

    /// Whether x != a number, in bool, without gradient.
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

    /// Whether x < a number, in bool, without gradient.
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

    /// Whether x <= a number, in bool, without gradient.
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

    /// Whether x > a number, in bool, without gradient.
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

    /// Whether x >= a number, in bool, without gradient.
    #[track_caller]
    #[must_use]
    fn ge_scalar(&self, number: f64) -> Self {
        Self::apply_one(Rc::new(CompareScalar { relation: Relation::Ge, number }), &[self])
    }

    /// Whether x and y are true (bool in and out).
    #[track_caller]
    #[must_use]
    fn logical_and(&self, other: &Self) -> Self {
        Self::apply_one(Logical::between(Table::And, &self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x or y is true (bool in and out).
    #[track_caller]
    #[must_use]
    fn logical_or(&self, other: &Self) -> Self {
        Self::apply_one(Logical::between(Table::Or, &self.shape(), &other.shape()), &[self, other])
    }

    /// Whether one of x and y is true and the other is not (bool in and out).
    #[track_caller]
    #[must_use]
    fn logical_xor(&self, other: &Self) -> Self {
        Self::apply_one(Logical::between(Table::Xor, &self.shape(), &other.shape()), &[self, other])
    }

    /// Whether x is false (bool in and out).
    #[track_caller]
    #[must_use]
    fn logical_not(&self) -> Self {
        Self::apply_one(Rc::new(Not), &[self])
    }

    /// x where this mask (bool) is true, else y.
    #[track_caller]
    #[must_use]
    fn choose(&self, x: &Self, y: &Self) -> Self {
        Self::apply_one(Choose::among(&self.shape(), &x.shape(), &y.shape()), &[self, x, y])
    }

    /// `value` where a mask (bool) is true, else x. A tensor of integers or truth values must hold the value
    /// (`Kind::DType`); to floats it is rounded.
    #[track_caller]
    #[must_use]
    fn masked_fill(&self, mask: &Self, value: f64) -> Self {
        Self::apply_one(unwind(MaskedFill::of(&self.shape(), &mask.shape(), value)), &[self, mask])
    }
}

impl<V: Value> Elementwise for V {}
