//! What ranks of several processes tell each other, as bytes.
//!
//! A frame is one byte that says of which kind it is, the length of its head and of its body, eight bytes each, the head, and the
//! body, which are elements as they lie in memory. A pulse is its first byte alone, so that none is ever sent by halves.

use crate::bytes::{Reading, Writing};
use crate::call::Issued;
use crate::error::Error;
use crate::mesh::Mesh;
use crate::table::Failure;

/// The first byte of a frame that says nothing but that its sender lives.
pub(super) const PULSE: u8 = 0;
/// Bytes before the head.
pub(super) const PREFIX_BYTES: usize = 17;
/// No head is longer: the longest holds calls with paths and what was given, one for each rank of a circle.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 20;

/// A question that travels along the waits of ranks: when it comes back, they wait in a circle.
#[derive(Clone, Debug)]
pub(super) struct Probe {
    /// How often its first rank has asked.
    pub(super) round: u64,
    /// Who waits in which call for the next, and the last of them for whom it is sent to.
    pub(super) path: Vec<(usize, Issued)>,
}

/// What one rank tells another.
#[derive(Debug)]
pub(super) enum Frame {
    /// It has come to a call, or sends a message, with the elements for the receiver.
    Call(Issued),
    /// Its chunk of the sum in a large all-reduce over the axes of these bits.
    Part(u16),
    /// It has waited in a call for some time.
    Waits(Issued),
    /// The wait that it told of is over.
    Goes,
    Probe(Probe),
    /// The world has ended.
    Failed(Failure),
    /// Its function has returned; its last call.
    Returned(Issued),
}

impl Frame {
    /// The frame up to its body.
    pub(super) fn head(&self) -> Vec<u8> {
        let mut out = Writing(vec![0; PREFIX_BYTES]);
        let kind: u8 = match self {
            Frame::Call(issued) => told(1, issued, &mut out),
            Frame::Part(bits) => {
                out.number((*bits).into());
                2
            }
            Frame::Waits(issued) => told(3, issued, &mut out),
            Frame::Goes => 4,
            Frame::Probe(Probe { round, path }) => {
                out.number(*round).count(path.len());
                path.iter().for_each(|(rank, issued)| issued.write(out.count(*rank)));
                5
            }
            Frame::Failed(Failure { error, origin, told }) => {
                error.write(out.count(*origin).counts(told));
                6
            }
            Frame::Returned(issued) => told(7, issued, &mut out),
        };
        let Writing(mut head) = out;
        let len = (head.len() - PREFIX_BYTES) as u64;
        head[0] = kind;
        head[1..9].copy_from_slice(&len.to_le_bytes());
        head
    }

    /// Reads a head of some kind that came from a rank of a mesh; `None` if it makes no sense.
    pub(super) fn read(kind: u8, head: &[u8], mesh: &Mesh) -> Option<Frame> {
        let mut from = Reading(head);
        let is_rank = |rank: usize| (rank < mesh.num_ranks()).then_some(rank);
        let frame = match kind {
            1 => Frame::Call(Issued::read(&mut from, mesh)?),
            2 => Frame::Part(u16::try_from(from.number()?).ok()?),
            3 => Frame::Waits(Issued::read(&mut from, mesh)?),
            4 => Frame::Goes,
            5 => {
                let (round, len) = (from.number()?, from.count()?);
                let mut one = || Some((is_rank(from.count()?)?, Issued::read(&mut from, mesh)?));
                let path = (0..len).map(|_| one()).collect::<Option<Vec<_>>>()?;
                Frame::Probe(Probe { round, path: Some(path).filter(|path| !path.is_empty())? })
            }
            6 => {
                let (origin, told) = (is_rank(from.count()?)?, from.counts::<Vec<usize>>()?);
                let told = told.into_iter().map(is_rank).collect::<Option<Vec<usize>>>()?;
                Frame::Failed(Failure { error: Error::read(&mut from)?, origin, told })
            }
            7 => Frame::Returned(Issued::read(&mut from, mesh)?),
            _ => return None,
        };
        from.0.is_empty().then_some(frame)
    }
}

fn told(kind: u8, issued: &Issued, out: &mut Writing) -> u8 {
    issued.write(out);
    kind
}

/// Says in a head how long the body is.
pub(super) fn set_body(head: &mut [u8], bytes: usize) {
    head[9..PREFIX_BYTES].copy_from_slice(&(bytes as u64).to_le_bytes());
}

/// The lengths of head and body that a prefix tells; `None` if they make no sense.
pub(super) fn lengths(prefix: &[u8; PREFIX_BYTES]) -> Option<(usize, usize)> {
    let mut from = Reading(&prefix[1..]);
    let (head, body) = (from.count()?, from.count()?);
    (head <= HEAD_BYTES_MAX).then_some((head, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn frames_read_as_they_were_written_and_junk_does_not() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
        let failure = || Failure { error: Error::new(Kind::Io, "no disk"), origin: 3, told: vec![1, 2] };
        let path = vec![(1, Issued::nothing()), (3, Issued::nothing())];
        let frames = [
            Frame::Call(Issued::nothing()),
            Frame::Part(3),
            Frame::Waits(Issued::nothing()),
            Frame::Goes,
            Frame::Probe(Probe { round: 4, path }),
            Frame::Failed(failure()),
            Frame::Returned(Issued::nothing()),
        ];
        for frame in frames {
            let mut head = frame.head();
            set_body(&mut head, 77);
            let prefix = head.first_chunk::<PREFIX_BYTES>().unwrap();
            assert_eq!(lengths(prefix), Some((head.len() - PREFIX_BYTES, 77)));
            let rest = &head[PREFIX_BYTES..];
            let read = Frame::read(head[0], rest, &mesh).unwrap();
            // What is told of a line is a text there.
            assert_eq!(read.head()[..9], head[..9]);
            assert_eq!(read.head()[PREFIX_BYTES..], *rest, "{frame:?}");
            assert!((0..rest.len()).all(|len| Frame::read(head[0], &rest[..len], &mesh).is_none()));
            assert!(Frame::read(head[0], &[rest, &[0]].concat(), &mesh).is_none());
            assert!(head[0] != PULSE && Frame::read(99, rest, &mesh).is_none());
        }
        assert_eq!(lengths(&[255; PREFIX_BYTES]), None);
        let single = Mesh::single();
        let head = Frame::Failed(failure()).head();
        assert!(Frame::read(6, &head[PREFIX_BYTES..], &single).is_none(), "a rank that is not there");
    }
}
