//! Layer normalization over the last dim, with scale and shift.

use crate::module;
use crate::module::activation_point::ActivationPoint;
use crate::module::param::{Init, Param};
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

module! {
    /// Layer normalization: y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and variance over the last dim. Ba, Kiros and
    /// Hinton, "Layer Normalization", arXiv 1607.06450.
    ///
    /// Activation point: `out`.
    #[doc(alias = "nn.LayerNorm")]
    #[derive(Debug)]
    pub struct LayerNorm {
        /// Scale, `[d]`, initialized with ones.
        pub weight: Param,
        /// Shift, `[d]`, initialized with zeros.
        pub bias: Param,
        out: ActivationPoint;
        eps: f64,
    }
}

impl LayerNorm {
    /// A norm for rows of width `d`, with eps 1e-5.
    #[must_use]
    pub fn new(d: usize) -> LayerNorm {
        LayerNorm {
            weight: Param::new(&[d]).init(Init::Ones),
            bias: Param::new(&[d]),
            out: ActivationPoint::default(),
            eps: 1e-5,
        }
    }

    /// Returns the same layer with another eps.
    #[must_use]
    pub fn eps(self, eps: f64) -> LayerNorm {
        LayerNorm { eps, ..self }
    }

    /// Normalizes x: `[.., d]` to `[.., d]`. The backward kernel adds to the gradient of x from its other uses, such as a residual
    /// connection.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d, or is sharded.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.out.constrain(&x.layer_norm(&self.weight.on(x), &self.bias.on(x), self.eps))
    }
}
