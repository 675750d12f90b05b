//! GPT-2: a decoder with learned positions. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

use super::family::{Family, check_ids, through};
use crate::cache::Cache;
use crate::hf::{Gpt2Config, ModelConfig};
use crate::layer::{Attention, Block, Dropout, Embedding, LayerNorm, Mlp};
use crate::loss::cross_entropy;
use crate::module;
use crate::param::Init;
use crate::plan::Plan;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

module! {
    /// Token and position embeddings, blocks, a norm, and an output layer: the token table transposed, or one of its own.
    /// Parameters are named as in `transformers`.
    #[derive(Debug)]
    pub struct Gpt2 {
        /// Tokens: `[vocab_size, n_embd]`.
        pub wte: Embedding,
        /// Positions: `[n_positions, n_embd]`.
        pub wpe: Embedding,
        drop: Dropout,
        /// The blocks.
        pub h: Vec<Block>,
        /// The norm before the output layer.
        pub ln_f: LayerNorm,
        /// The output layer where it is not tied: `[vocab_size, n_embd]`.
        pub lm_head: Option<Embedding>;
        config: Gpt2Config,
        recompute: bool,
    }
}

impl Gpt2 {
    /// A model of this shape. Fresh weights are normal with standard deviation `initializer_range`, those that end in the
    /// residual stream by a factor sqrt(2 n_layer) narrower; biases are zero, norms one.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the heads do not divide the width, or a dropout probability is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn new(config: &Gpt2Config) -> Gpt2 {
        let d = config.n_embd;
        let std = Init::Normal(config.initializer_range);
        let residual = Init::Normal(config.initializer_range / (2.0 * config.n_layer as f64).sqrt());
        let block = |_| {
            let attn = Attention::new(d, config.n_head).init(std, residual).dropout(config.attn_pdrop);
            let mlp = Mlp::new(d, config.hidden()).init(std, residual);
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
            config: config.clone(),
            recompute: false,
        }
    }

    /// The same model, which keeps only the inputs of its blocks for the backward pass and computes the rest again there.
    #[must_use]
    pub fn recompute(self, recompute: bool) -> Gpt2 {
        Gpt2 { recompute, ..self }
    }

    /// The table of splits for this family: rows of the batch and their tokens; heads, hidden units and vocabulary.
    #[must_use]
    pub fn plan(_: &Gpt2Config) -> Plan {
        Plan::gpt2()
    }

    /// The shape of the model.
    #[must_use]
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Logits of the next token: `[b, t]` (i64) to `[b, t, vocab_size]`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims, or `t` exceeds `n_positions`.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var) -> Var {
        check_ids(ids, 0, self.config.n_positions);
        self.logits(ids)
    }

    /// [`Gpt2::forward`] of ids that fit. What is asked for here is asked for by this text, not by its caller.
    fn logits(&self, ids: &Var) -> Var {
        let x = through(&self.h, self.embedded(ids, 0), self.recompute, |block, x| block.forward(x));
        self.scores(&x)
    }

    /// Logits of the token after the last of `ids`: `[b, t]` to `[b, 1, vocab_size]`. The ids continue what is in the cache,
    /// which then holds them too.
    ///
    /// # Panics
    /// As [`Gpt2::forward`], for all positions read so far; and if the cache is of another model.
    #[track_caller]
    #[must_use]
    pub fn next(&self, ids: &Var, cache: &mut Cache) -> Var {
        check_ids(ids, cache.len(), self.config.n_positions);
        let mut x = self.embedded(ids, cache.len());
        for (block, past) in self.h.iter().zip(cache.layers()) {
            x = block.attend(&x, Some(past));
        }
        let t = x.shape()[1];
        self.scores(&x.slice(1, t - 1..t))
    }

    /// Tokens and their positions, from `first` on.
    fn embedded(&self, ids: &Var, first: usize) -> Var {
        let tokens = self.wte.forward(ids);
        self.drop.forward(&tokens.add(&self.wpe.rows(ids, first..first + ids.shape()[1])))
    }

    fn scores(&self, x: &Var) -> Var {
        self.lm_head.as_ref().unwrap_or(&self.wte).scores(&self.ln_f.forward(x))
    }

    /// Mean next-token cross-entropy over all tokens: ids and targets `[b, t]` (i64), a scalar in the accumulator type.
    ///
    /// # Panics
    /// As [`Gpt2::forward`], and if a target is outside of the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss(&self, ids: &Var, targets: &Var) -> Var {
        cross_entropy(&self.forward(ids), targets).mean()
    }
}

/// The part of names in files that names here do not have.
const PREFIX: &str = "transformer.";

impl Family for Gpt2 {
    fn describe(&self) -> ModelConfig {
        ModelConfig::Gpt2(self.config.clone())
    }

    fn name_in_files(&self, name: &str) -> String {
        if name.starts_with("lm_head.") { name.to_string() } else { format!("{PREFIX}{name}") }
    }

    /// Buffers that old files hold beside the weights, and the head that a tied model has no use for.
    fn passed_over(&self) -> &'static [&'static str] {
        &["*.attn.bias", "*.attn.masked_bias", "lm_head.weight"]
    }
}
