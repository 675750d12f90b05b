//! Multi-head attention with one projection for queries, keys and values, as in GPT-2.

use super::documents::PackedDocuments;
use super::dropout::{Dropout, Residual};
use super::linear::Linear;
use crate::layer::kv_cache::LayerKvCache;
use crate::module;
use crate::module::activation_point::ActivationPoint;
use crate::module::param::Init;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Tensor, Value, unwind};

module! {
    /// Multi-head attention: softmax(q k^T / sqrt(c)) v in every head, with one joint projection for q, k and v, and one for the
    /// output. Vaswani et al., arXiv 1706.03762.
    ///
    /// Activation points: `queries`, `keys` and `values`, before attention, and `heads`, the outputs of the heads.
    #[doc(alias = "MultiheadAttention")]
    #[doc(alias = "CausalSelfAttention")]
    #[doc(alias = "scaled_dot_product_attention")]
    #[derive(Debug)]
    pub struct Attention {
        /// Joint projection to q, k and v of all heads, `[d]` to `[3, h, c]`.
        pub c_attn: Linear,
        /// Output projection, `[h, c]` to `[d]`.
        pub c_proj: Linear,
        keys: ActivationPoint,
        values: ActivationPoint,
        queries: ActivationPoint,
        heads: ActivationPoint,
        drop: Dropout;
        causal: bool,
    }
}

impl Attention {
    /// Causal attention with `heads` heads for rows of width `d`: a token attends to itself and the tokens before it.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the width is not a multiple of the heads.
    #[track_caller]
    #[must_use]
    pub fn new(d: usize, heads: usize) -> Attention {
        let (h, c) = (heads, channels_per_head(d, heads));
        Attention {
            c_attn: Linear::general(&[d], &[3, h, c]).packed_dims(1),
            c_proj: Linear::general(&[h, c], &[d]),
            keys: ActivationPoint::default(),
            values: ActivationPoint::default(),
            queries: ActivationPoint::default(),
            heads: ActivationPoint::default(),
            drop: Dropout::default(),
            causal: true,
        }
    }

    /// Returns the same layer with causal attention, or (`false`) with attention to all tokens.
    #[must_use]
    pub fn causal(self, causal: bool) -> Attention {
        Attention { causal, ..self }
    }

    /// Returns the same layer with dropout on the attention weights. On tapes with noise the attention weights are then
    /// materialized, `t * t` per head; without noise, attention is fused and stores none.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if `p` is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn dropout(self, p: f64) -> Attention {
        Attention { drop: Dropout::new(p), ..self }
    }

    /// Returns the same layer with other initializers: `first` of the joint projection, `last` of the output projection.
    #[must_use]
    pub fn init(self, first: Init, last: Init) -> Attention {
        Attention { c_attn: self.c_attn.init(first), c_proj: self.c_proj.init(last), ..self }
    }

    /// Applies attention: `[b, t, d]` to `[b, t, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if x has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.forward_with(x, None, None)
    }

    /// [`Attention::forward`] of tokens that follow the cached ones, if there is a cache, to which the keys and values of x are
    /// appended; plus the residual, if there is one.
    ///
    /// # Panics
    /// As [`Attention::forward`], if `cache` belongs to another layer, and if the residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_with(
        &self,
        x: &Var,
        cache: Option<&mut LayerKvCache>,
        residual: Option<Residual<'_>>,
    ) -> Var {
        self.c_proj.forward_optional_residual(&self.attend(x, cache, None), residual)
    }

    /// [`Attention::forward`] within packed documents, plus the residual, if there is one.
    ///
    /// # Panics
    /// As [`Attention::forward`]; unwinds with `Kind::Unsupported` under active dropout on the attention weights, and with an error if the
    /// residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_packed(
        &self,
        x: &Var,
        documents: &PackedDocuments,
        residual: Option<Residual<'_>>,
    ) -> Var {
        self.c_proj.forward_optional_residual(&self.attend(x, None, Some(documents)), residual)
    }

    /// The outputs of the heads, before the output projection.
    #[track_caller]
    fn attend(&self, x: &Var, cache: Option<&mut LayerKvCache>, documents: Option<&PackedDocuments>) -> Var {
        let qkv = self.c_attn.forward(x);
        let has_dropout = self.drop.is_active(x.tape());
        if cache.is_none() && !has_dropout && documents.is_none() {
            return qkv
                .qkv_packed_attention(self.causal, &[&self.keys, &self.values, &self.queries, &self.heads]);
        }
        let qkv = qkv.unbind(2);
        let q = &self.queries.constrain(&qkv[0]);
        let (k, v) = (self.keys.constrain(&qkv[1]), self.values.constrain(&qkv[2]));
        let (k, v) = match cache {
            Some(cache) => cache.extend(&k, &v),
            None => (k, v),
        };
        self.heads.constrain(&match documents {
            Some(documents) => {
                check_no_dropout(has_dropout);
                let ids = [&documents.segments, &documents.positions];
                q.document_attention(&k, &v, ids, self.causal, None)
            }
            None if has_dropout => {
                let mask = self.causal.then(|| attention_mask(q, k.shape()[1], None));
                unfused_attention([q, &k, &v], ["h", "h"], mask.as_ref(), &self.drop)
            }
            None => q.attention(&k, &v, self.causal),
        })
    }
}

