//! Plans of the model families (GPT-2, Llama, BERT): how tensor parallelism shards each parameter.
//!
//! A model of the family has some matrix of each kind (`Presence::OneOf`): where no rule of a kind matches, layers have other names and would
//! be copies on every rank without notice, so that the plan is refused. Biases and untied output layers are optional
//! ([`Model::unmatched_rules`](crate::Model::unmatched_rules) lists those that a model does not have).

use super::rule::Presence::{self, Optional};
use super::{Plan, RuleTarget};

/// Parameters of a model by pattern, their stored placements, and whether a model of the family has them.
type Table = [(&'static str, &'static str, Presence)];

impl Plan {
    /// Adds the rules of a table.
    fn with_table(self, table: &Table) -> Plan {
        table.iter().fold(self, |plan, (pattern, placement, presence)| {
            plan.rule(RuleTarget::Store, pattern, placement, presence.clone())
        })
    }
}

/// The axes of all families besides `tp`. `dp` is the outermost axis of the rows, before `fsdp` and `ep`.
fn family_axes() -> Plan {
    let rows = Plan::data_parallel("dp").and(Plan::fsdp("fsdp"));
    rows.and(Plan::context_parallel("cp")).and(Plan::pipeline_parallel("pp"))
}

/// Parameters of GPT-2 and their stored placements. Heads and hidden units are sharded, so a block costs two all-reduces forward and
/// two backward; the vocabulary is sharded, so no rank ever holds all logits.
const GPT2_TENSOR: [(&str, &str, Presence); 8] = [
    ("wte.weight", "tp@0", Presence::one_of("token embedding")),
    ("h.*.attn.c_attn.weight", "tp@2", Presence::one_of("attention projections")),
    ("h.*.attn.c_attn.bias", "tp@1", Optional),
    ("h.*.attn.c_proj.weight", "tp@0", Presence::one_of("output projections")),
    ("h.*.mlp.c_fc.weight", "tp@1", Presence::one_of("first layers of MLPs")),
    ("h.*.mlp.c_fc.bias", "tp@0", Optional),
    ("h.*.mlp.c_proj.weight", "tp@0", Presence::one_of("second layers of MLPs")),
    ("lm_head.weight", "tp@0", Optional),
];

impl Plan {
    /// Plan of GPT-2 on axes `pp` (layers), `dp` (rows of the batch), `fsdp` (rows, with sharded storage), `cp` (tokens of a row) and
    /// `tp` (heads, hidden units, vocabulary).
    #[must_use]
    pub fn gpt2() -> Plan {
        family_axes().with_table(&GPT2_TENSOR)
    }
}

/// Parameters of the Llama family and their stored placements. Key heads, with their groups of query heads, and hidden units are
/// sharded, so a block costs two all-reduces forward and two backward; the vocabulary is sharded, so no rank ever holds all
/// logits. With fewer key heads than ranks, the query heads of each group are sharded, and every rank has all keys.
const LLAMA_TENSOR: [(&str, &str, Presence); 14] = [
    ("model.embed_tokens.weight", "tp@0", Presence::one_of("token embedding")),
    ("*.self_attn.q_proj.weight", "tp@1|@2", Presence::one_of("query projections")),
    ("*.self_attn.q_proj.bias", "tp@0|@1", Optional),
    ("*.self_attn.k_proj.weight", "tp@1|=", Presence::one_of("key projections")),
    ("*.self_attn.k_proj.bias", "tp@0|=", Optional),
    ("*.self_attn.v_proj.weight", "tp@1|=", Presence::one_of("value projections")),
    ("*.self_attn.v_proj.bias", "tp@0|=", Optional),
    ("*.self_attn.o_proj.weight", "tp@0|@1", Presence::one_of("output projections")),
    ("*.mlp.gate_proj.weight", "tp@1", Presence::one_of("gate projections")),
    ("*.mlp.gate_proj.bias", "tp@0", Optional),
    ("*.mlp.up_proj.weight", "tp@1", Presence::one_of("up projections")),
    ("*.mlp.up_proj.bias", "tp@0", Optional),
    ("*.mlp.down_proj.weight", "tp@0", Presence::one_of("down projections")),
    ("lm_head.weight", "tp@0", Optional),
];

/// Compute placements of keys and values. Key projections that every rank has are used as replicas: their gradients are then reduced
/// once per step, not once per activation.
const LLAMA_KEYS: [(&str, &str); 4] = [
    ("*.self_attn.k_proj.weight", "tp@1|~"),
    ("*.self_attn.k_proj.bias", "tp@0|~"),
    ("*.self_attn.v_proj.weight", "tp@1|~"),
    ("*.self_attn.v_proj.bias", "tp@0|~"),
];

