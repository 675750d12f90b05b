//! Packed documents: rows of several documents, each of which attends to itself only, and orders of tokens.

use crate::module;
use crate::module::activation_point::ActivationPoint;
use shardgrad_autograd::Var;

/// The documents of a batch whose rows hold several of them, for layers and models: what each token belongs to, `[b, t]` (i64).
///
/// A token attends to the tokens of its row with its segment id, in causal attention to those with positions up to its own. So
/// tokens may stand in any order ([`zigzag_order`]), and a row of documents gives what each document gives as a row of its own.
#[doc(alias = "position_ids")]
#[doc(alias = "cu_seqlens")]
#[doc(alias = "sequence packing")]
#[derive(Clone, Debug)]
pub struct PackedDocuments {
    /// The segment id of each token.
    pub segments: Var,
    /// The position of each token in its document, from 0.
    pub positions: Var,
}

module! {
    /// Activation points `segments` and `positions`, where a plan states the layout in which attention reads the documents of a batch.
    #[derive(Debug, Default)]
    pub struct DocumentPoints {
        segments: ActivationPoint,
        positions: ActivationPoint,
    }
}

impl DocumentPoints {
    /// Returns the documents in the layout that the plan states.
    ///
    /// # Panics
    /// Unwinds with `Kind::Layout` if the plan shards a dim that the documents do not have.
    #[track_caller]
    #[must_use]
    pub fn constrain(&self, documents: &PackedDocuments) -> PackedDocuments {
        PackedDocuments {
            segments: self.segments.constrain(&documents.segments),
            positions: self.positions.constrain(&documents.positions),
        }
    }
}

/// Returns the segment ids and the positions of a row of documents of these lengths.
///
/// ```
/// use shardgrad_nn::document_ids;
/// assert_eq!(document_ids(&[2, 3]), [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2]]);
/// ```
#[must_use]
pub fn document_ids(lengths: &[usize]) -> [Vec<i64>; 2] {
    let segments = lengths.iter().enumerate().flat_map(|(i, len)| std::iter::repeat_n(i as i64, *len));
    let positions = lengths.iter().flat_map(|len| 0..*len as i64);
    [segments.collect(), positions.collect()]
}

/// Returns an order of the tokens of a row that balances causal attention over `num_shards` shards: each shard holds a chunk from the
/// head of the row and its mirror image from the tail, so that each computes the same number of scores. Token i of the row comes
/// from `order[i]`; ids, targets, segment ids and positions must be in the same order.
///
/// ```
/// use shardgrad_nn::zigzag_order;
/// assert_eq!(zigzag_order(8, 2), [0, 1, 6, 7, 2, 3, 4, 5]);
/// ```
#[doc(alias = "headtail")]
#[doc(alias = "load balancing")]
#[doc(alias = "striped attention")]
#[must_use]
pub fn zigzag_order(num_tokens: usize, num_shards: usize) -> Vec<usize> {
    let num_chunks = 2 * num_shards.max(1);
    let start = |chunk: usize| (chunk as u128 * num_tokens as u128 / num_chunks as u128) as usize;
    let chunks = (0..num_chunks / 2).flat_map(|shard| [shard, num_chunks - 1 - shard]);
    chunks.flat_map(|chunk| start(chunk)..start(chunk + 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zigzag_order_is_a_permutation_that_balances_causal_work() {
        for (num_tokens, num_shards) in [(0, 3), (1, 4), (7, 2), (24, 3), (65, 4), (4096, 8)] {
            let order = zigzag_order(num_tokens, num_shards);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..num_tokens), "{num_tokens} over {num_shards}");
        }
        // A token at position p sees p + 1 keys.
        let work = |order: &[usize], shard: usize| {
            order[shard * 512..(shard + 1) * 512].iter().map(|p| p + 1).sum::<usize>()
        };
        let order = zigzag_order(4096, 8);
        assert!((0..8).all(|shard| work(&order, shard) == 4096 * 4097 / 2 / 8));
        let plain: Vec<usize> = (0..4096).collect();
        assert!(work(&plain, 7) > 14 * work(&plain, 0));
    }
}
