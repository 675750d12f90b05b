//! What a step reads.

/// Rows of numbers, row major.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    /// i64 [rows, seq]: what the model reads.
    pub(crate) inputs: Vec<i64>,
    /// i64 [rows, seq]: the token after each of them, or the one that is asked for in its place.
    pub(crate) targets: Vec<i64>,
    /// i64 [rows, seq] each: what else is known of the inputs.
    pub(crate) more: Vec<Vec<i64>>,
}
