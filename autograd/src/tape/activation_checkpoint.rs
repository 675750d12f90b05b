//! Activation checkpointing (gradient checkpointing, rematerialization): keep the inputs of a block, recompute its ops
//! in the backward pass.
//!
//! The code of the block runs once, in the forward pass, under a recorder. The tape keeps the list of ops and the
//! external inputs. Random numbers are keyed inside the ops, so the replay draws the same ones. Chen et al., "Training
//! Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

use super::replay::{Recording, Values};
use super::{Tape, Var};
use crate::id::{Id, ReplayNoise};
use crate::leaf::Regather;
use crate::node::{BlockVjp, Node, NodeKind, SavedTensors};
use crate::program::{Program, Slot};
use shardgrad_dist::{Rank, Result};
use shardgrad_tensor::op::{Cotangents, GradAccumulator};
use shardgrad_tensor::{Context, Tensor, Value, unwind};
use smallvec::SmallVec;
use std::panic::Location;

/// Runs a block on a tape and adds a node that recomputes it.
///
/// # Errors
/// The error of the block.
pub(super) fn record_block(
    tape: &Tape,
    arguments: &[Var],
    site: &'static Location<'static>,
    block: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
) -> Result<Vec<Var>> {
    let Recording { mut program, external_inputs, results } = Recording::run(tape, arguments, site, block)?;
    // The node owns the external inputs, gathered ones as they are stored or by number, and releases them after its backward pass.
    let mut saved_leaves = SmallVec::new();
    let saved = external_inputs.iter().enumerate().map(|(i, v)| {
        if let Some(leaf) = tape.saved_by_number(v.id(), v.tensor()) {
            saved_leaves.push((i as u32, leaf));
            return (None, None);
        }
        match tape.saved_ungathered(v.id()) {
            Some((stored, regather)) => (Some(stored), Some(regather)),
            None => (Some(v.tensor().clone()), None),
        }
    });
    let (saved_inputs, regathers): (SmallVec<[Option<Tensor>; 4]>, Vec<Option<Regather>>) = saved.unzip();
    tape.free_gathered();
    program.external_inputs.iter_mut().for_each(|external| external.constant = None);
    let inputs: SmallVec<[Option<Id>; 4]> = external_inputs.iter().map(Var::id).collect();
    // A result that the block detached is a constant outside of it too.
    let reached = program.slots_with_gradient(|external| inputs[external].is_some());
    let pairs = program.outputs.iter().zip(&results);
    let live: Vec<bool> = pairs.map(|(slot, v)| reached.contains(slot) && !v.is_detached()).collect();
    if !live.contains(&true) {
        return Ok(results.into_iter().map(|v| tape.constant(v.tensor().clone())).collect());
    }
    let outputs = SmallVec::from_elem(None, results.len());
    let mut saved = SavedTensors { inputs: saved_inputs, outputs, indirect: None };
    if !saved_leaves.is_empty() {
        saved.indirect_mut().leaves = saved_leaves;
    }
    let site = (tape.context().path(), site);
    let block = CheckpointedBlock { program, regathers };
    let node = Node::new(NodeKind::Block(Box::new(block)), inputs, saved, results.len(), site);
    let (round, node) = tape.push_node(node);
    let made = |(out, v): (usize, Var)| {
        let id = live[out].then_some(Id::Output { round, node, out: out as u32 });
        Var::new(tape, v.tensor().clone(), id, None)
    };
    Ok(results.into_iter().enumerate().map(made).collect())
}

/// A checkpointed block: its program, and how to gather those of its inputs that were saved as they are stored.
struct CheckpointedBlock {
    program: Program,
    regathers: Vec<Option<Regather>>,
}

impl BlockVjp for CheckpointedBlock {
    /// Replays the program on the saved inputs and backpropagates the given cotangents through it.
    fn vjp(
        &self,
        rank: &Rank,
        inputs: &[Option<Tensor>],
        cotangents: &[Option<Tensor>],
        (wanted, sums): (&[bool], &[GradAccumulator]),
    ) -> Cotangents {
        let (tape, program) = (Tape::new(rank), &self.program);
        // The recomputed values live for this backward pass alone.
        tape.keep_gathered();
        let mut values = Values::new();
        let context = Context::of(rank);
        let forward = context.set_backward(false);
        for (i, (input, external)) in inputs.iter().zip(&program.external_inputs).enumerate() {
            let saved = input.as_ref().expect("a checkpoint keeps all that came from outside");
            let gathered = self.regathers[i].as_ref().map(|regather| regather.run(rank, context, saved));
            let tensor = gathered.as_ref().unwrap_or(saved);
            let var = match wanted[i] {
                true => tape.leaf_accumulated_in(i as u64, tensor, external.accumulation),
                false => tape.constant(tensor.clone()),
            };
            values.insert(Slot::External(i as u32), var);
        }
        unwind(program.replay(0..program.records.len(), &mut values, ReplayNoise::Recorded));
        drop(forward);
        let seed = |(slot, cotangent): (&Slot, &Option<Tensor>)| {
            let id = values.get(slot).and_then(Var::id)?;
            Some((id, cotangent.clone()?))
        };
        let seeds: Vec<(Id, Tensor)> = program.outputs.iter().zip(cotangents).filter_map(seed).collect();
        drop(values);
        tape.preload_gradients(&seeds, |key| sums.get(key as usize)?.take());
        tape.backward_from(seeds);
        let mut gradients = tape.gradients();
        (0..inputs.len()).map(|i| gradients.remove(&(i as u64))).collect()
    }
}
