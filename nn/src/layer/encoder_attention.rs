//! Bidirectional self-attention with a padding mask, as in BERT.

use super::attention::{channels_per_head, check_no_dropout};
use super::documents::PackedDocuments;
use super::dropout::{Dropout, Residual};
use super::linear::Linear;
use crate::module;
use crate::module::activation_point::ActivationPoint;
use crate::module::param::Init;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

module! {
    /// Bidirectional multi-head self-attention: softmax(q k^T / sqrt(c) + mask) v in every head, with a projection each for q, k, v
    /// and output. Weights are transposed in files. Devlin et al., arXiv 1810.04805.
    ///
    /// Activation points: `queries`, `keys` and `values`, before attention, and `heads`, the outputs of the heads.
    #[doc(alias = "BertSelfAttention")]
    #[doc(alias = "MultiheadAttention")]
    #[derive(Debug)]
    pub struct EncoderAttention {
        /// `[d]` to `[h, c]`.
        pub query: Linear,
        /// `[d]` to `[h, c]`.
        pub key: Linear,
        /// `[d]` to `[h, c]`.
        pub value: Linear,
        /// Output projection, `[h, c]` to `[d]`.
        pub dense: Linear,
        keys: ActivationPoint,
        values: ActivationPoint,
        queries: ActivationPoint,
        heads: ActivationPoint,
        drop: Dropout,
    }
}

impl EncoderAttention {
    /// Attention with `heads` heads for rows of width `d`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the width is not a multiple of the heads.
    #[track_caller]
    #[must_use]
    pub fn new(d: usize, heads: usize) -> EncoderAttention {
        let (h, c) = (heads, channels_per_head(d, heads));
        let part = || Linear::general(&[d], &[h, c]).with_transposed_file_shape();
        EncoderAttention {
            query: part(),
            key: part(),
            value: part(),
            dense: Linear::general(&[h, c], &[d]).with_transposed_file_shape(),
            keys: ActivationPoint::default(),
            values: ActivationPoint::default(),
            queries: ActivationPoint::default(),
            heads: ActivationPoint::default(),
            drop: Dropout::default(),
        }
    }

    /// Returns the same layer with dropout on the attention weights.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if `p` is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn dropout(self, p: f64) -> EncoderAttention {
        EncoderAttention { drop: Dropout::new(p), ..self }
    }

    /// Returns the same layer with another initializer of the weights.
    #[must_use]
    pub fn init(self, init: Init) -> EncoderAttention {
        EncoderAttention {
            query: self.query.init(init),
            key: self.key.init(init),
            value: self.value.init(init),
            dense: self.dense.init(init),
            ..self
        }
    }

    /// Applies attention: `[b, t, d]` to `[b, t, d]`.
    ///
    /// The mask `[b, t]` is added to the scores of the keys: 0 for visible keys, a large negative number for padding; with gathered
    /// keys the mask covers all keys. With a mask or dropout the attention weights are materialized, `t * t` per head; without,
    /// attention is fused and stores none.
    ///
    /// # Panics
    /// Unwinds with an error if x or the mask has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var, mask: Option<&Var>) -> Var {
        self.dense.forward(&self.attend(x, mask, None))
    }

    /// Returns residual + [`EncoderAttention::forward`].
    ///
    /// # Panics
    /// As [`EncoderAttention::forward`], and if the residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_with_residual<'a>(
        &self,
        x: &Var,
        mask: Option<&Var>,
        residual: impl Into<Residual<'a>>,
    ) -> Var {
        self.dense.forward_with_residual(&self.attend(x, mask, None), residual)
    }

    /// [`EncoderAttention::forward`] without a mask, within packed documents, plus the residual, if there is one.
    ///
    /// # Panics
    /// As [`EncoderAttention::forward`]; unwinds with `Kind::Unsupported` under active dropout on the attention weights, and with an error
    /// if the residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_packed(
        &self,
        x: &Var,
        documents: &PackedDocuments,
        residual: Option<Residual<'_>>,
    ) -> Var {
        self.dense.forward_optional_residual(&self.attend(x, None, Some(documents)), residual)
    }

    /// The outputs of the heads, before the output projection.
    #[track_caller]
    fn attend(&self, x: &Var, mask: Option<&Var>, documents: Option<&PackedDocuments>) -> Var {
        let (q, k, v) = (self.query.forward(x), self.key.forward(x), self.value.forward(x));
        let q = self.queries.constrain(&q);
        let (k, v) = (self.keys.constrain(&k), self.values.constrain(&v));
        let has_dropout = self.drop.is_active(x.tape());
        self.heads.constrain(&match documents {
            Some(documents) => {
                check_no_dropout(has_dropout);
                q.document_attention(&k, &v, [&documents.segments, &documents.positions], false, None)
            }
            None if mask.is_none() && !has_dropout => q.attention(&k, &v, false),
            None => self.unfused_attention(&q, &k, &v, mask),
        })
    }

    /// Attention op by op, with the mask and dropout.
    #[track_caller]
    fn unfused_attention(&self, q: &Var, k: &Var, v: &Var, mask: Option<&Var>) -> Var {
        let c = *q.shape().last().expect("queries have channels");
        // The mask dims come last, so that the mask is broadcast over heads and queries.
        let mut scores = q.einsum("b t h c, b s h c -> h t b s", k).scale(1.0 / (c as f64).sqrt());
        if let Some(mask) = mask {
            scores = scores.add(mask);
        }
        let weights = scores.permute(&[2, 0, 1, 3]).softmax();
        self.drop.forward(&weights).einsum("b h t s, b s h c -> b t h c", v)
    }
}
