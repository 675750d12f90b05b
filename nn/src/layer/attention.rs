//! Attention with several heads, in the form of GPT-2.

use super::linear::Linear;
use crate::module;
use crate::param::Init;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Value};

module! {
    /// softmax(q k^T / sqrt(c)) v in every head, between one product that makes q, k, v and one that joins the heads.
    /// Vaswani et al., arXiv 1706.03762.
    #[derive(Debug)]
    pub struct Attention {
        /// `[d]` to `[3, h, c]`: q, k and v of all heads.
        pub c_attn: Linear,
        /// `[h, c]` to `[d]`.
        pub c_proj: Linear;
        causal: bool,
    }
}

impl Attention {
    /// `heads` heads for rows of width `d`; a token attends to itself and those before it.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the heads do not divide the width.
    #[track_caller]
    #[must_use]
    pub fn new(d: usize, heads: usize) -> Attention {
        if heads == 0 || !d.is_multiple_of(heads) {
            let text = format!("{heads} heads do not divide a width of {d}");
            Error::new(Kind::Config, text).at(std::panic::Location::caller()).raise();
        }
        let (h, c) = (heads, d / heads);
        Attention {
            c_attn: Linear::shaped(&[d], &[3, h, c]).never_empty(2, "heads"),
            c_proj: Linear::shaped(&[h, c], &[d]).never_empty(0, "heads"),
            causal: true,
        }
    }

    /// The same layer; without `causal` a token attends to all others.
    #[must_use]
    pub fn causal(self, causal: bool) -> Attention {
        Attention { causal, ..self }
    }

    /// The same layer with other initial weights: of the first product, and of the one that ends in the residual stream.
    #[must_use]
    pub fn init(self, first: Init, last: Init) -> Attention {
        Attention { c_attn: self.c_attn.init(first), c_proj: self.c_proj.init(last), ..self }
    }

    /// `[b, t, d]` to `[b, t, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if x has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        let qkv = self.c_attn.forward(x).unbind(2);
        self.c_proj.forward(&qkv[0].attention(&qkv[1], &qkv[2], self.causal))
    }
}
