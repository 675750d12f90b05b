//! The rows of the steps of a run as one rank reads them: each once, before its step, whatever becomes of the files meanwhile.

use super::{Recipe, own, share, tensors};
use crate::data::{Batch, Sampler};
use shardgrad::prelude::*;
use std::cell::RefCell;
use std::ops::Range;

/// What a rank reads: its own rows of each microbatch, and of these its own tokens. Those of a step stay here until the step after the next is read.
#[derive(Debug)]
pub(crate) struct Ahead<'a> {
    recipe: &'a Recipe,
    pub(super) plan: &'a Plan,
    rows: &'a Sampler,
    held: RefCell<Vec<Held>>,
}

/// The rows of a step.
#[derive(Debug)]
struct Held {
    step: u64,
    /// What the losses of its microbatches are divided by ([`share`]).
    share: Option<f64>,
    microbatches: Vec<Batch>,
}

impl<'a> Ahead<'a> {
    /// Nothing is read yet.
    pub(crate) fn new(recipe: &'a Recipe, plan: &'a Plan, rows: &'a Sampler) -> Ahead<'a> {
        Ahead { recipe, plan, rows, held: RefCell::default() }
    }

    /// Reads the rows of a step, unless they are here. Those of the step before it stay, older ones go. Nothing is
    /// communicated: where one rank alone cannot read, it must tell the others before they begin the step.
    ///
    /// # Errors
    /// As [`Sampler::batch`]; nothing has changed then.
    pub(crate) fn read(&self, rank: &Rank, step: u64) -> Result<()> {
        if self.held.borrow().iter().any(|held| held.step == step) {
            return Ok(());
        }
        let Recipe { batch, seq, microbatches, .. } = *self.recipe;
        let (all, piece) = (Sampler::step(step, batch as u64), batch / microbatches);
        let layout = self.plan.batch_layout(rank.mesh(), DType::I64, &[piece, seq])?;
        let read = |microbatch: usize| {
            let first = all.start + (microbatch * piece) as u64;
            own(&layout, rank, |rows| self.rows.batch(first + rows.start as u64..first + rows.end as u64))
        };
        let microbatches = (0..microbatches).map(read).collect::<Result<_>>()?;
        let share = share(self.rows, all.clone(), piece)?;
        let mut held = self.held.borrow_mut();
        held.retain(|held| held.step + 1 == step);
        held.push(Held { step, share, microbatches });
        Ok(())
    }

    /// The arguments of the loss for one microbatch of a step, given as its rows of the global batch.
    ///
    /// # Errors
    /// As [`Ahead::read`], for a step that is not here.
    pub(super) fn arguments(&self, rank: &Rank, step: u64, rows: Range<usize>) -> Result<Vec<Tensor>> {
        self.read(rank, step)?;
        let layout = self.plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), self.recipe.seq])?;
        let held = self.held.borrow();
        let held = held.iter().find(|held| held.step == step).expect("what was read is here");
        tensors(rank, &layout, &held.microbatches[rows.start / rows.len()], held.share)
    }
}
