//! Encoding of an [`IssuedCall`] for other processes.

use super::{IssuedCall, Op, Phase, ReduceOp};
use crate::encoding::{Decoder, Encoder, printable};
use crate::mesh::{Axis, AxisSet, Mesh};
use shardgrad_kernels::DType;
use std::fmt;
use std::panic::Location;

/// The most characters kept of a source location of another process.
const SITE_CHARS_MAX: usize = 500;

/// The line of user code that made a call.
#[derive(Clone, Debug)]
pub(super) enum Site {
    /// A line of this process.
    Local(&'static Location<'static>),
    /// The location as another process sent it, escaped.
    Remote(String),
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Site::Local(site) => write!(f, "{}:{}", site.file(), site.line()),
            Site::Remote(text) => f.write_str(text),
        }
    }
}

const REDUCTIONS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];
const PHASES: [Phase; 3] = [Phase::Forward, Phase::Backward, Phase::Control];

impl Op {
    /// The op as a number, and its own parameter.
    fn code(self) -> [usize; 2] {
        match self {
            Op::AllReduce(how) => [0, how as usize],
            Op::AllGather => [1, 0],
            Op::ReduceScatter => [2, 0],
            Op::AllToAll => [3, 0],
            Op::Broadcast { root } => [4, root],
            Op::Send { to } => [5, to],
            Op::Recv { from } => [6, from],
            Op::Barrier => [7, 0],
        }
    }

    fn of([op, with]: [usize; 2]) -> Option<Op> {
        Some(match op {
            0 => Op::AllReduce(*REDUCTIONS.get(with)?),
            1 => Op::AllGather,
            2 => Op::ReduceScatter,
            3 => Op::AllToAll,
            4 => Op::Broadcast { root: with },
            5 => Op::Send { to: with },
            6 => Op::Recv { from: with },
            7 => Op::Barrier,
            _ => return None,
        })
    }
}

impl IssuedCall {
    /// Appends the call to `out`.
    pub(crate) fn encode(&self, out: &mut Encoder) {
        let dtype = DType::ALL.iter().position(|d| *d == self.dtype).unwrap_or_default();
        let [op, with] = self.op.code();
        out.count(op).count(with).number(self.axes.bits().into()).count(dtype).number(self.number);
        out.counts(&self.counts).counts(&self.received).count(self.phase as usize).text(&self.path);
        out.number(self.origin_hash).text(&self.recent_inputs);
        match &self.site {
            Site::Local(_) => out.text(&self.site.to_string()),
            Site::Remote(text) => out.text(text),
        };
    }

    /// Decodes a call of a rank of a mesh; `None` for a call that names axes or group ranks outside of the mesh, or whose counts do
    /// not fit its op.
    pub(crate) fn decode(from: &mut Decoder<'_>, mesh: &Mesh) -> Option<IssuedCall> {
        let op = Op::of([from.count()?, from.count()?])?;
        let bits = from.number()?;
        let axes: AxisSet = (0..mesh.num_axes() as u8).filter(|a| bits >> a & 1 == 1).map(Axis).collect();
        let issued = IssuedCall {
            op,
            axes,
            dtype: *DType::ALL.get(from.count()?)?,
            number: from.number()?,
            counts: from.counts()?,
            received: from.counts()?,
            phase: *PHASES.get(from.count()?)?,
            path: from.text()?.to_string(),
            origin_hash: from.number()?,
            recent_inputs: from.text()?.to_string(),
            site: Site::Remote(printable(from.text()?, SITE_CHARS_MAX)),
        };
        let group_size = mesh.group_size(axes);
        let is_there = |group_rank: usize| group_rank < group_size;
        let fits = match op {
            Op::Broadcast { root: group_rank }
            | Op::Send { to: group_rank }
            | Op::Recv { from: group_rank } => is_there(group_rank),
            _ => true,
        };
        (fits && u64::from(axes.bits()) == bits && issued.is_well_formed(group_size)).then_some(issued)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Call, GroupPosition, Origin, Request};

    #[test]
    fn decoded_call_equals_the_encoded_one() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 3)]).unwrap();
        let ops = [
            Op::AllReduce(ReduceOp::Min),
            Op::AllGather,
            Op::ReduceScatter,
            Op::AllToAll,
            Op::Broadcast { root: 2 },
            Op::Send { to: 1 },
            Op::Recv { from: 0 },
            Op::Barrier,
        ];
        for (op, dtype) in ops.into_iter().zip(DType::ALL.into_iter().cycle()) {
            let (axes, site) = (AxisSet::one(Axis(1)), Location::caller());
            let origin = Origin { hash: 7, recent_inputs: "f32[4] at a.rs:1" };
            let call = Call { axes, dtype, phase: Phase::Backward, path: "h.3", origin, site };
            let position = GroupPosition::new(&mesh, 1, axes);
            let (counts, received): (&[usize], &[usize]) = match op {
                Op::AllToAll => (&[3, 4, 5], &[1, 2, 3]),
                Op::AllGather | Op::ReduceScatter => (&[3, 4, 5], &[]),
                Op::Barrier => (&[], &[]),
                _ => (&[7], &[]),
            };
            let mut issued = IssuedCall::none();
            issued.set(&Request {
                call: &call,
                op,
                position: &position,
                number: 17,
                counts,
                received,
                x: None,
            });
            let mut out = Encoder::default();
            issued.encode(&mut out);
            let mut from = Decoder(&out.0);
            let read = IssuedCall::decode(&mut from, &mesh).unwrap();
            assert!(
                from.0.is_empty()
                    && read.differences(&issued).is_empty()
                    && read.recent_inputs == issued.recent_inputs
            );
            assert_eq!(read.text(&mesh, 4), issued.text(&mesh, 4));
            assert!(
                (0..out.0.len()).all(|len| IssuedCall::decode(&mut Decoder(&out.0[..len]), &mesh).is_none())
            );
            let other = Mesh::new(&[("tp", 2)]).unwrap();
            assert!(
                IssuedCall::decode(&mut Decoder(&out.0), &other).is_none(),
                "an axis outside of the mesh"
            );
        }
    }

    #[test]
    fn text_of_a_decoded_call_is_printable_and_truncated() {
        let mesh = Mesh::new(&[("tp", 2)]).unwrap();
        let mut issued = IssuedCall::none();
        issued.path = format!("h\x1b[2J\n{}", "x".repeat(5000));
        issued.site = Site::Remote(format!("a.rs:1\r\u{202e}{}", "y".repeat(5000)));
        let mut out = Encoder::default();
        issued.encode(&mut out);
        let read = IssuedCall::decode(&mut Decoder(&out.0), &mesh).unwrap();
        assert_eq!(read.path, issued.path, "paths are compared as they are");
        let text = read.text(&mesh, 0);
        assert!(
            text.contains(r"at a.rs:1\r\u{202e}yyy") && text.contains(r"(control, h\u{1b}[2J\nxxx"),
            "{text}"
        );
        assert!(text.chars().count() < 900 && !text.contains(|c: char| c.is_control()), "{text}");
    }
}
