//! The Llama family: decoders with rotary position embeddings, grouped-query attention, gated MLPs or mixtures of experts, and RMS
//! norms. Touvron et al., arXiv 2302.13971. Its members (Mistral, Qwen, Mixtral) differ in biases and norms.

use super::blocks::{check_ids, last_token};
use crate::checkpoint::hf::{ExpertsConfig, HfModel, LlamaConfig, LlamaKind, ModelConfig};
use crate::layer::kv_cache::{KvCache, LayerKvCache};
use crate::layer::{
    DocumentPoints, Embedding, FeedForward, GatedMlp, GroupedQueryAttention, MixtureOfExperts,
    PackedDocuments, RmsNorm, Routing,
};
use crate::loss::{CrossEntropy, Loss, cross_entropy, load_balancing_loss};
use crate::module;
use crate::module::param::Init;
use crate::plan::Plan;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Value, unwind};
use std::panic::Location;

module! {
    /// Llama block: x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)).
    #[doc(alias = "LlamaDecoderLayer")]
    #[derive(Debug)]
    pub struct LlamaBlock {
        /// The norm before attention.
        pub input_layernorm: RmsNorm,
        /// Attention.
        pub self_attn: GroupedQueryAttention,
        /// The norm before the MLP.
        pub post_attention_layernorm: RmsNorm,
        /// The MLP, dense or a mixture of experts.
        pub mlp: FeedForward,
    }
}

module! {
    /// The model without its output layer: token embedding, blocks and a norm.
    #[doc(alias = "LlamaModel")]
    #[derive(Debug)]
    pub struct LlamaBackbone {
        /// Token embedding, `[vocab_size, hidden_size]`.
        pub embed_tokens: Embedding,
        /// The blocks.
        pub layers: Vec<LlamaBlock>,
        /// The norm before the output layer.
        pub norm: RmsNorm,
    }
}

module! {
    /// Model of the Llama family: a backbone and an output layer, tied to the token embedding or untied. Parameters have the names of
    /// `transformers`.
    #[doc(alias = "LlamaForCausalLM")]
    #[doc(alias = "MistralForCausalLM")]
    #[doc(alias = "MixtralForCausalLM")]
    #[doc(alias = "Qwen2ForCausalLM")]
    #[doc(alias = "Qwen3ForCausalLM")]
    #[derive(Debug)]
    pub struct Llama {
        /// The backbone: all but the output layer.
        pub model: LlamaBackbone,
        /// The output layer if it is not tied to the token embedding: `[vocab_size, hidden_size]`.
        pub lm_head: Option<Embedding>,
        documents: DocumentPoints;
        config: LlamaConfig,
        recompute: bool,
    }
}

impl LlamaBlock {
    /// The block of a config with index `layer`.
    ///
    /// # Panics
    /// As [`Llama::new`].
    #[track_caller]
    #[must_use]
    fn new(config: &LlamaConfig, layer: usize, frequencies: &[f64]) -> LlamaBlock {
        let (d, std) = (config.hidden_size, Init::Normal(config.initializer_range));
        let norm = || RmsNorm::new(d).eps(config.rms_norm_eps);
        let heads = [config.num_key_value_heads, config.heads_per_kv_head(), config.head_dim];
        let attention = GroupedQueryAttention::new(d, heads, frequencies)
            .init(std)
            .with_bias(config.attention_bias, config.output_bias())
            .sliding_window(config.window(layer))
            .dropout(config.attention_dropout);
        LlamaBlock {
            input_layernorm: norm(),
            self_attn: match config.kind.has_head_norms() {
                true => attention.with_qk_norm(config.rms_norm_eps),
                false => attention,
            },
            post_attention_layernorm: norm(),
            mlp: feed_forward(config, layer, std),
        }
    }

    /// Applies the block: `[b, t, d]` to `[b, t, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if x has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.forward_with_cache(x, None)
    }

    /// [`LlamaBlock::forward`] of tokens that follow the cached ones. Appends the keys and values of x to `layer_cache`.
    ///
    /// # Panics
    /// As [`LlamaBlock::forward`], and if `layer_cache` belongs to another block.
    #[track_caller]
    #[must_use]
    pub fn forward_with_cache(&self, x: &Var, layer_cache: Option<&mut LayerKvCache>) -> Var {
        let x = self.self_attn.forward_with(&self.input_layernorm.forward(x), layer_cache, Some(x.into()));
        self.feed_forward(&x).0
    }

    /// [`LlamaBlock::forward`], within packed documents if there are any, and the routing if there are experts.
    #[track_caller]
    fn forward_with_routing(&self, x: &Var, documents: Option<&PackedDocuments>) -> (Var, Option<Routing>) {
        let (normed, residual) = (self.input_layernorm.forward(x), Some(x.into()));
        let x = match documents {
            Some(documents) => self.self_attn.forward_packed(&normed, documents, residual),
            None => self.self_attn.forward_with(&normed, None, residual),
        };
        self.feed_forward(&x)
    }

    /// The part after attention, and the routing if there are experts.
    #[track_caller]
    fn feed_forward(&self, x: &Var) -> (Var, Option<Routing>) {
        self.mlp.forward_with_residual(&self.post_attention_layernorm.forward(x), x)
    }
}

