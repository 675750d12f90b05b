//! Plans of the model families (GPT-2, Llama, BERT): how tensor parallelism shards each parameter.

use super::{Plan, RuleTarget};

/// Parameters of GPT-2 and their stored placements. Heads and hidden units are sharded, so a block costs two all-reduces forward and
/// two backward; the vocabulary is sharded, so no rank ever holds all logits.
const GPT2_TENSOR: [(&str, &str); 8] = [
    ("wte.weight", "tp@0"),
    ("h.*.attn.c_attn.weight", "tp@2"),
    ("h.*.attn.c_attn.bias", "tp@1"),
    ("h.*.attn.c_proj.weight", "tp@0"),
    ("h.*.mlp.c_fc.weight", "tp@1"),
    ("h.*.mlp.c_fc.bias", "tp@0"),
    ("h.*.mlp.c_proj.weight", "tp@0"),
    ("lm_head.weight", "tp@0"),
];

impl Plan {
    /// Plan of GPT-2 on axes `pp` (layers), `dp` (rows of the batch), `cp` (tokens of a row) and `tp` (heads, hidden units, vocabulary).
    #[must_use]
    pub fn gpt2() -> Plan {
        let start =
            Plan::data_parallel("dp").and(Plan::context_parallel("cp")).and(Plan::pipeline_parallel("pp"));
        // Optional rules: without blocks, or with a tied output layer, some of these parameters do not exist.
        GPT2_TENSOR.iter().fold(start, |plan, (pattern, placement)| {
            plan.rule(RuleTarget::Store, pattern, placement, *pattern != "wte.weight")
        })
    }
}

/// Parameters of the Llama family and their stored placements. Key heads, with their groups of query heads, and hidden units are
/// sharded, so a block costs two all-reduces forward and two backward; the vocabulary is sharded, so no rank ever holds all
/// logits. With fewer key heads than ranks, the query heads of each group are sharded, and every rank has all keys.
const LLAMA_TENSOR: [(&str, &str); 14] = [
    ("model.embed_tokens.weight", "tp@0"),
    ("*.self_attn.q_proj.weight", "tp@1|@2"),
    ("*.self_attn.q_proj.bias", "tp@0|@1"),
    ("*.self_attn.k_proj.weight", "tp@1|="),
    ("*.self_attn.k_proj.bias", "tp@0|="),
    ("*.self_attn.v_proj.weight", "tp@1|="),
    ("*.self_attn.v_proj.bias", "tp@0|="),
    ("*.self_attn.o_proj.weight", "tp@0|@1"),
    ("*.mlp.gate_proj.weight", "tp@1"),
    ("*.mlp.gate_proj.bias", "tp@0"),
    ("*.mlp.up_proj.weight", "tp@1"),
    ("*.mlp.up_proj.bias", "tp@0"),
    ("*.mlp.down_proj.weight", "tp@0"),
    ("lm_head.weight", "tp@0"),
];

/// Compute placements of keys and values. Key projections that every rank has are used as replicas: their gradients are then reduced
/// once per step, not once per activation.
const LLAMA_KEYS: [(&str, &str); 4] = [
    ("*.self_attn.k_proj.weight", "tp@1|~"),
    ("*.self_attn.k_proj.bias", "tp@0|~"),
    ("*.self_attn.v_proj.weight", "tp@1|~"),
    ("*.self_attn.v_proj.bias", "tp@0|~"),
];

/// Experts: hidden units are sharded, as those of a dense MLP.
const LLAMA_EXPERTS: [(&str, &str); 3] = [
    ("*.mlp.experts.gate_proj", "tp@2"),
    ("*.mlp.experts.up_proj", "tp@2"),
    ("*.mlp.experts.down_proj", "tp@1"),
];

impl Plan {
    /// [`Plan::llama`] for a mixture of experts: experts and rows of the batch are also sharded over `ep`, hidden units of experts over
    /// `tp`.
    #[doc(alias = "MoE")]
    #[doc(alias = "Mixtral")]
    #[must_use]
    pub fn llama_moe() -> Plan {
        // After the other batch axes, so that `dp` is the outermost axis of the rows.
        let plan = LLAMA_EXPERTS.iter().fold(Plan::llama(), |plan, (pattern, placement)| {
            plan.rule(RuleTarget::Store, pattern, placement, true)
        });
        plan.and(Plan::expert_parallel("ep"))
    }

    /// Plan of the Llama family on axes `pp` (layers), `dp` (rows of the batch), `cp` (tokens of a row) and `tp` (heads, hidden units,
    /// vocabulary).
    #[must_use]
    pub fn llama() -> Plan {
        // Optional rules: not every model has biases, blocks and an untied output layer.
        let start =
            Plan::data_parallel("dp").and(Plan::context_parallel("cp")).and(Plan::pipeline_parallel("pp"));
        let plan = LLAMA_TENSOR.iter().fold(start, |plan, (pattern, placement)| {
            plan.rule(RuleTarget::Store, pattern, placement, *pattern != "model.embed_tokens.weight")
        });
        LLAMA_KEYS
            .iter()
            .fold(plan, |plan, (pattern, placement)| plan.rule(RuleTarget::Compute, pattern, placement, true))
    }
}

/// Parameters of BERT and their stored placements. Heads and hidden units are sharded, so a block costs two all-reduces forward and
/// two backward; the vocabulary is sharded, so no rank ever holds all logits.
const BERT_TENSOR: [(&str, &str); 13] = [
    ("embeddings.word_embeddings.weight", "tp@0"),
    ("layer.*.attention.query.weight", "tp@1"),
    ("layer.*.attention.query.bias", "tp@0"),
    ("layer.*.attention.key.weight", "tp@1"),
    ("layer.*.attention.key.bias", "tp@0"),
    ("layer.*.attention.value.weight", "tp@1"),
    ("layer.*.attention.value.bias", "tp@0"),
    ("layer.*.attention.dense.weight", "tp@0"),
    ("layer.*.intermediate.weight", "tp@1"),
    ("layer.*.intermediate.bias", "tp@0"),
    ("layer.*.output.weight", "tp@0"),
    ("head.decoder.weight", "tp@0"),
    ("head.bias", "tp@0"),
];

impl Plan {
    /// Plan of BERT on axes `pp` (layers), `dp` (rows of the batch), `cp` (tokens of a row) and `tp` (heads, hidden units, vocabulary).
    #[must_use]
    pub fn bert() -> Plan {
        let start =
            Plan::data_parallel("dp").and(Plan::context_parallel("cp")).and(Plan::pipeline_parallel("pp"));
        // Optional rules: not every model has blocks and a head.
        BERT_TENSOR.iter().fold(start, |plan, (pattern, placement)| {
            plan.rule(RuleTarget::Store, pattern, placement, !pattern.starts_with("embeddings"))
        })
    }
}
