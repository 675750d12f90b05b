//! The NCCL transport between processes with a GPU each: NCCL carries the elements of collectives, TCP the calls.
//!
//! A rank submits each collective at once to its communication stream and continues. Behind it, the members of a group compare their calls
//! over TCP (`tcp::agreement`), and a mismatch, a deadlock, a departed rank or a timeout aborts the operations of all ranks.
//! Results leave the GPU once their calls are compared, and aborted ones never do. NCCL carries the messages between two ranks of an axis too
//! ([`messages`]). Messages of host data ([`Phase::Control`]), empty ones, those between other ranks, and barriers go through TCP, after
//! the comparison of all calls before.
//!
//! NCCL sums f32, f64 and i64. All other reductions, and reduce-scatters of uneven parts, are an exchange of pieces that the kernels of the
//! other transports reduce, in the same order: 16-bit floats are rounded once, and NaN is no number that a maximum may drop. With
//! [`tree_sums`](crate::World::tree_sums) that holds for sums of f32 and f64 too.

mod watchdog;
mod messages;
mod session;

pub(crate) use session::Session;

use super::Transport;
use super::buffer_ops::{copy, offset, reduce_ranges};
use super::tcp::{Received, TcpTransport};
use super::thread::is_root;
use crate::call::{Op, Phase, ReduceOp, Request, chunk};
use crate::error::{Error, Result};
use shardgrad_kernels::{Backend, Buffer, DType};
use shardgrad_nccl::{Communicator, Part};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The NCCL transport of one rank.
#[derive(Debug)]
pub(crate) struct NcclTransport {
    tcp: TcpTransport,
    session: Arc<Session>,
    /// Whether NCCL adds no floats.
    has_tree_sums: bool,
}

impl Transport for NcclTransport {
    fn check(&self) -> Result<()> {
        self.tcp.check()
    }

    fn set_min_timeout(&self, limit: Duration) -> Duration {
        self.tcp.set_min_timeout(limit)
    }

    fn run(&self, own: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        let outcome = match request.op {
            Op::Send { to } if self.is_sent_by_nccl(request, request.position.members[to]) => {
                self.check()?;
                let to = request.position.members[to];
                self.session.messages().send(&self.tcp, &self.session.pending, request, to).map(|()| None)
            }
            Op::Recv { from } => {
                self.session.pending.wait_until_compared(self.tcp.spin())?;
                self.receive(own, request, request.position.members[from]).map(Some)
            }
            Op::Send { .. } | Op::Barrier => {
                self.session.pending.wait_until_compared(self.tcp.spin())?;
                return self.tcp.run(own, request);
            }
            _ => {
                self.check()?;
                self.collective(own, request)
            }
        };
        outcome.map_err(|error| self.fail_call(request, error))
    }
}

/// A collective on its communication stream.
struct Submission<'a> {
    tcp: &'a TcpTransport,
    comm: &'a Communicator,
    on: &'a dyn Backend,
    request: &'a Request<'a>,
    has_tree_sums: bool,
}

impl NcclTransport {
    pub(crate) fn new(tcp: TcpTransport, session: Arc<Session>, has_tree_sums: bool) -> NcclTransport {
        NcclTransport { tcp, session, has_tree_sums }
    }

    /// Whether NCCL carries a message. Its sender decides, and its receiver follows.
    fn is_sent_by_nccl(&self, request: &Request<'_>, to: usize) -> bool {
        request.call.phase != Phase::Control && request.counts[0] > 0 && self.session.messages().reaches(to)
    }

    fn receive(&self, own: &dyn Backend, request: &Request<'_>, from: usize) -> Result<Buffer> {
        match self.tcp.receive(own, request, from)? {
            Received::Elements(y) => Ok(y),
            Received::Announced(id) => self.session.messages().receive(&self.tcp, request, &id),
        }
    }

