//! `LanguageModel`: a model of any family, chosen by its config.

use super::bert::Bert;
use super::gpt2::Gpt2;
use super::llama::Llama;
use crate::checkpoint::hf::{HfModel, ModelConfig};
use crate::layer::PackedDocuments;
use crate::layer::kv_cache::KvCache;
use crate::loss::Loss;
use crate::module::Module;
use crate::plan::Plan;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind};

/// A model of any family, chosen by its config. Parameter names are those of the family's struct.
#[doc(alias = "AutoModel")]
#[doc(alias = "AutoModelForCausalLM")]
#[derive(Debug)]
pub enum LanguageModel {
    /// `gpt2`.
    Gpt2(Box<Gpt2>),
    /// `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral` and `qwen3_moe`.
    Llama(Box<Llama>),
    /// `bert`, which predicts masked tokens instead of the next token.
    Bert(Box<Bert>),
}

impl LanguageModel {
    /// A model of this config, with freshly initialized weights.
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

    /// The parallelism plan of the family.
    #[must_use]
    pub fn plan(config: &ModelConfig) -> Plan {
        match config {
            ModelConfig::Gpt2(config) => Gpt2::plan(config),
            ModelConfig::Llama(config) => Llama::plan(config),
            ModelConfig::Bert(config) => Bert::plan(config),
        }
    }

    /// Returns the same model with activation checkpointing: only the inputs of blocks are saved for the backward pass, which computes
    /// the rest again.
    #[doc(alias = "checkpoint")]
    #[doc(alias = "remat")]
    #[doc(alias = "activation checkpointing")]
    #[doc(alias = "gradient_checkpointing_enable")]
    #[must_use]
    pub fn recompute(self, recompute: bool) -> LanguageModel {
        match self {
            LanguageModel::Gpt2(model) => LanguageModel::Gpt2(Box::new(model.recompute(recompute))),
            LanguageModel::Llama(model) => LanguageModel::Llama(Box::new(model.recompute(recompute))),
            LanguageModel::Bert(model) => LanguageModel::Bert(Box::new(model.recompute(recompute))),
        }
    }

