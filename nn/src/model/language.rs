//! A language model of any family.

use super::family::Family;
use super::gpt2::Gpt2;
use super::llama::Llama;
use crate::cache::Cache;
use crate::hf::ModelConfig;
use crate::module::Module;
use crate::plan::Plan;
use shardgrad_autograd::Var;

/// A model of the family that a config names. Its parameters have the names that they have in the family's own struct.
#[derive(Debug)]
pub enum LanguageModel {
    /// `gpt2`.
    Gpt2(Box<Gpt2>),
    /// `llama`, `mistral`, `qwen2` and `qwen3`.
    Llama(Box<Llama>),
}

impl LanguageModel {
    /// A model of this shape, with fresh weights.
    ///
    /// # Panics
    /// As the `new` of the family.
    #[track_caller]
    #[must_use]
    pub fn new(config: &ModelConfig) -> LanguageModel {
        match config {
            ModelConfig::Gpt2(config) => LanguageModel::Gpt2(Box::new(Gpt2::new(config))),
            ModelConfig::Llama(config) => LanguageModel::Llama(Box::new(Llama::new(config))),
        }
    }

    /// The table of splits of the family.
    #[must_use]
    pub fn plan(config: &ModelConfig) -> Plan {
        match config {
            ModelConfig::Gpt2(config) => Gpt2::plan(config),
            ModelConfig::Llama(config) => Llama::plan(config),
        }
    }

    /// The same model, which keeps only the inputs of its blocks for the backward pass and computes the rest again there.
    #[must_use]
    pub fn recompute(self, recompute: bool) -> LanguageModel {
        match self {
            LanguageModel::Gpt2(model) => LanguageModel::Gpt2(Box::new(model.recompute(recompute))),
            LanguageModel::Llama(model) => LanguageModel::Llama(Box::new(model.recompute(recompute))),
        }
    }

    /// Logits of the next token: `[b, t]` (i64) to `[b, t, vocab_size]`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims, or are longer than the model has positions.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var) -> Var {
        match self {
            LanguageModel::Gpt2(model) => model.forward(ids),
            LanguageModel::Llama(model) => model.forward(ids),
        }
    }

    /// Logits of the token after the last of `ids`: `[b, t]` to `[b, 1, vocab_size]`. The ids continue what is in the cache,
    /// which then holds them too.
    ///
    /// # Panics
    /// As [`LanguageModel::forward`], for all positions read so far; and if the cache is of another model.
    #[track_caller]
    #[must_use]
    pub fn next(&self, ids: &Var, cache: &mut Cache) -> Var {
        match self {
            LanguageModel::Gpt2(model) => model.next(ids, cache),
            LanguageModel::Llama(model) => model.next(ids, cache),
        }
    }

    /// An empty cache for this model.
    #[must_use]
    pub fn cache(&self) -> Cache {
        Cache::new(match self {
            LanguageModel::Gpt2(model) => model.h.len(),
            LanguageModel::Llama(model) => model.model.layers.len(),
        })
    }

    /// Mean next-token cross-entropy over all tokens: ids and targets `[b, t]` (i64), a scalar in the accumulator type.
    ///
    /// # Panics
    /// As [`LanguageModel::forward`], and if a target is outside of the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss(&self, ids: &Var, targets: &Var) -> Var {
        match self {
            LanguageModel::Gpt2(model) => model.loss(ids, targets),
            LanguageModel::Llama(model) => model.loss(ids, targets),
        }
    }

    fn family(&self) -> &dyn Family {
        match self {
            LanguageModel::Gpt2(model) => &**model,
            LanguageModel::Llama(model) => &**model,
        }
    }
}

impl Module for LanguageModel {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        self.family().children(visit);
    }
}

impl Family for LanguageModel {
    fn describe(&self) -> ModelConfig {
        self.family().describe()
    }

    fn name_in_files(&self, name: &str) -> String {
        self.family().name_in_files(name)
    }

    fn passed_over(&self) -> &'static [&'static str] {
        self.family().passed_over()
    }
}
