//! What a collective call is: the part callers state, and the fingerprint that ranks compare.

mod coded;
mod payload;

use coded::Site;

use crate::bytes::printable;
use crate::mesh::{AxisSet, Mesh};
use shardgrad_kernels::{Buffer, DType};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::panic::Location;

/// How an all-reduce combines elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum, in a fixed balanced tree over the place in the group.
    Sum,
    /// The largest.
    Max,
    /// The smallest.
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

/// Which part of a step a call belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Neither: norms, stop words, loading, saving.
    Control,
}

/// What the elements of a call come from, as far as its caller knows: ranks that meet made it alike.
#[derive(Clone, Copy, Debug, Default)]
pub struct Origin<'a> {
    /// The same on all ranks that meet; 0 where nothing is known, which is compared with nothing.
    pub mark: u64,
    /// What this rank was given last, a line each with ` at ` and where, the newest first, for the error of unlike marks. It is not
    /// compared.
    pub given: &'a str,
}

/// What a caller states of a collective besides its buffers.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The mesh axes over which ranks meet.
    pub axes: AxisSet,
    /// What the elements are.
    pub dtype: DType,
    /// The part of the step; the same on all ranks that meet.
    pub phase: Phase,
    /// The value in question, as in `h.3.mlp.out`. May be empty; ranks that meet and name one name the same.
    pub path: &'a str,
    /// What the elements come from.
    pub origin: Origin<'a>,
    /// The line of user code that asked.
    pub site: &'static Location<'static>,
}

/// A collective with what belongs to it alone. Roots and peers are places in the group.
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

    /// Whether the whole group takes part, not one pair.
    pub(crate) fn is_collective(self) -> bool {
        !matches!(self, Op::Send { .. } | Op::Recv { .. })
    }
}

/// A rank's seat in one group: who is in it, where this rank stands, how often it has called.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) members: Vec<usize>,
    pub(crate) place: usize,
    pub(crate) calls: Cell<u64>,
    pub(crate) sent: RefCell<Vec<u64>>,
    pub(crate) received: RefCell<Vec<u64>>,
}

impl Seat {
    pub(crate) fn new(mesh: &Mesh, rank: usize, axes: AxisSet) -> Seat {
        let members = mesh.group(rank, axes);
        let place = members.iter().position(|&r| r == rank).expect("a rank is in each of its groups");
        let none = || RefCell::new(vec![0; members.len()]);
        Seat { place, calls: Cell::new(0), sent: none(), received: none(), members }
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// The number of this call: from 1 in its group, or among the messages of its pair.
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

/// How messages call a difference of what the elements come from.
pub(crate) const ORIGIN: &str = "global shapes";

/// One call on its way to a transport. `counts` holds the global extents that all members must agree on; for
/// all_to_all it holds what this rank sends to each member, and `received` what it gets from each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) call: &'a Call<'a>,
    pub(crate) op: Op,
    pub(crate) seat: &'a Seat,
    pub(crate) number: u64,
    pub(crate) counts: &'a [usize],
    pub(crate) received: &'a [usize],
    pub(crate) x: Option<&'a Buffer>,
}

/// Chunk i of n elements over k ranks: floor(i*n/k) .. floor((i+1)*n/k).
pub(crate) fn chunk(n: usize, k: usize, i: usize) -> Range<usize> {
    let border = |i: usize| (i as u128 * n as u128 / k as u128) as usize;
    border(i)..border(i + 1)
}

impl Request<'_> {
    /// Elements of the result; `None` for calls without one.
    pub(crate) fn result_numel(&self) -> Option<usize> {
        match self.op {
            Op::AllReduce(_) | Op::Broadcast { .. } | Op::Recv { .. } => Some(self.counts[0]),
            Op::AllGather => Some(self.counts.iter().sum()),
            Op::ReduceScatter => Some(self.counts[self.seat.place]),
            Op::AllToAll => Some(self.received.iter().sum()),
            Op::Send { .. } | Op::Barrier => None,
        }
    }

