//! Recording a program from model text, and replaying a slice of one on other values.

use crate::id::{Draw, Noise};
use crate::program::{Program, Recorder, Slot};
use crate::tape::Tape;
use crate::var::Var;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_tensor::{Context, Layout, Op, Tensor, Value};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// Values by what they are in a program.
pub type Values = HashMap<Slot, Var>;

/// A program with the variables that stand for its outer slots and the results of the recording run.
pub(crate) struct Recording {
    pub(crate) program: Program,
    pub(crate) outers: Vec<Var>,
    pub(crate) results: Vec<Var>,
}

impl Tape {
    /// Runs model text under a recorder and without nodes, asked for by a line.
    pub(crate) fn recorded(
        &self,
        arguments: &[Var],
        site: &'static Location<'static>,
        text: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
    ) -> Result<Recording> {
        if self.is_recording() {
            return Err(Error::new(
                Kind::Unsupported,
                "a program is recorded inside the recording of another",
            ));
        }
        let mut recorder = Recorder::default();
        // Arguments count as outer values of this tape, whatever recording made them.
        let taken = |v: &Var| Var::new(self, v.tensor().clone(), self.live_here(v, site), None);
        let fresh: Vec<Var> = arguments.iter().map(taken).collect();
        for argument in &fresh {
            let (id, sums) = (argument.id(), self.sums_of(argument.id(), argument.tensor()));
            recorder.outer((id, id.and_then(|id| self.key_of(id))), argument.tensor(), sums);
        }
        recorder.program.num_arguments = recorder.program.outers.len();
        recorder.program.outers.iter_mut().for_each(|outer| outer.constant = None);
        self.set_recorder(Some(recorder));
        let results = self.without_nodes(|| text(&fresh));
        let outputs = results.as_ref().map(|all| all.iter().map(|v| self.slot_of(v, site)).collect());
        let recorder = self.set_recorder(None).unwrap_or_default();
        let mut program = recorder.program;
        program.outputs = outputs.unwrap_or_default();
        let outers = recorder.outers.into_iter().map(|(id, t)| Var::new(self, t, id, None)).collect();
        Ok(Recording { program, outers, results: results? })
    }
}

impl Program {
    /// Runs model text on arguments of these layouts in outline and keeps its ops: nothing is computed, nothing moves. To
    /// read a value is an error. With `noise`, random ops are recorded too.
    ///
    /// # Errors
    /// Whatever `text` returns.
    #[track_caller]
    pub fn record(
        rank: &Rank,
        arguments: &[Layout],
        noise: Option<Noise>,
        text: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
    ) -> Result<Program> {
        let tape = Tape::outline(rank);
        tape.set_noise(noise);
        let arguments: Vec<Var> =
            arguments.iter().map(|layout| tape.constant(Tensor::outline(rank, layout))).collect();
        let before = Context::of(rank).path();
        let recording = tape.recorded(&arguments, Location::caller(), text);
        Context::of(rank).set_path(&before);
        Ok(recording?.program)
    }

    /// Applies a slice of the records to values; `values` holds what the slice takes from before it (outer slots
    /// and results of earlier records) and receives what it makes. Random ops draw as `draw` says. Blocks that lie
    /// in the slice keep only what they take for the backward pass.
    ///
    /// # Errors
    /// `Kind::Unsupported` if a value that the slice needs is missing.
    pub fn replay(&self, range: Range<usize>, values: &mut Values, draw: Draw) -> Result<()> {
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

    /// For each record of a slice, what the slice has made that nobody reads after it.
    fn last_uses(&self, range: Range<usize>) -> Vec<Vec<Slot>> {
        let stay: HashSet<Slot> = self.leaves(range.clone()).into_iter().collect();
        let mut last: HashMap<Slot, usize> = HashMap::new();
        for at in range.clone() {
            let record = &self.records[at];
            let made = (0..record.outputs.len()).map(|out| Slot::Made { record: at as u32, out: out as u32 });
            last.extend(record.inputs.iter().copied().chain(made).map(|slot| (slot, at)));
        }
        let mut done = vec![Vec::new(); range.len()];
        for (slot, at) in last {
            if matches!(slot, Slot::Made { record, .. } if range.contains(&(record as usize)))
                && !stay.contains(&slot)
            {
                done[at - range.start].push(slot);
            }
        }
        done
    }

    fn replay_one(&self, at: usize, values: &mut Values, draw: Draw) -> Result<()> {
        let record = &self.records[at];
        let mut inputs: SmallVec<[Var; 4]> =
            record.inputs.iter().map(|slot| self.value(at, slot, values)).collect::<Result<_>>()?;
        for (input, _) in inputs.iter_mut().zip(&record.stops).filter(|(_, stops)| **stops) {
            *input = input.detach();
        }
        let inputs: SmallVec<[&Var; 4]> = inputs.iter().collect();
        Context::of(inputs[0].rank()).set_path(&record.path);
        let redrawn = match draw {
            Draw::Same => None,
            Draw::Of(noise) => record.op.redrawn(noise.step, noise.first_row),
            Draw::Off if record.op.redrawn(0, 0).is_some() => {
                values.insert(Slot::Made { record: at as u32, out: 0 }, inputs[0].clone());
                return Ok(());
            }
            Draw::Off => None,
        };
        let op: Rc<dyn Op> = redrawn.unwrap_or_else(|| record.op.clone());
        for (out, var) in Var::apply_at(op, &inputs, record.site).into_iter().enumerate() {
            values.insert(Slot::Made { record: at as u32, out: out as u32 }, var);
        }
        Ok(())
    }

    fn replay_block(&self, block: &Range<usize>, values: &mut Values, draw: Draw) -> Result<()> {
        let (needs, leaves) = (self.needs(block.clone()), self.leaves(block.clone()));
        let arguments: Vec<Var> =
            needs.iter().map(|slot| self.value(block.start, slot, values)).collect::<Result<_>>()?;
        let tape = arguments[0].tape().clone();
        let made = tape.checkpoint(&arguments, |arguments| {
            let mut inner: Values = needs.iter().copied().zip(arguments.iter().cloned()).collect();
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

    fn value(&self, at: usize, slot: &Slot, values: &Values) -> Result<Var> {
        values.get(slot).cloned().ok_or_else(|| {
            let name = self.records[at].op.name();
            let text = format!("replay: record {at} ({name}) needs {slot:?}, which is not there");
            Error::new(Kind::Unsupported, text)
        })
    }
}
