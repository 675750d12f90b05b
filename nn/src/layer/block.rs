//! A pre-norm transformer block.

use super::attention::Attention;
use super::dropout::Dropout;
use super::layer_norm::LayerNorm;
use super::mlp::Mlp;
use crate::layer::kv_cache::LayerKvCache;
use crate::module;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

module! {
    /// Pre-norm transformer block: x + attn(ln_1(x)), then x + mlp(ln_2(x)), with dropout before each addition.
    #[doc(alias = "TransformerBlock")]
    #[doc(alias = "GPT2Block")]
    #[derive(Debug)]
    pub struct Block {
        /// The norm before attention.
        pub ln_1: LayerNorm,
        /// Attention.
        pub attn: Attention,
        attn_drop: Dropout,
        /// The norm before the MLP.
        pub ln_2: LayerNorm,
        /// The MLP.
        pub mlp: Mlp,
        mlp_drop: Dropout,
    }
}

impl Block {
    /// A block of this attention and this MLP for rows of width `d`.
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

    /// Applies the block: `[b, t, d]` to `[b, t, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if x has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.forward_with_cache(x, None)
    }

    /// [`Block::forward`] of tokens that follow the cached ones. Appends the keys and values of x to `cache`.
    ///
    /// # Panics
    /// As [`Block::forward`], and if `cache` belongs to another block.
    #[track_caller]
    #[must_use]
    pub fn forward_with_cache(&self, x: &Var, cache: Option<&mut LayerKvCache>) -> Var {
        let (x, y) = self.ln_1.forward_and_residual(x);
        let x = if self.attn_drop.is_identity(x.tape()) {
            self.attn.forward_with_cache_and_residual(&y, cache, &x)
        } else {
            x.add(&self.attn_drop.forward(&self.attn.forward_with_cache(&y, cache)))
        };
        let (x, y) = self.ln_2.forward_and_residual(&x);
        if self.mlp_drop.is_identity(x.tape()) {
            self.mlp.forward_with_residual(&y, &x)
        } else {
            x.add(&self.mlp_drop.forward(&self.mlp.forward(&y)))
        }
    }
}
