//! How many elements members of a group bring to each other in a call: the one rule by which both transports send, and by which
//! both check what another rank has brought.

use super::{Issued, Op, Request, chunk};
use shardgrad_kernels::DType;
use std::ops::Range;

/// Up to this size every member of an all-reduce combines all elements itself: a second exchange costs more than the bytes.
const DIRECT_BYTES_MAX: usize = 32 << 10;

/// The part of a call that determines what each member brings. Members are numbered by their place in the group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload<'a> {
    op: Op,
    dtype: DType,
    counts: &'a [usize],
    group_size: usize,
}

impl Payload<'_> {
    /// Whether the call is an all-reduce that is cut into chunks: member i combines chunk i of all members, then brings the result
    /// to all. Members with equal calls decide alike.
    pub(crate) fn is_chunked(&self) -> bool {
        matches!(self.op, Op::AllReduce(_))
            && self.group_size > 2
            && self.counts[0] * self.dtype.size() > DIRECT_BYTES_MAX
    }

    /// The elements of its argument that member `from` brings to member `to`. For `from == to` these are the elements that a member
    /// takes from its own argument.
    pub(crate) fn elements(&self, from: usize, to: usize) -> Range<usize> {
        let before = |i: usize| self.counts[..i].iter().sum::<usize>();
        match self.op {
            Op::AllReduce(_) if self.is_chunked() => self.chunk(to),
            Op::AllReduce(_) | Op::Send { .. } => 0..self.counts[0],
            Op::AllGather => 0..self.counts[from],
            Op::ReduceScatter | Op::AllToAll => before(to)..before(to + 1),
            Op::Broadcast { root } if root == from => 0..self.counts[0],
            Op::Broadcast { .. } | Op::Recv { .. } | Op::Barrier => 0..0,
        }
    }

    /// The elements of the result of a chunked all-reduce that member `from` combines and brings to all.
    pub(crate) fn chunk(&self, from: usize) -> Range<usize> {
        chunk(self.counts[0], self.group_size, from)
    }

    /// Bytes of the message from member `from` to member `to`.
    pub(crate) fn bytes(&self, from: usize, to: usize) -> usize {
        self.elements(from, to).len() * self.dtype.size()
    }

    /// Bytes of the message in which member `from` brings its chunk of the result.
    pub(crate) fn chunk_bytes(&self, from: usize) -> usize {
        self.chunk(from).len() * self.dtype.size()
    }

    /// Bytes that the argument of member `from` has at least, so that it holds what member `to` reads in it.
    pub(crate) fn argument_bytes(&self, from: usize, to: usize) -> usize {
        match self.elements(from, to) {
            none if none.is_empty() => 0,
            elements => elements.end * self.dtype.size(),
        }
    }
}

impl Request<'_> {
    /// What the members of the group bring in this call.
    pub(crate) fn payload(&self) -> Payload<'_> {
        let (op, dtype) = (self.op, self.call.dtype);
        Payload { op, dtype, counts: self.counts, group_size: self.seat.size() }
    }
}

impl Issued {
    /// What the members of a group of this size bring in this call.
    pub(crate) fn payload(&self, group_size: usize) -> Payload<'_> {
        Payload { op: self.op, dtype: self.dtype, counts: &self.counts, group_size }
    }

    /// Whether the call has as many counts as its op takes in a group of this size, and as many bytes as memory can hold.
    pub(crate) fn is_well_formed(&self, group_size: usize) -> bool {
        let (counts, received) = match self.op {
            Op::AllReduce(_) | Op::Broadcast { .. } | Op::Send { .. } | Op::Recv { .. } => (1, 0),
            Op::AllGather | Op::ReduceScatter => (group_size, 0),
            Op::AllToAll => (group_size, group_size),
            Op::Barrier => (0, 0),
        };
        let fits = |counts: &[usize]| {
            let numel = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
            let bytes = numel.and_then(|numel| numel.checked_mul(self.dtype.size()));
            bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok())
        };
        self.counts.len() == counts
            && self.received.len() == received
            && fits(&self.counts)
            && fits(&self.received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::ReduceOp;

    fn payload(op: Op, counts: &[usize]) -> Payload<'_> {
        Payload { op, dtype: DType::F32, counts, group_size: 3 }
    }

    #[test]
    fn bytes_by_hand() {
        let sum = Op::AllReduce(ReduceOp::Sum);
        let all = |op: Op, counts: &[usize]| [0, 1, 2].map(|from| payload(op, counts).bytes(from, 0));
        assert_eq!(all(sum, &[5]), [20; 3]);
        assert_eq!(all(sum, &[8192]), [32768; 3]);
        // Above 32 KiB member 0 gets its third, and gives it back to all.
        assert_eq!(all(sum, &[8195]), [2731 * 4; 3]);
        assert_eq!([0, 1, 2].map(|from| payload(sum, &[8195]).chunk_bytes(from)), [10924, 10928, 10928]);
        assert_eq!(all(Op::AllGather, &[3, 0, 5]), [12, 0, 20]);
        assert_eq!(all(Op::ReduceScatter, &[3, 0, 5]), [12; 3]);
        assert_eq!(all(Op::AllToAll, &[3, 0, 5]), [12; 3]);
        assert_eq!(all(Op::Broadcast { root: 1 }, &[7]), [0, 28, 0]);
        assert_eq!(all(Op::Send { to: 0 }, &[7]), [28; 3]);
        assert_eq!(all(Op::Barrier, &[]), [0; 3]);
        assert_eq!(payload(Op::ReduceScatter, &[3, 0, 5]).argument_bytes(1, 2), 32);
        assert_eq!(payload(Op::ReduceScatter, &[3, 0, 5]).argument_bytes(1, 1), 0);
    }

    #[test]
    fn a_call_with_other_counts_than_its_op_takes_is_not_well_formed() {
        let is_well_formed = |op: Op, counts: &[usize], received: &[usize]| {
            let mut issued = Issued::nothing();
            (issued.op, issued.dtype) = (op, DType::F32);
            (issued.counts, issued.received) = (counts.into(), received.into());
            issued.is_well_formed(2)
        };
        assert!(is_well_formed(Op::AllToAll, &[1, 2], &[2, 1]) && is_well_formed(Op::Barrier, &[], &[]));
        assert!(is_well_formed(Op::AllGather, &[0, 3], &[]) && is_well_formed(Op::Send { to: 1 }, &[4], &[]));
        for (op, counts, received) in [
            (Op::AllToAll, &[1, 2][..], &[2][..]),
            (Op::AllToAll, &[1], &[2, 1]),
            (Op::AllGather, &[1, 2, 3], &[]),
            (Op::AllGather, &[usize::MAX, 2], &[]),
            (Op::AllGather, &[usize::MAX / 4, 2], &[]),
            (Op::ReduceScatter, &[1], &[]),
            (Op::Broadcast { root: 0 }, &[], &[]),
            (Op::Send { to: 1 }, &[1, 1], &[]),
            (Op::Recv { from: 1 }, &[usize::MAX], &[]),
            (Op::AllReduce(ReduceOp::Max), &[4], &[4]),
            (Op::Barrier, &[0], &[]),
        ] {
            assert!(!is_well_formed(op, counts, received), "{op:?} {counts:?} {received:?}");
        }
    }
}
