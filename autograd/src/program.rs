//! A recorded program: the list of ops that model code applied, without values.
//!
//! Activation checkpointing replays a program; a pipeline cuts one into stages. A recorder makes the list in one run of
//! the model code, with values or on meta tensors; a slice of the list can be replayed on other values.

use crate::id::{Id, Key};
use shardgrad_dist::Result;
use shardgrad_tensor::tensor::redistribute::complete_partial_sum;
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
    /// An external input (argument, parameter or constant), in order of first use.
    External(u32),
    /// Output `out` of record `record`.
    Output {
        /// The index of the record.
        record: u32,
        /// The index among its visible outputs.
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
    /// The dotted name of the parameter or checkpoint used last before it.
    pub path: Rc<str>,
    /// The line that applied the op.
    pub site: &'static Location<'static>,
    /// Per argument, whether this use of it stops the gradient.
    pub stops_gradient: SmallVec<[bool; 4]>,
}

impl fmt::Debug for OpRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?} -> {:?} at {}", self.op.name(), self.inputs, self.outputs, self.path)
    }
}

/// The range of dtypes in which cotangents of a value are accumulated.
#[doc(alias = "main_grad")]
#[doc(alias = "accumulate_allreduce_grads_in_fp32")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccumulationDType {
    /// Narrower cotangents are widened to this dtype.
    pub min: DType,
    /// Wider cotangents are rounded to this dtype.
    pub max: DType,
}

impl AccumulationDType {
    /// One dtype for all cotangents.
    #[must_use]
    pub fn of(dtype: DType) -> AccumulationDType {
        AccumulationDType { min: dtype, max: dtype }
    }

    /// The same range before the sum over ranks: a wider cotangent is rounded after that sum.
    #[must_use]
    pub fn before_reduction(self) -> AccumulationDType {
        let accumulator = self.max.accumulator();
        AccumulationDType {
            max: if accumulator.size() > self.max.size() { accumulator } else { self.max },
            ..self
        }
    }

    /// A cotangent, cast into the range.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub(crate) fn cast(self, cotangent: Tensor) -> Result<Tensor> {
        let size = cotangent.dtype().size();
        let cast = |dtype| complete_partial_sum(cotangent.clone(), Location::caller())?.into_dtype(dtype);
        match self {
            AccumulationDType { min, .. } if size < min.size() => cast(min),
            AccumulationDType { max, .. } if size > max.size() => cast(max),
            _ => Ok(cotangent),
        }
    }
}

/// A value that a program takes from outside.
#[doc(alias = "free variable")]
#[doc(alias = "invars")]
#[doc(alias = "constvars")]
#[derive(Clone, Debug)]
pub struct ExternalInput {
    /// The key, if the value is a parameter.
    pub key: Option<Key>,
    /// Its layout; of a parameter, the layout it is computed in.
    pub layout: Layout,
    /// The dtypes in which its cotangents are accumulated; of a parameter, at least the dtype it is stored in.
    pub accumulation: AccumulationDType,
    /// Its value, if it is neither an argument nor a parameter.
    pub constant: Option<Tensor>,
}

/// A list of op records with external inputs and outputs.
#[doc(alias = "jaxpr")]
#[doc(alias = "fx graph")]
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// The external inputs, in order of first use, arguments first.
    pub external_inputs: Vec<ExternalInput>,
    /// The number of external inputs that are arguments.
    pub num_arguments: usize,
    /// The ops, in the order in which they were applied.
    pub records: Vec<OpRecord>,
    /// Ranges of records that are recomputed in the backward pass (activation checkpointing).
    pub blocks: Vec<Range<usize>>,
    /// The results, in the order in which the model code returned them.
    pub outputs: Vec<Slot>,
}

/// A recorder: the program so far, and the values of its external inputs.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) program: Program,
    pub(crate) external_inputs: Vec<(Option<Id>, Tensor)>,
}

/// A cache of values that belong to a recording and are useless after it.
pub(crate) trait RecordingCache {
    /// Drops the values that a recording made.
    fn forget(&self, recording: u32);
}

