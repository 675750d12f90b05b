//! The splits of GPT-2: its table of parameters.

use super::{Plan, Subject};

/// Parameter and the state in which it is stored. Heads and hidden units are split, so a block needs two all-reduces
/// forward and two backward; the vocabulary is split, so no rank ever holds all logits.
const TENSOR: [(&str, &str); 8] = [
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
    /// GPT-2 on axes `pp` (layers), `dp` (rows of the batch), `cp` (tokens of a row) and `tp` (heads, hidden units, vocabulary).
    #[must_use]
    pub fn gpt2() -> Plan {
        let start = Plan::data("dp").and(Plan::context("cp")).and(Plan::pipeline("pp"));
        // Without blocks, or with a tied head, some of these parameters do not exist.
        TENSOR.iter().fold(start, |plan, (pattern, state)| {
            plan.rule(Subject::Store, pattern, state, *pattern != "wte.weight")
        })
    }
}
