//! Mixture-of-experts fields of Llama family configs.

use super::{LlamaConfig, LlamaKind};
use crate::checkpoint::hf::config_check::ExpectedShape;
use crate::checkpoint::hf::config_fields::ConfigErrors;
use serde_json::{Map, Value, json};

/// The field of the number of experts in transformers 5 and later, for all members.
const ANY_FIELD: &str = "num_local_experts";

/// The field of the update rate of the biases that balance experts.
const BIAS_RATE_FIELD: &str = "router_bias_update_rate";

/// The experts of a model, and which of its blocks have experts.
#[doc(alias = "MoE")]
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// The number of experts per block.
    pub num_experts: usize,
    /// The number of experts per token (top-k).
    pub num_experts_per_tok: usize,
    /// The number of hidden units per expert.
    pub moe_intermediate_size: usize,
    /// Whether the weights of a token's experts are renormalized to sum to one.
    pub norm_topk_prob: bool,
    /// Every n-th block has experts: those whose number, counted from 1, is a multiple of this.
    pub decoder_sparse_step: usize,
    /// Blocks, counted from 0, that have a dense MLP nevertheless.
    pub mlp_only_layers: Vec<usize>,
    /// The weight of the load-balancing loss.
    pub router_aux_loss_coef: f64,
    /// Whether the training loss includes the load-balancing loss.
    pub output_router_logits: bool,
    /// By how much a training step moves the bias of each expert that balances the load
    /// ([`MixtureOfExperts::with_bias_balancing`](crate::MixtureOfExperts::with_bias_balancing)); 0 for no bias. A field of this library:
    /// transformers selects experts without the bias.
    #[doc(alias = "moe_router_bias_update_rate")]
    pub router_bias_update_rate: f64,
}

impl ExpertsConfig {
    /// Experts in all blocks, without the load-balancing loss in training.
    #[must_use]
    pub fn new(
        num_experts: usize,
        num_experts_per_tok: usize,
        moe_intermediate_size: usize,
    ) -> ExpertsConfig {
        ExpertsConfig {
            num_experts,
            num_experts_per_tok,
            moe_intermediate_size,
            norm_topk_prob: true,
            decoder_sparse_step: 1,
            mlp_only_layers: Vec::new(),
            router_aux_loss_coef: 0.001,
            output_router_logits: false,
            router_bias_update_rate: 0.0,
        }
    }

    /// Whether a block, counted from 0, has experts.
    #[must_use]
    pub fn is_moe_layer(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.decoder_sparse_step) && !self.mlp_only_layers.contains(&layer)
    }
}

impl LlamaKind {
    /// Whether models of this member have experts.
    #[must_use]
    pub fn has_experts(self) -> bool {
        matches!(self, LlamaKind::Mixtral | LlamaKind::Qwen3Moe)
    }

    /// The field of the number of experts.
    pub(super) fn experts_field(self) -> &'static str {
        if self == LlamaKind::Mixtral { ANY_FIELD } else { "num_experts" }
    }
}

