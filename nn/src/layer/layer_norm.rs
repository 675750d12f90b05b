//! Normalisation over the last dim, with scale and shift.

use crate::module;
use crate::param::{Init, Param};
use crate::point::Point;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Residual, Value};

module! {
    /// y = (x - mean) / sqrt(var + eps) * weight + bias over the last dim; mean and var are those of the row. Ba, Kiros
    /// and Hinton, "Layer Normalization", arXiv 1607.06450.
    #[derive(Debug)]
    pub struct LayerNorm {
        /// `[d]`, initially 1.
        pub weight: Param,
        /// `[d]`, initially 0.
        pub bias: Param,
        out: Point;
        eps: f64,
    }
}

impl LayerNorm {
    /// For rows of width `d`, with eps 1e-5.
    #[must_use]
    pub fn new(d: usize) -> LayerNorm {
        LayerNorm {
            weight: Param::new(&[d]).init(Init::Ones),
            bias: Param::new(&[d]),
            out: Point::default(),
            eps: 1e-5,
        }
    }

    /// The same layer with another eps.
    #[must_use]
    pub fn eps(self, eps: f64) -> LayerNorm {
        LayerNorm { eps, ..self }
    }

    /// `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d, or is split.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.out.at(&x.layer_norm(&self.weight.on(x), &self.bias.on(x), self.eps))
    }

    /// x, to which what is made of y is to be added, and y: `[.., d]` both. The norm then adds the gradient of the sum to its own.
    ///
    /// # Panics
    /// As [`LayerNorm::forward`].
    #[track_caller]
    #[must_use]
    pub fn forward_beside(&self, x: &Var) -> (Var, Var) {
        let (x, y) = x.layer_norm_beside(&self.weight.on(x), &self.bias.on(x), self.eps);
        (x, self.out.at(&y))
    }
}
