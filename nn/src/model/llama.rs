//! The Llama family: decoders with rotary positions, grouped queries, gated MLPs and RMS norms. Touvron et al., arXiv
//! 2302.13971; its members differ in biases and norms.

use super::family::{Family, check_ids};
use crate::cache::{Cache, Past};
use crate::hf::{LlamaConfig, LlamaKind, ModelConfig};
use crate::layer::{Embedding, Experts, FeedForward, GatedMlp, GroupedAttention, RmsNorm, Routes};
use crate::loss::{balance, cross_entropy};
use crate::module;
use crate::param::Init;
use crate::plan::Plan;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Value, unwind};
use std::panic::Location;

module! {
    /// x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)).
    #[derive(Debug)]
    pub struct LlamaBlock {
        /// The norm before attention.
        pub input_layernorm: RmsNorm,
        /// Attention.
        pub self_attn: GroupedAttention,
        /// The norm before the feed-forward half.
        pub post_attention_layernorm: RmsNorm,
        /// The feed-forward half.
        pub mlp: FeedForward,
    }
}

module! {
    /// Token embedding, blocks and a norm.
    #[derive(Debug)]
    pub struct LlamaTrunk {
        /// Tokens: `[vocab_size, hidden_size]`.
        pub embed_tokens: Embedding,
        /// The blocks.
        pub layers: Vec<LlamaBlock>,
        /// The norm before the output layer.
        pub norm: RmsNorm,
    }
}

module! {
    /// A trunk and an output layer: the token table transposed, or one of its own. Parameters are named as in
    /// `transformers`.
    #[derive(Debug)]
    pub struct Llama {
        /// All but the output layer.
        pub model: LlamaTrunk,
        /// The output layer where it is not tied: `[vocab_size, hidden_size]`.
        pub lm_head: Option<Embedding>;
        config: LlamaConfig,
        recompute: bool,
    }
}

impl LlamaBlock {
    /// A block of this shape.
    ///
    /// # Panics
    /// As [`Llama::new`].
    #[track_caller]
    #[must_use]
    fn new(config: &LlamaConfig, layer: usize, frequencies: &[f64]) -> LlamaBlock {
        let (d, std) = (config.hidden_size, Init::Normal(config.initializer_range));
        let norm = || RmsNorm::new(d).eps(config.rms_norm_eps);
        let heads = [config.num_key_value_heads, config.heads_per_key(), config.head_dim];
        let attention = GroupedAttention::new(d, heads, frequencies)
            .init(std)
            .bias(config.attention_bias, config.output_bias())
            .window(config.window(layer))
            .dropout(config.attention_dropout);
        LlamaBlock {
            input_layernorm: norm(),
            self_attn: match config.kind.has_head_norms() {
                true => attention.normed(config.rms_norm_eps),
                false => attention,
            },
            post_attention_layernorm: norm(),
            mlp: feed_forward(config, layer, std),
        }
    }

    /// `[b, t, d]` to `[b, t, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if x has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.attend(x, None)
    }

    /// The same, after what was read before: `past` then holds the rows of x too.
    ///
    /// # Panics
    /// As [`LlamaBlock::forward`], and if `past` is of another block.
    #[track_caller]
    #[must_use]
    pub fn attend(&self, x: &Var, past: Option<&mut Past>) -> Var {
        self.routed(x, past).0
    }

    /// The same, and how tokens were spread over experts, if there are any.
    #[track_caller]
    fn routed(&self, x: &Var, past: Option<&mut Past>) -> (Var, Option<Routes>) {
        let (x, y) = self.input_layernorm.forward_beside(x);
        let x = self.self_attn.attend_onto(&y, past, &x);
        let (x, y) = self.post_attention_layernorm.forward_beside(&x);
        self.mlp.forward_onto(&y, &x)
    }
}

/// The feed-forward half of a block.
fn feed_forward(config: &LlamaConfig, layer: usize, std: Init) -> FeedForward {
    let d = config.hidden_size;
    let Some(experts) = config.experts_of(layer) else {
        let mlp = GatedMlp::new(d, config.intermediate_size, config.mlp_bias).init(std);
        return FeedForward::Dense(Box::new(mlp));
    };
    let (count, taken) = (experts.num_experts, experts.num_experts_per_tok);
    let layer = Experts::new(d, experts.moe_intermediate_size, count, taken, experts.norm_topk_prob);
    FeedForward::Experts(Box::new(layer.init(std)))
}

/// Refuses query heads of which each key head would not have as many: the model would have others than its config tells.
#[track_caller]
fn check_heads(config: &LlamaConfig) {
    let (heads, key_heads) = (config.num_attention_heads, config.num_key_value_heads);
    if key_heads == 0 || !heads.is_multiple_of(key_heads) {
        let text = format!("{key_heads} key heads do not divide {heads} heads");
        Error::new(Kind::Config, text)
            .detail("help", "give a `num_key_value_heads` that divides `num_attention_heads`")
            .at(Location::caller())
            .raise();
    }
}

