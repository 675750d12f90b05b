//! Descriptions of collective calls: the part that callers give ([`Call`]), and the fingerprint that ranks compare.

mod encoding;
mod payload;

use encoding::Site;

use crate::encoding::printable;
use crate::error::Error;
use crate::mesh::{AxisSet, Mesh};
use shardgrad_kernels::{Buffer, DType};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::panic::Location;

/// The reduction of an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum, in a fixed balanced tree over the group ranks.
    Sum,
    /// The maximum.
    Max,
    /// The minimum.
    Min,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        })
    }
}

/// The part of a training step that a call belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Everything else: norms, stop flags, loading, saving.
    Control,
}

/// The origin of the elements of a call: which global tensors they were computed from, as far as the caller knows. It must be the
/// same on all members of the group.
#[derive(Clone, Copy, Debug, Default)]
pub struct Origin<'a> {
    /// A hash of the origin, compared between members; 0 if the origin is unknown, which matches any hash.
    pub hash: u64,
    /// The newest global tensors that this rank created, for the error about different origins: one line `shape at file:line` each,
    /// the newest first. Not compared.
    pub recent_inputs: &'a str,
}

/// The description of a collective that its caller gives, besides buffers and counts.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The mesh axes of the group.
    pub axes: AxisSet,
    /// The dtype of the elements.
    pub dtype: DType,
    /// The part of the step; the same on all members of the group.
    pub phase: Phase,
    /// The name of the value, as in `h.3.mlp.out`, or the names of several values between
    /// [separators](crate::MEMBER_SEPARATOR); may be empty. Members that name the value must give the same name.
    pub path: &'a str,
    /// The origin of the elements.
    pub origin: Origin<'a>,
    /// The line of user code that made the call.
    pub site: &'static Location<'static>,
}

/// A collective or message with its own parameters. Roots and peers are group ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast { root: usize },
    Send { to: usize },
    Recv { from: usize },
    Barrier,
}

impl Op {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::AllReduce(_) => "all_reduce",
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllToAll => "all_to_all",
            Op::Broadcast { .. } => "broadcast",
            Op::Send { .. } => "send",
            Op::Recv { .. } => "recv",
            Op::Barrier => "barrier",
        }
    }

    /// Whether the whole group takes part, rather than a pair of ranks.
    pub(crate) fn is_collective(self) -> bool {
        !matches!(self, Op::Send { .. } | Op::Recv { .. })
    }
}

/// A rank's position in one group: the members, its group rank, and how many calls it has made.
#[derive(Debug)]
pub(crate) struct GroupPosition {
    pub(crate) members: Vec<usize>,
    pub(crate) group_rank: usize,
    pub(crate) calls: Cell<u64>,
    pub(crate) sent: RefCell<Vec<u64>>,
    pub(crate) received: RefCell<Vec<u64>>,
}

impl GroupPosition {
    pub(crate) fn new(mesh: &Mesh, rank: usize, axes: AxisSet) -> GroupPosition {
        let members = mesh.group(rank, axes);
        let group_rank = members.iter().position(|&r| r == rank).expect("bug: a rank is not in its group");
        let none = || RefCell::new(vec![0; members.len()]);
        GroupPosition { group_rank, calls: Cell::new(0), sent: none(), received: none(), members }
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// Counts a call and returns its number, from 1: in its group, or among the messages of its pair of ranks.
    pub(crate) fn count(&self, op: Op) -> u64 {
        let next = |counts: &RefCell<Vec<u64>>, peer: usize| {
            let mut counts = counts.borrow_mut();
            counts[peer] += 1;
            counts[peer]
        };
        match op {
            Op::Send { to } => next(&self.sent, to),
            Op::Recv { from } => next(&self.received, from),
            _ => {
                self.calls.set(self.calls.get() + 1);
                self.calls.get()
            }
        }
    }
}

/// The word for a different origin in error messages.
pub(crate) const ORIGIN_DIFFERS: &str = "global shapes";

/// One call on its way to a transport. `counts` holds the counts that all members must agree on; for all_to_all, `counts` holds
/// the elements that this rank sends to each member, and `received` the elements that it receives from each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) call: &'a Call<'a>,
    pub(crate) op: Op,
    pub(crate) position: &'a GroupPosition,
    pub(crate) number: u64,
    pub(crate) counts: &'a [usize],
    pub(crate) received: &'a [usize],
    pub(crate) x: Option<&'a Buffer>,
}

