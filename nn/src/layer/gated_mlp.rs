//! Gated MLP (SwiGLU), as in Llama.

use super::dropout::Residual;
use super::linear::Linear;
use crate::module;
use crate::module::param::Init;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

module! {
    /// Gated MLP (SwiGLU): y = (silu(x wg) * (x wu)) wd. Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    #[doc(alias = "SwiGLU")]
    #[doc(alias = "LlamaMLP")]
    #[derive(Debug)]
    pub struct GatedMlp {
        /// Gate projection, `[d]` to `[hidden]`.
        pub gate_proj: Linear,
        /// Up projection, `[d]` to `[hidden]`.
        pub up_proj: Linear,
        /// Down projection, `[hidden]` to `[d]`.
        pub down_proj: Linear,
    }
}

impl GatedMlp {
    /// A gated MLP with `hidden` units for rows of width `d`. Weights are transposed in files.
    #[must_use]
    pub fn new(d: usize, hidden: usize, bias: bool) -> GatedMlp {
        let linear = |from, to| Linear::new(from, to).with_transposed_file_shape().with_bias(bias);
        GatedMlp { gate_proj: linear(d, hidden), up_proj: linear(d, hidden), down_proj: linear(hidden, d) }
    }

    /// Returns the same layer with another initializer of the weights.
    #[must_use]
    pub fn init(self, init: Init) -> GatedMlp {
        let GatedMlp { gate_proj, up_proj, down_proj } = self;
        GatedMlp {
            gate_proj: gate_proj.init(init),
            up_proj: up_proj.init(init),
            down_proj: down_proj.init(init),
        }
    }

    /// Applies the MLP: `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.down_proj.forward(&self.hidden(x))
    }

    /// Returns residual + y: `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// As [`GatedMlp::forward`], and if the residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_with_residual<'a>(&self, x: &Var, residual: impl Into<Residual<'a>>) -> Var {
        self.down_proj.forward_with_residual(&self.hidden(x), residual)
    }

    #[track_caller]
    fn hidden(&self, x: &Var) -> Var {
        self.gate_proj.forward(x).swiglu(&self.up_proj.forward(x))
    }
}
