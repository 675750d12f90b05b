//! More elementwise methods of every [`Value`].

use crate::ops::erf::Erf;
use crate::ops::gelu_exact::GeluExact;
use crate::ops::sigmoid::Sigmoid;
use crate::value::Value;
use std::rc::Rc;

/// Functions of single elements beyond those of [`Value`]. Misuse unwinds with the error that names op, layouts and line.
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
}

impl<V: Value> Elementwise for V {}
