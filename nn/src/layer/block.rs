//! A pre-norm transformer block.

use super::attention::Attention;
use super::documents::PackedDocuments;
use super::dropout::Dropout;
use super::layer_norm::LayerNorm;
use super::mlp::Mlp;
use crate::layer::kv_cache::LayerKvCache;
use crate::module;
use shardgrad_autograd::Var;

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
        let x = self.attn.forward_with(&self.ln_1.forward(x), cache, Some(self.attn_drop.then_add(x)));
        self.mlp.forward_with_residual(&self.ln_2.forward(&x), self.mlp_drop.then_add(&x))
    }

    /// [`Block::forward`] within packed documents.
    ///
    /// # Panics
    /// As [`Block::forward`] and [`Attention::forward_packed`].
    #[track_caller]
    #[must_use]
    pub fn forward_packed(&self, x: &Var, documents: &PackedDocuments) -> Var {
        let residual = Some(self.attn_drop.then_add(x));
        let x = self.attn.forward_packed(&self.ln_1.forward(x), documents, residual);
        self.mlp.forward_with_residual(&self.ln_2.forward(&x), self.mlp_drop.then_add(&x))
    }
}