impl Recorder {
    /// The slot of a value that the program did not make; a value is taken in once.
    pub(crate) fn external(
        &mut self,
        (id, key): (Option<Id>, Option<Key>),
        tensor: &Tensor,
        accumulation: AccumulationDType,
    ) -> Slot {
        Slot::External(self.position_of(id, tensor).unwrap_or_else(|| {
            let constant = key.is_none().then(|| tensor.clone());
            self.program.external_inputs.push(ExternalInput {
                key,
                layout: tensor.layout().clone(),
                accumulation,
                constant,
            });
            self.external_inputs.push((id, tensor.clone()));
            self.external_inputs.len() - 1
        }) as u32)
    }

    /// Whether a value is one of the arguments.
    pub(crate) fn is_argument(&self, id: Option<Id>, tensor: &Tensor) -> bool {
        self.position_of(id, tensor).is_some_and(|at| at < self.program.num_arguments)
    }

    /// The index of a value among the external inputs.
    fn position_of(&self, id: Option<Id>, tensor: &Tensor) -> Option<usize> {
        // A variable and its detached form are two values with the same buffer.
        let same = |(i, t): &(Option<Id>, Tensor)| *i == id && (id.is_some() || t.ptr_eq(tensor));
        self.external_inputs.iter().position(same)
    }
}

impl Program {
    /// The slots that a slice reads but does not make: the inputs of a stage.
    #[must_use]
    pub fn inputs_of(&self, range: Range<usize>) -> Vec<Slot> {
        let mut needs = Vec::new();
        for record in &self.records[range.clone()] {
            for &slot in &record.inputs {
                let inside =
                    matches!(slot, Slot::Output { record, .. } if range.contains(&(record as usize)));
                if !inside && !needs.contains(&slot) {
                    needs.push(slot);
                }
            }
        }
        needs
    }

    /// The slots that a slice makes and other records read, or that are results of the program: the outputs of a stage.
    #[must_use]
    pub fn outputs_of(&self, range: Range<usize>) -> Vec<Slot> {
        let inside = |at: usize| range.contains(&at);
        let outside = self.records.iter().enumerate().filter(|(at, _)| !inside(*at));
        let read = outside.flat_map(|(_, record)| &record.inputs).chain(&self.outputs);
        let made = |slot: &&Slot| matches!(slot, Slot::Output { record, .. } if inside(*record as usize));
        read.filter(made).copied().collect::<BTreeSet<Slot>>().into_iter().collect()
    }

    /// The layout of a slot.
    #[must_use]
    pub fn layout(&self, slot: Slot) -> &Layout {
        match slot {
            Slot::External(external) => &self.external_inputs[external as usize].layout,
            Slot::Output { record, out } => &self.records[record as usize].outputs[out as usize],
        }
    }

    /// The slots that have a gradient: the external inputs chosen by `from`, and all results that depend on them
    /// through differentiable ops.
    pub(crate) fn slots_with_gradient(&self, from: impl Fn(usize) -> bool) -> HashSet<Slot> {
        let sources = (0..self.external_inputs.len()).filter(|external| from(*external));
        let mut reached: HashSet<Slot> = sources.map(|external| Slot::External(external as u32)).collect();
        for (at, record) in self.records.iter().enumerate() {
            let layouts: SmallVec<[&Layout; 4]> = record.inputs.iter().map(|s| self.layout(*s)).collect();
            let differentiable = op::differentiable_args(&*record.op, &layouts);
            let flows = |(i, s): (usize, &Slot)| {
                differentiable[i] && !record.stops_gradient[i] && reached.contains(s)
            };
            if !record.inputs.iter().enumerate().any(flows) {
                continue;
            }
            for (out, layout) in record.outputs.iter().enumerate() {
                if layout.dtype().is_float() {
                    reached.insert(Slot::Output { record: at as u32, out: out as u32 });
                }
            }
        }
        reached
    }
}
