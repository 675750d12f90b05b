//! Prefetching the rows of a step on one rank: each is read once, before its step, so that later changes of the files do not matter.

use super::{TrainConfig, local_rows, to_tensors};
use crate::data::{Batch, Sampler};
use shardgrad::prelude::*;
use std::cell::RefCell;
use std::ops::Range;

/// Reads and caches the local rows and tokens of each pass. The rows of a step stay until the step after the next is read.
#[derive(Debug)]
pub(crate) struct Prefetcher<'a> {
    train_config: &'a TrainConfig,
    pub(super) plan: &'a Plan,
    rows: &'a Sampler,
    cached: RefCell<Vec<StepRows>>,
}

/// The local rows of a step.
#[derive(Debug)]
struct StepRows {
    step: u64,
    /// The rows of each pass, with their range in the global batch.
    passes: Vec<(Range<usize>, Batch)>,
}

impl<'a> Prefetcher<'a> {
    /// Creates an empty prefetcher.
    pub(crate) fn new(train_config: &'a TrainConfig, plan: &'a Plan, rows: &'a Sampler) -> Prefetcher<'a> {
        Prefetcher { train_config, plan, rows, cached: RefCell::default() }
    }

    /// Reads the rows of a step, unless they are cached. Keeps those of the step before and drops older ones. Does not communicate: a rank that
    /// fails must tell the others before they start the step.
    ///
    /// # Errors
    /// As [`Sampler::batch`]; the cache is unchanged then.
    pub(crate) fn read(&self, rank: &Rank, step: u64) -> Result<()> {
        if self.cached.borrow().iter().any(|cached| cached.step == step) {
            return Ok(());
        }
        let TrainConfig { batch, seq, microbatches, deterministic, .. } = *self.train_config;
        let all = Sampler::rows_of_step(step, batch as u64);
        let read = |pass: Range<usize>| {
            let layout = self.plan.batch_layout(rank.mesh(), DType::I64, &[pass.len(), seq])?;
            let first = all.start + pass.start as u64;
            let rows = local_rows(&layout, rank, |rows| {
                self.rows.batch(first + rows.start as u64..first + rows.end as u64)
            });
            Ok((pass, rows?))
        };
        let passes = deterministic.row_ranges(rank, self.plan, batch, microbatches)?;
        let passes = passes.into_iter().map(read).collect::<Result<_>>()?;
        let mut cached = self.cached.borrow_mut();
        cached.retain(|cached| cached.step + 1 == step);
        cached.push(StepRows { step, passes });
        Ok(())
    }

    /// Returns the arguments of the loss for a pass, given as its rows of the global batch.
    ///
    /// # Errors
    /// As [`Prefetcher::read`], for a step that is not cached.
    pub(super) fn arguments(&self, rank: &Rank, step: u64, rows: Range<usize>) -> Result<Vec<Tensor>> {
        self.read(rank, step)?;
        let layout = self.plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), self.train_config.seq])?;
        let cached = self.cached.borrow();
        let cached = cached.iter().find(|cached| cached.step == step).expect("the step was just read");
        let (_, batch) = cached
            .passes
            .iter()
            .find(|(pass, _)| *pass == rows)
            .expect("a trainer asks for the rows of its passes");
        to_tensors(rank, &layout, batch)
    }
}