/// The range of chunk i of n elements over k ranks: floor(i*n/k) .. floor((i+1)*n/k).
pub(crate) fn chunk(n: usize, k: usize, i: usize) -> Range<usize> {
    let border = |i: usize| (i as u128 * n as u128 / k as u128) as usize;
    border(i)..border(i + 1)
}

impl Request<'_> {
    /// The number of elements of the result; `None` for calls without a result.
    pub(crate) fn result_numel(&self) -> Option<usize> {
        match self.op {
            Op::AllReduce(_) | Op::Broadcast { .. } | Op::Recv { .. } => Some(self.counts[0]),
            Op::AllGather => Some(self.counts.iter().sum()),
            Op::ReduceScatter => Some(self.counts[self.position.group_rank]),
            Op::AllToAll => Some(self.received.iter().sum()),
            Op::Send { .. } | Op::Barrier => None,
        }
    }

    /// The number of elements that a member makes readable to the others.
    pub(crate) fn published_numel(&self, group_rank: usize) -> usize {
        match self.op {
            Op::AllReduce(_) => self.counts[0],
            Op::AllGather => self.counts[group_rank],
            Op::Broadcast { root } if root != group_rank => 0,
            Op::Barrier | Op::Recv { .. } => 0,
            _ => self.counts.iter().sum(),
        }
    }

    /// The number of elements that this rank has to transfer, whatever the algorithm.
    pub(crate) fn transferred_numel(&self) -> usize {
        let (group_rank, k) = (self.position.group_rank, self.position.size());
        let total: usize = self.counts.iter().sum();
        match self.op {
            Op::AllReduce(_) => 2 * (total - chunk(total, k, group_rank).len()),
            Op::AllGather | Op::ReduceScatter => total - self.counts[group_rank],
            Op::AllToAll => total.max(self.received.iter().sum()) - self.counts[group_rank],
            Op::Broadcast { .. } if k == 1 => 0,
            Op::Send { to: peer } | Op::Recv { from: peer } if peer == group_rank => 0,
            Op::Broadcast { .. } | Op::Send { .. } | Op::Recv { .. } => total,
            Op::Barrier => 0,
        }
    }
}

/// The fingerprint of a call: three hashes that members compare in place of the full description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    /// The hash of everything that must be the same for every member.
    pub(crate) call: u64,
    /// The hash of the path; 0 if the path is empty.
    pub(crate) path: u64,
    /// The hash of the origin of the elements; 0 if the origin is unknown.
    pub(crate) origin: u64,
}

impl Fingerprint {
    /// The fingerprint of a collective. Calls that [`IssuedCall::differences`] distinguishes have different fingerprints, except with
    /// a chance of 2^-64. The splits of an all_to_all are left out: they differ from member to member.
    pub(crate) fn of(request: &Request<'_>) -> Fingerprint {
        let Call { axes, dtype, phase, path, origin, .. } = *request.call;
        let (kind, with) = match request.op {
            Op::AllReduce(reduce_op) => (0, reduce_op as u64),
            Op::AllGather => (1, 0),
            Op::ReduceScatter => (2, 0),
            Op::AllToAll => (3, 0),
            Op::Broadcast { root } => (4, root as u64),
            Op::Barrier => (5, 0),
            Op::Send { .. } | Op::Recv { .. } => unreachable!("bug: messages have no fingerprint"),
        };
        let small = kind | (dtype as u64) << 8 | (phase as u64) << 16 | u64::from(axes.bits()) << 32;
        let counts = if request.op == Op::AllToAll { &[] } else { request.counts };
        let start = [small, with, request.number, counts.len() as u64].into_iter().fold(0, mix);
        let call = counts.iter().fold(start, |hash, count| mix(hash, *count as u64));
        let hash = hash_bytes(path.as_bytes());
        Fingerprint { call, path: if path.is_empty() { 0 } else { hash | 1 }, origin: origin.hash }
    }

