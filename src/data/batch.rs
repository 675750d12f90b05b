//! A batch of token rows.

use std::ops::Range;

/// Rows of token ids, row-major.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    /// i64 [rows, seq]: input token ids.
    pub(crate) inputs: Vec<i64>,
    /// i64 [rows, seq]: target token ids: the next tokens, or the labels of an encoder.
    pub(crate) targets: Vec<i64>,
    /// i64 [rows, seq] each: attention mask and token types of an encoder; segment ids and positions of tokens that are not in the order
    /// of the row; or empty.
    pub(crate) extra: Vec<Vec<i64>>,
}

impl Batch {
    /// Keeps a range of columns of rows of `seq` tokens (context parallelism).
    #[must_use]
    pub(crate) fn columns(self, seq: usize, columns: Range<usize>) -> Batch {
        if columns.len() == seq {
            return self;
        }
        let cut = |all: Vec<i64>| all.chunks(seq).flat_map(|row| &row[columns.clone()]).copied().collect();
        let Batch { inputs, targets, extra } = self;
        Batch { inputs: cut(inputs), targets: cut(targets), extra: extra.into_iter().map(cut).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_selects_token_ranges() {
        let batch = || Batch { inputs: (0..6).collect(), targets: (1..7).collect(), extra: vec![vec![9; 6]] };
        let cut = batch().columns(3, 1..3);
        assert_eq!(
            cut,
            Batch { inputs: vec![1, 2, 4, 5], targets: vec![2, 3, 5, 6], extra: vec![vec![9; 4]] }
        );
        assert_eq!(batch().columns(3, 0..3), batch());
        assert_eq!(batch().columns(3, 2..2), Batch { extra: vec![Vec::new()], ..Batch::default() });
    }
}