/// What a forward pass returns of the routing of its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UsageStats {
    None,
    /// The tokens of each expert, for the report of a step.
    Tokens,
    /// Also the sums of the router scores, for the load-balancing loss.
    TokensAndScores,
}

impl UsageStats {
    /// The statistics of the routing of a block.
    #[track_caller]
    fn of(self, routing: &Routing) -> Vec<Var> {
        match self {
            UsageStats::None => Vec::new(),
            UsageStats::Tokens => vec![routing.tokens_per_expert()],
            UsageStats::TokensAndScores => routing.expert_usage().into(),
        }
    }
}

/// The use of the experts of a block in a forward pass.
struct ExpertUsage {
    /// The name of the tokens in the report of a step.
    name: String,
    tokens: Var,
    /// The sums of the scores, if asked for.
    scores: Option<Var>,
}

/// Returns the dense MLP or the mixture of experts of a block.
fn feed_forward(config: &LlamaConfig, layer: usize, std: Init) -> FeedForward {
    let d = config.hidden_size;
    let Some(experts) = config.layer_experts(layer) else {
        let mlp = GatedMlp::new(d, config.intermediate_size, config.mlp_bias).init(std);
        return FeedForward::Dense(Box::new(mlp));
    };
    let (count, top_k) = (experts.num_experts, experts.num_experts_per_tok);
    let layer = MixtureOfExperts::new(d, experts.moe_intermediate_size, count, top_k, experts.norm_topk_prob);
    let layer = match experts.router_bias_update_rate {
        0.0 => layer,
        rate => layer.with_bias_balancing(rate),
    };
    FeedForward::MixtureOfExperts(Box::new(layer.init(std)))
}

/// Rejects a number of query heads that is not a multiple of the key heads: the model would have other heads than its config.
#[track_caller]
fn check_heads(config: &LlamaConfig) {
    let (heads, key_heads) = (config.num_attention_heads, config.num_key_value_heads);
    if key_heads == 0 || !heads.is_multiple_of(key_heads) {
        let text = format!("{heads} query heads are not a multiple of {key_heads} key heads");
        Error::new(Kind::Config, text)
            .detail("help", "give a `num_key_value_heads` that divides `num_attention_heads`")
            .at(Location::caller())
            .raise();
    }
}

impl Llama {
    /// A model of this config. Weights are initialized from a normal distribution with standard deviation `initializer_range`, biases
    /// with zeros, norms with ones.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the query heads are not a multiple of the key heads, if heads have an odd number of channels, or
    /// if the dropout probability is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn new(config: &LlamaConfig) -> Llama {
        check_heads(config);
        let (d, frequencies) = (config.hidden_size, config.rope.frequencies(config.head_dim));
        let table = || Embedding::new(config.vocab_size, d).init(Init::Normal(config.initializer_range));
        Llama {
            model: LlamaBackbone {
                embed_tokens: table(),
                layers: (0..config.num_hidden_layers)
                    .map(|layer| LlamaBlock::new(config, layer, &frequencies))
                    .collect(),
                norm: RmsNorm::new(d).eps(config.rms_norm_eps),
            },
            lm_head: (!config.tie_word_embeddings).then(table),
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
    pub fn recompute(self, recompute: bool) -> Llama {
        Llama { recompute, ..self }
    }

    /// The parallelism plan of this family: rows and tokens of the batch; heads, hidden units and vocabulary.
    #[must_use]
    pub fn plan(config: &LlamaConfig) -> Plan {
        let groups = config.num_key_value_heads;
        let plan = match config.num_attention_heads <= groups * groups {
            true => Plan::llama_of_small_groups(),
            false => Plan::llama(),
        };
        if config.experts.is_some() { plan.with_experts() } else { plan }
    }

    /// The config of the model.
    #[must_use]
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Returns the logits of the next token: `[b, t]` (i64) to `[b, t, vocab_size]`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims, or `t` exceeds `max_position_embeddings`.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var) -> Var {
        check_ids(ids, 0, self.config.max_position_embeddings);
        self.forward_checked(ids, None, UsageStats::None).0
    }

