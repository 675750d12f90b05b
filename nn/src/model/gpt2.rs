//! GPT-2: a decoder with learned position embeddings. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

use super::blocks::{check_ids, last_token, run_blocks};
use crate::checkpoint::hf::{Gpt2Config, HfModel, ModelConfig};
use crate::layer::kv_cache::KvCache;
use crate::layer::{Attention, Block, DocumentPoints, Dropout, Embedding, LayerNorm, Mlp, PackedDocuments};
use crate::loss::{CrossEntropy, Loss, cross_entropy};
use crate::module;
use crate::module::param::Init;
use crate::plan::Plan;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

module! {
    /// GPT-2: token and position embeddings, blocks, a norm, and an output layer, tied to the token embedding or untied. Parameters
    /// have the names of `transformers`.
    #[doc(alias = "GPT2LMHeadModel")]
    #[derive(Debug)]
    pub struct Gpt2 {
        /// Token embedding, `[vocab_size, n_embd]`.
        pub wte: Embedding,
        /// Position embedding, `[n_positions, n_embd]`.
        pub wpe: Embedding,
        drop: Dropout,
        /// The blocks.
        pub h: Vec<Block>,
        /// The norm before the output layer.
        pub ln_f: LayerNorm,
        /// The output layer if it is not tied to the token embedding: `[vocab_size, n_embd]`.
        pub lm_head: Option<Embedding>,
        documents: DocumentPoints;
        config: Gpt2Config,
        recompute: bool,
    }
}