    /// Takes over the hashes that `other` knows and this fingerprint does not.
    pub(crate) fn fill_unknown(&mut self, other: Fingerprint) {
        let known = |own: u64, other: u64| if own == 0 { other } else { own };
        (self.path, self.origin) = (known(self.path, other.path), known(self.origin, other.origin));
    }

    /// Whether two members' calls match.
    pub(crate) fn fits(self, other: Fingerprint) -> bool {
        let agree = |a: u64, b: u64| a == b || a == 0 || b == 0;
        self.call == other.call && agree(self.path, other.path) && agree(self.origin, other.origin)
    }
}

/// A 64-bit hash of bytes, for comparisons between ranks of one build.
pub(crate) fn hash_bytes(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let start = words.iter().fold(bytes.len() as u64, |hash, word| mix(hash, u64::from_le_bytes(*word)));
    rest.iter().fold(start, |hash, byte| mix(hash, u64::from(*byte)))
}

/// Mixes one word into a hash: a multiplication spreads its bits upwards, a shift brings the upper half down.
fn mix(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    product ^ product >> 32
}

/// The most characters of a path that an error message shows.
const PATH_CHARS_MAX: usize = 200;

/// The description of an issued call, stored where other ranks can read it. `number` is 0 before the first call.
#[derive(Clone, Debug)]
pub(crate) struct IssuedCall {
    pub(crate) op: Op,
    pub(crate) axes: AxisSet,
    pub(crate) dtype: DType,
    pub(crate) number: u64,
    pub(crate) counts: SmallVec<[usize; 8]>,
    pub(crate) received: SmallVec<[usize; 8]>,
    phase: Phase,
    path: String,
    origin_hash: u64,
    pub(crate) recent_inputs: String,
    site: Site,
}

impl IssuedCall {
    /// The value before the first call.
    pub(crate) fn none() -> IssuedCall {
        IssuedCall {
            op: Op::Barrier,
            axes: AxisSet::EMPTY,
            dtype: DType::U8,
            number: 0,
            counts: SmallVec::new(),
            received: SmallVec::new(),
            phase: Phase::Control,
            path: String::new(),
            origin_hash: 0,
            recent_inputs: String::new(),
            site: Site::Local(Location::caller()),
        }
    }

    /// Overwrites the description with that of a call, reusing the memory.
    pub(crate) fn set(&mut self, request: &Request<'_>) {
        self.op = request.op;
        self.axes = request.call.axes;
        self.dtype = request.call.dtype;
        self.number = request.number;
        self.counts.clear();
        self.counts.extend_from_slice(request.counts);
        self.received.clear();
        self.received.extend_from_slice(request.received);
        self.phase = request.call.phase;
        self.path.clear();
        self.path.push_str(request.call.path);
        self.origin_hash = request.call.origin.hash;
        self.recent_inputs.clear();
        self.recent_inputs.push_str(request.call.origin.recent_inputs);
        self.site = Site::Local(request.call.site);
    }

    /// The description of a call without the elements that an all_to_all receives.
    pub(crate) fn new(call: &Call<'_>, op: Op, number: u64, counts: &[usize]) -> IssuedCall {
        IssuedCall {
            op,
            axes: call.axes,
            dtype: call.dtype,
            number,
            counts: counts.into(),
            received: SmallVec::new(),
            phase: call.phase,
            path: call.path.to_string(),
            origin_hash: call.origin.hash,
            recent_inputs: call.origin.recent_inputs.to_string(),
            site: Site::Local(call.site),
        }
    }

    /// The line of user code, `file:line`.
    pub(crate) fn line(&self) -> String {
        self.site.to_string()
    }

    /// An error about the call, at its line.
    pub(crate) fn locate(&self, error: Error) -> Error {
        match &self.site {
            Site::Local(site) => error.at(site),
            Site::Remote(text) => error.detail("line", text.clone()),
        }
    }

