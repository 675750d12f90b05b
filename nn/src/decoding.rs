//! Autoregressive decoding with a KV cache: tokens in, logits of the next token out.

use crate::kv_cache::KvCache;
use crate::model::{HfModel, LanguageModel};
use crate::sharded_model::Model;
use shardgrad_tensor::{Error, Kind, Result, Tensor, Value};

/// Feeds a text to a causal language model token by token and returns the logits of the next token. Every rank feeds the same
/// tokens and gets the same logits.
///
/// A text can grow longer than the model's positions. When the positions are used up, the session keeps the last half of the
/// text as the new context and feeds that half again, so the amortized cost of a token stays little more than one forward step.
#[doc(alias = "generate")]
#[doc(alias = "prefill")]
#[derive(Debug)]
pub struct DecodingSession<'a> {
    model: &'a Model<LanguageModel>,
    cache: KvCache,
    /// The tokens in the cache.
    context: Vec<i64>,
}

impl<'a> DecodingSession<'a> {
    /// Begins a session with an empty context.
    #[must_use]
    pub fn new(model: &'a Model<LanguageModel>) -> DecodingSession<'a> {
        DecodingSession { model, cache: model.new_kv_cache(), context: Vec::new() }
    }

    /// Appends tokens to the context and returns the logits of the next token, `[vocab_size]`. If there are more tokens than
    /// positions, only the last ones enter the context.
    ///
    /// # Errors
    /// `Kind::Shape` for an empty list of tokens; `Kind::OutOfMemory`.
    ///
    /// # Panics
    /// Unwinds with an error if a token is outside the vocabulary.
    #[track_caller]
    pub fn feed(&mut self, tokens: &[i64]) -> Result<Vec<f64>> {
        if tokens.is_empty() {
            return Err(Error::new(Kind::Shape, "cannot decode from an empty list of tokens")
                .detail("help", "feed at least one token, such as the token that begins a text"));
        }
        let positions = self.model.model_config().max_positions();
        let mut new = tokens.to_vec();
        if self.context.len() + new.len() > positions {
            // New tokens that alone exceed the positions fill them all; a text that grew beyond them leaves room for more.
            let context_len =
                if tokens.len() > positions { positions } else { (positions / 2).max(tokens.len()) };
            let mut text = std::mem::take(&mut self.context);
            text.append(&mut new);
            new = text.split_off(text.len() - context_len.min(text.len()));
            self.cache = self.model.new_kv_cache();
        }
        let ids = Tensor::from_host(self.model.rank(), &[1, new.len()], &new)?;
        let logits =
            self.model.next_token_logits(&self.model.inference_tape().constant(ids), &mut self.cache);
        self.context.append(&mut new);
        logits.tensor().to_f64()
    }

    /// The tokens on which the next logits depend.
    #[must_use]
    pub fn context(&self) -> &[i64] {
        &self.context
    }
}
