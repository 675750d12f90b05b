//! Autoregressive decoding with a KV cache: tokens in, logits of the next token out.

use crate::inference::inference_model::{InferenceModel, ResultRanks};
use crate::layer::kv_cache::KvCache;
use crate::model::{HfModel, LanguageModel};
use crate::sharded_model::Model;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Layout, Rank, Result, Tensor, Value};
use std::cell::RefCell;

/// Feeds a text to a causal language model token by token and returns the logits of the next token. Every rank feeds the same
/// tokens and gets the same logits.
///
/// Under context parallelism a list of tokens is sharded over its axis, as a batch is; a list with fewer tokens than ranks, as one new
/// token, is computed by every rank. The cache has the keys and values of all tokens on every rank, also under a ring; under an exchange
/// it is sharded by heads.
///
/// A text can grow longer than the model's positions. When the positions are used up, the session keeps the last half of the
/// text as the new context and feeds that half again, so the amortized cost of a token stays little more than one forward step.
#[doc(alias = "generate")]
#[doc(alias = "prefill")]
#[derive(Debug)]
pub struct DecodingSession<'a> {
    decoder: Decoder<'a>,
    /// The tokens on which the next logits depend.
    context: Vec<i64>,
    /// Whether the cache holds these tokens; else an error has interrupted a call, and the next one feeds them again.
    is_cache_complete: bool,
}

