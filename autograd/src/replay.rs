//! Recording a program from model text, and replaying a slice of one on other values.

use crate::program::{Program, Recorder, Slot};
use crate::tape::Tape;
use crate::var::Var;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_tensor::Value;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::ops::Range;

/// A program with the variables that stand for its outer slots and the results of the recording run.
pub(crate) struct Recording {
    pub(crate) program: Program,
    pub(crate) outers: Vec<Var>,
    pub(crate) results: Vec<Var>,
}

impl Tape {
    /// Runs model text under a recorder and without nodes.
    pub(crate) fn recorded(
        &self,
        arguments: &[Var],
        text: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
    ) -> Result<Recording> {
        if self.is_recording() {
            return Err(Error::new(
                Kind::Unsupported,
                "a program is recorded inside the recording of another",
            ));
        }
        let mut recorder = Recorder::default();
        for argument in arguments {
            recorder.outer(argument.id(), argument.key(), argument.tensor());
        }
        self.set_recorder(Some(recorder));
        // Arguments count as outer values, whatever recording made them.
        let fresh: Vec<Var> = arguments.iter().map(Var::without_slot).collect();
        let results = self.no_grad(|| text(&fresh));
        let outputs = results.as_ref().map(|all| all.iter().map(|v| self.slot_of(v)).collect());
        let recorder = self.set_recorder(None).unwrap_or_default();
        let mut program = recorder.program;
        program.outputs = outputs.unwrap_or_default();
        let outers = recorder.outers.into_iter().map(|(id, t)| Var::new(self, t, id, None)).collect();
        Ok(Recording { program, outers, results: results? })
    }
}

impl Program {
    /// Runs model text and keeps its ops. Reading a value while recording is an error.
    ///
    /// # Errors
    /// Whatever `text` returns; `Kind::Unsupported` inside another recording.
    pub fn record(
        tape: &Tape,
        arguments: &[Var],
        text: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
    ) -> Result<Program> {
        Ok(tape.recorded(arguments, text)?.program)
    }

    /// Applies a slice of the records to values; `values` holds what the slice takes from before it (outer slots
    /// and results of earlier records) and receives what it makes.
    ///
    /// # Errors
    /// `Kind::Unsupported` if a value that the slice needs is missing.
    pub fn replay(&self, range: Range<usize>, values: &mut HashMap<Slot, Var>) -> Result<()> {
        for at in range {
            let record = &self.records[at];
            let missing = |slot: &Slot| {
                let text =
                    format!("replay: record {at} ({}) needs {slot:?}, which is not there", record.op.name());
                Error::new(Kind::Unsupported, text)
            };
            let inputs: SmallVec<[Var; 4]> = record
                .inputs
                .iter()
                .map(|slot| values.get(slot).cloned().ok_or_else(|| missing(slot)))
                .collect::<Result<_>>()?;
            let inputs: SmallVec<[&Var; 4]> = inputs.iter().collect();
            for (out, var) in Var::apply(record.op.clone(), &inputs).into_iter().enumerate() {
                values.insert(Slot::Made { record: at as u32, out: out as u8 }, var);
            }
        }
        Ok(())
    }
}
