//! What a rank has asked the others for: running totals always, full records on request.

use crate::call::{Op, Phase, ReduceOp, Request};
use crate::mesh::AxisSet;
use shardgrad_kernels::DType;
use std::cell::{Cell, RefCell};
use std::panic::Location;

/// One issued collective, as one rank sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The collective: `all_reduce`, `all_gather`, ...
    pub op: &'static str,
    /// How an all-reduce combines.
    pub reduction: Option<ReduceOp>,
    /// The root of a broadcast, the other end of a send or recv, as a place in the group.
    pub peer: Option<usize>,
    /// The axes over which ranks meet.
    pub axes: AxisSet,
    /// What the elements are.
    pub dtype: DType,
    /// Elements: one global number, or one per member for gathers and scatters (all_to_all: what this rank
    /// sends to each).
    pub counts: Vec<usize>,
    /// Bytes that this rank must move, whatever the algorithm.
    pub bytes: u64,
    /// The part of the step.
    pub phase: Phase,
    /// The value in question; may be empty.
    pub path: String,
    /// The line of user code that asked.
    pub site: &'static Location<'static>,
    /// The number of the call in its group (of a send or recv: among the messages of its pair), from 1.
    pub seq: u64,
}

impl Record {
    /// Elements in all: the sum of `counts`.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.counts.iter().sum()
    }
}

/// The collectives of one rank. Totals are always kept; records only while enabled (dry runs start enabled).
#[derive(Debug, Default)]
pub struct Trace {
    enabled: Cell<bool>,
    records: RefCell<Vec<Record>>,
    num_collectives: Cell<u64>,
    bytes: Cell<u64>,
}

impl Trace {
    /// Starts to keep records.
    pub fn enable(&self) {
        self.enabled.set(true);
    }

    /// Stops to keep records; those kept stay.
    pub fn disable(&self) {
        self.enabled.set(false);
    }

    /// Whether records are kept.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.enabled.get()
    }

    /// Hands out the records kept so far and forgets them.
    pub fn take(&self) -> Vec<Record> {
        self.records.take()
    }

    /// How many collectives were issued, recorded or not.
    #[must_use]
    pub fn num_collectives(&self) -> u64 {
        self.num_collectives.get()
    }

    /// The bytes that this rank had to move for all of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    pub(crate) fn add(&self, request: &Request<'_>) {
        let call = request.call;
        let bytes = request.moved_numel() as u64 * call.dtype.size() as u64;
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
