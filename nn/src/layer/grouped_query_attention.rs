//! Grouped-query attention (GQA) with rotary position embeddings, as in Llama.

use super::attention::{attention_mask, check_no_dropout, unfused_attention};
use super::documents::PackedDocuments;
use super::dropout::{Dropout, Residual};
use super::linear::Linear;
use super::rms_norm::RmsNorm;
use crate::layer::kv_cache::LayerKvCache;
use crate::module;
use crate::module::activation_point::ActivationPoint;
use crate::module::param::Init;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Value};
use std::rc::Rc;

module! {
    /// Causal grouped-query attention: softmax(q k^T / sqrt(c)) v in every head, where each of g key heads serves r query heads, and
    /// queries and keys are rotated by their positions (RoPE). Ainslie et al., arXiv 2305.13245; Su et al., arXiv 2104.09864.
    ///
    /// Activation points: `queries` and `keys`, after rotation, and `values`, before attention; `heads`, the outputs of the heads.
    #[doc(alias = "GQA")]
    #[doc(alias = "MQA")]
    #[doc(alias = "RoPE")]
    #[doc(alias = "LlamaAttention")]
    #[doc(alias = "sliding window attention")]
    #[derive(Debug)]
    pub struct GroupedQueryAttention {
        /// Query projection, `[d]` to `[g, r, c]`.
        pub q_proj: Linear,
        /// `[d]` to `[g, c]`.
        pub k_proj: Linear,
        /// `[d]` to `[g, c]`.
        pub v_proj: Linear,
        /// Output projection, `[g, r, c]` to `[d]`.
        pub o_proj: Linear,
        /// Norm over the channels of each query, before rotation.
        pub q_norm: Option<RmsNorm>,
        /// Norm over the channels of each key, before rotation.
        pub k_norm: Option<RmsNorm>,
        keys: ActivationPoint,
        values: ActivationPoint,
        queries: ActivationPoint,
        heads: ActivationPoint,
        drop: Dropout;
        frequencies: Rc<[f64]>,
        window: Option<usize>,
    }
}

impl GroupedQueryAttention {
    /// Attention with `[key heads, query heads per key head, channels]` for rows of width `d`. Channel pair i rotates by
    /// `frequencies[i]` radians per position. Weights are transposed in files; there are no biases and no norms.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the number of channels is not twice the number of frequencies, or if there are no heads.
    #[track_caller]
    #[must_use]
    pub fn new(d: usize, [g, r, c]: [usize; 3], frequencies: &[f64]) -> GroupedQueryAttention {
        if g * r * c == 0 || c != 2 * frequencies.len() {
            let pairs = frequencies.len();
            let text =
                format!("{g} groups of {r} heads of {c} channels do not fit {pairs} rotary frequencies");
            Error::new(Kind::Config, text)
                .detail("help", "give at least one group and head, and one frequency per pair of channels")
                .at(std::panic::Location::caller())
                .raise();
        }
        let linear = |from: &[usize], to: &[usize]| {
            Linear::general(from, to).with_transposed_file_shape().without_bias()
        };
        GroupedQueryAttention {
            q_proj: linear(&[d], &[g, r, c]),
            k_proj: linear(&[d], &[g, c]),
            v_proj: linear(&[d], &[g, c]),
            o_proj: linear(&[g, r, c], &[d]),
            q_norm: None,
            k_norm: None,
            keys: ActivationPoint::default(),
            values: ActivationPoint::default(),
            queries: ActivationPoint::default(),
            heads: ActivationPoint::default(),
            drop: Dropout::default(),
            frequencies: frequencies.into(),
            window: None,
        }
    }

    /// Returns the same layer with sliding window attention: a token attends to the last `keys` tokens, itself included.
    #[must_use]
    pub fn sliding_window(self, keys: Option<usize>) -> GroupedQueryAttention {
        GroupedQueryAttention { window: keys, ..self }
    }

    /// Returns the same layer with or without biases in the query, key and value projections (`inputs`) and in the output projection.
    #[must_use]
    pub fn with_bias(self, inputs: bool, output: bool) -> GroupedQueryAttention {
        GroupedQueryAttention {
            q_proj: self.q_proj.with_bias(inputs),
            k_proj: self.k_proj.with_bias(inputs),
            v_proj: self.v_proj.with_bias(inputs),
            o_proj: self.o_proj.with_bias(output),
            ..self
        }
    }