impl Llama {
    /// A model of this shape. Fresh weights are normal with standard deviation `initializer_range`; biases are zero, norms
    /// one.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the key heads do not divide the query heads, if heads have an odd number of channels, or if
    /// the dropout probability is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn new(config: &LlamaConfig) -> Llama {
        check_heads(config);
        let (d, frequencies) = (config.hidden_size, config.rotary.frequencies(config.head_dim));
        let table = || Embedding::new(config.vocab_size, d).init(Init::Normal(config.initializer_range));
        Llama {
            model: LlamaTrunk {
                embed_tokens: table(),
                layers: (0..config.num_hidden_layers)
                    .map(|layer| LlamaBlock::new(config, layer, &frequencies))
                    .collect(),
                norm: RmsNorm::new(d).eps(config.rms_norm_eps),
            },
            lm_head: (!config.tie_word_embeddings).then(table),
            config: config.clone(),
            recompute: false,
        }
    }

    /// The same model, which keeps only the inputs of its blocks for the backward pass and computes the rest again there.
    #[must_use]
    pub fn recompute(self, recompute: bool) -> Llama {
        Llama { recompute, ..self }
    }

    /// The table of splits for this family: rows of the batch and their tokens; heads, hidden units and vocabulary.
    #[must_use]
    pub fn plan(config: &LlamaConfig) -> Plan {
        if config.experts.is_some() { Plan::llama_of_experts() } else { Plan::llama() }
    }

    /// The shape of the model.
    #[must_use]
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Logits of the next token: `[b, t]` (i64) to `[b, t, vocab_size]`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims, or `t` exceeds `max_position_embeddings`.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var) -> Var {
        check_ids(ids, 0, self.config.max_position_embeddings);
        self.logits(ids, false).0
    }

    /// [`Llama::forward`] of ids that fit, and, if asked for, how the experts of each block that has some are used. What is asked for
    /// here is asked for by this text, not by its caller.
    fn logits(&self, ids: &Var, tells: bool) -> (Var, Vec<[Var; 2]>) {
        let mut usage = Vec::new();
        let mut x = self.model.embed_tokens.forward(ids);
        for block in &self.model.layers {
            let forward = |x: &Var| {
                let (x, routes) = block.routed(x, None);
                let told = routes.filter(|_| tells).map(|routes| routes.usage());
                [vec![x], told.map_or_else(Vec::new, Vec::from)].concat()
            };
            let mut made = match self.recompute {
                true => unwind(x.tape().clone().checkpoint(&[x], |x| Ok(forward(&x[0])))),
                false => forward(&x),
            };
            if let Ok(told) = <[Var; 2]>::try_from(made.split_off(1)) {
                usage.push(told);
            }
            x = made.swap_remove(0);
        }
        (self.scores(&x), usage)
    }

    /// Logits of the token after the last of `ids`: `[b, t]` to `[b, 1, vocab_size]`. The ids continue what is in the cache,
    /// which then holds them too.
    ///
    /// # Panics
    /// As [`Llama::forward`], for all positions read so far; and if the cache is of another model.
    #[track_caller]
    #[must_use]
    pub fn next(&self, ids: &Var, cache: &mut Cache) -> Var {
        check_ids(ids, cache.len(), self.config.max_position_embeddings);
        let mut x = self.model.embed_tokens.forward(ids);
        for (block, past) in self.model.layers.iter().zip(cache.layers()) {
            x = block.attend(&x, Some(past));
        }
        let t = x.shape()[1];
        self.scores(&x.slice(1, t - 1..t))
    }

    fn scores(&self, x: &Var) -> Var {
        self.lm_head.as_ref().unwrap_or(&self.model.embed_tokens).scores(&self.model.norm.forward(x))
    }

    /// Mean next-token cross-entropy over all tokens: ids and targets `[b, t]` (i64), a scalar in the accumulator type. Where the
    /// config says `output_router_logits`, [`balance`] times `router_aux_loss_coef` is added.
    ///
    /// # Panics
    /// As [`Llama::forward`], and if a target is outside of the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss(&self, ids: &Var, targets: &Var) -> Var {
        check_ids(ids, 0, self.config.max_position_embeddings);
        let told = self.config.experts.as_ref().filter(|experts| experts.output_router_logits);
        let (logits, usage) = self.logits(ids, told.is_some());
        let loss = cross_entropy(&logits, targets).mean();
        match told {
            Some(experts) if !usage.is_empty() => {
                let rows = ids.layout().numel() * usage.len();
                loss.add(&balance(&usage, rows).scale(experts.router_aux_loss_coef))
            }
            _ => loss,
        }
    }
}

impl Family for Llama {
    fn describe(&self) -> ModelConfig {
        ModelConfig::Llama(self.config.clone())
    }

    fn name_in_files(&self, name: &str) -> String {
        let Some((block, part)) = name.split_once(".mlp.") else { return name.to_string() };
        let is_mixtral = self.config.kind == LlamaKind::Mixtral;
        match (part, part.strip_prefix("experts.")) {
            (_, Some(stack)) if is_mixtral => {
                let matrix = match stack {
                    "gate_proj" => "w1",
                    "up_proj" => "w3",
                    _ => "w2",
                };
                format!("{block}.block_sparse_moe.experts.*.{matrix}.weight")
            }
            (_, Some(stack)) => format!("{block}.mlp.experts.*.{stack}.weight"),
            ("gate.weight", None) if is_mixtral => format!("{block}.block_sparse_moe.gate.weight"),
            _ => name.to_string(),
        }
    }

    /// Buffers that old files hold beside the weights, and the head that a tied model has no use for.
    fn passed_over(&self) -> &'static [&'static str] {
        &["*.rotary_emb.inv_freq", "lm_head.weight"]
    }
}
