//! Training a language model: what a run is made of, apart from how it was asked for.

mod session;
mod validate;

pub(crate) use session::Session;
pub(crate) use validate::mean_loss;

use crate::data::Batch;
use shardgrad::nn::optim::Schedule;
use shardgrad::prelude::*;
use std::ops::Range;

/// Everything that decides the numbers of a run.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    pub(crate) steps: usize,
    /// Sequences in the global batch.
    pub(crate) batch: usize,
    /// Tokens in a sequence.
    pub(crate) seq: usize,
    /// Rounds that a step is cut into.
    pub(crate) microbatches: usize,
    pub(crate) schedule: Schedule,
    pub(crate) optim: AdamW,
    /// Bound of the global gradient norm; `None` does not clip.
    pub(crate) clip: Option<f64>,
    pub(crate) seed: u64,
    pub(crate) dtype: DType,
}

/// Inputs and targets `[rows, seq]`, split over the batch axes; every rank reads its own rows only. `read` gives the
/// tokens of a range of rows.
pub(crate) fn batch(
    rank: &Rank,
    plan: &Plan,
    shape: [usize; 2],
    read: impl FnOnce(Range<usize>) -> Result<Batch>,
) -> Result<(Tensor, Tensor)> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &shape)?;
    let own = read(layout.range(0, rank.coordinates()))?;
    Ok((Tensor::from_local(rank, &layout, &own.inputs)?, Tensor::from_local(rank, &layout, &own.targets)?))
}

/// This rank's part of a scalar, such that the parts of all ranks add up to it.
pub(crate) fn share(scalar: &Tensor) -> Result<f64> {
    let (layout, rank) = (scalar.layout(), scalar.rank());
    let counts = |a| layout.state(a) == State::Partial || rank.coordinate(a) == 0;
    let value = scalar.to_local_f64()?.first().copied().unwrap_or(0.0);
    Ok(if rank.mesh().axes().all(counts) { value } else { 0.0 })
}
