//! RMS normalization over the last dim.

use crate::module;
use crate::module::activation_point::ActivationPoint;
use crate::module::param::{Init, Param};
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

module! {
    /// RMS normalization: y = x / sqrt(mean(x^2) + eps) * weight, with the mean over the last dim. Zhang and Sennrich, arXiv
    /// 1910.07467.
    ///
    /// Activation point: `out`.
    #[doc(alias = "RMSNorm")]
    #[derive(Debug)]
    pub struct RmsNorm {
        /// Scale, `[d]`, initialized with ones.
        pub weight: Param,
        out: ActivationPoint;
        eps: f64,
    }
}

impl RmsNorm {
    /// A norm for rows of width `d`, with eps 1e-5.
    #[must_use]
    pub fn new(d: usize) -> RmsNorm {
        RmsNorm { weight: Param::new(&[d]).init(Init::Ones), out: ActivationPoint::default(), eps: 1e-5 }
    }

    /// Returns the same layer with another eps.
    #[must_use]
    pub fn eps(self, eps: f64) -> RmsNorm {
        RmsNorm { eps, ..self }
    }

    /// Normalizes x: `[.., d]` to `[.., d]`. The backward kernel adds to the gradient of x from its other uses, such as a residual
    /// connection.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d, or is sharded.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.out.constrain(&x.rms_norm(&self.weight.on(x), self.eps))
    }
}