/// A model with its KV cache.
#[derive(Debug)]
enum Decoder<'a> {
    Whole { model: &'a Model<LanguageModel>, cache: KvCache },
    Staged { model: &'a InferenceModel<LanguageModel>, cache: StagedKvCache },
}

/// The KV cache of a model on a pipeline: each rank holds the keys and values of the layers of its stage.
#[derive(Debug)]
struct StagedKvCache {
    /// Layouts of the keys and the values of each layer; the tensors on the ranks of the layer's stage. Empty before the first token.
    tensors: Vec<(Layout, Option<Tensor>)>,
    /// Number of evicted positions of each layer.
    num_evicted: Vec<usize>,
}

impl<'a> DecodingSession<'a> {
    /// Begins a session with an empty context.
    #[must_use]
    pub fn new(model: &'a Model<LanguageModel>) -> DecodingSession<'a> {
        DecodingSession::with_decoder(Decoder::Whole { model, cache: model.new_kv_cache() })
    }

    /// Begins a session with an empty context on an inference model, which may be on a pipeline.
    ///
    /// On a pipeline the stages compute a token one after the other, so that one stage works at a time. The model is recorded for each
    /// list of tokens, because the shapes differ, and each stage copies the cached keys and values of its layers once per list.
    #[must_use]
    pub fn in_stages(model: &'a InferenceModel<LanguageModel>) -> DecodingSession<'a> {
        if model.num_stages() == 1 {
            return DecodingSession::new(model.model());
        }
        let cache = StagedKvCache::new(model);
        DecodingSession::with_decoder(Decoder::Staged { model, cache })
    }

    fn with_decoder(decoder: Decoder<'a>) -> DecodingSession<'a> {
        DecodingSession { decoder, context: Vec::new(), is_cache_complete: true }
    }

    /// Appends tokens to the context and returns the logits of the next token, `[vocab_size]`. If there are more tokens than
    /// positions, only the last ones enter the context. After an error on all ranks, the context is that before the call, and the call
    /// may be repeated.
    ///
    /// # Errors
    /// `Kind::Shape` for an empty list of tokens; `Kind::OutOfMemory`; on a pipeline, errors of transfers between stages.
    ///
    /// # Panics
    /// Unwinds with an error if a token is outside the vocabulary.
    #[track_caller]
    pub fn feed(&mut self, tokens: &[i64]) -> Result<Vec<f64>> {
        if tokens.is_empty() {
            return Err(Error::new(Kind::Shape, "cannot decode from an empty list of tokens")
                .detail("help", "feed at least one token, such as the token that begins a text"));
        }
        let positions = self.decoder.model().model_config().max_positions();
        let is_full = self.context.len() + tokens.len() > positions;
        let mut new = tokens.to_vec();
        let starts_again = is_full || !self.is_cache_complete;
        if starts_again {
            new = [&self.context[..], tokens].concat();
            self.decoder.clear_cache();
        }
        if is_full {
            // New tokens that alone exceed the positions fill them all; a text that grew beyond them leaves room for more.
            let context_len =
                if tokens.len() > positions { positions } else { (positions / 2).max(tokens.len()) };
            new.drain(..new.len() - context_len.min(new.len()));
        }
        self.is_cache_complete = false;
        let model = self.decoder.model();
        let ids = model.shard_new_tokens(Tensor::from_host(model.rank(), &[1, new.len()], &new)?);
        let logits = self.decoder.next_token_logits(ids)?.to_f64()?;
        if starts_again {
            self.context.clear();
        }
        self.context.append(&mut new);
        self.is_cache_complete = true;
        Ok(logits)
    }

    /// The tokens on which the next logits depend.
    #[must_use]
    pub fn context(&self) -> &[i64] {
        &self.context
    }
}

impl Decoder<'_> {
    fn model(&self) -> &Model<LanguageModel> {
        match self {
            Decoder::Whole { model, .. } => model,
            Decoder::Staged { model, .. } => model.model(),
        }
    }

    fn clear_cache(&mut self) {
        match self {
            Decoder::Whole { model, cache } => *cache = model.new_kv_cache(),
            Decoder::Staged { model, cache } => *cache = StagedKvCache::new(model),
        }
    }

    /// Appends ids `[1, t]` to the cache and returns the logits of the next token, on all ranks.
    #[track_caller]
    fn next_token_logits(&mut self, ids: Tensor) -> Result<Tensor> {
        match self {
            Decoder::Whole { model, cache } => {
                Ok(model.next_token_logits(&model.inference_tape().constant(ids), cache).tensor().clone())
            }
            Decoder::Staged { model, cache } => cache.next_token_logits(model, ids),
        }
    }
}

impl StagedKvCache {
    fn new(model: &InferenceModel<LanguageModel>) -> StagedKvCache {
        let num_layers = model.model().new_kv_cache().layers().count();
        StagedKvCache { tensors: Vec::new(), num_evicted: vec![0; num_layers] }
    }

    /// Runs the stages on ids `[1, t]`, with the cached keys and values as arguments and those of all tokens as results.
    #[track_caller]
    fn next_token_logits(&mut self, model: &InferenceModel<LanguageModel>, ids: Tensor) -> Result<Tensor> {
        let rank: &Rank = model.rank();
        let past = std::mem::take(&mut self.tensors).into_iter();
        let past = past.map(|(layout, tensor)| tensor.unwrap_or_else(|| Tensor::meta(rank, &layout)));
        let arguments = [vec![ids], past.collect()].concat();
        let recorded = RefCell::default();
        let forward = |model: &LanguageModel, x: &[Var]| {
            let mut cache = KvCache::recorded(&x[1..], &self.num_evicted);
            let logits = model.next_token_logits(&x[0], &mut cache);
            let (vars, num_evicted) = cache.into_recorded();
            let layouts: Vec<Layout> = vars.iter().map(|var| var.layout().clone()).collect();
            recorded.replace((layouts, num_evicted));
            Ok([vec![logits], vars].concat())
        };
        let mut results = model.forward(&[arguments], ResultRanks::AllStages, forward)?.into_iter().flatten();
        let logits = results.next().flatten().expect("all stages get the logits");
        let (layouts, num_evicted) = recorded.into_inner();
        *self = StagedKvCache { tensors: layouts.into_iter().zip(results).collect(), num_evicted };
        Ok(logits)
    }
}
