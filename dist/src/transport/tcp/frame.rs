//! The frames that processes send each other, and their encoding.
//!
//! A frame is: one byte for its kind; the lengths of head and body, eight bytes each; the head; the body, which holds elements in
//! their memory layout. A heartbeat has neither head nor body. The first [`PREFIX_BYTES`] are one record of the connection, so the
//! lengths are verified before they are used. Head and body follow as one record if they are short, the body before the head, where the
//! receiver uses it without another copy; else each in records of its own, the head first, which states whether the body is due.

use crate::call::IssuedCall;
use crate::encoding::{Decoder, Encoder};
use crate::error::Error;
use crate::mesh::Mesh;
use crate::world_state::Failure;

/// The kind byte of a heartbeat.
pub(super) const HEARTBEAT: u8 = 0;
/// Bytes before the head.
pub(super) const PREFIX_BYTES: usize = 17;
/// The most bytes of head and body together that are sent as one record: 16 KiB of elements and some more, less than an encrypted record.
const SHORT_BYTES_MAX: usize = 32 << 10;
/// The longest head. The longest heads are probes: a call with path and inputs for each rank of a cycle.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 20;

/// A deadlock probe, which is forwarded along waits: if it returns to its first rank, the ranks on its path are deadlocked.
#[derive(Clone, Debug)]
pub(super) struct Probe {
    /// The number of the probe among those of its first rank.
    pub(super) round: u64,
    /// Ranks and the calls in which they wait: each for the next rank, the last for the rank to which the probe is sent.
    pub(super) path: Vec<(usize, IssuedCall)>,
}

/// What identifies a call between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct CallId {
    pub(super) is_message: bool,
    /// The bits of its axes.
    pub(super) bits: u16,
    pub(super) number: u64,
}

impl CallId {
    pub(super) fn of(issued: &IssuedCall) -> CallId {
        let is_message = !issued.op.is_collective();
        CallId { is_message, bits: issued.axes.bits(), number: issued.number }
    }
}

/// A frame from one rank to another.
#[derive(Debug)]
pub(super) enum Frame {
    /// A collective call or a message; the body holds the elements for the receiver.
    Call(IssuedCall),
    /// The sender's reduced chunk of a chunked all-reduce over the axes with these bits, in the body.
    ReducedChunk(u16),
    /// The sender has waited in this call for some time.
    Waiting(IssuedCall),
    /// The announced wait of the sender is over.
    Resumed,
    /// A deadlock probe.
    Probe(Probe),
    /// The world has failed.
    Failed(Failure),
    /// The sender's function has returned; its last call.
    Returned(IssuedCall),
    /// A call or message without its elements, which the sender keeps until the receiver asks for them.
    ReadyToSend(IssuedCall),
    /// The receiver of a call asks for its elements.
    ClearToSend(CallId),
    /// The receiver of a message cannot ask for its elements soon.
    Hold(CallId),
    /// The elements of a call, in the body.
    Elements(CallId),
    /// The receiver has taken this many bytes out of its queue.
    Credit(u64),
    /// A collective call or a message whose elements travel elsewhere.
    CallOnly(IssuedCall),
}

impl Frame {
    /// Encodes the frame up to its body; [`set_body`] sets the length of the body.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Encoder(vec![0; PREFIX_BYTES]);
        let kind: u8 = match self {
            Frame::Call(issued) => encode_call(1, issued, &mut out),
            Frame::ReducedChunk(bits) => {
                out.number((*bits).into());
                2
            }
            Frame::Waiting(issued) => encode_call(3, issued, &mut out),
            Frame::Resumed => 4,
            Frame::Probe(Probe { round, path }) => {
                out.number(*round).count(path.len());
                path.iter().for_each(|(rank, issued)| issued.encode(out.count(*rank)));
                5
            }
            Frame::Failed(Failure { error, origin, affected }) => {
                error.encode(out.count(*origin).counts(affected));
                6
            }
            Frame::Returned(issued) => encode_call(7, issued, &mut out),
            Frame::ReadyToSend(issued) => encode_call(8, issued, &mut out),
            Frame::ClearToSend(id) => encode_id(9, *id, &mut out),
            Frame::Hold(id) => encode_id(10, *id, &mut out),
            Frame::Elements(id) => encode_id(11, *id, &mut out),
            Frame::Credit(bytes) => {
                out.number(*bytes);
                12
            }
            Frame::CallOnly(issued) => encode_call(13, issued, &mut out),
        };
        let Encoder(mut head) = out;
        let len = (head.len() - PREFIX_BYTES) as u64;
        head[0] = kind;
        head[1..9].copy_from_slice(&len.to_le_bytes());
        head
    }

    /// Decodes a head of some kind, from a rank of `mesh`; `None` if it is malformed.
    pub(super) fn decode(kind: u8, head: &[u8], mesh: &Mesh) -> Option<Frame> {
        let mut from = Decoder(head);
        let is_rank = |rank: usize| (rank < mesh.num_ranks()).then_some(rank);
        let frame = match kind {
            1 => Frame::Call(IssuedCall::decode(&mut from, mesh)?),
            2 => Frame::ReducedChunk(u16::try_from(from.number()?).ok()?),
            3 => Frame::Waiting(IssuedCall::decode(&mut from, mesh)?),
            4 => Frame::Resumed,
            5 => {
                let (round, len) = (from.number()?, from.count()?);
                let mut one = || Some((is_rank(from.count()?)?, IssuedCall::decode(&mut from, mesh)?));
                let path = (0..len).map(|_| one()).collect::<Option<Vec<_>>>()?;
                Frame::Probe(Probe { round, path: Some(path).filter(|path| !path.is_empty())? })
            }
            6 => {
                let (origin, affected) = (is_rank(from.count()?)?, from.counts::<Vec<usize>>()?);
                let affected = affected.into_iter().map(is_rank).collect::<Option<Vec<usize>>>()?;
                Frame::Failed(Failure { error: Error::decode(&mut from)?, origin, affected })
            }
            7 => Frame::Returned(IssuedCall::decode(&mut from, mesh)?),
            8 => Frame::ReadyToSend(IssuedCall::decode(&mut from, mesh)?),
            9 => Frame::ClearToSend(decode_id(&mut from)?),
            10 => Frame::Hold(decode_id(&mut from)?),
            11 => Frame::Elements(decode_id(&mut from)?),
            12 => Frame::Credit(from.number()?),
            13 => Frame::CallOnly(IssuedCall::decode(&mut from, mesh)?),
            _ => return None,
        };
        from.0.is_empty().then_some(frame)
    }
}

