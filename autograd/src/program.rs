//! A recorded program: the ops that a piece of model text applied, without any value.
//!
//! Recomputation replays one; a pipeline cuts one into stages. Under a recorder the model text runs once, on the
//! null back end or for real, and leaves this list; a slice of it can then be replayed on other values.

use crate::tape::{Key, Tape};
use crate::var::Var;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_tensor::{Layout, Op, Value};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

/// A value of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Slot {
    /// Something that came from outside: argument, parameter or constant, in order of first use.
    Outer(u32),
    /// Output `out` of record `record`.
    Made {
        /// Which record.
        record: u32,
        /// Which of its visible outputs.
        out: u8,
    },
}

/// One application of an op.
#[derive(Clone)]
pub struct OpRecord {
    /// The op.
    pub op: Rc<dyn Op>,
    /// Its arguments.
    pub inputs: SmallVec<[Slot; 4]>,
    /// Layouts of its visible outputs.
    pub outputs: SmallVec<[Layout; 2]>,
    /// The dotted name of the parameter or point touched last before it.
    pub path: Rc<str>,
}

impl fmt::Debug for OpRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?} -> {:?} at {}", self.op.name(), self.inputs, self.outputs, self.path)
    }
}

/// Something that a program takes from outside.
#[derive(Clone, Debug)]
pub struct Outer {
    /// The parameter it is, if it is one.
    pub key: Option<Key>,
    /// Its layout.
    pub layout: Layout,
}

/// A list of op records with what they take from outside and what they leave.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// What comes from outside, in order of first use (arguments first).
    pub outers: Vec<Outer>,
    /// The ops, in the order in which they were applied.
    pub records: Vec<OpRecord>,
    /// The results, in the order in which the model text returned them.
    pub outputs: Vec<Slot>,
}

/// A recorder: the program so far and the variables that stand for its outer slots.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) program: Program,
    pub(crate) outers: Vec<Var>,
}

impl Recorder {
    /// The slot of a variable; one that the program has not made is taken in from outside.
    pub(crate) fn slot(&mut self, var: &Var) -> Slot {
        if let Some(slot) = var.slot() {
            return slot;
        }
        let known = self.outers.iter().position(|o| o.same_as(var));
        Slot::Outer(known.unwrap_or_else(|| {
            self.program.outers.push(Outer { key: var.key(), layout: var.layout().clone() });
            self.outers.push(var.clone());
            self.outers.len() - 1
        }) as u32)
    }
}

impl Program {
    /// Runs model text and keeps its ops. Reading a value while recording is an error.
    ///
    /// # Errors
    /// Whatever `text` returns.
    pub fn record(
        tape: &Tape,
        arguments: &[Var],
        text: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
    ) -> Result<Program> {
        let (program, _, _) = tape.recorded(arguments, text)?;
        Ok(program)
    }

    /// Applies a slice of the records to values; `values` holds what the slice takes from before it (outer slots
    /// and results of earlier records) and receives what it makes.
    ///
    /// # Errors
    /// `Kind::Unsupported` if a value that the slice needs is missing.
    pub fn replay(&self, range: Range<usize>, values: &mut HashMap<Slot, Var>) -> Result<()> {
        for at in range {
            let record = &self.records[at];
            let inputs: SmallVec<[Var; 4]> = record
                .inputs
                .iter()
                .map(|slot| {
                    values.get(slot).cloned().ok_or_else(|| {
                        let text = format!("replay: record {at} ({}) needs {slot:?}, which is not there", record.op.name());
                        Error::new(Kind::Unsupported, text)
                    })
                })
                .collect::<Result<_>>()?;
            let inputs: SmallVec<[&Var; 4]> = inputs.iter().collect();
            for (out, var) in Var::apply(record.op.clone(), &inputs).into_iter().enumerate() {
                values.insert(Slot::Made { record: at as u32, out: out as u8 }, var);
            }
        }
        Ok(())
    }

    /// The slots that a slice reads but does not make: what has to cross into a stage.
    #[must_use]
    pub fn needs(&self, range: Range<usize>) -> Vec<Slot> {
        let mut needs = Vec::new();
        for record in &self.records[range.clone()] {
            for &slot in &record.inputs {
                let inside = matches!(slot, Slot::Made { record, .. } if range.contains(&(record as usize)));
                if !inside && !needs.contains(&slot) {
                    needs.push(slot);
                }
            }
        }
        needs
    }
}
