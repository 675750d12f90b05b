//! The feed-forward half of a block.

use super::linear::Linear;
use crate::module;
use crate::param::Init;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

module! {
    /// y = gelu(x w1 + b1) w2 + b2, with the tanh form of GELU.
    #[derive(Debug)]
    pub struct Mlp {
        /// `[d]` to `[hidden]`.
        pub c_fc: Linear,
        /// `[hidden]` to `[d]`.
        pub c_proj: Linear,
    }
}

impl Mlp {
    /// For rows of width `d`.
    #[must_use]
    pub fn new(d: usize, hidden: usize) -> Mlp {
        Mlp { c_fc: Linear::new(d, hidden), c_proj: Linear::new(hidden, d) }
    }

    /// The same layer with other initial weights: of the first product, and of the one that ends in the residual stream.
    #[must_use]
    pub fn init(self, first: Init, last: Init) -> Mlp {
        Mlp { c_fc: self.c_fc.init(first), c_proj: self.c_proj.init(last) }
    }

    /// `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.c_proj.forward(&self.c_fc.forward(x).gelu())
    }
}
