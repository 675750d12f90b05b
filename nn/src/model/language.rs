//! A model of any family.

use super::bert::Bert;
use super::family::Family;
use super::gpt2::Gpt2;
use super::llama::Llama;
use crate::cache::Cache;
use crate::hf::ModelConfig;
use crate::module::Module;
use crate::plan::Plan;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Value};

/// A model of the family that a config names. Its parameters have the names that they have in the family's own struct.
#[derive(Debug)]
pub enum LanguageModel {
    /// `gpt2`.
    Gpt2(Box<Gpt2>),
    /// `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral` and `qwen3_moe`.
    Llama(Box<Llama>),
    /// `bert`, which predicts tokens that are hidden from it instead of the next one.
    Bert(Box<Bert>),
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
            ModelConfig::Bert(config) => LanguageModel::Bert(Box::new(Bert::new(config))),
        }
    }

    /// The table of splits of the family.
    #[must_use]
    pub fn plan(config: &ModelConfig) -> Plan {
        match config {
            ModelConfig::Gpt2(config) => Gpt2::plan(config),
            ModelConfig::Llama(config) => Llama::plan(config),
            ModelConfig::Bert(config) => Bert::plan(config),
        }
    }

    /// The same model, which keeps only the inputs of its blocks for the backward pass and computes the rest again there.
    #[must_use]
    pub fn recompute(self, recompute: bool) -> LanguageModel {
        match self {
            LanguageModel::Gpt2(model) => LanguageModel::Gpt2(Box::new(model.recompute(recompute))),
            LanguageModel::Llama(model) => LanguageModel::Llama(Box::new(model.recompute(recompute))),
            LanguageModel::Bert(model) => LanguageModel::Bert(Box::new(model.recompute(recompute))),
        }
    }

    /// Logits of the next token, or, of an encoder, of the token at each place: `[b, t]` (i64) to `[b, t, vocab_size]`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims, or are longer than the model has positions; with
    /// `Kind::Unsupported` if an encoder has no head of tokens.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var) -> Var {
        match self {
            LanguageModel::Gpt2(model) => model.forward(ids),
            LanguageModel::Llama(model) => model.forward(ids),
            LanguageModel::Bert(model) => model.forward(ids, None, None),
        }
    }

    /// Logits of the token after the last of `ids`: `[b, t]` to `[b, 1, vocab_size]`. The ids continue what is in the cache,
    /// which then holds them too.
    ///
    /// # Panics
    /// As [`LanguageModel::forward`], for all positions read so far; and if the cache is of another model. Unwinds with
    /// `Kind::Unsupported` for an encoder.
    #[track_caller]
    #[must_use]
    pub fn next(&self, ids: &Var, cache: &mut Cache) -> Var {
        match self {
            LanguageModel::Gpt2(model) => model.next(ids, cache),
            LanguageModel::Llama(model) => model.next(ids, cache),
            LanguageModel::Bert(_) => Error::new(Kind::Unsupported, "an encoder does not continue a text")
                .at(std::panic::Location::caller())
                .raise(),
        }
    }

    /// An empty cache for this model.
    #[must_use]
    pub fn cache(&self) -> Cache {
        Cache::new(match self {
            LanguageModel::Gpt2(model) => model.h.len(),
            LanguageModel::Llama(model) => model.model.layers.len(),
            LanguageModel::Bert(_) => 0,
        })
    }

    /// Mean cross-entropy over all tokens: ids and targets `[b, t]` (i64), a scalar in the accumulator type. The targets of an
    /// encoder are those of hidden tokens, [`Bert::IGNORED`] elsewhere.
    ///
    /// # Panics
    /// As [`LanguageModel::forward`], and if a target is outside of the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss(&self, ids: &Var, targets: &Var) -> Var {
        self.loss_of(&[ids.clone(), targets.clone()])
    }

    /// [`LanguageModel::loss`] of ids, targets, and, for an encoder whose rows are filled up, mask and types as
    /// [`Bert::hidden`] takes them. A scalar behind them is what an encoder's sum of losses is divided by, instead of the number
    /// of its labels: for microbatches, the labels of the step over the number of microbatches.
    ///
    /// # Panics
    /// As [`LanguageModel::loss`], and if there are less than two arguments.
    #[track_caller]
    #[must_use]
    pub fn loss_of(&self, x: &[Var]) -> Var {
        if let (LanguageModel::Bert(model), Some((share, x))) = (self, x.split_last())
            && share.shape().is_empty()
        {
            let sum = model.loss_sum(&x[0], &x[1], x.get(2), x.get(3));
            return sum.div(&share.cast(sum.dtype()));
        }
        match self {
            LanguageModel::Gpt2(model) => model.loss(&x[0], &x[1]),
            LanguageModel::Llama(model) => model.loss(&x[0], &x[1]),
            LanguageModel::Bert(model) => model.loss(&x[0], &x[1], x.get(2), x.get(3)),
        }
    }

    /// [`LanguageModel::forward`] of the same arguments; the targets are not looked at.
    ///
    /// # Panics
    /// As [`LanguageModel::forward`], and if there is no argument.
    #[track_caller]
    #[must_use]
    pub fn forward_of(&self, x: &[Var]) -> Var {
        match self {
            LanguageModel::Bert(model) => model.forward(&x[0], x.get(2), x.get(3)),
            LanguageModel::Gpt2(_) | LanguageModel::Llama(_) => self.forward(&x[0]),
        }
    }

    fn family(&self) -> &dyn Family {
        match self {
            LanguageModel::Gpt2(model) => &**model,
            LanguageModel::Llama(model) => &**model,
            LanguageModel::Bert(model) => &**model,
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

    fn older_name_in_files(&self, name: &str) -> Option<String> {
        self.family().older_name_in_files(name)
    }

    fn passed_over(&self) -> &'static [&'static str] {
        self.family().passed_over()
    }
}
