//! The splits of the Llama family: its table of parameters.

use super::{Plan, Subject};

/// Parameter and the state in which it is stored. Key heads, with the query heads that they serve, and hidden units are
/// split, so a block needs two all-reduces forward and two backward; the vocabulary is split, so no rank ever holds all
/// logits. Where there are fewer key heads than ranks, the query heads of each are split, and every rank has all keys.
const TENSOR: [(&str, &str); 14] = [
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

/// Keys that every rank has are computed by each for itself: their gradients are then summed once a step, and not for
/// every activation.
const KEYS: [(&str, &str); 4] = [
    ("*.self_attn.k_proj.weight", "tp@1|~"),
    ("*.self_attn.k_proj.bias", "tp@0|~"),
    ("*.self_attn.v_proj.weight", "tp@1|~"),
    ("*.self_attn.v_proj.bias", "tp@0|~"),
];

/// Experts: their hidden units are split as those of a feed-forward half that all tokens pass.
const EXPERTS: [(&str, &str); 3] = [
    ("*.mlp.experts.gate_proj", "tp@2"),
    ("*.mlp.experts.up_proj", "tp@2"),
    ("*.mlp.experts.down_proj", "tp@1"),
];

impl Plan {
    /// [`Plan::llama`] of a member with experts, which are split over an axis `ep`, as are the rows of the batch; so their hidden
    /// units are over `tp`.
    #[must_use]
    pub fn llama_of_experts() -> Plan {
        // Behind rows and tokens, so that rows are split over `dp` first.
        let plan = EXPERTS
            .iter()
            .fold(Plan::llama(), |plan, (pattern, state)| plan.rule(Subject::Store, pattern, state, true));
        plan.and(Plan::experts("ep"))
    }

    /// The Llama family on axes `pp` (layers), `dp` (rows of the batch), `cp` (tokens of a row) and `tp` (heads, hidden units,
    /// vocabulary).
    #[must_use]
    pub fn llama() -> Plan {
        // Biases, blocks and a head of its own are not in every model.
        let start = Plan::data("dp").and(Plan::context("cp")).and(Plan::pipeline("pp"));
        let plan = TENSOR.iter().fold(start, |plan, (pattern, state)| {
            plan.rule(Subject::Store, pattern, state, *pattern != "model.embed_tokens.weight")
        });
        KEYS.iter().fold(plan, |plan, (pattern, state)| plan.rule(Subject::Compute, pattern, state, true))
    }
}
