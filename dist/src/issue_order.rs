//! One issue order of collectives over all groups, proved on recorded traces.
//!
//! Ranks whose calls block, or wait in a queue, cannot deadlock if one order of all calls exists in which each rank issues its own. That
//! holds if the traces run to their ends in a simulation: a collective takes place when it is the next call of every member, and a message
//! at its recv, once it was sent. GPUs run messages over NCCL in that order too. For two groups this means that the ranks that share both issue their calls in the same order.

use crate::call::{Call, IssuedCall, Op, Origin};
use crate::error::{Error, Kind, Result};
use crate::mesh::Mesh;
use crate::trace::Record;
use std::collections::HashMap;

/// Checks that recorded calls of all ranks of a mesh, by rank, match and have one order over all groups: no execution deadlocks.
/// [`World::dry_run`](crate::World::dry_run) records a trace without running anything;
/// [`Rank::check_issue_order`](crate::Rank::check_issue_order) compares the traces of the ranks of a running world.
///
/// ```
/// use shardgrad_dist::{Mesh, World, check_issue_order};
/// let mesh = Mesh::parse("dp=2,tp=2")?;
/// let trace = |index| World::new(mesh.clone()).dry_run(index, |rank| Ok(rank.trace().take()));
/// let traces: Vec<_> = (0..4).map(trace).collect::<Result<_, _>>()?;
/// check_issue_order(&mesh, &traces)?;
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
///
/// # Errors
/// `Kind::Collective`, naming the calls that no order fits, that differ, or that another rank does not make; `Kind::Mesh` for another number of
/// traces than ranks.
pub fn check_issue_order(mesh: &Mesh, traces: &[Vec<Record>]) -> Result<()> {
    if traces.len() != mesh.num_ranks() {
        let text = format!("{} traces for {mesh}: give one trace per rank", traces.len());
        return Err(Error::new(Kind::Mesh, text));
    }
    let traces: Vec<Vec<IssuedCall>> = traces.iter().map(|trace| issued_calls(trace)).collect();
    simulate(mesh, &traces.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

/// The calls of a trace.
pub(crate) fn issued_calls(trace: &[Record]) -> Vec<IssuedCall> {
    trace.iter().map(issued_call).collect()
}

/// The call of a record. A record has no origin, and of an all_to_all no received counts; neither is compared.
fn issued_call(record: &Record) -> IssuedCall {
    let peer = record.peer.unwrap_or_default();
    let op = match (record.op, record.reduction) {
        ("all_reduce", Some(how)) => Op::AllReduce(how),
        ("all_gather", _) => Op::AllGather,
        ("reduce_scatter", _) => Op::ReduceScatter,
        ("all_to_all", _) => Op::AllToAll,
        ("broadcast", _) => Op::Broadcast { root: peer },
        ("send", _) => Op::Send { to: peer },
        ("recv", _) => Op::Recv { from: peer },
        _ => Op::Barrier,
    };
    let &Record { axes, dtype, phase, ref path, site, seq, ref counts, .. } = record;
    let call = Call { axes, dtype, phase, path, origin: Origin::default(), site };
    let mut issued = IssuedCall::new(&call, op, seq, counts);
    if op == Op::AllToAll {
        // A call without them is not well formed.
        issued.received = issued.counts.clone();
    }
    issued
}

/// [`check_issue_order`] of the calls of each rank.
pub(crate) fn simulate(mesh: &Mesh, traces: &[&[IssuedCall]]) -> Result<()> {
    let mut simulation = Simulation { mesh, traces, next: vec![0; traces.len()], messages: HashMap::new() };
    let mut active: Vec<usize> = (0..traces.len()).collect();
    while let Some(rank) = active.pop() {
        active.extend(simulation.advance(rank)?);
    }
    let blocked = (0..traces.len()).find(|rank| simulation.head(*rank).is_some());
    blocked.map_or(Ok(()), |rank| Err(simulation.no_order(rank)))
}

/// Ranks that issue their recorded calls as early as possible.
struct Simulation<'a> {
    mesh: &'a Mesh,
    traces: &'a [&'a [IssuedCall]],
    /// By rank, the position of its next call.
    next: Vec<usize>,
    /// The messages sent and not received, by axes, sender and receiver.
    messages: HashMap<(u16, usize, usize), usize>,
}

