//! A recorded program: the ops that a piece of model text applied, without any value.
//!
//! Recomputation replays one; a pipeline cuts one into stages. Under a recorder the model text runs once, on the
//! null back end or for real, and leaves this list; a slice of it can then be replayed on other values.

use crate::id::{Id, Key};
use shardgrad_dist::Result;
use shardgrad_tensor::{DType, Layout, Op, Tensor, op};
use smallvec::SmallVec;
use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::ops::Range;
use std::panic::Location;
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
        out: u32,
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
    /// The line that asked for it.
    pub site: &'static Location<'static>,
    /// Per argument, whether no gradient flows back through this use of it.
    pub stops: SmallVec<[bool; 4]>,
}

impl fmt::Debug for OpRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?} -> {:?} at {}", self.op.name(), self.inputs, self.outputs, self.path)
    }
}

/// The dtypes in which cotangents of a value are added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumDType {
    /// Narrower cotangents are widened to this dtype.
    pub least: DType,
    /// Wider cotangents are rounded to this dtype.
    pub most: DType,
}

impl SumDType {
    /// One dtype for all cotangents.
    #[must_use]
    pub fn of(dtype: DType) -> SumDType {
        SumDType { least: dtype, most: dtype }
    }

    /// The same for a value whose cotangents the ranks still have to add up: a wider one is rounded after that.
    #[must_use]
    pub fn before_ranks(self) -> SumDType {
        let accumulator = self.most.accumulator();
        SumDType { most: if accumulator.size() > self.most.size() { accumulator } else { self.most }, ..self }
    }

    /// A cotangent in a dtype in which it can be added up.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub(crate) fn fit(self, cotangent: Tensor) -> Result<Tensor> {
        let size = cotangent.dtype().size();
        match self {
            SumDType { least, .. } if size < least.size() => cotangent.converted(least),
            SumDType { most, .. } if size > most.size() => cotangent.converted(most),
            _ => Ok(cotangent),
        }
    }
}

/// Something that a program takes from outside.
#[derive(Clone, Debug)]
pub struct Outer {
    /// The parameter it is, if it is one.
    pub key: Option<Key>,
    /// Its layout: of a parameter, the one in which it is computed with.
    pub layout: Layout,
    /// The dtypes in which its cotangents are added up: of a parameter, at least the one in which it is stored.
    pub sums: SumDType,
    /// Its value, if it is neither an argument nor a parameter.
    pub constant: Option<Tensor>,
}

/// A list of op records with what they take from outside and what they leave.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// What comes from outside, in order of first use (arguments first).
    pub outers: Vec<Outer>,
    /// How many of them are arguments.
    pub num_arguments: usize,
    /// The ops, in the order in which they were applied.
    pub records: Vec<OpRecord>,
    /// Ranges of records that are to be computed again in the backward pass.
    pub blocks: Vec<Range<usize>>,
    /// The results, in the order in which the model text returned them.
    pub outputs: Vec<Slot>,
}

/// A recorder: the program so far and the values that stand for its outer slots.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) program: Program,
    pub(crate) outers: Vec<(Option<Id>, Tensor)>,
}

/// Something that keeps what a recording has made, which is of no use after it.
pub(crate) trait Keeper {
    /// Lets go of what a recording has made.
    fn forget(&self, recording: u32);
}

impl Recorder {
    /// The slot of a value that the program has not made: it is taken in from outside, once.
    pub(crate) fn outer(
        &mut self,
        (id, key): (Option<Id>, Option<Key>),
        tensor: &Tensor,
        sums: SumDType,
    ) -> Slot {
        Slot::Outer(self.known(id, tensor).unwrap_or_else(|| {
            let constant = key.is_none().then(|| tensor.clone());
            self.program.outers.push(Outer { key, layout: tensor.layout().clone(), sums, constant });
            self.outers.push((id, tensor.clone()));
            self.outers.len() - 1
        }) as u32)
    }

    /// Whether a value is one of the arguments.
    pub(crate) fn is_argument(&self, id: Option<Id>, tensor: &Tensor) -> bool {
        self.known(id, tensor).is_some_and(|at| at < self.program.num_arguments)
    }

    /// Where a value stands among those from outside.
    fn known(&self, id: Option<Id>, tensor: &Tensor) -> Option<usize> {
        // One memory can stand for two values: a variable and what was cut off of it.
        let same = |(i, t): &(Option<Id>, Tensor)| *i == id && (id.is_some() || t.same_as(tensor));
        self.outers.iter().position(same)
    }
}

impl Program {
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

    /// The slots that a slice makes and others read: what has to leave a stage. Results of the program are among them.
    #[must_use]
    pub fn leaves(&self, range: Range<usize>) -> Vec<Slot> {
        let inside = |at: usize| range.contains(&at);
        let outside = self.records.iter().enumerate().filter(|(at, _)| !inside(*at));
        let read = outside.flat_map(|(_, record)| &record.inputs).chain(&self.outputs);
        let made = |slot: &&Slot| matches!(slot, Slot::Made { record, .. } if inside(*record as usize));
        read.filter(made).copied().collect::<BTreeSet<Slot>>().into_iter().collect()
    }

    /// The layout of a slot.
    #[must_use]
    pub fn layout(&self, slot: Slot) -> &Layout {
        match slot {
            Slot::Outer(outer) => &self.outers[outer as usize].layout,
            Slot::Made { record, out } => &self.records[record as usize].outputs[out as usize],
        }
    }

    /// What a gradient can reach: some of what comes from outside, and what is made of it by ops that have one.
    pub(crate) fn reached(&self, from: impl Fn(usize) -> bool) -> HashSet<Slot> {
        let sources = (0..self.outers.len()).filter(|outer| from(*outer));
        let mut reached: HashSet<Slot> = sources.map(|outer| Slot::Outer(outer as u32)).collect();
        for (at, record) in self.records.iter().enumerate() {
            let layouts: SmallVec<[&Layout; 4]> = record.inputs.iter().map(|s| self.layout(*s)).collect();
            let differentiable = op::differentiable_args(&*record.op, &layouts);
            let flows = |(i, s): (usize, &Slot)| differentiable[i] && !record.stops[i] && reached.contains(s);
            if !record.inputs.iter().enumerate().any(flows) {
                continue;
            }
            for (out, layout) in record.outputs.iter().enumerate() {
                if layout.dtype().is_float() {
                    reached.insert(Slot::Made { record: at as u32, out: out as u32 });
                }
            }
        }
        reached
    }
}