    /// [`Llama::forward`] of rows of packed documents: tokens attend within their documents, and are rotated by their positions there.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims than `[b, t]`.
    #[doc(alias = "position_ids")]
    #[track_caller]
    #[must_use]
    pub fn forward_packed(&self, ids: &Var, documents: &PackedDocuments) -> Var {
        check_ids(ids, 0, usize::MAX);
        self.forward_checked(ids, Some(documents), UsageStats::None).0
    }

    /// [`Llama::forward`] of ids whose shape was checked, within packed documents if there are any, and statistics of each block with
    /// experts. Not `track_caller`: errors point to the model's code, not to its caller.
    fn forward_checked(
        &self,
        ids: &Var,
        documents: Option<&PackedDocuments>,
        stats: UsageStats,
    ) -> (Var, Vec<ExpertUsage>) {
        let mut usage = Vec::new();
        let documents = documents.map(|documents| self.documents.constrain(documents));
        let mut x = self.model.embed_tokens.forward(ids);
        for block in &self.model.layers {
            let forward = |x: &Var| {
                let (x, routing) = block.forward_with_routing(x, documents.as_ref());
                [vec![x], routing.map_or_else(Vec::new, |routing| stats.of(&routing))].concat()
            };
            let mut made = match self.recompute {
                true => unwind(x.tape().clone().checkpoint(&[x], |x| Ok(forward(&x[0])))),
                false => forward(&x),
            };
            let mut of_block = made.split_off(1).into_iter();
            if let (Some(tokens), Some(experts)) = (of_block.next(), block.mlp.experts()) {
                usage.push(ExpertUsage { name: experts.report_name(), tokens, scores: of_block.next() });
            }
            x = made.swap_remove(0);
        }
        (self.lm_logits(&x), usage)
    }

    /// Returns the logits of the token after the last of `ids`, `[b, t]` to `[b, 1, vocab_size]`. The ids follow the cached tokens and
    /// are appended to the cache.
    ///
    /// # Panics
    /// As [`Llama::forward`], counting cached positions; and if the cache belongs to another model.
    #[track_caller]
    #[must_use]
    pub fn next_token_logits(&self, ids: &Var, cache: &mut KvCache) -> Var {
        check_ids(ids, cache.len(), self.config.max_position_embeddings);
        let mut x = self.model.embed_tokens.forward(ids);
        for (block, layer_cache) in self.model.layers.iter().zip(cache.layers()) {
            x = block.forward_with_cache(&x, Some(layer_cache));
        }
        self.normed_logits(&last_token(&self.model.norm.forward(&x)))
    }

    fn lm_logits(&self, x: &Var) -> Var {
        self.normed_logits(&self.model.norm.forward(x))
    }

    fn normed_logits(&self, x: &Var) -> Var {
        self.lm_head.as_ref().unwrap_or(&self.model.embed_tokens).logits(x)
    }

