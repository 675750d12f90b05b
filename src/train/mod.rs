//! Training a language model: what a run is made of, apart from how it was asked for.

mod ahead;
mod control;
mod validate;
#[cfg(test)]
mod tests;

pub(crate) use ahead::Ahead;
pub(crate) use control::ControlFlags;
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
    /// Whether steps are captured and replayed, where that can be.
    pub(crate) capture: bool,
}

/// Inputs, targets and what else there is, `[rows, seq]` each, split over the batch axes; every rank reads its own rows only, and
/// keeps of them its own tokens. `read` gives the tokens of a range of rows. Last, where rows say what they ask for, [`share`] of it, f64 `[]`.
pub(crate) fn batch(
    rank: &Rank,
    plan: &Plan,
    shape: [usize; 2],
    share: Option<f64>,
    read: impl FnOnce(Range<usize>) -> Result<Batch>,
) -> Result<Vec<Tensor>> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &shape)?;
    tensors(rank, &layout, &own(&layout, rank, read)?, share)
}

/// What a rank holds of a batch of a layout `[rows, seq]`, where `read` gives rows.
fn own(layout: &Layout, rank: &Rank, read: impl FnOnce(Range<usize>) -> Result<Batch>) -> Result<Batch> {
    let [rows, columns] = [0, 1].map(|dim| layout.range(dim, rank.coordinates()));
    Ok(read(rows)?.columns(layout.extent(1), columns))
}

/// What a rank has read, as [`batch`] gives it.
fn tensors(rank: &Rank, layout: &Layout, own: &Batch, share: Option<f64>) -> Result<Vec<Tensor>> {
    let all = [&own.inputs, &own.targets].into_iter().chain(&own.more);
    let share = share.map(|share| Tensor::from_host(rank, &[], &[share]));
    all.map(|numbers| Tensor::from_local(rank, layout, numbers)).chain(share).collect()
}

/// What the sum of losses of `part` of some rows is divided by, so that the mean over parts, by their rows, is the mean over
/// all targets of the rows, however they are spread; rows without any have a mean of 0. `None` where each token is a target.
///
/// # Errors
/// As [`Sampler::asked`].
pub(crate) fn share(sampler: &Sampler, rows: Range<u64>, part: usize) -> Result<Option<f64>> {
    let weight = part as f64 / (rows.end - rows.start) as f64;
    Ok(sampler.asked(rows)?.map(|asked| asked.max(1) as f64 * weight))
}

impl Recipe {
    /// A model in training on one rank, on the rows that it reads for this recipe.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub(crate) fn trainer<'a>(
        &self,
        rank: &Rank,
        model: LanguageModel,
        ahead: &'a Ahead<'a>,
    ) -> Result<Trainer<'a, LanguageModel>> {
        let settings = Settings {
            rows: self.batch,
            microbatches: self.microbatches,
            seed: self.seed,
            dtype: self.precision.dtype,
            param_dtype: Some(self.precision.param_dtype),
            schedule: Some(self.schedule.clone()),
            clip: self.clip,
            capture: self.capture,
        };
        let read = |rank: &Rank, step: u64, rows: Range<usize>| ahead.arguments(rank, step, rows);
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_of(x);
        Trainer::new(rank, model, ahead.plan, self.optim.clone(), settings, read, loss)
    }
}
