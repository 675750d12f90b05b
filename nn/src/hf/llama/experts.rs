//! How a config file tells of experts.

use super::{LlamaConfig, LlamaKind};
use crate::hf::fields::Faults;
use crate::hf::fit::Claim;
use serde_json::{Map, Value, json};

/// The field in which releases of transformers from 5 on tell the number of experts, of all members.
const ANY_FIELD: &str = "num_local_experts";

/// The experts of a model, and which of its blocks have them.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// The number of experts of a block.
    pub num_experts: usize,
    /// How many of them each token passes.
    pub num_experts_per_tok: usize,
    /// The width of the hidden layer of each.
    pub moe_intermediate_size: usize,
    /// Whether the weights of the experts that a token passes are made to add up to one.
    pub norm_topk_prob: bool,
    /// Every block whose number, counted from 1, this divides has experts.
    pub decoder_sparse_step: usize,
    /// Blocks, counted from 0, that have none all the same.
    pub mlp_only_layers: Vec<usize>,
    /// The weight of the loss that tells how unevenly experts are used.
    pub router_aux_loss_coef: f64,
    /// Whether that loss is part of the loss in training.
    pub output_router_logits: bool,
}

impl ExpertsConfig {
    /// Experts in all blocks, with a loss of how they are used that is not part of the loss in training.
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
        }
    }

    /// Whether a block, counted from 0, has experts.
    #[must_use]
    pub fn has(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.decoder_sparse_step) && !self.mlp_only_layers.contains(&layer)
    }
}

impl LlamaKind {
    /// Whether blocks of this member have experts.
    #[must_use]
    pub fn has_experts(self) -> bool {
        matches!(self, LlamaKind::Mixtral | LlamaKind::Qwen3Moe)
    }

    /// The field that tells the number of experts.
    pub(super) fn experts_field(self) -> &'static str {
        if self == LlamaKind::Mixtral { ANY_FIELD } else { "num_experts" }
    }
}

impl LlamaConfig {
    /// The matrices by which the widths of feed-forward halves are known, and the number of experts.
    pub(super) fn hidden_claims(&self, width: (&'static str, usize)) -> Vec<Claim> {
        let units = ("intermediate_size", self.intermediate_size);
        let Some(experts) = self.experts_of(0) else {
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

/// What the fields of a file tell of the experts of a member that has them.
pub(super) fn read(fields: &Map<String, Value>, config: &LlamaConfig, faults: &mut Faults) -> ExpertsConfig {
    let number = |name: &str| fields.get(name).and_then(Value::as_u64);
    let is_set = |name: &str| fields.get(name).and_then(Value::as_bool).unwrap_or(false);
    let is_mixtral = config.kind == LlamaKind::Mixtral;
    let mut experts = ExpertsConfig {
        num_experts: faults.extent(
            config.kind.experts_field(),
            number(config.kind.experts_field()).or_else(|| number(ANY_FIELD)),
            None,
        ),
        num_experts_per_tok: faults.extent("num_experts_per_tok", number("num_experts_per_tok"), None),
        moe_intermediate_size: config.intermediate_size,
        output_router_logits: is_set("output_router_logits"),
        ..ExpertsConfig::new(0, 0, 0)
    };
    let coefficient = fields.get("router_aux_loss_coef").and_then(Value::as_f64);
    experts.router_aux_loss_coef = faults.number("router_aux_loss_coef", coefficient, 0.001, 1e3);
    if !is_mixtral {
        experts.moe_intermediate_size =
            faults.extent("moe_intermediate_size", number("moe_intermediate_size"), None);
        experts.norm_topk_prob = is_set("norm_topk_prob");
        experts.decoder_sparse_step =
            faults.extent("decoder_sparse_step", number("decoder_sparse_step"), Some(1));
        let layers = fields.get("mlp_only_layers").and_then(Value::as_array);
        let layers = layers.into_iter().flatten().filter_map(Value::as_u64);
        experts.mlp_only_layers = layers.filter_map(|layer| usize::try_from(layer).ok()).collect();
    }
    if experts.num_experts_per_tok > experts.num_experts {
        let (taken, all) = (experts.num_experts_per_tok, experts.num_experts);
        faults.add(format!("`num_experts_per_tok` is {taken} of {all} experts"));
    }
    if is_mixtral && fields.get("router_jitter_noise").and_then(Value::as_f64).is_some_and(|x| x != 0.0) {
        faults.add("`router_jitter_noise` is not 0; scores are not made noisy".to_string());
    }
    experts
}

/// Puts the fields of a config's experts among others.
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
    if config.kind == LlamaKind::Qwen3Moe {
        value["moe_intermediate_size"] = json!(experts.moe_intermediate_size);
        value["norm_topk_prob"] = json!(experts.norm_topk_prob);
        value["decoder_sparse_step"] = json!(experts.decoder_sparse_step);
        value["mlp_only_layers"] = json!(experts.mlp_only_layers);
    }
}