impl LlamaConfig {
    /// The expected shapes of the MLP or the experts of the first block.
    pub(super) fn mlp_shapes(&self, width: (&'static str, usize)) -> Vec<ExpectedShape> {
        let units = ("intermediate_size", self.intermediate_size);
        let Some(experts) = self.layer_experts(0) else {
            return vec![("model.layers.0.mlp.gate_proj.weight", [units, width])];
        };
        let count = (self.kind.experts_field(), experts.num_experts);
        match self.kind {
            LlamaKind::Mixtral => vec![
                ("model.layers.0.block_sparse_moe.gate.weight", [count, width]),
                ("model.layers.0.block_sparse_moe.experts.0.w1.weight", [units, width]),
            ],
            _ => vec![
                ("model.layers.0.mlp.gate.weight", [count, width]),
                (
                    "model.layers.0.mlp.experts.0.gate_proj.weight",
                    [("moe_intermediate_size", experts.moe_intermediate_size), width],
                ),
            ],
        }
    }
}

/// Reads the experts from the fields of a file.
pub(super) fn read(
    fields: &Map<String, Value>,
    config: &LlamaConfig,
    errors: &mut ConfigErrors,
) -> ExpertsConfig {
    let number = |name: &str| fields.get(name).and_then(Value::as_u64);
    let is_set = |name: &str| fields.get(name).and_then(Value::as_bool).unwrap_or(false);
    let is_mixtral = config.kind == LlamaKind::Mixtral;
    let mut experts = ExpertsConfig {
        num_experts: errors.extent(
            config.kind.experts_field(),
            number(config.kind.experts_field()).or_else(|| number(ANY_FIELD)),
            None,
        ),
        num_experts_per_tok: errors.extent("num_experts_per_tok", number("num_experts_per_tok"), None),
        moe_intermediate_size: config.intermediate_size,
        output_router_logits: is_set("output_router_logits"),
        ..ExpertsConfig::new(0, 0, 0)
    };
    let coefficient = fields.get("router_aux_loss_coef").and_then(Value::as_f64);
    experts.router_aux_loss_coef = errors.number("router_aux_loss_coef", coefficient, 0.001, 1e3);
    let rate = fields.get(BIAS_RATE_FIELD).and_then(Value::as_f64);
    experts.router_bias_update_rate = errors.number(BIAS_RATE_FIELD, rate, 0.0, 1e3);
    if !is_mixtral {
        experts.moe_intermediate_size =
            errors.extent("moe_intermediate_size", number("moe_intermediate_size"), None);
        experts.norm_topk_prob = is_set("norm_topk_prob");
        experts.decoder_sparse_step =
            errors.extent("decoder_sparse_step", number("decoder_sparse_step"), Some(1));
        let layers = fields.get("mlp_only_layers").and_then(Value::as_array);
        let layers = layers.into_iter().flatten().filter_map(Value::as_u64);
        experts.mlp_only_layers = layers.filter_map(|layer| usize::try_from(layer).ok()).collect();
    }
    if experts.num_experts_per_tok > experts.num_experts {
        let (top_k, all) = (experts.num_experts_per_tok, experts.num_experts);
        errors.add(format!("`num_experts_per_tok` is {top_k}, but there are {all} experts"));
    }
    if is_mixtral && fields.get("router_jitter_noise").and_then(Value::as_f64).is_some_and(|x| x != 0.0) {
        errors.add("`router_jitter_noise` is not 0; router noise is not supported".to_string());
    }
    experts
}

/// Writes the fields of the experts into a config file.
pub(super) fn write(config: &LlamaConfig, value: &mut Value) {
    let Some(experts) = config.experts.as_ref().filter(|_| config.kind.has_experts()) else { return };
    let own = config.kind.experts_field();
    let mut names = vec![own, ANY_FIELD];
    names.retain(|name| value.get(name).is_some());
    if names.is_empty() {
        names.push(own);
    }
    names.iter().for_each(|name| value[name] = json!(experts.num_experts));
    value["num_experts_per_tok"] = json!(experts.num_experts_per_tok);
    value["router_aux_loss_coef"] = json!(experts.router_aux_loss_coef);
    value["output_router_logits"] = json!(experts.output_router_logits);
    match (experts.router_bias_update_rate, value.as_object_mut()) {
        (0.0, Some(fields)) => drop(fields.remove(BIAS_RATE_FIELD)),
        (rate, _) => value[BIAS_RATE_FIELD] = json!(rate),
    }
    if config.kind == LlamaKind::Qwen3Moe {
        value["moe_intermediate_size"] = json!(experts.moe_intermediate_size);
        value["norm_topk_prob"] = json!(experts.norm_topk_prob);
        value["decoder_sparse_step"] = json!(experts.decoder_sparse_step);
        value["mlp_only_layers"] = json!(experts.mlp_only_layers);
    }
}
