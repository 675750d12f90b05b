//! Training a language model: what a run is made of, apart from how it was asked for.

mod session;
mod validate;

pub(crate) use session::{Session, StepReport};
pub(crate) use validate::mean_loss;

use shardgrad::nn::optim::Schedule;
use shardgrad::prelude::*;

/// Where rows of tokens come from. A row is a function of its global number, so the mesh does not change what is read.
pub(crate) trait Rows: Sync {
    /// Row `sample` of the run: `seq + 1` tokens.
    fn row(&self, sample: u64) -> Vec<u8>;
}

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

/// Tokens `rows` of a global batch as a tensor split over the batch axes; every rank uploads its own rows only.
pub(crate) fn tokens(
    rank: &Rank,
    plan: &Plan,
    shape: [usize; 2],
    mut row: impl FnMut(usize) -> Vec<i64>,
) -> Result<Tensor> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &shape)?;
    let mut own = Vec::new();
    for r in layout.range(0, rank.coordinates()) {
        own.extend(row(r));
    }
    Tensor::from_local(rank, &layout, &own)
}

/// This rank's part of a scalar, such that the parts of all ranks add up to it.
pub(crate) fn share(scalar: &Tensor) -> Result<f64> {
    let (layout, rank) = (scalar.layout(), scalar.rank());
    let counts = |a| layout.state(a) == State::Partial || rank.coordinate(a) == 0;
    let value = scalar.to_local_f64()?.first().copied().unwrap_or(0.0);
    Ok(if rank.mesh().axes().all(counts) { value } else { 0.0 })
}
