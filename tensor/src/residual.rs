//! Methods for x + f(norm(x)), the halves of a block, for plain tensors and recorded variables alike.

use crate::ops::layer_norm::LayerNorm;
use crate::ops::rms_norm::RmsNorm;
use crate::value::Value;
use std::rc::Rc;

/// Norms that give x back beside what they make of it. The sum with a branch is then made of that x, and the norm adds the gradient
/// of the sum to its own in one pass: `let (x, y) = x.rms_norm_beside(&w, eps)`, then `x.add(&f(&y))`.
pub trait Residual: Value {
    /// x itself, the same memory, and [`Value::layer_norm`] of it: `[.., d]` both, `w` and `b` `[d]`, one float dtype.
    #[track_caller]
    #[must_use]
    fn layer_norm_beside(&self, w: &Self, b: &Self, eps: f64) -> (Self, Self) {
        let mut made = Self::apply(Rc::new(LayerNorm { eps, has_residual: true }), &[self, w, b]);
        (made.swap_remove(1), made.swap_remove(0))
    }

    /// x itself, the same memory, and [`Value::rms_norm`] of it: `[.., d]` both, `w` `[d]`, one float dtype.
    #[track_caller]
    #[must_use]
    fn rms_norm_beside(&self, w: &Self, eps: f64) -> (Self, Self) {
        let mut made = Self::apply(Rc::new(RmsNorm { eps, has_residual: true }), &[self, w]);
        (made.swap_remove(1), made.swap_remove(0))
    }
}

impl<V: Value> Residual for V {}
