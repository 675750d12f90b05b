//! Recording a program from model code, and replaying a slice of it on other values.

use super::{Tape, Var};
use crate::id::{Noise, ReplayNoise};
use crate::program::{Program, Recorder, Slot};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_tensor::{Context, Layout, Op, Tensor, Value};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// Values by their slot in a program.
pub type Values = HashMap<Slot, Var>;

/// A recorded program, the variables of its external inputs, and the results of the recorded run.
pub(super) struct Recording {
    pub(super) program: Program,
    pub(super) external_inputs: Vec<Var>,
    pub(super) results: Vec<Var>,
}

impl Recording {
    /// Runs model code under a recorder of a tape and without nodes. `site` is the caller's line.
    pub(super) fn run(
        tape: &Tape,
        arguments: &[Var],
        site: &'static Location<'static>,
        model: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
    ) -> Result<Recording> {
        if tape.is_recording() {
            return Err(Error::new(Kind::Unsupported, "a program is recorded while another recording runs"));
        }
        let mut recorder = Recorder::default();
        // Arguments are external inputs, even those that another recording made.
        let as_external = |v: &Var| Var::new(tape, v.tensor().clone(), v.id_on(tape, site), None);
        let fresh: Vec<Var> = arguments.iter().map(as_external).collect();
        for argument in &fresh {
            let (id, accumulation) =
                (argument.id(), tape.accumulation_dtype_of(argument.id(), argument.tensor()));
            recorder.external((id, id.and_then(|id| tape.key_of(id))), argument.tensor(), accumulation);
        }
        recorder.program.num_arguments = recorder.program.external_inputs.len();
        recorder.program.external_inputs.iter_mut().for_each(|external| external.constant = None);
        let recording = tape.begin_recording(recorder);
        let results = tape.without_nodes(|| model(&fresh));
        let outputs = results.as_ref().map(|all| all.iter().map(|v| v.slot_on(tape, site)).collect());
        let recorder = recording.finish();
        let mut program = recorder.program;
        program.outputs = outputs.unwrap_or_default();
        let external_inputs =
            recorder.external_inputs.into_iter().map(|(id, t)| Var::new(tape, t, id, None)).collect();
        Ok(Recording { program, external_inputs, results: results? })
    }
}

impl Program {
    /// Records a program from model code: runs it on meta tensors of the given layouts, so that nothing is computed or
    /// communicated. Reading a value is an error. With `noise`, random ops are recorded too.
    ///
    /// # Errors
    /// The error of `model`.
    #[doc(alias = "make_jaxpr")]
    #[doc(alias = "torch.export")]
    #[doc(alias = "symbolic trace")]
    #[track_caller]
    pub fn record(
        rank: &Rank,
        arguments: &[Layout],
        noise: Option<Noise>,
        model: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
    ) -> Result<Program> {
        let tape = Tape::meta(rank);
        tape.set_noise(noise);
        let arguments: Vec<Var> =
            arguments.iter().map(|layout| tape.constant(Tensor::meta(rank, layout))).collect();
        let before = Context::of(rank).path();
        let recording = Recording::run(&tape, &arguments, Location::caller(), model);
        Context::of(rank).set_path(&before);
        Ok(recording?.program)
    }

    /// Runs a slice of the records. `values` holds the inputs of the slice (external inputs and results of earlier
    /// records) and receives its results. Random ops draw as `draw` says. Checkpointed blocks that lie within the slice
    /// save only their inputs for the backward pass. A parameter in another layout than the recorded one, as it is stored, is
    /// redistributed at each use.
    ///
    /// # Errors
    /// `Kind::Unsupported` if an input of the slice is missing.
    pub fn replay(&self, range: Range<usize>, values: &mut Values, draw: ReplayNoise) -> Result<()> {
        let done = self.last_uses(range.clone());
        let mut at = range.start;
        while at < range.end {
            let from = at;
            let whole = |b: &&Range<usize>| b.start == at && !b.is_empty() && b.end <= range.end;
            match self.blocks.iter().filter(whole).max_by_key(|b| b.end).cloned() {
                Some(block) => {
                    self.replay_block(&block, values, draw)?;
                    at = block.end;
                }
                None => {
                    self.replay_one(at, values, draw)?;
                    at += 1;
                }
            }
            done[from - range.start..at - range.start].iter().flatten().for_each(|slot| {
                values.remove(slot);
            });
        }
        Ok(())
    }