    /// Elements that the member at a place shows to the others.
    pub(crate) fn shown_numel(&self, place: usize) -> usize {
        match self.op {
            Op::AllReduce(_) => self.counts[0],
            Op::AllGather => self.counts[place],
            Op::Broadcast { root } if root != place => 0,
            Op::Barrier | Op::Recv { .. } => 0,
            _ => self.counts.iter().sum(),
        }
    }

    /// Elements that this rank has to move, whatever the algorithm.
    pub(crate) fn moved_numel(&self) -> usize {
        let (place, k) = (self.seat.place, self.seat.size());
        let total: usize = self.counts.iter().sum();
        match self.op {
            Op::AllReduce(_) => 2 * (total - chunk(total, k, place).len()),
            Op::AllGather | Op::ReduceScatter => total - self.counts[place],
            Op::AllToAll => total.max(self.received.iter().sum()) - self.counts[place],
            Op::Broadcast { .. } if k == 1 => 0,
            Op::Send { to: peer } | Op::Recv { from: peer } if peer == place => 0,
            Op::Broadcast { .. } | Op::Send { .. } | Op::Recv { .. } => total,
            Op::Barrier => 0,
        }
    }
}

/// What is compared of a call, in three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Print {
    /// Of all that has to be the same for every member.
    pub(crate) call: u64,
    /// Of the path; 0 if there is none.
    pub(crate) path: u64,
    /// Of what the elements come from; 0 if nothing is known.
    pub(crate) mark: u64,
}

impl Print {
    /// Of a call to a whole group. What [`Issued::differences`] tells apart has unlike prints but for one chance in 2^64; the
    /// splits of an all_to_all, which differ from member to member, are not in it.
    pub(crate) fn of(request: &Request<'_>) -> Print {
        let Call { axes, dtype, phase, path, origin, .. } = *request.call;
        let (kind, with) = match request.op {
            Op::AllReduce(how) => (0, how as u64),
            Op::AllGather => (1, 0),
            Op::ReduceScatter => (2, 0),
            Op::AllToAll => (3, 0),
            Op::Broadcast { root } => (4, root as u64),
            Op::Barrier => (5, 0),
            Op::Send { .. } | Op::Recv { .. } => unreachable!("bug: messages have no print"),
        };
        let small = kind | (dtype as u64) << 8 | (phase as u64) << 16 | u64::from(axes.bits()) << 32;
        let counts = if request.op == Op::AllToAll { &[] } else { request.counts };
        let start = [small, with, request.number, counts.len() as u64].into_iter().fold(0, mixed);
        let call = counts.iter().fold(start, |hash, count| mixed(hash, *count as u64));
        let (words, rest) = path.as_bytes().as_chunks::<8>();
        let start = words.iter().fold(path.len() as u64, |hash, word| mixed(hash, u64::from_ne_bytes(*word)));
        let hash = rest.iter().fold(start, |hash, byte| mixed(hash, u64::from(*byte)));
        Print { call, path: if path.is_empty() { 0 } else { hash | 1 }, mark: origin.mark }
    }

    /// Takes over what another knows and this one does not.
    pub(crate) fn learn(&mut self, other: Print) {
        let known = |own: u64, other: u64| if own == 0 { other } else { own };
        (self.path, self.mark) = (known(self.path, other.path), known(self.mark, other.mark));
    }

    /// Whether two members' calls fit together.
    pub(crate) fn fits(self, other: Print) -> bool {
        let agree = |a: u64, b: u64| a == b || a == 0 || b == 0;
        self.call == other.call && agree(self.path, other.path) && agree(self.mark, other.mark)
    }
}

/// One word more in a hash: a product spreads it, and what it brought to the upper half comes down.
fn mixed(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    product ^ product >> 32
}

/// Characters of a path that a message shows.
const PATH_CHARS_MAX: usize = 200;

