//! Training a language model: what a run is made of, apart from how it was asked for.

mod validate;

pub(crate) use validate::{Measured, mean_loss};

use crate::data::{Batch, Sampler};
use shardgrad::nn::optim::Schedule;
use shardgrad::nn::{LanguageModel, Precision, Settings, Trainer};
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
    /// Pieces that the batch is cut into.
    pub(crate) microbatches: usize,
    pub(crate) schedule: Schedule,
    pub(crate) optim: AdamW,
    /// Bound of the global gradient norm; `None` does not clip.
    pub(crate) clip: Option<f64>,
    pub(crate) seed: u64,
    pub(crate) precision: Precision,
}

/// Inputs, targets and what else there is, `[rows, seq]` each, split over the batch axes; every rank reads its own rows only. `read` gives the
/// tokens of a range of rows.
pub(crate) fn batch(
    rank: &Rank,
    plan: &Plan,
    shape: [usize; 2],
    read: impl FnOnce(Range<usize>) -> Result<Batch>,
) -> Result<Vec<Tensor>> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &shape)?;
    let own = read(layout.range(0, rank.coordinates()))?;
    let all = [&own.inputs, &own.targets].into_iter().chain(&own.more);
    all.map(|numbers| Tensor::from_local(rank, &layout, numbers)).collect()
}

impl Recipe {
    /// A model in training on one rank, on the rows of a sampler.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub(crate) fn trainer<'a>(
        &'a self,
        rank: &Rank,
        model: LanguageModel,
        plan: &'a Plan,
        rows: &'a Sampler,
    ) -> Result<Trainer<'a, LanguageModel>> {
        let settings = Settings {
            rows: self.batch,
            microbatches: self.microbatches,
            seed: self.seed,
            dtype: self.precision.dtype,
            param_dtype: Some(self.precision.param_dtype),
            schedule: Some(self.schedule),
            clip: self.clip,
        };
        let read = |rank: &Rank, step: u64, piece: Range<usize>| {
            let first = Sampler::step(step, self.batch as u64).start + piece.start as u64;
            let read = |own: Range<usize>| rows.batch(first + own.start as u64..first + own.end as u64);
            batch(rank, plan, [piece.len(), self.seq], read)
        };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_of(x);
        Trainer::new(rank, model, plan, self.optim.clone(), settings, read, loss)
    }
}