    /// For each record of a slice, the values made in the slice that no record after it reads.
    fn last_uses(&self, range: Range<usize>) -> Vec<Vec<Slot>> {
        let stay: HashSet<Slot> = self.outputs_of(range.clone()).into_iter().collect();
        let mut last: HashMap<Slot, usize> = HashMap::new();
        for at in range.clone() {
            let record = &self.records[at];
            let made =
                (0..record.outputs.len()).map(|out| Slot::Output { record: at as u32, out: out as u32 });
            last.extend(record.inputs.iter().copied().chain(made).map(|slot| (slot, at)));
        }
        let mut done = vec![Vec::new(); range.len()];
        for (slot, at) in last {
            if matches!(slot, Slot::Output { record, .. } if range.contains(&(record as usize)))
                && !stay.contains(&slot)
            {
                done[at - range.start].push(slot);
            }
        }
        done
    }

    fn replay_one(&self, at: usize, values: &mut Values, draw: ReplayNoise) -> Result<()> {
        let record = &self.records[at];
        let mut inputs: SmallVec<[Var; 4]> =
            record.inputs.iter().map(|slot| self.value(at, slot, values)).collect::<Result<_>>()?;
        for (input, _) in
            inputs.iter_mut().zip(&record.stops_gradient).filter(|(_, stops_gradient)| **stops_gradient)
        {
            *input = input.detach();
        }
        let inputs: SmallVec<[&Var; 4]> = inputs.iter().collect();
        Context::of(inputs[0].rank()).set_path(&record.path);
        let redrawn = match draw {
            ReplayNoise::Recorded => None,
            ReplayNoise::Of(noise) => record.op.reseed(noise.step, noise.first_row),
            ReplayNoise::Off if record.op.reseed(0, 0).is_some() => {
                values.insert(Slot::Output { record: at as u32, out: 0 }, inputs[0].clone());
                return Ok(());
            }
            ReplayNoise::Off => None,
        };
        let op: Rc<dyn Op> = redrawn.unwrap_or_else(|| record.op.clone());
        for (out, var) in Var::apply_at(op, &inputs, &[], record.site).into_iter().enumerate() {
            values.insert(Slot::Output { record: at as u32, out: out as u32 }, var);
        }
        Ok(())
    }

    fn replay_block(&self, block: &Range<usize>, values: &mut Values, draw: ReplayNoise) -> Result<()> {
        let leaves = self.outputs_of(block.clone());
        // Parameters as they are stored are redistributed inside of the block, which does not save them then.
        let (stored, needs): (Vec<Slot>, Vec<Slot>) = self
            .inputs_of(block.clone())
            .into_iter()
            .partition(|slot| values.get(slot).is_some_and(|var| self.is_stored(slot, var)));
        let arguments: Vec<Var> =
            needs.iter().map(|slot| self.value(block.start, slot, values)).collect::<Result<_>>()?;
        let stored: Values = stored.iter().map(|slot| (*slot, values[slot].clone())).collect();
        let tape =
            arguments.first().or(stored.values().next()).expect("a block reads a value").tape().clone();
        let made = tape.checkpoint(&arguments, |arguments| {
            let mut inner: Values = needs.iter().copied().zip(arguments.iter().cloned()).collect();
            inner.extend(stored);
            let done = self.last_uses(block.clone());
            for (at, done) in block.clone().zip(done) {
                self.replay_one(at, &mut inner, draw)?;
                done.iter().for_each(|slot| {
                    inner.remove(slot);
                });
            }
            Ok(leaves.iter().map(|slot| inner[slot].clone()).collect())
        })?;
        values.extend(leaves.into_iter().zip(made));
        Ok(())
    }

    /// The value of a slot that a record reads, in the recorded layout.
    fn value(&self, at: usize, slot: &Slot, values: &Values) -> Result<Var> {
        let record = &self.records[at];
        let var = values.get(slot).ok_or_else(|| {
            let text =
                format!("replay: record {at} ({}) reads {slot:?}, which has no value", record.op.name());
            Error::new(Kind::Unsupported, text).detail(
                "help",
                "put the inputs of the slice (Program::inputs_of) into `values` before replay()",
            )
        })?;
        if !self.is_stored(slot, var) {
            return Ok(var.clone());
        }
        Context::of(var.rank()).set_path(&record.path);
        // The variable lives for the slice, and would hold the redistributed value as long.
        Ok(var.without_cached_layouts().to_layout_at(self.layout(*slot), record.site))
    }

    /// Whether the value of a slot is a parameter in another layout than the recorded one.
    fn is_stored(&self, slot: &Slot, var: &Var) -> bool {
        match slot {
            Slot::External(external) => {
                let declared = &self.external_inputs[*external as usize];
                declared.key.is_some() && declared.layout != *var.layout()
            }
            Slot::Output { .. } => false,
        }
    }
}
