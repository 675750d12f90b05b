//! One issue order of collectives over all groups, proved on recorded traces.
//!
//! Ranks whose calls block, or wait in a queue, cannot deadlock if one order of all calls exists in which each rank issues its own. That
//! holds if the traces run to their ends in a simulation: a collective takes place when it is the next call of every member, and a message
//! at its recv, once it was sent. GPUs run messages over NCCL in that order too. For two groups this means that the ranks that share both issue their calls in the same order.

use crate::encoding::printable;
use crate::error::{Error, Kind, Result};
use crate::mesh::Mesh;
use crate::trace::Record;
use std::collections::HashMap;

/// The most characters of a path that an error message shows.
const PATH_CHARS_MAX: usize = 200;

/// Checks that recorded calls of all ranks of a mesh, by rank, match and have one order over all groups: no execution deadlocks.
/// [`World::dry_run`](crate::World::dry_run) records a trace without running anything.
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
    traces: &'a [Vec<Record>],
    /// By rank, the position of its next call.
    next: Vec<usize>,
    /// The messages sent and not received, by axes, sender and receiver.
    messages: HashMap<(u16, usize, usize), usize>,
}

impl Simulation<'_> {
    /// The next call of a rank.
    fn head(&self, rank: usize) -> Option<&Record> {
        self.traces[rank].get(self.next[rank])
    }

    /// The ranks that a rank's next call waits for.
    fn awaited(&self, rank: usize, call: &Record) -> Vec<usize> {
        let members = self.mesh.group(rank, call.axes);
        match (call.op, call.peer) {
            ("recv", Some(from)) => vec![members[from]],
            _ => members.into_iter().filter(|member| !self.is_at(*member, call)).collect(),
        }
    }

    /// Whether the next call of a rank is a collective over the axes of a call.
    fn is_at(&self, rank: usize, call: &Record) -> bool {
        self.head(rank).is_some_and(|head| head.axes == call.axes && is_collective(head))
    }

    /// Runs the next call of a rank if nothing is missing. Returns the ranks that may go on then.
    fn advance(&mut self, rank: usize) -> Result<Vec<usize>> {
        let Some(call) = self.traces[rank].get(self.next[rank]) else { return Ok(Vec::new()) };
        let members = self.mesh.group(rank, call.axes);
        let peer = call.peer.map(|peer| members[peer]);
        match (call.op, peer) {
            ("send", Some(to)) => {
                *self.messages.entry((call.axes.bits(), rank, to)).or_default() += 1;
                self.next[rank] += 1;
                Ok(vec![to, rank])
            }
            ("recv", Some(from)) => {
                let sent = self.messages.entry((call.axes.bits(), from, rank)).or_default();
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
        let calls: Vec<&Record> = members.iter().filter_map(|member| self.head(*member)).collect();
        let differs = (1..calls.len()).find(|i| !do_match(calls[0], calls[*i]));
        differs.map_or(Ok(()), |i| {
            let text = format!(
                "recorded collectives differ: rank {} issues {}, rank {} issues {}",
                members[0],
                self.text(calls[0]),
                members[i],
                self.text(calls[i])
            );
            Err(Error::new(Kind::Collective, text).at(calls[0].site))
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
                    self.text(call)
                );
                return Error::new(Kind::Collective, text).at(call.site);
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
        let mut error = Error::new(Kind::Collective, text).at(head(ranks[0]).site);
        for (i, rank) in ranks.iter().enumerate() {
            // The rank before waits for this one in `awaited`.
            let before = ranks[(i + ranks.len() - 1) % ranks.len()];
            let awaited = head(before);
            let later = self.traces[*rank][self.next[*rank]..]
                .iter()
                .find(|later| later.axes == awaited.axes && (is_collective(later) == is_collective(awaited)));
            let first = self.text(head(*rank));
            let order = match later {
                Some(later) => format!("rank {rank} issues {first} before {}", self.text(later)),
                None => format!("rank {rank} issues {first}, but no match of {}", self.text(awaited)),
            };
            error = error.detail("order", order);
        }
        error.detail("help", "issue the calls of these groups in one order on all ranks that share them")
    }

    /// The call as errors name it: `#3 all_reduce f32[128] over dp at src/x.rs:10 (h.3)`.
    fn text(&self, call: &Record) -> String {
        let (op, dtype, seq, numel) = (call.op, call.dtype, call.seq, call.numel());
        let over = self.mesh.names(call.axes);
        let path = match &*printable(&call.path, PATH_CHARS_MAX) {
            "" => String::new(),
            path => format!(" ({path})"),
        };
        format!("#{seq} {op} {dtype}[{numel}] over {over} at {}:{}{path}", call.site.file(), call.site.line())
    }
}

fn is_collective(call: &Record) -> bool {
    !matches!(call.op, "send" | "recv")
}

/// Whether two members' calls match; the splits of an all_to_all differ between members.
fn do_match(a: &Record, b: &Record) -> bool {
    let named_alike = a.path == b.path || a.path.is_empty() || b.path.is_empty();
    let counts = a.op == "all_to_all" || a.counts == b.counts;
    let [fields, others] = [a, b].map(|r| (r.op, r.reduction, r.dtype, r.phase, r.seq));
    let roots = a.op != "broadcast" || a.peer == b.peer;
    named_alike && counts && fields == others && roots
}
