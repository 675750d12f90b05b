//! Trace of the collectives of a rank: totals always, full records on request.

use crate::call::{Op, Phase, ReduceOp, Request};
use crate::error::{Error, Kind, Result};
use crate::mesh::{AxisSet, Mesh};
use shardgrad_kernels::DType;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
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

    /// The names of the values that share the call: gradients in a bucket. One name, possibly empty, for all other calls.
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

/// Verifies that all ranks issue their calls in one order: that a total order of all calls exists of which the trace of each rank is a
/// part. `traces` holds the records of every rank, by rank. Then the calls of any two groups come in the same order on the ranks that
/// share both groups, and no cycle of ranks waits in several groups: operations of several communicators of NCCL, which run in the order of
/// their issue, cannot block each other. A send waits for nothing, a recv for its send.
///
/// # Errors
/// `Kind::Collective` with the calls that ranks wait in.
pub fn verify_issue_order(mesh: &Mesh, traces: &[Vec<Record>]) -> Result<()> {
    let mut issued = vec![0; traces.len()];
    let mut messages: HashMap<(usize, usize, AxisSet), usize> = HashMap::new();
    loop {
        let before = issued.clone();
        for rank in 0..traces.len() {
            while let Some(record) = traces[rank].get(issued[rank]) {
                let members = mesh.group(rank, record.axes);
                let peer = record.peer.map_or(rank, |peer| members[peer]);
                let is_at_call = |member: &usize| {
                    let other = traces[*member].get(issued[*member]);
                    other.is_some_and(|o| (o.op, o.axes, o.seq) == (record.op, record.axes, record.seq))
                };
                match record.op {
                    "send" => *messages.entry((rank, peer, record.axes)).or_default() += 1,
                    "recv" => match messages.get_mut(&(peer, rank, record.axes)) {
                        Some(count) if *count > 0 => *count -= 1,
                        _ => break,
                    },
                    _ if members.iter().all(is_at_call) => {
                        members
                            .iter()
                            .filter(|member| **member != rank)
                            .for_each(|other| issued[*other] += 1);
                    }
                    _ => break,
                }
                issued[rank] += 1;
            }
        }
        if issued == before {
            break;
        }
    }
    let waits: Vec<String> = (0..traces.len())
        .filter_map(|rank| {
            let Record { op, axes, seq, site, .. } = traces[rank].get(issued[rank])?;
            Some(format!("rank {rank} waits in #{seq} {op} over {} at {site}", mesh.names(*axes)))
        })
        .collect();
    if waits.is_empty() {
        return Ok(());
    }
    let why = format!("ranks issue their calls in different orders: {}", waits.join(", "));
    let help =
        "ranks that share groups must call them in the same order; a recv needs an earlier send of its peer";
    Err(Error::new(Kind::Collective, why).detail("help", help))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(mesh: &Mesh, op: &'static str, axes: &str, peer: Option<usize>, seq: u64) -> Record {
        let axes: AxisSet = mesh.axes().filter(|axis| axes.contains(mesh.name(*axis))).collect();
        let (reduction, dtype, counts, bytes) = (None, DType::F32, vec![1], 4);
        let (phase, path, site) = (Phase::Forward, String::new(), Location::caller());
        Record { op, reduction, peer, axes, dtype, counts, bytes, phase, path, site, seq }
    }

    #[test]
    fn one_issue_order_is_verified_and_other_orders_are_found() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
        let [dp, tp, all] = ["dp", "tp", "dp, tp"].map(|axes| record(&mesh, "all_reduce", axes, None, 1));
        let verify = |traces: [&[&Record]; 4]| {
            let traces = traces.map(|trace| trace.iter().map(|one| (*one).clone()).collect());
            verify_issue_order(&mesh, &traces)
        };
        verify([&[&dp, &tp, &all]; 4]).unwrap();
        verify([&[]; 4]).unwrap();
        // Ranks 0 and 2 share two groups.
        let text = verify([&[&dp, &all], &[&all], &[&all, &dp], &[&all]]).unwrap_err().to_string();
        assert!(text.contains("rank 0 waits in #1 all_reduce over dp at"), "{text}");
        assert!(text.contains("rank 2 waits in #1 all_reduce over dp,tp at"), "{text}");
        // Any two ranks share one group only, and one of these orders is a cycle.
        verify([&[&tp, &dp], &[&tp, &dp], &[&dp, &tp], &[&dp, &tp]]).unwrap();
        verify([&[&tp, &dp], &[&dp, &tp], &[&dp, &tp], &[&tp, &dp]]).unwrap_err();
        // A call that a member does not make, and another op.
        verify([&[&dp], &[], &[], &[]]).unwrap_err();
        let gather = record(&mesh, "all_gather", "dp", None, 1);
        verify([&[&dp], &[], &[&gather], &[]]).unwrap_err();
    }

    #[test]
    fn issue_order_of_messages_and_collectives() {
        let mesh = Mesh::new(&[("pp", 2)]).unwrap();
        let (sum, send) =
            (record(&mesh, "all_reduce", "pp", None, 1), record(&mesh, "send", "pp", Some(1), 1));
        let recv = record(&mesh, "recv", "pp", Some(0), 1);
        let verify = |a: [&Record; 2], b: [&Record; 2]| {
            verify_issue_order(&mesh, &[a, b].map(|trace| trace.map(Clone::clone).to_vec()))
        };
        verify([&send, &sum], [&recv, &sum]).unwrap();
        verify([&send, &sum], [&sum, &recv]).unwrap();
        verify([&sum, &send], [&recv, &sum]).unwrap_err();
    }
}
