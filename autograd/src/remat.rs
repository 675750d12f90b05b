//! Recomputation (activation checkpointing): keep a block's inputs, replay its ops in the backward pass.
//!
//! The block's text runs once, in the forward pass, under a recorder; what is kept is the list of ops and the values
//! that came from outside. Random numbers are keyed inside the ops, so the replay draws the same ones. Chen et al.,
//! "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

use crate::id::{Draw, Id};
use crate::program::{Program, Slot};
use crate::replay::{Recording, Values};
use crate::tape::{Node, PullBack, Tape, Work};
use crate::var::Var;
use shardgrad_dist::{Rank, Result};
use shardgrad_tensor::op::{Cotangents, Offer};
use shardgrad_tensor::{Context, Tensor, Value, unwind};
use smallvec::SmallVec;
use std::panic::Location;

impl Tape {
    /// Runs `block` so that only its arguments and the parameters it uses are kept for the backward pass; the rest is
    /// computed again there. The values are those of an unchecked run, and so are the gradients.
    ///
    /// Inside a recording the block is kept as one of the program's.
    ///
    /// # Errors
    /// Whatever `block` returns.
    ///
    /// # Panics
    /// Unwinds with `Kind::Unsupported` if the block takes a variable of another tape, or one from before the last backward
    /// pass, that was not cut off.
    #[track_caller]
    pub fn checkpoint(
        &self,
        arguments: &[Var],
        block: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
    ) -> Result<Vec<Var>> {
        let site = Location::caller();
        if self.is_recording() {
            let from = self.num_records();
            let results = block(arguments)?;
            self.note_block(from..self.num_records());
            return Ok(results);
        }
        if !self.records() {
            return block(arguments);
        }
        let Recording { mut program, outers, results } = self.recorded(arguments, site, block)?;
        // The node keeps what the block takes, and lets go of it in time.
        program.outers.iter_mut().for_each(|outer| outer.constant = None);
        let inputs: SmallVec<[Option<Id>; 4]> = outers.iter().map(Var::id).collect();
        // What the block has cut off is a constant outside of it too, whatever made it.
        let reached = program.reached(|outer| inputs[outer].is_some());
        let pairs = program.outputs.iter().zip(&results);
        let live: Vec<bool> = pairs.map(|(slot, v)| reached.contains(slot) && !v.is_cut()).collect();
        if !live.contains(&true) {
            return Ok(results.into_iter().map(|v| self.constant(v.tensor().clone())).collect());
        }
        let node = Node {
            work: Work::Block(Box::new(program)),
            inputs,
            kept_inputs: outers.iter().map(|v| Some(v.tensor().clone())).collect(),
            kept_outputs: SmallVec::from_elem(None, results.len()),
            cotangents: SmallVec::from_elem(None, results.len()),
            path: self.context().path(),
            site,
        };
        let (round, node) = self.push(node);
        let made = |(out, v): (usize, Var)| {
            let id = live[out].then_some(Id::Made { round, node, out: out as u32 });
            Var::new(self, v.tensor().clone(), id, None)
        };
        Ok(results.into_iter().enumerate().map(made).collect())
    }
}

impl PullBack for Program {
    /// Replays the program on the kept inputs and goes backwards through it from the given cotangents.
    fn pull_back(
        &self,
        rank: &Rank,
        inputs: &[Option<Tensor>],
        cotangents: &[Option<Tensor>],
        (wanted, sums): (&[bool], &[Offer]),
    ) -> Cotangents {
        let tape = Tape::new(rank);
        let mut values = Values::new();
        for (i, (input, outer)) in inputs.iter().zip(&self.outers).enumerate() {
            let tensor = input.as_ref().expect("a checkpoint keeps all that came from outside");
            let var = match wanted[i] {
                true => tape.leaf_summed(i as u64, tensor, outer.sums),
                false => tape.constant(tensor.clone()),
            };
            values.insert(Slot::Outer(i as u32), var);
        }
        let context = Context::of(rank);
        let before = context.set_backward(false);
        unwind(self.replay(0..self.records.len(), &mut values, Draw::Same));
        context.set_backward(before);
        let seed = |(slot, cotangent): (&Slot, &Option<Tensor>)| {
            let id = values.get(slot).and_then(Var::id)?;
            Some((id, cotangent.clone()?))
        };
        let seeds: Vec<(Id, Tensor)> = self.outputs.iter().zip(cotangents).filter_map(seed).collect();
        drop(values);
        tape.begin_with(&seeds, |key| sums.get(key as usize)?.take());
        tape.backward_from(seeds);
        let mut gradients = tape.gradients();
        (0..inputs.len()).map(|i| gradients.remove(&(i as u64))).collect()
    }
}
