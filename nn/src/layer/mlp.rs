//! MLP of a transformer block, with GELU.

use super::dropout::Residual;
use super::linear::Linear;
use crate::module;
use crate::module::param::Init;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Point, Value};

module! {
    /// MLP with GELU in its tanh form: y = gelu(x w1 + b1) w2 + b2.
    #[doc(alias = "FeedForward")]
    #[doc(alias = "FFN")]
    #[doc(alias = "ParallelMLP")]
    #[derive(Debug)]
    pub struct Mlp {
        /// First linear layer, `[d]` to `[hidden]`.
        pub c_fc: Linear,
        /// Second linear layer, `[hidden]` to `[d]`.
        pub c_proj: Linear,
    }
}

impl Mlp {
    /// An MLP with `hidden` units for rows of width `d`.
    #[must_use]
    pub fn new(d: usize, hidden: usize) -> Mlp {
        Mlp { c_fc: Linear::new(d, hidden), c_proj: Linear::new(hidden, d) }
    }

    /// Returns the same layer with other initializers: `first` of the first linear layer, `last` of the second.
    #[must_use]
    pub fn init(self, first: Init, last: Init) -> Mlp {
        Mlp { c_fc: self.c_fc.init(first), c_proj: self.c_proj.init(last) }
    }

    /// Applies the MLP: `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.forward_optional_residual(x, None)
    }

    /// Returns residual + y: `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// As [`Mlp::forward`], and if the residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_with_residual<'a>(&self, x: &Var, residual: impl Into<Residual<'a>>) -> Var {
        self.forward_optional_residual(x, Some(residual.into()))
    }

    #[track_caller]
    fn forward_optional_residual(&self, x: &Var, residual: Option<Residual<'_>>) -> Var {
        let Mlp { c_fc, c_proj } = self;
        if c_proj.adapter().is_some() || c_fc.out.is_watched() || c_proj.out.is_watched() {
            // An adapter needs the value between the products, and hooks the products without biases.
            return c_proj.forward_optional_residual(&c_fc.forward(x).gelu(), residual);
        }
        let (x, w1, b1) = c_fc.operands(x);
        let (b2, w2) = (c_proj.bias_on(&x), c_proj.weight.on(&x));
        let (residual, branch) = Residual::parts(residual);
        let points: [&dyn Point<Var>; 4] = [&c_fc.adapted_out(&x), &c_proj.input, &c_proj.out, branch];
        x.mlp_general([&w1, &w2], [b1.as_ref(), b2.as_ref()], residual, &points)
    }
}