    fn collective(&self, own: &dyn Backend, request: &Request<'_>) -> Result<Option<Buffer>> {
        self.session.pending.push(&self.tcp, request)?;
        // A message may write it on another stream.
        request.x.map_or(Ok(()), |x| own.wait_for_writer(x))?;
        let on = own.begin_async()?.expect("bug: a GPU has a communication stream");
        if let Some(x) = request.x {
            on.record_stream(x);
        }
        let comm = self.session.communicator(request.call.axes);
        let outcome =
            Submission { tcp: &self.tcp, comm, on, request, has_tree_sums: self.has_tree_sums }.run();
        // After an error too: other ranks may wait for this one's part.
        let ended = own.end_async();
        let y = outcome?;
        ended?;
        Ok(y)
    }

    /// Fails the world with the error of a call, unless that error follows from the failure of the world.
    fn fail_call(&self, request: &Request<'_>, error: Error) -> Error {
        if self.session.is_consequence(&error) {
            return self.session.pending.failure_error();
        }
        self.tcp.fail_call(request, error)
    }
}

impl Submission<'_> {
    fn run(&self) -> Result<Option<Buffer>> {
        let (request, size) = (self.request, self.request.position.size());
        let counts = request.counts;
        match request.op {
            Op::AllReduce(op) if self.is_reduced_by_nccl(op) => {
                let (numel, dtype) = (counts[0], self.dtype());
                let op = match op {
                    ReduceOp::Sum => shardgrad_nccl::ReduceOp::Sum,
                    ReduceOp::Max => shardgrad_nccl::ReduceOp::Max,
                    ReduceOp::Min => shardgrad_nccl::ReduceOp::Min,
                };
                self.submit_to_new(numel, request.x, &[Part::AllReduce { numel, dtype, op }]).map(Some)
            }
            Op::AllReduce(op) if request.payload().is_chunked() => {
                let part = |i: usize| chunk(counts[0], size, i);
                let mine = self.exchange_and_reduce(op, part)?;
                let counts: SmallVec<[usize; 8]> = (0..size).map(|i| part(i).len()).collect();
                self.gather(&mine, &counts).map(Some)
            }
            Op::AllReduce(op) => {
                let numel = counts[0];
                let all = self.gather(self.x(), &SmallVec::<[usize; 8]>::from_elem(numel, size))?;
                let operands = (0..size).map(|i| (&all, i * numel..(i + 1) * numel));
                let mut y = self.alloc(numel)?;
                reduce_ranges(self.on, self.dtype(), op, operands, &mut y)?;
                Ok(Some(y))
            }
            Op::ReduceScatter => {
                let is_even = counts.iter().all(|count| *count == counts[0]);
                let (numel, dtype) = (counts[0], self.dtype());
                if is_even && self.is_reduced_by_nccl(ReduceOp::Sum) {
                    return self
                        .submit_to_new(numel, request.x, &[Part::ReduceScatter { numel, dtype }])
                        .map(Some);
                }
                let part = |i: usize| offset(counts, i)..offset(counts, i + 1);
                self.exchange_and_reduce(ReduceOp::Sum, part).map(Some)
            }
            Op::AllGather => self.gather(self.x(), counts).map(Some),
            Op::AllToAll => {
                let mut y = self.alloc(request.received.iter().sum())?;
                let of = |counts: &[usize], i: usize| offset(counts, i)..offset(counts, i + 1);
                self.exchange(self.x(), &mut y, |i| of(counts, i), |i| of(request.received, i))?;
                Ok(Some(y))
            }
            Op::Broadcast { root } => {
                let part = Part::Broadcast { bytes: self.bytes(counts[0]), root };
                if is_root(request) {
                    self.submit(request.x, None, &[part])?;
                    return Ok(request.x.cloned());
                }
                self.submit_to_new(counts[0], None, &[part]).map(Some)
            }
            Op::Send { .. } | Op::Recv { .. } | Op::Barrier => unreachable!("bug: not a collective of NCCL"),
        }
    }

    /// Whether NCCL reduces as the kernels do, up to the order of a sum, which may matter.
    fn is_reduced_by_nccl(&self, op: ReduceOp) -> bool {
        let is_summed = !self.has_tree_sums && op == ReduceOp::Sum;
        self.dtype() == DType::I64 || is_summed && matches!(self.dtype(), DType::F32 | DType::F64)
    }

    fn dtype(&self) -> DType {
        self.request.call.dtype
    }

    fn bytes(&self, numel: usize) -> usize {
        numel * self.dtype().size()
    }

    fn alloc(&self, numel: usize) -> Result<Buffer> {
        Ok(self.on.alloc(self.bytes(numel))?)
    }

    fn x(&self) -> &Buffer {
        self.request.x.expect("bug: a member of a collective without a buffer")
    }

    /// Submits parts. Without elements on any rank there is nothing to submit.
    fn submit(&self, x: Option<&Buffer>, y: Option<&mut Buffer>, parts: &[Part]) -> Result<()> {
        let is_empty = |part: &Part| match part {
            Part::AllReduce { numel, .. } | Part::ReduceScatter { numel, .. } => *numel == 0,
            Part::AllGather { bytes } | Part::Broadcast { bytes, .. } => *bytes == 0,
            Part::Send { range, .. } | Part::Recv { range, .. } => range.is_empty(),
        };
        let parts: SmallVec<[Part; 8]> = parts.iter().filter(|part| !is_empty(part)).cloned().collect();
        if parts.is_empty() {
            return Ok(());
        }
        self.comm.submit(self.on, x, y, &parts, &mut self.tcp.submission_check(self.request))
    }

    /// Submits parts whose result has `numel` elements.
    fn submit_to_new(&self, numel: usize, x: Option<&Buffer>, parts: &[Part]) -> Result<Buffer> {
        let mut y = self.alloc(numel)?;
        self.submit(x, Some(&mut y), parts)?;
        Ok(y)
    }

    /// Sends the elements `sent(i)` of `x` to each member i and receives into the elements `received(i)` of `y`.
    fn exchange(
        &self,
        x: &Buffer,
        y: &mut Buffer,
        sent: impl Fn(usize) -> Range<usize>,
        received: impl Fn(usize) -> Range<usize>,
    ) -> Result<()> {
        let me = self.request.position.group_rank;
        let bytes = |range: Range<usize>| self.bytes(range.start)..self.bytes(range.end);
        let others = (0..self.request.position.size()).filter(|i| *i != me);
        let parts = others.flat_map(|i| {
            [Part::Send { range: bytes(sent(i)), to: i }, Part::Recv { range: bytes(received(i)), from: i }]
        });
        let parts: SmallVec<[Part; 8]> = parts.collect();
        self.submit(Some(x), Some(&mut *y), &parts)?;
        copy(self.on, self.dtype(), x, sent(me), y, received(me).start)
    }

    /// Concatenates the first `counts[i]` elements of each member i.
    fn gather(&self, x: &Buffer, counts: &[usize]) -> Result<Buffer> {
        let numel = counts.iter().sum();
        if counts.iter().all(|count| *count == counts[0]) {
            return self.submit_to_new(numel, Some(x), &[Part::AllGather { bytes: self.bytes(counts[0]) }]);
        }
        let (me, mut y) = (self.request.position.group_rank, self.alloc(numel)?);
        self.exchange(x, &mut y, |_| 0..counts[me], |i| offset(counts, i)..offset(counts, i + 1))?;
        Ok(y)
    }

    /// Reduces the elements `part(me)` of all members by the kernel of the other transports. Each member sends `part(i)` to member i.
    fn exchange_and_reduce(&self, op: ReduceOp, part: impl Fn(usize) -> Range<usize>) -> Result<Buffer> {
        let (me, size) = (self.request.position.group_rank, self.request.position.size());
        let numel = part(me).len();
        let mut all = self.alloc(size * numel)?;
        let place = |i: usize| i * numel..(i + 1) * numel;
        self.exchange(self.x(), &mut all, &part, place)?;
        let mut y = self.alloc(numel)?;
        reduce_ranges(self.on, self.dtype(), op, (0..size).map(|i| (&all, place(i))), &mut y)?;
        Ok(y)
    }
}