/// Experts, also those that all tokens use: hidden units are sharded, as those of a dense MLP.
const LLAMA_EXPERTS: [(&str, &str, Presence); 6] = [
    ("*.mlp.experts.gate_proj", "tp@2", Presence::one_of("gate projections")),
    ("*.mlp.experts.up_proj", "tp@2", Presence::one_of("up projections")),
    ("*.mlp.experts.down_proj", "tp@1", Presence::one_of("down projections")),
    ("*.mlp.shared_experts.gate_proj.weight", "tp@1", Optional),
    ("*.mlp.shared_experts.up_proj.weight", "tp@1", Optional),
    ("*.mlp.shared_experts.down_proj.weight", "tp@0", Optional),
];

impl Plan {
    /// [`Plan::llama`] for a mixture of experts: experts and rows of the batch are also sharded over `ep`, hidden units of experts over
    /// `tp`.
    #[doc(alias = "MoE")]
    #[doc(alias = "Mixtral")]
    #[must_use]
    pub fn llama_moe() -> Plan {
        Plan::llama().with_experts()
    }

    /// The plan of a dense model of the family, for one with experts.
    pub(crate) fn with_experts(self) -> Plan {
        // `ep` after the other batch axes, because it leaves the rows first.
        self.with_table(&LLAMA_EXPERTS).and(Plan::expert_parallel("ep"))
    }

    /// Plan of the Llama family on axes `pp` (layers), `dp` (rows of the batch), `fsdp` (rows, with sharded storage), `cp` (tokens of a
    /// row) and `tp` (heads, hidden units, vocabulary).
    ///
    /// [`LanguageModel::plan`](crate::LanguageModel::plan) also knows the heads of a model. Without them, context parallelism by exchange is
    /// an error of layouts where `tp` has more ranks than the model has key heads, and its groups are small.
    #[must_use]
    pub fn llama() -> Plan {
        Plan::llama_with_keys(|placement| placement)
    }

    /// [`Plan::llama`] of a model that has no more query heads in a group than groups. Its queries are sharded by groups on any number
    /// of ranks, and so are its keys: copies would be sharded unlike the queries where an axis of tokens exchanges heads.
    pub(crate) fn llama_of_small_groups() -> Plan {
        Plan::llama_with_keys(|placement| placement.split('|').next().unwrap_or(placement))
    }

    /// The plan of the family with other placements of keys and values.
    fn llama_with_keys(placement_of_keys: fn(&'static str) -> &'static str) -> Plan {
        let is_of_keys = |pattern: &str| LLAMA_KEYS.iter().any(|(keys, _)| *keys == pattern);
        let plan = LLAMA_TENSOR.iter().fold(family_axes(), |plan, (pattern, placement, presence)| {
            let placement = if is_of_keys(pattern) { placement_of_keys(placement) } else { placement };
            plan.rule(RuleTarget::Store, pattern, placement, presence.clone())
        });
        LLAMA_KEYS.iter().fold(plan, |plan, (pattern, placement)| {
            plan.rule(RuleTarget::Compute, pattern, placement_of_keys(placement), Optional)
        })
    }
}

/// Parameters of BERT and their stored placements. Heads and hidden units are sharded, so a block costs two all-reduces forward and
/// two backward; the vocabulary is sharded, so no rank ever holds all logits.
const BERT_TENSOR: [(&str, &str, Presence); 13] = [
    ("embeddings.word_embeddings.weight", "tp@0", Presence::one_of("token embedding")),
    ("layer.*.attention.query.weight", "tp@1", Presence::one_of("query projections")),
    ("layer.*.attention.query.bias", "tp@0", Optional),
    ("layer.*.attention.key.weight", "tp@1", Presence::one_of("key projections")),
    ("layer.*.attention.key.bias", "tp@0", Optional),
    ("layer.*.attention.value.weight", "tp@1", Presence::one_of("value projections")),
    ("layer.*.attention.value.bias", "tp@0", Optional),
    ("layer.*.attention.dense.weight", "tp@0", Presence::one_of("output projections")),
    ("layer.*.intermediate.weight", "tp@1", Presence::one_of("first layers of MLPs")),
    ("layer.*.intermediate.bias", "tp@0", Optional),
    ("layer.*.output.weight", "tp@0", Presence::one_of("second layers of MLPs")),
    ("head.decoder.weight", "tp@0", Optional),
    ("head.bias", "tp@0", Optional),
];

impl Plan {
    /// Plan of BERT on axes `pp` (layers), `dp` (rows of the batch), `fsdp` (rows, with sharded storage), `cp` (tokens of a row) and
    /// `tp` (heads, hidden units, vocabulary).
    #[must_use]
    pub fn bert() -> Plan {
        family_axes().with_table(&BERT_TENSOR)
    }
}
