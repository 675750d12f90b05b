//! What a step reads.

use std::ops::Range;

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

impl Batch {
    /// The same rows of `seq` tokens, of each those at some places only.
    #[must_use]
    pub(crate) fn columns(self, seq: usize, columns: Range<usize>) -> Batch {
        if columns.len() == seq {
            return self;
        }
        let cut = |all: Vec<i64>| all.chunks(seq).flat_map(|row| &row[columns.clone()]).copied().collect();
        let Batch { inputs, targets, more } = self;
        Batch { inputs: cut(inputs), targets: cut(targets), more: more.into_iter().map(cut).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_by_hand() {
        let batch = || Batch { inputs: (0..6).collect(), targets: (1..7).collect(), more: vec![vec![9; 6]] };
        let cut = batch().columns(3, 1..3);
        assert_eq!(
            cut,
            Batch { inputs: vec![1, 2, 4, 5], targets: vec![2, 3, 5, 6], more: vec![vec![9; 4]] }
        );
        assert_eq!(batch().columns(3, 0..3), batch());
        assert_eq!(batch().columns(3, 2..2), Batch { more: vec![Vec::new()], ..Batch::default() });
    }
}
