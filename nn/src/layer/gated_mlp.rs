//! The feed-forward half of a block, with a gate.

use super::linear::Linear;
use crate::module;
use crate::param::Init;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

module! {
    /// y = (silu(x wg) * (x wu)) wd. Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    #[derive(Debug)]
    pub struct GatedMlp {
        /// `[d]` to `[hidden]`: the gate.
        pub gate_proj: Linear,
        /// `[d]` to `[hidden]`: what passes it.
        pub up_proj: Linear,
        /// `[hidden]` to `[d]`.
        pub down_proj: Linear,
    }
}

impl GatedMlp {
    /// For rows of width `d`. Weights are transposed in files.
    #[must_use]
    pub fn new(d: usize, hidden: usize, bias: bool) -> GatedMlp {
        let linear = |from, to| Linear::new(from, to).transposed_in_files().with_bias(bias);
        GatedMlp { gate_proj: linear(d, hidden), up_proj: linear(d, hidden), down_proj: linear(hidden, d) }
    }

    /// The same layer with other initial weights.
    #[must_use]
    pub fn init(self, init: Init) -> GatedMlp {
        let GatedMlp { gate_proj, up_proj, down_proj } = self;
        GatedMlp {
            gate_proj: gate_proj.init(init),
            up_proj: up_proj.init(init),
            down_proj: down_proj.init(init),
        }
    }

    /// `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.down_proj.forward(&self.gate_proj.forward(x).swiglu(&self.up_proj.forward(x)))
    }

    /// residual + y, in one pass at the end of the last product where nothing happens in between: `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// As [`GatedMlp::forward`], and if the residual cannot be added to what comes out.
    #[track_caller]
    #[must_use]
    pub fn forward_onto(&self, x: &Var, residual: &Var) -> Var {
        self.down_proj.forward_onto(&self.gate_proj.forward(x).swiglu(&self.up_proj.forward(x)), residual)
    }
}
