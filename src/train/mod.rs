//! Training a language model: what a run is made of, apart from how it was asked for.

mod validate;
#[cfg(test)]
mod tests;

pub(crate) use validate::{Measured, mean_loss};

use crate::data::{Batch, Sampler};
use shardgrad::nn::optim::Schedule;
use shardgrad::nn::{LanguageModel, Precision, Settings, Trainer};
use shardgrad::prelude::*;
use std::cell::Cell;
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

/// Inputs, targets and what else there is, `[rows, seq]` each, split over the batch axes; every rank reads its own rows only. `read`
/// gives the tokens of a range of rows. Last, where rows say what they ask for, [`share`] of it, f64 `[]`.
pub(crate) fn batch(
    rank: &Rank,
    plan: &Plan,
    shape: [usize; 2],
    share: Option<f64>,
    read: impl FnOnce(Range<usize>) -> Result<Batch>,
) -> Result<Vec<Tensor>> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &shape)?;
    let own = read(layout.range(0, rank.coordinates()))?;
    let all = [&own.inputs, &own.targets].into_iter().chain(&own.more);
    let share = share.map(|share| Tensor::from_host(rank, &[], &[share]));
    all.map(|numbers| Tensor::from_local(rank, &layout, numbers)).chain(share).collect()
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
        // The microbatches of a step have one share, for which all its labels are read.
        let known = Cell::new(None);
        let read = move |rank: &Rank, step: u64, piece: Range<usize>| {
            let all = Sampler::step(step, self.batch as u64);
            let first = all.start + piece.start as u64;
            let read = |own: Range<usize>| rows.batch(first + own.start as u64..first + own.end as u64);
            let part = (step, piece.len());
            let share = match known.get() {
                Some((of, share)) if of == part => share,
                _ => share(rows, all, piece.len())?,
            };
            known.set(Some((part, share)));
            batch(rank, plan, [piece.len(), self.seq], share, read)
        };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_of(x);
        Trainer::new(rank, model, plan, self.optim.clone(), settings, read, loss)
    }
}
