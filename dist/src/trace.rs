//! Trace of the collectives of a rank: totals always, full records on request.

use crate::call::{Op, Phase, ReduceOp, Request};
use crate::mesh::AxisSet;
use shardgrad_kernels::DType;
use std::cell::{Cell, RefCell};
use std::panic::Location;

/// The text between the names of values that share a call, in [`Call::path`](crate::Call::path).
pub const MEMBER_SEPARATOR: &str = ", ";

/// One collective or message that a rank issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The collective: `all_reduce`, `all_gather`, ...
    pub op: &'static str,
    /// The reduction of an all-reduce.
    pub reduction: Option<ReduceOp>,
    /// The root of a broadcast, or the peer of a send or recv, as a group rank.
    pub peer: Option<usize>,
    /// The axes of the group.
    pub axes: AxisSet,
    /// The dtype of the elements.
    pub dtype: DType,
    /// Element counts: one number, or one per group rank for gathers and scatters (all_to_all: the elements that this rank sends to
    /// each).
    pub counts: Vec<usize>,
    /// Bytes that this rank must transfer, whatever the algorithm.
    pub bytes: u64,
    /// The part of the training step.
    pub phase: Phase,
    /// The name of the value, as in `h.3.mlp.out`; the [names](Record::members) of several values that share the call; may be empty.
    pub path: String,
    /// The line of user code that made the call.
    pub site: &'static Location<'static>,
    /// The sequence number of the call in its group (of a send or recv: among the messages of its pair of ranks), from 1.
    pub seq: u64,
}

impl Record {
    /// The number of elements: the sum of `counts`.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The names of the values that share the call: gradients in a bucket, or small parameters. One name, possibly empty, for all other
    /// calls.
    pub fn members(&self) -> impl Iterator<Item = &str> {
        self.path.split(MEMBER_SEPARATOR)
    }
}

/// The trace of one rank's collectives. Totals are always kept, records only while enabled (dry runs start enabled).
#[derive(Debug, Default)]
pub struct Trace {
    enabled: Cell<bool>,
    records: RefCell<Vec<Record>>,
    num_collectives: Cell<u64>,
    bytes: Cell<u64>,
}

impl Trace {
    /// Starts recording.
    pub fn enable(&self) {
        self.enabled.set(true);
    }

    /// Stops recording; existing records stay.
    pub fn disable(&self) {
        self.enabled.set(false);
    }

    /// Whether calls are recorded.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.enabled.get()
    }

    /// Returns and clears the records.
    pub fn take(&self) -> Vec<Record> {
        self.records.take()
    }

    /// The number of collectives and messages issued, recorded or not.
    #[must_use]
    pub fn num_collectives(&self) -> u64 {
        self.num_collectives.get()
    }

    /// The bytes that this rank had to transfer for all of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    pub(crate) fn add(&self, request: &Request<'_>) {
        let call = request.call;
        let bytes = request.transferred_numel() as u64 * call.dtype.size() as u64;
        self.num_collectives.set(self.num_collectives.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
        if !self.enabled.get() {
            return;
        }
        let (reduction, peer) = match request.op {
            Op::AllReduce(how) => (Some(how), None),
            Op::Broadcast { root: peer } | Op::Send { to: peer } | Op::Recv { from: peer } => {
                (None, Some(peer))
            }
            _ => (None, None),
        };
        self.records.borrow_mut().push(Record {
            op: request.op.name(),
            reduction,
            peer,
            axes: call.axes,
            dtype: call.dtype,
            counts: request.counts.to_vec(),
            bytes,
            phase: call.phase,
            path: call.path.to_string(),
            site: call.site,
            seq: request.number,
        });
    }
}