    /// Mean next-token cross-entropy over all tokens: ids and targets `[b, t]` (i64), a scalar in the accumulator type. If
    /// `output_router_logits` of the config is set, adds [`load_balancing_loss`] times `router_aux_loss_coef`.
    ///
    /// # Panics
    /// As [`Llama::forward`], and if a target is outside the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss(&self, ids: &Var, targets: &Var) -> Var {
        check_ids(ids, 0, self.config.max_position_embeddings);
        self.loss_checked(ids, targets, None, self.stats_of_loss()).0
    }

    /// [`Llama::loss`] of rows of packed documents.
    ///
    /// # Panics
    /// As [`Llama::forward_packed`], and if a target is outside the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss_packed(&self, ids: &Var, targets: &Var, documents: &PackedDocuments) -> Var {
        check_ids(ids, 0, usize::MAX);
        self.loss_checked(ids, targets, Some(documents), self.stats_of_loss()).0
    }

    /// [`Llama::loss`], and the number of tokens routed to each expert of each block with experts, `[experts]`, partial sums where rows
    /// are sharded: for [`expert_imbalance`](crate::expert_imbalance) and [`MixtureOfExperts::update_bias`].
    ///
    /// # Panics
    /// As [`Llama::loss`].
    #[doc(alias = "tokens_per_expert")]
    #[track_caller]
    #[must_use]
    pub fn loss_with_tokens_per_expert(&self, ids: &Var, targets: &Var) -> (Var, Vec<Var>) {
        check_ids(ids, 0, self.config.max_position_embeddings);
        let (loss, usage) = self.loss_checked(ids, targets, None, self.stats_of_report());
        (loss, usage.into_iter().map(|usage| usage.tokens).collect())
    }

    /// [`Llama::loss`] as the loss of a step, which reports the tokens of each expert ([`ExpertLoad`](crate::ExpertLoad)); within packed
    /// documents if there are any.
    ///
    /// # Panics
    /// As [`Llama::loss`] and [`Llama::loss_packed`].
    #[track_caller]
    #[must_use]
    pub fn step_loss(&self, ids: &Var, targets: &Var, documents: Option<&PackedDocuments>) -> Loss {
        check_ids(ids, 0, documents.map_or(self.config.max_position_embeddings, |_| usize::MAX));
        let (loss, usage) = self.loss_checked(ids, targets, documents, self.stats_of_report());
        report(loss.into(), usage)
    }

    /// [`Llama::loss`] of ids whose shape was checked, within packed documents if there are any, and statistics of each block with
    /// experts.
    #[track_caller]
    fn loss_checked(
        &self,
        ids: &Var,
        targets: &Var,
        documents: Option<&PackedDocuments>,
        stats: UsageStats,
    ) -> (Var, Vec<ExpertUsage>) {
        let (logits, usage) = self.forward_checked(ids, documents, stats);
        let loss = cross_entropy(&logits, targets).mean();
        let loss = self.balance(ids, &usage).map_or(loss.clone(), |balance| loss.add(&balance));
        (loss, usage)
    }

    /// [`Llama::step_loss`] over the tokens whose target is not [`IGNORE_INDEX`](crate::loss::IGNORE_INDEX), a sum with
    /// the number of these tokens. The load-balancing loss counts all tokens; microbatches weigh in it by their numbers of targets.
    ///
    /// # Panics
    /// As [`Llama::loss`].
    #[track_caller]
    #[must_use]
    pub fn masked_loss(&self, ids: &Var, targets: &Var) -> Loss {
        check_ids(ids, 0, self.config.max_position_embeddings);
        let (logits, usage) = self.forward_checked(ids, None, self.stats_of_report());
        let loss = CrossEntropy::MASKED.loss(&logits, targets);
        let loss = self.balance(ids, &usage).map_or(loss.clone(), |balance| loss.add_mean(&balance));
        report(loss, usage)
    }

    /// The experts, if the config asks for the load-balancing loss.
    fn balanced_experts(&self) -> Option<&ExpertsConfig> {
        self.config.experts.as_ref().filter(|experts| experts.output_router_logits)
    }

    /// The load-balancing loss times its coefficient, if the config asks for it.
    fn balance(&self, ids: &Var, usage: &[ExpertUsage]) -> Option<Var> {
        let experts = self.balanced_experts().filter(|_| !usage.is_empty())?;
        let usage: Vec<[Var; 2]> =
            usage.iter().filter_map(|of| Some([of.tokens.clone(), of.scores.clone()?])).collect();
        let rows = ids.shape().iter().product::<usize>() * usage.len();
        Some(load_balancing_loss(&usage, rows).scale(experts.router_aux_loss_coef))
    }

    /// The statistics that the loss itself needs.
    fn stats_of_loss(&self) -> UsageStats {
        if self.balanced_experts().is_some() { UsageStats::TokensAndScores } else { UsageStats::None }
    }

    /// The statistics that the loss of a step needs, which reports the tokens of each expert.
    fn stats_of_report(&self) -> UsageStats {
        if self.balanced_experts().is_some() { UsageStats::TokensAndScores } else { UsageStats::Tokens }
    }
}

/// Adds the tokens of each expert to the auxiliary vectors of a loss.
#[track_caller]
fn report(loss: Loss, usage: Vec<ExpertUsage>) -> Loss {
    usage.into_iter().fold(loss, |loss, usage| loss.also_vector(usage.name, usage.tokens))
}

impl HfModel for Llama {
    fn model_config(&self) -> ModelConfig {
        ModelConfig::Llama(self.config.clone())
    }

    fn hf_name(&self, name: &str) -> String {
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
            ("gate.weight" | "e_score_correction_bias", None) if is_mixtral => {
                format!("{block}.block_sparse_moe.{part}")
            }
            _ => name.to_string(),
        }
    }

    /// Ignores the buffers in old files, and the output layer, which a tied model does not need.
    fn ignored_on_load(&self) -> &'static [&'static str] {
        &["*.rotary_emb.inv_freq", "lm_head.weight"]
    }
}
