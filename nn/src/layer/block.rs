//! A transformer block with norms before its halves.

use super::attention::Attention;
use super::dropout::Dropout;
use super::layer_norm::LayerNorm;
use super::mlp::Mlp;
use crate::cache::Past;
use crate::module;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

module! {
    /// x + attn(ln_1(x)), then x + mlp(ln_2(x)), with dropout before each addition.
    #[derive(Debug)]
    pub struct Block {
        /// The norm before attention.
        pub ln_1: LayerNorm,
        /// Attention.
        pub attn: Attention,
        attn_drop: Dropout,
        /// The norm before the feed-forward half.
        pub ln_2: LayerNorm,
        /// The feed-forward half.
        pub mlp: Mlp,
        mlp_drop: Dropout,
    }
}

impl Block {
    /// A block of these two halves for rows of width `d`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if `dropout` is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn new(d: usize, attn: Attention, mlp: Mlp, eps: f64, dropout: f64) -> Block {
        Block {
            ln_1: LayerNorm::new(d).eps(eps),
            attn,
            attn_drop: Dropout::new(dropout),
            ln_2: LayerNorm::new(d).eps(eps),
            mlp,
            mlp_drop: Dropout::new(dropout),
        }
    }

    /// `[b, t, d]` to `[b, t, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if x has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.attend(x, None)
    }

    /// The same, after what was read before: `past` then holds the rows of x too.
    ///
    /// # Panics
    /// As [`Block::forward`], and if `past` is of another block.
    #[track_caller]
    #[must_use]
    pub fn attend(&self, x: &Var, past: Option<&mut Past>) -> Var {
        let (x, y) = self.ln_1.forward_beside(x);
        let x = if self.attn_drop.is_off(x.tape()) {
            self.attn.attend_onto(&y, past, &x)
        } else {
            x.add(&self.attn_drop.forward(&self.attn.attend(&y, past)))
        };
        let (x, y) = self.ln_2.forward_beside(&x);
        if self.mlp_drop.is_off(x.tape()) {
            self.mlp.forward_onto(&y, &x)
        } else {
            x.add(&self.mlp_drop.forward(&self.mlp.forward(&y)))
        }
    }
}
