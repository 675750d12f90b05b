//! Elementwise methods of every [`Value`] beyond the basic ones: activations, rounding, comparisons, logic, where.

use crate::methods::value::Value;
use crate::op::unwind;
use crate::ops::clamp::Clamp;
use crate::ops::compare::{Compare, CompareScalar, Relation};
use crate::ops::logical::{Connective, Logical, Not};
use crate::ops::masked_fill::MaskedFill;
use crate::ops::maximum::Maximum;
use crate::ops::pow::Pow;
use crate::ops::unary::{ops_of_elementwise, unary_methods};
use crate::ops::where_cond::WhereCond;
use std::rc::Rc;

/// Elementwise functions beyond those of [`Value`]. Two arguments broadcast, aligned at the last dim. A scalar compared
/// with floats is rounded to their dtype; integers are compared with the exact scalar, so that none equals 0.5. A misuse
/// unwinds with the error that names op, layouts and source line.
pub trait Elementwise: Value {
    ops_of_elementwise!(unary_methods);

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
