//! Payload sizes of collectives: how many elements each member of a group sends to each other member. Both transports send by this
//! rule, and both check received payloads against it.

use super::{IssuedCall, Op, Request, chunk};
use shardgrad_kernels::DType;
use std::ops::Range;

/// Up to this size every member of an all-reduce reduces all elements itself: a second exchange would cost more than the bytes.
const DIRECT_BYTES_MAX: usize = 32 << 10;

/// The part of a call that determines the payloads. Members are numbered by their group ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload<'a> {
    op: Op,
    dtype: DType,
    counts: &'a [usize],
    group_size: usize,
}

impl Payload<'_> {
    /// Whether the call is an all-reduce in chunks (reduce-scatter, then all-gather): member i reduces chunk i of all members, then
    /// sends the result to all. Members with equal calls decide the same way.
    pub(crate) fn is_chunked(&self) -> bool {
        matches!(self.op, Op::AllReduce(_))
            && self.group_size > 2
            && self.counts[0] * self.dtype.size() > DIRECT_BYTES_MAX
    }

    /// The range of elements of its argument that member `from` sends to member `to`. For `from == to`: the elements that a member
    /// uses of its own argument.
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

    /// The range of elements of a chunked all-reduce that member `from` reduces and sends to all.
    pub(crate) fn chunk(&self, from: usize) -> Range<usize> {
        chunk(self.counts[0], self.group_size, from)
    }

    /// The size in bytes of the payload from member `from` to member `to`.
    pub(crate) fn bytes(&self, from: usize, to: usize) -> usize {
        self.elements(from, to).len() * self.dtype.size()
    }

    /// The size in bytes of the reduced chunk of member `from`.
    pub(crate) fn chunk_bytes(&self, from: usize) -> usize {
        self.chunk(from).len() * self.dtype.size()
    }

    /// The least size in bytes of the argument of member `from`, so that member `to` can read its part.
    pub(crate) fn argument_bytes(&self, from: usize, to: usize) -> usize {
        match self.elements(from, to) {
            none if none.is_empty() => 0,
            elements => elements.end * self.dtype.size(),
        }
    }
}

impl Request<'_> {
    /// The payload sizes of this call.
    pub(crate) fn payload(&self) -> Payload<'_> {
        let (op, dtype) = (self.op, self.call.dtype);
        Payload { op, dtype, counts: self.counts, group_size: self.position.size() }
    }
}

impl IssuedCall {
    /// The payload sizes of this call in a group of this size.
    pub(crate) fn payload(&self, group_size: usize) -> Payload<'_> {
        Payload { op: self.op, dtype: self.dtype, counts: &self.counts, group_size }
    }

    /// Whether the call has the number of counts that its op takes in a group of this size, and no more bytes than memory can hold.
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
    fn payload_bytes_by_hand() {
        let sum = Op::AllReduce(ReduceOp::Sum);
        let all = |op: Op, counts: &[usize]| [0, 1, 2].map(|from| payload(op, counts).bytes(from, 0));
        assert_eq!(all(sum, &[5]), [20; 3]);
        assert_eq!(all(sum, &[8192]), [32768; 3]);
        // Above 32 KiB member 0 receives its third, and sends the reduced chunk to all.
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
    fn calls_with_wrong_counts_are_not_well_formed() {
        let is_well_formed = |op: Op, counts: &[usize], received: &[usize]| {
            let mut issued = IssuedCall::none();
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