/// The fingerprint of a call, kept where other ranks can read it. `number` 0 means no call yet.
#[derive(Clone, Debug)]
pub(crate) struct Issued {
    pub(crate) op: Op,
    pub(crate) axes: AxisSet,
    pub(crate) dtype: DType,
    pub(crate) number: u64,
    pub(crate) counts: SmallVec<[usize; 8]>,
    pub(crate) received: SmallVec<[usize; 8]>,
    phase: Phase,
    path: String,
    mark: u64,
    pub(crate) given: String,
    site: Site,
}

impl Issued {
    /// No call yet.
    pub(crate) fn nothing() -> Issued {
        Issued {
            op: Op::Barrier,
            axes: AxisSet::EMPTY,
            dtype: DType::U8,
            number: 0,
            counts: SmallVec::new(),
            received: SmallVec::new(),
            phase: Phase::Control,
            path: String::new(),
            mark: 0,
            given: String::new(),
            site: Site::Here(Location::caller()),
        }
    }

    /// Takes over a call, reusing the memory of the last one.
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
        self.mark = request.call.origin.mark;
        self.given.clear();
        self.given.push_str(request.call.origin.given);
        self.site = Site::Here(request.call.site);
    }

    /// In what this call and another member's cannot belong together; empty if they can. The splits of an
    /// all_to_all are compared by pairs elsewhere; both ends of a message count as one op.
    pub(crate) fn differences(&self, other: &Issued) -> SmallVec<[&'static str; 4]> {
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
        let marks = self.mark != 0 && other.mark != 0 && self.mark != other.mark;
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
            (marks, ORIGIN),
        ]
        .iter()
        .filter_map(|&(differs, what)| differs.then_some(what))
        .collect()
    }

    /// The call as messages name it: `#17 all_reduce(sum) f32[4096] over tp at src/x.rs:10 (backward of
    /// h.3)`.
    pub(crate) fn text(&self, mesh: &Mesh, rank: usize) -> String {
        let member = |place: usize| mesh.group(rank, self.axes)[place];
        let extent = self.extent();
        let what = match self.op {
            Op::AllReduce(how) => format!("all_reduce({how}) {extent}"),
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

    /// Dtype and elements: `f32[12]`, uneven parts as `f32[3+4+5]`.
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
    fn chunks_follow_the_floor_rule() {
        let all: Vec<_> = (0..4).map(|i| chunk(10, 4, i)).collect();
        assert_eq!(all, [0..2, 2..5, 5..7, 7..10]);
        assert_eq!(chunk(2, 4, 0), 0..0);
    }

    #[test]
    fn moved_elements_by_hand() {
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
            let seat = Seat::new(&mesh, rank, axes);
            Request { call: &call, op, seat: &seat, number: 1, counts, received, x: None }.moved_numel()
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
    fn prints_tell_apart_what_is_compared() {
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
            Call { origin: Origin { mark: 3, given: "x" }, ..plain },
            Call { origin: Origin { mark: 4, given: "x" }, ..plain },
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
        let mut all: Vec<(Print, Issued)> = Vec::new();
        let parts = calls.iter().flat_map(|call| ops.iter().map(move |op| (call, *op)));
        for (call, op) in parts {
            let seat = Seat::new(&mesh, 0, call.axes);
            for (counts, number) in counts.iter().flat_map(|counts| [(*counts, 1), (*counts, 2)]) {
                let request = Request { call, op, seat: &seat, number, counts, received: &[], x: None };
                let mut issued = Issued::nothing();
                issued.set(&request);
                all.push((Print::of(&request), issued));
            }
        }
        for (i, (print, issued)) in all.iter().enumerate() {
            for (other_print, other) in &all[i..] {
                let fits = issued.differences(other).is_empty();
                assert_eq!(print.fits(*other_print), fits, "{issued:?} and {other:?}");
            }
        }
    }

    #[test]
    fn a_call_reads_as_one_line() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
        let mut issued = Issued::nothing();
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