    /// The fields in which this call and another member's differ; empty if the calls match. The splits of an all_to_all are compared
    /// pairwise elsewhere. A send matches a recv.
    pub(crate) fn differences(&self, other: &IssuedCall) -> SmallVec<[&'static str; 4]> {
        let same_op = match (self.op, other.op) {
            (Op::Send { .. }, Op::Recv { .. }) | (Op::Recv { .. }, Op::Send { .. }) => true,
            (a, b) => std::mem::discriminant(&a) == std::mem::discriminant(&b),
        };
        let (mut reduction, mut root) = (false, false);
        match (self.op, other.op) {
            (Op::AllReduce(a), Op::AllReduce(b)) => reduction = a != b,
            (Op::Broadcast { root: a }, Op::Broadcast { root: b }) => root = a != b,
            _ => {}
        }
        let origins =
            self.origin_hash != 0 && other.origin_hash != 0 && self.origin_hash != other.origin_hash;
        let paths = !self.path.is_empty() && !other.path.is_empty() && self.path != other.path;
        [
            (!same_op, "op"),
            (reduction, "reduction"),
            (root, "root"),
            (self.dtype != other.dtype, "dtype"),
            (same_op && self.op != Op::AllToAll && self.counts != other.counts, "counts"),
            (self.number != other.number, "number"),
            (self.axes != other.axes, "axes"),
            (self.phase != other.phase, "phase"),
            (paths, "path"),
            (origins, ORIGIN_DIFFERS),
        ]
        .iter()
        .filter_map(|&(differs, what)| differs.then_some(what))
        .collect()
    }

    /// The call as error messages name it: `#17 all_reduce(sum) f32[4096] over tp at src/x.rs:10 (backward of
    /// h.3)`.
    pub(crate) fn text(&self, mesh: &Mesh, rank: usize) -> String {
        let member = |group_rank: usize| mesh.group(rank, self.axes)[group_rank];
        let extent = self.extent();
        let what = match self.op {
            Op::AllReduce(reduce_op) => format!("all_reduce({reduce_op}) {extent}"),
            Op::Broadcast { root } => format!("broadcast {extent} from rank {}", member(root)),
            Op::Send { to } => format!("send {extent} to rank {}", member(to)),
            Op::Recv { from } => format!("recv {extent} from rank {}", member(from)),
            Op::Barrier => "barrier".to_string(),
            op => format!("{} {extent}", op.name()),
        };
        let over = if self.axes.is_empty() { "no axis".to_string() } else { mesh.names(self.axes) };
        let about = match (self.phase, &*printable(&self.path, PATH_CHARS_MAX)) {
            (Phase::Forward, "") => String::new(),
            (Phase::Forward, path) => format!(" ({path})"),
            (Phase::Backward, "") => " (backward)".to_string(),
            (Phase::Backward, path) => format!(" (backward of {path})"),
            (Phase::Control, "") => " (control)".to_string(),
            (Phase::Control, path) => format!(" (control, {path})"),
        };
        format!("#{} {what} over {over} at {}{about}", self.number, self.site)
    }

