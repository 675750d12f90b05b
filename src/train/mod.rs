//! Training a language model, independent of the command line: configuration, batches, evaluation.

mod prefetch;
mod control;
mod validate;
#[cfg(test)]
mod tests;

pub(crate) use control::RunFlags;
pub(crate) use prefetch::Prefetcher;
pub(crate) use validate::{Evaluation, mean_loss, mean_loss_by_groups};

use crate::data::Batch;
use shardgrad::nn::optim::LrScheduler;
use shardgrad::nn::{Deterministic, LanguageModel, Precision, Trainer, TrainerConfig};
use shardgrad::prelude::*;
use std::ops::Range;

/// The training configuration: everything that decides the results of a run, besides model and data.
#[derive(Clone, Debug)]
pub(crate) struct TrainConfig {
    pub(crate) steps: usize,
    /// Sequences in the global batch.
    pub(crate) batch: usize,
    /// Sequence length.
    pub(crate) seq: usize,
    /// Microbatches per step.
    pub(crate) microbatches: usize,
    /// Which changes of the run leave its bits as they are.
    pub(crate) deterministic: Deterministic,
    pub(crate) schedule: LrScheduler,
    pub(crate) optim: AdamW,
    /// Maximum global gradient norm; `None` does not clip.
    pub(crate) clip: Option<f64>,
    pub(crate) seed: u64,
    pub(crate) precision: Precision,
    /// Whether steps are captured as a graph (CUDA graph) and replayed, if possible.
    pub(crate) capture: bool,
}

/// Returns the arguments of the loss: inputs, targets and extra columns, `[rows, seq]` each, sharded over the batch axes. Every rank reads
/// only its own rows with `read` and keeps its own tokens of them.
pub(crate) fn batch(
    rank: &Rank,
    plan: &Plan,
    shape: [usize; 2],
    read: impl FnOnce(Range<usize>) -> Result<Batch>,
) -> Result<Vec<Tensor>> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &shape)?;
    to_tensors(rank, &layout, &local_rows(&layout, rank, read)?)
}

/// Reads the local part of a batch with layout `[rows, seq]`.
fn local_rows(
    layout: &Layout,
    rank: &Rank,
    read: impl FnOnce(Range<usize>) -> Result<Batch>,
) -> Result<Batch> {
    let [rows, columns] = [0, 1].map(|dim| layout.range(dim, rank.coordinates()));
    Ok(read(rows)?.columns(layout.extent(1), columns))
}

/// Converts a local batch to tensors, as returned by [`batch`].
fn to_tensors(rank: &Rank, layout: &Layout, own: &Batch) -> Result<Vec<Tensor>> {
    let all = [&own.inputs, &own.targets].into_iter().chain(&own.extra);
    all.map(|numbers| Tensor::from_local(rank, layout, numbers)).collect()
}

impl TrainConfig {
    /// The largest number of rows of a pass, over all ranks that share it.
    pub(crate) fn rows_of_pass(&self) -> usize {
        match self.deterministic {
            Deterministic::Run => self.batch / self.microbatches,
            Deterministic::Mesh { batch_leaves, .. } => self.batch / batch_leaves,
        }
    }

    /// Creates the trainer of one rank.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub(crate) fn trainer<'a>(
        &self,
        rank: &Rank,
        model: LanguageModel,
        prefetcher: &'a Prefetcher<'a>,
    ) -> Result<Trainer<'a, LanguageModel>> {
        let settings = TrainerConfig {
            rows: self.batch,
            microbatches: self.microbatches,
            seed: self.seed,
            dtype: self.precision.dtype,
            param_dtype: Some(self.precision.param_dtype),
            lr_scheduler: Some(self.schedule.clone()),
            clip: self.clip,
            deterministic: self.deterministic,
            // `train` compares more, every `--check-every` steps: Trainer::check_consistent.
            copies_checked_every: 0,
            capture: self.capture,
            ..TrainerConfig::new(self.batch)
        };
        let read = |rank: &Rank, step: u64, rows: Range<usize>| prefetcher.arguments(rank, step, rows);
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
        Trainer::new(rank, model, prefetcher.plan, self.optim.clone(), settings, read, loss)
    }
}