impl<'a> Simulation<'a> {
    /// The next call of a rank.
    fn head(&self, rank: usize) -> Option<&'a IssuedCall> {
        self.traces[rank].get(self.next[rank])
    }

    /// The ranks that a rank's next call waits for.
    fn awaited(&self, rank: usize, call: &IssuedCall) -> Vec<usize> {
        let members = self.mesh.group(rank, call.axes);
        match call.op {
            Op::Recv { from } => vec![members[from]],
            _ => members.into_iter().filter(|member| !self.is_at(*member, call)).collect(),
        }
    }

    /// Whether the next call of a rank is a collective over the axes of a call.
    fn is_at(&self, rank: usize, call: &IssuedCall) -> bool {
        self.head(rank).is_some_and(|head| head.axes == call.axes && head.op.is_collective())
    }

    /// Runs the next call of a rank if nothing is missing. Returns the ranks that may go on then.
    fn advance(&mut self, rank: usize) -> Result<Vec<usize>> {
        let Some(call) = self.head(rank) else { return Ok(Vec::new()) };
        let members = self.mesh.group(rank, call.axes);
        match call.op {
            Op::Send { to } => {
                *self.messages.entry((call.axes.bits(), rank, members[to])).or_default() += 1;
                self.next[rank] += 1;
                Ok(vec![members[to], rank])
            }
            Op::Recv { from } => {
                let sent = self.messages.entry((call.axes.bits(), members[from], rank)).or_default();
                if *sent == 0 {
                    return Ok(Vec::new());
                }
                *sent -= 1;
                self.next[rank] += 1;
                Ok(vec![rank])
            }
            _ if members.iter().all(|member| self.is_at(*member, call)) => {
                self.compare(&members)?;
                members.iter().for_each(|member| self.next[*member] += 1);
                Ok(members)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Compares the next calls of the members of a group.
    fn compare(&self, members: &[usize]) -> Result<()> {
        let calls: Vec<&IssuedCall> = members.iter().filter_map(|member| self.head(*member)).collect();
        let differs = (1..calls.len()).find(|i| !calls[0].differences(calls[*i]).is_empty());
        differs.map_or(Ok(()), |i| {
            let text = format!(
                "recorded collectives differ: rank {} issues {}, rank {} issues {}",
                members[0],
                calls[0].text(self.mesh, members[0]),
                members[i],
                calls[i].text(self.mesh, members[i])
            );
            Err(calls[0].locate(Error::new(Kind::Collective, text)))
        })
    }

    /// The error about a rank that cannot go on: follows the waits to a rank without calls, or around a cycle.
    fn no_order(&self, blocked: usize) -> Error {
        let mut path = vec![blocked];
        loop {
            let rank = path[path.len() - 1];
            let call = self.head(rank).expect("bug: a rank without a call waits");
            let next = self.awaited(rank, call)[0];
            if self.head(next).is_none() {
                let text = format!(
                    "rank {rank} issues {}, but rank {next} issues no such call: every rank of a group makes each of its calls",
                    call.text(self.mesh, rank)
                );
                return call.locate(Error::new(Kind::Collective, text));
            }
            if let Some(start) = path.iter().position(|earlier| *earlier == next) {
                return self.cycle(&path[start..]);
            }
            path.push(next);
        }
    }

    /// The error about ranks of which each waits for the next one, and the last for the first.
    fn cycle(&self, ranks: &[usize]) -> Error {
        let head = |rank: usize| self.head(rank).expect("bug: a rank without a call waits");
        let text = format!("the collectives of {} have no common issue order", self.mesh);
        let mut error = head(ranks[0]).locate(Error::new(Kind::Collective, text));
        for (i, rank) in ranks.iter().enumerate() {
            // The rank before waits for this one in `awaited`.
            let before = ranks[(i + ranks.len() - 1) % ranks.len()];
            let awaited = head(before);
            let later = self.traces[*rank][self.next[*rank]..].iter().find(|later| {
                later.axes == awaited.axes && (later.op.is_collective() == awaited.op.is_collective())
            });
            let first = head(*rank).text(self.mesh, *rank);
            let order = match later {
                Some(later) => format!("rank {rank} issues {first} before {}", later.text(self.mesh, *rank)),
                None => {
                    let awaited = awaited.text(self.mesh, before);
                    format!("rank {rank} issues {first}, but no match of {awaited}")
                }
            };
            error = error.detail("order", order);
        }
        error.detail("help", "issue the calls of these groups in one order on all ranks that share them")
    }
}