    /// Returns the logits of the next token, or for an encoder of the token at each position: `[b, t]` (i64) to `[b, t, vocab_size]`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims, or more tokens than the model has positions; with
    /// `Kind::Unsupported` if an encoder has no masked language modeling head.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var) -> Var {
        match self {
            LanguageModel::Gpt2(model) => model.forward(ids),
            LanguageModel::Llama(model) => model.forward(ids),
            LanguageModel::Bert(model) => model.forward(ids, None, None),
        }
    }

    /// Returns the logits of the token after the last of `ids`, `[b, t]` to `[b, 1, vocab_size]`. The ids follow the cached tokens and
    /// are appended to the cache.
    ///
    /// # Panics
    /// As [`LanguageModel::forward`], counting cached positions; and if the cache belongs to another model. Unwinds with
    /// `Kind::Unsupported` for an encoder.
    #[track_caller]
    #[must_use]
    pub fn next_token_logits(&self, ids: &Var, cache: &mut KvCache) -> Var {
        match self {
            LanguageModel::Gpt2(model) => model.next_token_logits(ids, cache),
            LanguageModel::Llama(model) => model.next_token_logits(ids, cache),
            LanguageModel::Bert(_) => {
                Error::new(Kind::Unsupported, "BERT is an encoder and cannot predict the next token")
                    .detail("help", "use a causal model, of the GPT-2 or Llama family")
                    .at(std::panic::Location::caller())
                    .raise()
            }
        }
    }

    /// Returns an empty KV cache for this model.
    #[must_use]
    pub fn new_kv_cache(&self) -> KvCache {
        KvCache::new(match self {
            LanguageModel::Gpt2(model) => model.h.len(),
            LanguageModel::Llama(model) => model.model.layers.len(),
            LanguageModel::Bert(_) => 0,
        })
    }

    /// Mean cross-entropy over all tokens: ids and targets `[b, t]` (i64), a scalar in the accumulator type. The targets of an
    /// encoder are the masked tokens, and [`Bert::IGNORE_INDEX`] at all other positions.
    ///
    /// # Panics
    /// As [`LanguageModel::forward`], and if a target is outside the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss(&self, ids: &Var, targets: &Var) -> Var {
        match self {
            LanguageModel::Gpt2(model) => model.loss(ids, targets),
            LanguageModel::Llama(model) => model.loss(ids, targets),
            LanguageModel::Bert(model) => model.masked_loss(ids, targets, None, None).value(),
        }
    }

    /// [`LanguageModel::loss`] over the tokens whose target is not [`IGNORE_INDEX`](crate::loss::IGNORE_INDEX), as the loss of a step: a
    /// sum with the number of these tokens.
    ///
    /// # Panics
    /// As [`LanguageModel::loss`].
    #[track_caller]
    #[must_use]
    pub fn masked_loss(&self, ids: &Var, targets: &Var) -> Loss {
        match self {
            LanguageModel::Gpt2(model) => model.masked_loss(ids, targets),
            LanguageModel::Llama(model) => model.masked_loss(ids, targets),
            LanguageModel::Bert(model) => model.masked_loss(ids, targets, None, None),
        }
    }

    /// The loss of the tensors of a batch for a step: ids, targets and, for an encoder with padding, mask and types as in
    /// [`Bert::hidden_states`]. With packed documents segment ids and positions as in [`PackedDocuments`] come last: after the targets of a
    /// decoder, after the types of an encoder, which then has no mask. A mean, or for an encoder a sum with the number of labels, which
    /// microbatches have unequally. Reports the tokens of each expert ([`ExpertLoad`](crate::ExpertLoad)).
    ///
    /// # Panics
    /// As [`LanguageModel::loss`], and if there are fewer than two tensors.
    #[track_caller]
    #[must_use]
    pub fn loss_from_batch(&self, x: &[Var]) -> Loss {
        match (self, self.packed_documents(x)) {
            (LanguageModel::Gpt2(model), None) => Loss::mean(model.loss(&x[0], &x[1])),
            (LanguageModel::Gpt2(model), Some(documents)) => {
                Loss::mean(model.loss_packed(&x[0], &x[1], &documents))
            }
            (LanguageModel::Llama(model), documents) => model.step_loss(&x[0], &x[1], documents.as_ref()),
            (LanguageModel::Bert(model), None) => model.masked_loss(&x[0], &x[1], x.get(2), x.get(3)),
            (LanguageModel::Bert(model), Some(documents)) => {
                model.masked_loss_packed(&x[0], &x[1], x.get(2), &documents)
            }
        }
    }

    /// [`LanguageModel::forward`] of the tensors of a batch, as for [`LanguageModel::loss_from_batch`]; ignores the targets.
    ///
    /// # Panics
    /// As [`LanguageModel::forward`], and if there is no tensor.
    #[track_caller]
    #[must_use]
    pub fn forward_from_batch(&self, x: &[Var]) -> Var {
        match (self, self.packed_documents(x)) {
            (LanguageModel::Bert(model), None) => model.forward(&x[0], x.get(2), x.get(3)),
            (LanguageModel::Bert(model), Some(documents)) => {
                model.forward_packed(&x[0], x.get(2), &documents)
            }
            (LanguageModel::Gpt2(model), Some(documents)) => model.forward_packed(&x[0], &documents),
            (LanguageModel::Llama(model), Some(documents)) => model.forward_packed(&x[0], &documents),
            (_, None) => self.forward(&x[0]),
        }
    }

    /// The segment ids and positions among the tensors of a batch: after ids and targets, and after the types of an encoder.
    fn packed_documents(&self, x: &[Var]) -> Option<PackedDocuments> {
        match (self, x) {
            (LanguageModel::Bert(_), [_, _, _, segments, positions])
            | (LanguageModel::Gpt2(_) | LanguageModel::Llama(_), [_, _, segments, positions]) => {
                Some(PackedDocuments { segments: segments.clone(), positions: positions.clone() })
            }
            _ => None,
        }
    }

    fn as_hf_model(&self) -> &dyn HfModel {
        match self {
            LanguageModel::Gpt2(model) => &**model,
            LanguageModel::Llama(model) => &**model,
            LanguageModel::Bert(model) => &**model,
        }
    }
}

impl Module for LanguageModel {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        self.as_hf_model().children(visit);
    }
}

impl HfModel for LanguageModel {
    fn model_config(&self) -> ModelConfig {
        self.as_hf_model().model_config()
    }

    fn hf_name(&self, name: &str) -> String {
        self.as_hf_model().hf_name(name)
    }

    fn legacy_hf_name(&self, name: &str) -> Option<String> {
        self.as_hf_model().legacy_hf_name(name)
    }

    fn ignored_on_load(&self) -> &'static [&'static str] {
        self.as_hf_model().ignored_on_load()
    }
}