    /// Returns the same layer with QK-norm: an RMS norm over the channels of each query and key.
    #[must_use]
    pub fn with_qk_norm(self, eps: f64) -> GroupedQueryAttention {
        let norm = || Some(RmsNorm::new(2 * self.frequencies.len()).eps(eps));
        GroupedQueryAttention { q_norm: norm(), k_norm: norm(), ..self }
    }

    /// Returns the same layer with dropout on the attention weights. On tapes with noise the attention weights are then
    /// materialized, `t * t` per head; without noise, attention is fused and stores none.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if `p` is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn dropout(self, p: f64) -> GroupedQueryAttention {
        GroupedQueryAttention { drop: Dropout::new(p), ..self }
    }

    /// Returns the same layer with another initializer of the weights.
    #[must_use]
    pub fn init(self, init: Init) -> GroupedQueryAttention {
        GroupedQueryAttention {
            q_proj: self.q_proj.init(init),
            k_proj: self.k_proj.init(init),
            v_proj: self.v_proj.init(init),
            o_proj: self.o_proj.init(init),
            ..self
        }
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

    /// [`GroupedQueryAttention::forward`] of tokens that follow the cached ones, if there is a cache, to which the keys and values of
    /// x are appended, and from which older positions outside the sliding window are evicted; plus the residual, if there is one.
    ///
    /// # Panics
    /// As [`GroupedQueryAttention::forward`], if `cache` belongs to another layer, and if the residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_with(
        &self,
        x: &Var,
        cache: Option<&mut LayerKvCache>,
        residual: Option<Residual<'_>>,
    ) -> Var {
        self.o_proj.forward_optional_residual(&self.attend(x, cache, None), residual)
    }

    /// [`GroupedQueryAttention::forward`] within packed documents, plus the residual, if there is one: queries and keys are rotated by
    /// their positions in their documents.
    ///
    /// # Panics
    /// As [`GroupedQueryAttention::forward`]; unwinds with `Kind::Unsupported` under active dropout on the attention weights, and with an
    /// error if the residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_packed(
        &self,
        x: &Var,
        documents: &PackedDocuments,
        residual: Option<Residual<'_>>,
    ) -> Var {
        self.o_proj.forward_optional_residual(&self.attend(x, None, Some(documents)), residual)
    }

    /// The outputs of the heads, before the output projection.
    #[track_caller]
    fn attend(&self, x: &Var, cache: Option<&mut LayerKvCache>, documents: Option<&PackedDocuments>) -> Var {
        let normed =
            |norm: &Option<RmsNorm>, x: Var| norm.as_ref().map_or(x.clone(), |norm| norm.forward(&x));
        let first = cache.as_ref().map_or(0, |cache| cache.len());
        let rotated = |x: Var| match documents {
            Some(documents) => x.rope_at(&self.frequencies, &documents.positions),
            None => x.rope(&self.frequencies, first),
        };
        let q = self.queries.constrain(&rotated(normed(&self.q_norm, self.q_proj.forward(x))));
        let k = rotated(normed(&self.k_norm, self.k_proj.forward(x)));
        let (k, v) = (self.keys.constrain(&k), self.values.constrain(&self.v_proj.forward(x)));
        let (k, v) = match cache {
            Some(cache) => {
                self.window.into_iter().for_each(|keys| cache.evict_beyond_window(keys));
                cache.extend(&k, &v)
            }
            None => (k, v),
        };
        let has_dropout = self.drop.is_active(x.tape());
        self.heads.constrain(&match (documents, self.window) {
            (Some(documents), window) => {
                check_no_dropout(has_dropout);
                q.document_attention(&k, &v, [&documents.segments, &documents.positions], true, window)
            }
            (None, window) if has_dropout => {
                let mask = attention_mask(&q, k.shape()[1], window);
                unfused_attention([&q, &k, &v], ["g r", "g"], Some(&mask), &self.drop)
            }
            (None, Some(keys)) => q.window_attention(&k, &v, keys),
            (None, None) => q.attention(&k, &v, true),
        })
    }
}