    /// Dtype and element count: `f32[12]`; uneven parts as `f32[3+4+5]`.
    fn extent(&self) -> String {
        let parts = |counts: &[usize]| counts.iter().map(usize::to_string).collect::<Vec<_>>().join("+");
        if self.op == Op::AllToAll {
            return format!("{}[{} out, {} in]", self.dtype, parts(&self.counts), parts(&self.received));
        }
        let even = self.counts.windows(2).all(|w| w[0] == w[1]);
        let total = self.counts.iter().sum::<usize>().to_string();
        format!("{}[{}]", self.dtype, if even { total } else { parts(&self.counts) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Axis;

    #[test]
    fn chunk_bounds_are_rounded_down() {
        let all: Vec<_> = (0..4).map(|i| chunk(10, 4, i)).collect();
        assert_eq!(all, [0..2, 2..5, 5..7, 7..10]);
        assert_eq!(chunk(2, 4, 0), 0..0);
    }

    #[test]
    fn transferred_elements_by_hand() {
        let mesh = Mesh::new(&[("tp", 3)]).unwrap();
        let axes = AxisSet::one(Axis(0));
        let call = Call {
            axes,
            dtype: DType::F32,
            phase: Phase::Forward,
            path: "",
            origin: Origin::default(),
            site: Location::caller(),
        };
        let moved = |rank: usize, op: Op, counts: &[usize], received: &[usize]| {
            let position = GroupPosition::new(&mesh, rank, axes);
            Request { call: &call, op, position: &position, number: 1, counts, received, x: None }
                .transferred_numel()
        };
        assert_eq!(moved(0, Op::AllReduce(ReduceOp::Sum), &[10], &[]), 14);
        assert_eq!(moved(2, Op::AllReduce(ReduceOp::Sum), &[10], &[]), 12);
        assert_eq!(moved(1, Op::AllGather, &[3, 4, 5], &[]), 8);
        assert_eq!(moved(1, Op::ReduceScatter, &[3, 4, 5], &[]), 8);
        assert_eq!(moved(1, Op::AllToAll, &[1, 2, 3], &[4, 2, 2]), 6);
        assert_eq!(moved(0, Op::Send { to: 1 }, &[7], &[]), 7);
        assert_eq!(moved(0, Op::Barrier, &[], &[]), 0);
    }

    #[test]
    fn fingerprints_differ_exactly_where_calls_differ() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
        let site = Location::caller();
        let call = |axis: u8, dtype, phase, path| Call {
            axes: AxisSet::one(Axis(axis)),
            dtype,
            phase,
            path,
            origin: Origin::default(),
            site,
        };
        let plain = call(0, DType::F32, Phase::Forward, "h.0.mlp.out");
        let calls = [
            plain,
            Call { axes: AxisSet::one(Axis(1)), ..plain },
            Call { dtype: DType::BF16, ..plain },
            Call { phase: Phase::Backward, ..plain },
            Call { path: "h.1.mlp.out", ..plain },
            Call { path: "h.0.mlp.ouu", ..plain },
            Call { path: "h.0.mlp", ..plain },
            Call { path: "", ..plain },
            Call { origin: Origin { hash: 3, recent_inputs: "x" }, ..plain },
            Call { origin: Origin { hash: 4, recent_inputs: "x" }, ..plain },
        ];
        let ops = [
            Op::AllReduce(ReduceOp::Sum),
            Op::AllReduce(ReduceOp::Max),
            Op::AllGather,
            Op::ReduceScatter,
            Op::Broadcast { root: 0 },
            Op::Broadcast { root: 1 },
            Op::AllToAll,
            Op::Barrier,
        ];
        let counts = [&[][..], &[6], &[7], &[3, 4], &[4, 3], &[0, 7]];
        let mut all: Vec<(Fingerprint, IssuedCall)> = Vec::new();
        let parts = calls.iter().flat_map(|call| ops.iter().map(move |op| (call, *op)));
        for (call, op) in parts {
            let position = GroupPosition::new(&mesh, 0, call.axes);
            for (counts, number) in counts.iter().flat_map(|counts| [(*counts, 1), (*counts, 2)]) {
                let request =
                    Request { call, op, position: &position, number, counts, received: &[], x: None };
                let mut issued = IssuedCall::none();
                issued.set(&request);
                all.push((Fingerprint::of(&request), issued));
            }
        }
        for (i, (fingerprint, issued)) in all.iter().enumerate() {
            for (other_fingerprint, other) in &all[i..] {
                let fits = issued.differences(other).is_empty();
                assert_eq!(fingerprint.fits(*other_fingerprint), fits, "{issued:?} and {other:?}");
            }
        }
    }

    #[test]
    fn call_text_is_one_line() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
        let mut issued = IssuedCall::none();
        issued.number = 17;
        issued.op = Op::Broadcast { root: 1 };
        issued.axes = AxisSet::one(Axis(1));
        issued.dtype = DType::BF16;
        issued.counts = SmallVec::from_slice(&[4096]);
        issued.phase = Phase::Backward;
        issued.path = "h.3".to_string();
        let text = issued.text(&mesh, 2);
        assert!(text.starts_with("#17 broadcast bf16[4096] from rank 3 over tp at "), "{text}");
        assert!(text.ends_with(" (backward of h.3)"), "{text}");
    }
}