/// Returns the channels of each head of a width, which must be a multiple of the heads.
#[track_caller]
pub(super) fn channels_per_head(d: usize, heads: usize) -> usize {
    if heads == 0 || !d.is_multiple_of(heads) {
        let text = format!("a width of {d} is not a multiple of {heads} heads");
        Error::new(Kind::Config, text)
            .detail("help", "choose a number of heads that divides the width")
            .at(std::panic::Location::caller())
            .raise();
    }
    d / heads
}

/// Rejects active dropout on the attention weights within packed documents, whose kernel stores no weights.
#[track_caller]
pub(super) fn check_no_dropout(has_dropout: bool) {
    if has_dropout {
        Error::new(Kind::Unsupported, "attention drops weights, which packed documents do not support")
            .detail("help", "build the layer without dropout on the attention weights")
            .at(std::panic::Location::caller())
            .raise();
    }
}

/// Attention op by op, with dropout on the attention weights: queries `[b, t, .., c]`, keys and values `[b, s, .., c]`, where `heads`
/// names the dims of the heads of queries, and of keys.
#[track_caller]
pub(super) fn unfused_attention(
    [q, k, v]: [&Var; 3],
    [q_heads, k_heads]: [&str; 2],
    mask: Option<&Var>,
    drop: &Dropout,
) -> Var {
    let c = *q.shape().last().expect("queries have channels");
    let products = format!("b t {q_heads} c, b s {k_heads} c -> b {q_heads} t s");
    let mut scores = q.einsum(&products, k).scale(1.0 / (c as f64).sqrt());
    if let Some(mask) = mask {
        scores = scores.add(mask);
    }
    let sums = format!("b {q_heads} t s, b s {k_heads} c -> b t {q_heads} c");
    drop.forward(&scores.softmax()).einsum(&sums, v)
}

/// Returns the additive causal mask `[t, s]` of queries `[b, t, ..]` over `s` keys: the last query sees all keys, each query before
/// it one key less; with a window, only the last `window` of these keys.
#[track_caller]
pub(super) fn attention_mask(q: &Var, s: usize, window: Option<usize>) -> Var {
    let t = q.shape()[1];
    // Key j is hidden from query i if it comes after the query, or before the window of the query.
    let is_hidden = |(i, j)| j + t > i + s || window.is_some_and(|keys| j + t + keys <= i + s);
    let hidden = |at: usize| if is_hidden((at / s, at % s)) { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> = (0..t * s).map(hidden).collect();
    q.constant(unwind(Tensor::from_host(q.rank(), &[t, s], &mask)).cast(q.dtype()))
}
