//! Normalisation over the last dim by its root mean square.

use crate::module;
use crate::param::{Init, Param};
use crate::point::Point;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Residual, Value};

module! {
    /// y = x / sqrt(mean(x^2) + eps) * weight over the last dim. Zhang and Sennrich, arXiv 1910.07467.
    #[derive(Debug)]
    pub struct RmsNorm {
        /// `[d]`, initially 1.
        pub weight: Param,
        out: Point;
        eps: f64,
    }
}

impl RmsNorm {
    /// For rows of width `d`, with eps 1e-5.
    #[must_use]
    pub fn new(d: usize) -> RmsNorm {
        RmsNorm { weight: Param::new(&[d]).init(Init::Ones), out: Point::default(), eps: 1e-5 }
    }

    /// The same layer with another eps.
    #[must_use]
    pub fn eps(self, eps: f64) -> RmsNorm {
        RmsNorm { eps, ..self }
    }

    /// `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d, or is split.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.out.at(&x.rms_norm(&self.weight.on(x), self.eps))
    }

    /// x, to which what is made of y is to be added, and y: `[.., d]` both. The norm then adds the gradient of the sum to its own.
    ///
    /// # Panics
    /// As [`RmsNorm::forward`].
    #[track_caller]
    #[must_use]
    pub fn forward_beside(&self, x: &Var) -> (Var, Var) {
        let (x, y) = x.rms_norm_beside(&self.weight.on(x), self.eps);
        (x, self.out.at(&y))
    }
}