impl Gpt2 {
    /// A model of this config. Weights are initialized from a normal distribution with standard deviation `initializer_range`, divided
    /// by sqrt(2 n_layer) for the projections into the residual stream; biases with zeros, norms with ones.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the width is not a multiple of the heads, or a dropout probability is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn new(config: &Gpt2Config) -> Gpt2 {
        let d = config.n_embd;
        let std = Init::Normal(config.initializer_range);
        let residual = Init::Normal(config.initializer_range / (2.0 * config.n_layer as f64).sqrt());
        let block = |_| {
            let attn = Attention::new(d, config.n_head).init(std, residual).dropout(config.attn_pdrop);
            let mlp = Mlp::new(d, config.mlp_hidden_size()).init(std, residual);
            Block::new(d, attn, mlp, config.layer_norm_epsilon, config.resid_pdrop)
        };
        let table = |rows| Embedding::new(rows, d).init(std);
        Gpt2 {
            wte: table(config.vocab_size),
            wpe: table(config.n_positions),
            drop: Dropout::new(config.embd_pdrop),
            h: (0..config.n_layer).map(block).collect(),
            ln_f: LayerNorm::new(d).eps(config.layer_norm_epsilon),
            lm_head: (!config.tie_word_embeddings).then(|| table(config.vocab_size)),
            documents: DocumentPoints::default(),
            config: config.clone(),
            recompute: false,
        }
    }

    /// Returns the same model with activation checkpointing: only the inputs of blocks are saved for the backward pass, which computes
    /// the rest again.
    #[doc(alias = "checkpoint")]
    #[doc(alias = "remat")]
    #[doc(alias = "activation checkpointing")]
    #[doc(alias = "gradient_checkpointing_enable")]
    #[must_use]
    pub fn recompute(self, recompute: bool) -> Gpt2 {
        Gpt2 { recompute, ..self }
    }

    /// The parallelism plan of this family: rows and tokens of the batch; heads, hidden units and vocabulary.
    #[must_use]
    pub fn plan(_: &Gpt2Config) -> Plan {
        Plan::gpt2()
    }

    /// The config of the model.
    #[must_use]
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Returns the logits of the next token: `[b, t]` (i64) to `[b, t, vocab_size]`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims, or `t` exceeds `n_positions`.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var) -> Var {
        check_ids(ids, 0, self.config.n_positions);
        self.forward_checked(ids)
    }

    /// [`Gpt2::forward`] of ids whose shape was checked. Not `track_caller`: errors point to the model's code, not to its caller.
    fn forward_checked(&self, ids: &Var) -> Var {
        let x = run_blocks(&self.h, self.embed(ids, 0), self.recompute, |block, x| block.forward(x));
        self.lm_logits(&x)
    }

    /// [`Gpt2::forward`] of rows of packed documents: tokens attend within their documents, and position embeddings are those of their
    /// positions there.
    ///
    /// # Panics
    /// As [`Gpt2::forward`], and if a position is outside of the model's.
    #[doc(alias = "position_ids")]
    #[track_caller]
    #[must_use]
    pub fn forward_packed(&self, ids: &Var, documents: &PackedDocuments) -> Var {
        check_ids(ids, 0, usize::MAX);
        let x = self.drop.forward(&self.wte.forward(ids).add(&self.wpe.forward(&documents.positions)));
        let documents = self.documents.constrain(documents);
        let forward = |block: &Block, x: &Var| block.forward_packed(x, &documents);
        self.lm_logits(&run_blocks(&self.h, x, self.recompute, forward))
    }

    /// Returns the logits of the token after the last of `ids`, `[b, t]` to `[b, 1, vocab_size]`. The ids follow the cached tokens and
    /// are appended to the cache.
    ///
    /// # Panics
    /// As [`Gpt2::forward`], counting cached positions; and if the cache belongs to another model.
    #[track_caller]
    #[must_use]
    pub fn next_token_logits(&self, ids: &Var, cache: &mut KvCache) -> Var {
        check_ids(ids, cache.len(), self.config.n_positions);
        let mut x = self.embed(ids, cache.len());
        for (block, layer_cache) in self.h.iter().zip(cache.layers()) {
            x = block.forward_with_cache(&x, Some(layer_cache));
        }
        self.normed_logits(&last_token(&self.ln_f.forward(&x)))
    }

    /// Embeds tokens, and their positions from `first` on.
    fn embed(&self, ids: &Var, first: usize) -> Var {
        let tokens = self.wte.forward(ids);
        self.drop.forward(&tokens.add(&self.wpe.rows(ids, first..first + ids.shape()[1])))
    }

    fn lm_logits(&self, x: &Var) -> Var {
        self.normed_logits(&self.ln_f.forward(x))
    }

    fn normed_logits(&self, x: &Var) -> Var {
        self.lm_head.as_ref().unwrap_or(&self.wte).logits(x)
    }

    /// Mean next-token cross-entropy over all tokens: ids and targets `[b, t]` (i64), a scalar in the accumulator type.
    ///
    /// # Panics
    /// As [`Gpt2::forward`], and if a target is outside the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss(&self, ids: &Var, targets: &Var) -> Var {
        cross_entropy(&self.forward(ids), targets).mean()
    }

    /// [`Gpt2::loss`] of rows of packed documents.
    ///
    /// # Panics
    /// As [`Gpt2::forward_packed`], and if a target is outside the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss_packed(&self, ids: &Var, targets: &Var, documents: &PackedDocuments) -> Var {
        cross_entropy(&self.forward_packed(ids, documents), targets).mean()
    }

    /// [`Gpt2::loss`] over the tokens whose target is not [`IGNORE_INDEX`](crate::loss::IGNORE_INDEX), as the loss of a step: a sum with
    /// the number of these tokens.
    ///
    /// # Panics
    /// As [`Gpt2::loss`].
    #[track_caller]
    #[must_use]
    pub fn masked_loss(&self, ids: &Var, targets: &Var) -> Loss {
        CrossEntropy::MASKED.loss(&self.forward(ids), targets)
    }
}

/// The prefix of parameter names in files.
const PREFIX: &str = "transformer.";

impl HfModel for Gpt2 {
    fn model_config(&self) -> ModelConfig {
        ModelConfig::Gpt2(self.config.clone())
    }

    fn hf_name(&self, name: &str) -> String {
        if name.starts_with("lm_head.") { name.to_string() } else { format!("{PREFIX}{name}") }
    }

    /// Ignores the buffers in old files, and the output layer, which a tied model does not need.
    fn ignored_on_load(&self) -> &'static [&'static str] {
        &["*.attn.bias", "*.attn.masked_bias", "lm_head.weight"]
    }
}