fn encode_call(kind: u8, issued: &IssuedCall, out: &mut Encoder) -> u8 {
    issued.encode(out);
    kind
}

fn encode_id(kind: u8, id: CallId, out: &mut Encoder) -> u8 {
    out.number(id.is_message.into()).number(id.bits.into()).number(id.number);
    kind
}

fn decode_id(from: &mut Decoder<'_>) -> Option<CallId> {
    let is_message = match from.number()? {
        0 => false,
        1 => true,
        _ => return None,
    };
    Some(CallId { is_message, bits: from.number()?.try_into().ok()?, number: from.number()? })
}

/// The prefix of a heartbeat.
pub(super) fn heartbeat() -> [u8; PREFIX_BYTES] {
    let mut prefix = [0; PREFIX_BYTES];
    prefix[0] = HEARTBEAT;
    prefix
}

/// Writes the length of the body into an encoded head.
pub(super) fn set_body(head: &mut [u8], bytes: usize) {
    head[9..PREFIX_BYTES].copy_from_slice(&(bytes as u64).to_le_bytes());
}

/// Whether head and body of these lengths are sent as one record.
pub(super) fn is_short(head: usize, body: usize) -> bool {
    head.checked_add(body).is_some_and(|bytes| bytes <= SHORT_BYTES_MAX)
}

/// The lengths of head and body in a prefix; `None` if they are invalid.
pub(super) fn lengths(prefix: &[u8; PREFIX_BYTES]) -> Option<(usize, usize)> {
    let mut from = Decoder(&prefix[1..]);
    let (head, body) = (from.count()?, from.count()?);
    (head <= HEAD_BYTES_MAX).then_some((head, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn decoded_frames_equal_encoded_ones_and_malformed_bytes_are_rejected() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
        let failure = || Failure { error: Error::new(Kind::Io, "no disk"), origin: 3, affected: vec![1, 2] };
        let path = vec![(1, IssuedCall::none()), (3, IssuedCall::none())];
        let id = CallId { is_message: true, bits: 3, number: 5 };
        let frames = [
            Frame::Call(IssuedCall::none()),
            Frame::ReducedChunk(3),
            Frame::Waiting(IssuedCall::none()),
            Frame::Resumed,
            Frame::Probe(Probe { round: 4, path }),
            Frame::Failed(failure()),
            Frame::Returned(IssuedCall::none()),
            Frame::ReadyToSend(IssuedCall::none()),
            Frame::ClearToSend(id),
            Frame::Hold(CallId { is_message: false, ..id }),
            Frame::Elements(id),
            Frame::Credit(1 << 40),
            Frame::CallOnly(IssuedCall::none()),
        ];
        for frame in frames {
            let mut head = frame.encode();
            set_body(&mut head, 77);
            let prefix = head.first_chunk::<PREFIX_BYTES>().unwrap();
            assert_eq!(lengths(prefix), Some((head.len() - PREFIX_BYTES, 77)));
            let rest = &head[PREFIX_BYTES..];
            let read = Frame::decode(head[0], rest, &mesh).unwrap();
            // Compared as bytes: a decoded source location is a text.
            assert_eq!(read.encode()[..9], head[..9]);
            assert_eq!(read.encode()[PREFIX_BYTES..], *rest, "{frame:?}");
            assert!((0..rest.len()).all(|len| Frame::decode(head[0], &rest[..len], &mesh).is_none()));
            assert!(Frame::decode(head[0], &[rest, &[0]].concat(), &mesh).is_none());
            assert!(head[0] != HEARTBEAT && Frame::decode(99, rest, &mesh).is_none());
        }
        assert_eq!(lengths(&[255; PREFIX_BYTES]), None);
        let single = Mesh::single();
        let head = Frame::Failed(failure()).encode();
        assert!(Frame::decode(6, &head[PREFIX_BYTES..], &single).is_none(), "a rank outside of the mesh");
    }
}
