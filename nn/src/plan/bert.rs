//! The splits of BERT: its table of parameters.

use super::{Plan, Subject};

/// Parameter and the state in which it is stored. Heads and hidden units are split, so a block needs two all-reduces
/// forward and two backward; the vocabulary is split, so no rank ever holds all scores.
const TENSOR: [(&str, &str); 13] = [
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
    /// BERT on axes `pp` (layers), `dp` (rows of the batch), `cp` (tokens of a row) and `tp` (heads, hidden units, vocabulary).
    #[must_use]
    pub fn bert() -> Plan {
        let start = Plan::data("dp").and(Plan::context("cp")).and(Plan::pipeline("pp"));
        // Blocks and heads are not in every model.
        TENSOR.iter().fold(start, |plan, (pattern, state)| {
            plan.rule(Subject::Store, pattern, state, !pattern.starts_with("embeddings"))
        })
    }
}
