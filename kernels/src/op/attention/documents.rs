//! The mask of packed documents: a query sees the keys of its own document only, by position if causal.

use super::Problem;
use super::tile::Pairs;
use crate::dtype::Real;
use crate::kernel::{Arg, Scalar};
use std::ops::Range;

/// The segment ids and positions of the queries and keys of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Documents<'a> {
    /// Segment ids and positions of queries (b, t), then of keys (b, s).
    ids: [&'a Arg<'a>; 4],
    /// The keys that a query sees up to its own position; `None` if it sees its whole document.
    window: Option<i64>,
}

/// The documents of one batch element: segment ids and positions, one number per token.
#[derive(Clone, Copy, Debug)]
pub(super) struct DocumentRow<'a> {
    query_segments: &'a [i64],
    query_positions: &'a [i64],
    key_segments: &'a [i64],
    key_positions: &'a [i64],
    window: Option<i64>,
}

impl<'a> Documents<'a> {
    /// The documents of a launch whose operands `rest` follow those of a launch without documents; `None` without documents.
    pub(super) fn new(rest: &'a [Arg<'a>], scalars: &[Scalar]) -> Option<Documents<'a>> {
        if rest.is_empty() {
            return None;
        }
        let [a, b, c, d] = rest else { panic!("the contract asks for four operands of documents") };
        let window = match (scalars[1].int(), scalars[3].int()) {
            (0, _) => None,
            (_, 0) => Some(i64::MAX),
            (_, window) => Some(window),
        };
        Some(Documents { ids: [a, b, c, d], window })
    }

    /// The documents of batch element `b`.
    pub(super) fn row(&self, b: usize) -> DocumentRow<'a> {
        let row = |arg: &'a Arg<'a>| -> &'a [i64] {
            let (shape, strides) = (&arg.view.shape, &arg.view.strides);
            debug_assert!(strides[1] == 1 || shape[1] <= 1, "the contract asks for contiguous rows");
            match shape[1] {
                0 => &[],
                len => &arg.buffer.as_slice()[arg.view.offset + b * strides[0]..][..len],
            }
        };
        let [query_segments, query_positions, key_segments, key_positions] = self.ids.map(row);
        DocumentRow { query_segments, query_positions, key_segments, key_positions, window: self.window }
    }
}

/// The smallest and the largest of some numbers.
fn bounds(numbers: &[i64]) -> [i64; 2] {
    numbers.iter().fold([i64::MAX, i64::MIN], |[low, high], &n| [low.min(n), high.max(n)])
}

impl DocumentRow<'_> {
    /// Whether query i sees key j.
    #[inline(always)]
    pub(super) fn sees(&self, i: usize, j: usize) -> bool {
        let distance = self.query_positions[i].wrapping_sub(self.key_positions[j]);
        self.query_segments[i] == self.key_segments[j]
            && self.window.is_none_or(|window| (0..window).contains(&distance))
    }

    /// Whether a query of a range may see a key of a range; never false if one does.
    fn may_see(&self, queries: Range<usize>, keys: Range<usize>) -> bool {
        let [q_low, q_high] = bounds(&self.query_segments[queries.clone()]);
        let [k_low, k_high] = bounds(&self.key_segments[keys.clone()]);
        if q_high < k_low || k_high < q_low {
            return false;
        }
        let is_one_document = [q_high, k_low, k_high] == [q_low; 3];
        let Some(window) = self.window.filter(|_| is_one_document) else { return true };
        let [q_first, q_last] = bounds(&self.query_positions[queries]);
        let [k_first, k_last] = bounds(&self.key_positions[keys]);
        k_first <= q_last && q_first.saturating_sub(k_last) < window
    }

    /// Whether a query of a tile may see a key of the tile.
    fn may_see_in(&self, pairs: &Pairs) -> bool {
        let Pairs { first, queries, first_key, keys, .. } = *pairs;
        self.may_see(first..first + queries, first_key..first_key + keys)
    }

    /// Replaces the numbers of the queries of a tile that do not see its key j: `row` has one number per query.
    #[inline(always)]
    pub(super) fn replace_hidden<R: Real>(
        &self,
        pairs: &Pairs,
        j: usize,
        row: &mut [R],
        value: impl Fn(usize) -> R,
    ) {
        let key = pairs.first_key + j;
        for (i, number) in row[..pairs.queries].iter_mut().enumerate() {
            if !self.sees(pairs.first + i, key) {
                *number = value(i);
            }
        }
    }
}

/// Iterates over the tiles of keys that queries from `first` on see, without those of other documents.
pub(super) fn visible_tiles(
    problem: Problem,
    documents: Option<&DocumentRow<'_>>,
    [first, queries]: [usize; 2],
) -> impl Iterator<Item = Pairs> {
    Pairs::of(problem, first, queries)
        .filter(move |pairs| documents.is_none_or(|documents| documents.may_see_in(pairs)))
}

#[cfg(test)]
mod tests {
    use super::super::tile::{KEYS, QUERIES};
    use super::*;

    /// The tiles of scores that each rank of a ring computes for a causal row whose shards hold tokens of these positions.
    fn tiles_per_rank(shards: &[Vec<i64>]) -> Vec<usize> {
        let tiles = |queries: &Vec<i64>, keys: &Vec<i64>| {
            let segments = vec![0; queries.len()];
            let row = DocumentRow {
                query_segments: &segments,
                query_positions: queries,
                key_segments: &segments,
                key_positions: keys,
                window: Some(i64::MAX),
            };
            let (t, s) = (queries.len(), keys.len());
            let problem = Problem {
                b: 1,
                t,
                g: 1,
                r: 1,
                c: 8,
                s,
                scale: 1.0,
                causal: false,
                t_start: 0,
                window: usize::MAX / 4,
            };
            let of_block = |first| visible_tiles(problem, Some(&row), [first, QUERIES]).count();
            (0..t).step_by(QUERIES).map(of_block).sum::<usize>()
        };
        shards.iter().map(|queries| shards.iter().map(|keys| tiles(queries, keys)).sum()).collect()
    }

    #[test]
    fn tiles_that_no_query_sees_are_skipped_so_that_paired_chunks_balance_a_ring() {
        let chunk = |i: usize| (i * QUERIES) as i64..((i + 1) * QUERIES) as i64;
        let shards =
            |pairs: [[usize; 2]; 4]| pairs.map(|pair| pair.into_iter().flat_map(chunk).collect::<Vec<i64>>());
        let per_chunk = QUERIES / KEYS;
        // Chunk i sees i + 1 chunks.
        let zigzag = tiles_per_rank(&shards([[0, 7], [1, 6], [2, 5], [3, 4]]));
        assert_eq!(zigzag, [9 * per_chunk; 4]);
        let in_order = tiles_per_rank(&shards([[0, 1], [2, 3], [4, 5], [6, 7]]));
        assert_eq!(in_order, [3, 7, 11, 15].map(|chunks| chunks * per_chunk));
    }
}
