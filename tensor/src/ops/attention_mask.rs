//! The mask of attention: which keys a query sees, by index or by document and position.

use super::embedding::check_index;
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::op::{DTypes, common_float};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::{DType, Kernel, Scalar};
use smallvec::SmallVec;
use std::ops::Range;

/// The keys that a query sees.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mask {
    /// All keys.
    None,
    /// Its own key and the keys before it.
    Causal,
    /// The last keys of these, at most so many; at least one.
    Window(usize),
}

/// Windows of more keys hide none: sums with it fit into an i64.
const WINDOW_MAX: usize = 1 << 62;

impl Mask {
    /// Whether some query of a range of indices sees some key of a range, where the mask counts by index.
    pub(super) fn sees(self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        if queries.is_empty() || keys.is_empty() {
            return false;
        }
        let is_before = keys.start < queries.end;
        match self {
            Mask::None => true,
            Mask::Causal => is_before,
            Mask::Window(window) => is_before && queries.start < keys.end.saturating_add(window - 1),
        }
    }
}

/// Segment ids and positions of all tokens of the rows of this rank, `[b, s]` each.
pub(super) type DocumentIds<'a> = [&'a LocalTensor; 2];

/// One launch of an attention kernel: some queries on some keys of a sequence.
#[derive(Clone, Debug)]
pub(super) struct AttentionLaunch<'a> {
    pub(super) rank: &'a Rank,
    pub(super) mask: Mask,
    /// The channels of a head.
    pub(super) c: usize,
    /// The indices of the queries and of the keys among all keys: the last query has the index of the last key.
    pub(super) queries: Range<i64>,
    pub(super) keys: Range<i64>,
    /// The documents of all keys, if rows are packed; contiguous.
    pub(super) documents: Option<DocumentIds<'a>>,
}

impl AttentionLaunch<'_> {
    /// Runs a kernel on tensors of five dims of queries and four of keys.
    ///
    /// # Errors
    /// The errors of the kernel.
    pub(super) fn run(
        &self,
        kernel: &Kernel,
        inputs: &[&LocalTensor],
        outputs: &mut [&mut LocalTensor],
    ) -> Result<()> {
        let (causal, window) = match self.mask {
            Mask::None => (0, 0),
            Mask::Causal => (1, 0),
            Mask::Window(keys) => (1, keys.min(WINDOW_MAX) as i64),
        };
        let [causal, start, window] = [causal, self.queries.start - self.keys.start, window].map(Scalar::Int);
        let scalars = [Scalar::Real(1.0 / (self.c as f64).sqrt()), causal, start, window];
        let ids =
            self.documents.map(|ids| [&self.queries, &self.keys].map(|range| ids.map(|x| narrow(x, range))));
        let ids: SmallVec<[LocalTensor; 4]> = ids.into_iter().flatten().flatten().collect();
        let inputs: SmallVec<[&LocalTensor; 10]> = inputs.iter().copied().chain(&ids).collect();
        launch(self.rank, kernel, &inputs, outputs, &scalars)
    }
}

/// Rejects documents of another number of tokens than there are keys, or fewer than there are queries.
///
/// # Errors
/// `Kind::Shape`.
pub(super) fn check_documents(op: &str, num_ids: usize, num_keys: usize, num_queries: usize) -> Result<()> {
    if num_ids == num_keys && num_queries <= num_keys {
        return Ok(());
    }
    let text =
        format!("{op}: documents of {num_ids} tokens do not fit {num_queries} queries on {num_keys} keys");
    let help = "give a segment id and a position for each key; the queries are the last tokens of the keys";
    Err(Error::new(Kind::Shape, text).detail("help", help))
}

/// The ids of a range of tokens.
fn narrow(ids: &LocalTensor, range: &Range<i64>) -> LocalTensor {
    ids.with_view(ids.view.narrow(1, range.start as usize, range.end as usize))
}

/// The dtypes of o and lse for q, k and v of one float dtype, then documents, i64.
///
/// # Errors
/// `Kind::DType`.
pub(super) fn forward_dtypes(inputs: &[DType]) -> Result<DTypes> {
    let (floats, ids) = inputs.split_at(3.min(inputs.len()));
    ids.iter().try_for_each(|dtype| check_index(*dtype))?;
    let dtype = common_float(floats)?;
    Ok(SmallVec::from_slice(&[dtype, dtype.accumulator()]))
}
