//! Tests with malformed messages, changed on their way: an error on every rank, without a panic, an endless wait or a result.

#![cfg(not(loom))]

use super::flow_control::QUEUE_BYTES_MAX;
use super::frame::{CallId, Frame, HEARTBEAT, PREFIX_BYTES, is_short, lengths, set_body};
use super::link::Link;
use super::{Endpoint, TcpTransport};
use crate::call::{Call, IssuedCall, Op, Origin, Phase, ReduceOp};
use crate::error::{Error, Kind, Result};
use crate::mesh::{AxisSet, Mesh};
use crate::rank::Rank;
use crate::world_state::Failure;
use shardgrad_kernels::{Buffer, Cpu, DType};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::panic::Location;
use std::thread;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(30);
const RANKS: usize = 3;

/// The kind bytes of frames with a body.
const CALL: u8 = 1;
const REDUCED_CHUNK: u8 = 2;

/// Changes the length of a body with elements of the given size in bytes.
type Change = fn(&mut Vec<u8>, usize);

/// The changes of bodies.
const CHANGES: [(&str, Change); 5] = [
    ("one byte less", |body, _| body.truncate(body.len().saturating_sub(1))),
    ("half", |body, _| body.truncate(body.len() / 2)),
    ("nothing", |body, _| body.clear()),
    ("one byte more", |body, _| body.push(0)),
    ("one element more", |body, size| body.resize(body.len() + size, 0)),
];

/// The two ends of a new connection.
fn pair() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [near, listener.accept().unwrap().0]
}

/// Reads one frame, as head and body; a heartbeat is a head alone. `None` at the end.
fn read(from: &mut TcpStream) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut prefix = [HEARTBEAT; PREFIX_BYTES];
    from.read_exact(&mut prefix).ok()?;
    let (head_bytes, body_bytes) = lengths(&prefix)?;
    let (mut head, mut body) = (prefix.to_vec(), vec![0; body_bytes]);
    head.resize(PREFIX_BYTES + head_bytes, 0);
    let mut parts = [&mut head[PREFIX_BYTES..], &mut body];
    if is_short(head_bytes, body_bytes) {
        parts.reverse();
    }
    parts.into_iter().try_for_each(|part| from.read_exact(part)).ok()?;
    Some((head, body))
}

/// The bytes of a frame on an unprotected connection.
fn on_wire(head: &[u8], body: &[u8]) -> Vec<u8> {
    let (prefix, head) = head.split_at(PREFIX_BYTES);
    if is_short(head.len(), body.len()) { [prefix, body, head] } else { [prefix, head, body] }.concat()
}

/// Forwards frames, changed by `change`, until one side closes.
fn forward(mut from: TcpStream, mut to: TcpStream, mut change: impl FnMut(&mut Vec<u8>, &mut Vec<u8>)) {
    while let Some((mut head, mut body)) = read(&mut from) {
        change(&mut head, &mut body);
        if to.write_all(&on_wire(&head, &body)).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Runs a program on three ranks, where `change` changes the frames from rank 1 to rank 0. Returns the result of each rank.
fn ends(
    program: impl Fn(&Rank) -> Result<()> + Sync,
    change: impl FnMut(&mut Vec<u8>, &mut Vec<u8>) + Send,
) -> Vec<Result<()>> {
    let mesh = Mesh::new(&[("tp", RANKS)]).unwrap();
    let [mut zero, mut one, mut two] = [(); RANKS].map(|()| [(); RANKS].map(|()| None));
    let ([near, far], [other_near, other_far]) = (pair(), pair());
    (zero[1], one[0]) = (Some(near), Some(other_near));
    let ([third, fourth], [fifth, sixth]) = (pair(), pair());
    (zero[2], two[0], one[2], two[1]) = (Some(third), Some(fourth), Some(fifth), Some(sixth));
    let live = |rank: usize, streams: Vec<Option<TcpStream>>| {
        let links = streams.into_iter().map(|stream| stream.map(Link::unprotected)).collect();
        let endpoint = Endpoint::new(&mesh, rank, links, TIMEOUT).unwrap();
        let transport = Box::new(TcpTransport::new(endpoint.clone(), TIMEOUT, Duration::ZERO));
        let own = Rank::new(mesh.clone(), rank, Cpu::backend(1), transport);
        let ended = program(&own).and_then(|()| endpoint.finish());
        drop(own);
        ended.map_err(|error| {
            endpoint.fail(error.clone());
            endpoint.abort(error)
        })
    };
    thread::scope(|scope| {
        let back = (far.try_clone().unwrap(), other_far.try_clone().unwrap());
        scope.spawn(move || forward(other_far, far, change));
        scope.spawn(move || forward(back.0, back.1, |_, _| ()));
        let live = &live;
        let ranks = [zero, one, two].into_iter().enumerate();
        let ranks: Vec<_> =
            ranks.map(|(rank, streams)| scope.spawn(move || live(rank, streams.into()))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn call(dtype: DType) -> Call<'static> {
    let (axes, site) = (AxisSet::one(crate::mesh::Axis(0)), Location::caller());
    Call { axes, dtype, phase: Phase::Control, path: "", origin: Origin::default(), site }
}

/// A collective or message between three ranks.
#[derive(Clone, Copy, Debug)]
enum Case {
    Sum(usize),
    Gather,
    Scatter,
    Exchange,
    Broadcast(usize),
    /// Rank 1 sends its part to rank 0, as before a save.
    Message,
    Barrier,
}

impl Case {
    /// Makes the call, then a barrier.
    fn run(self, rank: &Rank, dtype: DType) -> Result<()> {
        let (call, index) = (call(dtype), rank.index());
        let x = |numel: usize| rank.backend().alloc(numel * dtype.size());
        let filled = |numel: usize| -> Result<Buffer> {
            let mut x = x(numel)?;
            rank.backend().upload(&vec![0; numel * dtype.size()], &mut x)?;
            Ok(x)
        };
        let sent = [[1, 2, 3], [4, 5, 6], [7, 8, 9]];
        match self {
            Case::Sum(numel) => drop(rank.all_reduce(&call, &filled(numel)?, numel, ReduceOp::Max)?),
            Case::Gather => drop(rank.all_gather(&call, &filled([3, 4, 5][index])?, &[3, 4, 5])?),
            Case::Scatter => drop(rank.reduce_scatter(&call, &filled(12)?, &[3, 4, 5])?),
            Case::Exchange => {
                let received = sent.map(|row| row[index]);
                rank.all_to_all(&call, &filled(24)?, &sent[index], &received)?;
            }
            Case::Broadcast(root) => drop(rank.broadcast(&call, Some(&filled(7)?), 7, root)?),
            Case::Message if index == 1 => rank.send(&call, &filled(9)?, 9, 0)?,
            Case::Message if index == 0 => drop(rank.recv(&call, 9, 1)?),
            Case::Message => {}
            Case::Barrier => rank.barrier(&call)?,
        }
        rank.barrier(&call)
    }
}

#[test]
fn body_of_a_wrong_length_is_an_error_on_all_ranks() {
    let (mut tried, start) = (0, Instant::now());
    for (case, dtype, kind, numel) in [
        (Case::Sum(5), DType::F32, CALL, 5),
        (Case::Sum(5), DType::BF16, CALL, 5),
        (Case::Sum(30_000), DType::F32, CALL, 10_000),
        (Case::Sum(30_000), DType::F32, REDUCED_CHUNK, 10_000),
        (Case::Gather, DType::F32, CALL, 4),
        (Case::Gather, DType::U8, CALL, 4),
        (Case::Scatter, DType::F32, CALL, 3),
        (Case::Exchange, DType::I64, CALL, 4),
        (Case::Broadcast(1), DType::F32, CALL, 7),
        (Case::Broadcast(0), DType::F32, CALL, 0),
        (Case::Message, DType::U8, CALL, 9),
        (Case::Message, DType::F64, CALL, 9),
        (Case::Barrier, DType::F32, CALL, 0),
    ] {
        let due = numel * dtype.size();
        let undisturbed = ends(|rank| case.run(rank, dtype), |_, _| ());
        assert!(undisturbed.iter().all(Result::is_ok), "{case:?}: {undisturbed:?}");
        for (name, change) in CHANGES {
            let (mut is_first, mut sent) = (true, due);
            let ended = ends(
                |rank| case.run(rank, dtype),
                |head, body| {
                    if head[0] == kind && std::mem::take(&mut is_first) {
                        assert_eq!(body.len(), due, "{case:?} {dtype}");
                        change(body, dtype.size());
                        set_body(head, body.len());
                        sent = body.len();
                    }
                },
            );
            if sent == due {
                assert!(ended.iter().all(Result::is_ok), "{case:?} {dtype}, {name}: {ended:?}");
                continue;
            }
            tried += 1;
            let first = format!("rank 1 sent a malformed message: {sent} bytes for #1 ");
            for (rank, end) in ended.into_iter().enumerate() {
                let error = end.expect_err(&format!("{case:?} {dtype}, {name}: rank {rank} goes on"));
                let text = error.message();
                assert_eq!(error.kind(), Kind::PeerLost, "{case:?} {dtype}, {name}: {error}");
                assert!(text.starts_with(&first), "{case:?} {dtype}, {name}: {error}");
                assert!(
                    text.ends_with(&format!("; rank {rank} stops too")),
                    "{case:?} {dtype}, {name}: {error}"
                );
                assert!(text.contains(&format!(", expected {due}")), "{case:?} {dtype}, {name}: {error}");
                assert_eq!(error.details().is_empty(), rank != 0, "one rank reports the details: {error}");
            }
        }
    }
    assert!(tried > 50 && start.elapsed() < TIMEOUT * 2, "{tried} in {:?}", start.elapsed());
}

/// Only a transport that carries elements elsewhere takes calls without them.
#[test]
fn call_without_its_elements_is_an_error_on_all_ranks() {
    let call_only = Frame::CallOnly(IssuedCall::none()).encode()[0];
    for case in [Case::Sum(5), Case::Sum(30_000), Case::Exchange, Case::Message, Case::Barrier] {
        let mut is_first = true;
        let ended = ends(
            |rank| case.run(rank, DType::F32),
            |head, body| {
                if head[0] == CALL && std::mem::take(&mut is_first) {
                    head[0] = call_only;
                    body.clear();
                    set_body(head, 0);
                }
            },
        );
        for (rank, end) in ended.into_iter().enumerate() {
            let error = end.expect_err(&format!("{case:?}: rank {rank} goes on"));
            assert_eq!(error.kind(), Kind::PeerLost, "{case:?}: {error}");
            assert!(error.message().contains("rank 1 sent a malformed message"), "{case:?}: {error}");
        }
    }
}

/// The error of rank 0 in a barrier while rank 1 sends some frames, each with a body, and then nothing.
fn end_after(frames: &[(Frame, &[u8])]) -> Error {
    let mesh = Mesh::new(&[("tp", 2), ("dp", 2)]).unwrap();
    let ([near, mut far], mut streams) = (pair(), vec![None, None, None, None]);
    streams[1] = Some(near);
    let others = [pair(), pair()];
    for (rank, [near, _]) in others.iter().enumerate() {
        streams[2 + rank] = Some(near.try_clone().unwrap());
    }
    for (frame, body) in frames {
        let mut head = frame.encode();
        set_body(&mut head, body.len());
        far.write_all(&on_wire(&head, body)).unwrap();
    }
    let links = streams.into_iter().map(|stream| stream.map(Link::unprotected)).collect();
    let endpoint = Endpoint::new(&mesh, 0, links, TIMEOUT).unwrap();
    let transport = Box::new(TcpTransport::new(endpoint.clone(), TIMEOUT, Duration::ZERO));
    let own = Rank::new(mesh, 0, Cpu::backend(1), transport);
    let error = own.barrier(&Call { axes: own.mesh().all_axes(), ..call(DType::F32) }).unwrap_err();
    drop((own, others));
    endpoint.fail(error.clone());
    endpoint.abort(error)
}

fn issued(op: Op, bits: u16, counts: &[usize]) -> IssuedCall {
    let mut issued = IssuedCall::none();
    issued.axes = (0..2u8).filter(|axis| bits >> axis & 1 == 1).map(crate::mesh::Axis).collect();
    (issued.op, issued.dtype, issued.number, issued.counts) = (op, DType::F32, 1, counts.into());
    issued
}

#[test]
fn unexpected_frames_are_malformed() {
    let sum = Op::AllReduce(ReduceOp::Sum);
    let id = CallId { is_message: true, bits: 2, number: 1 };
    let full = vec![0; QUEUE_BYTES_MAX];
    // Ranks 0 and 1 differ in dp alone, the second axis; rank 0 is in a barrier over both.
    for (what, frame, body) in [
        ("a chunk without an all-reduce", Frame::ReducedChunk(3), &[0; 4][..]),
        ("a chunk without an all-reduce, of no bytes", Frame::ReducedChunk(3), &[]),
        ("a chunk over unknown axes", Frame::ReducedChunk(77), &[]),
        ("the call of a group without this rank", Frame::Call(issued(sum, 1, &[1])), &[0; 4]),
        ("a message to another rank", Frame::Call(issued(Op::Send { to: 1 }, 2, &[1])), &[0; 4]),
        ("a recv", Frame::Call(issued(Op::Recv { from: 0 }, 2, &[1])), &[]),
        ("a sum of two counts", Frame::Call(issued(sum, 3, &[1, 1])), &[0; 8]),
        ("parts for fewer members", Frame::Call(issued(Op::AllGather, 3, &[1; 3])), &[0; 4]),
        ("an exchange without counts", Frame::Call(issued(Op::AllToAll, 3, &[])), &[]),
        ("more bytes than there can be", Frame::Call(issued(sum, 3, &[usize::MAX / 2])), &[0; 4]),
        ("counts that overflow", Frame::Call(issued(Op::AllGather, 3, &[usize::MAX; 4])), &[0; 4]),
        ("a wait with a body", Frame::Resumed, &[0]),
        ("an end with a body", Frame::Returned(IssuedCall::none()), &[0]),
        ("elements that nobody has asked for", Frame::Elements(id), &[0; 4]),
        ("a question for elements that are not kept", Frame::ClearToSend(id), &[]),
        ("a reply to a message that was not announced", Frame::Hold(id), &[]),
        // Rank 0 may have sent its own call before it reads this.
        ("credit for what was not sent", Frame::Credit(QUEUE_BYTES_MAX as u64 + 1), &[]),
        ("an announced call with elements", Frame::ReadyToSend(issued(sum, 3, &[1])), &[0; 4]),
        (
            "an announced message to another rank",
            Frame::ReadyToSend(issued(Op::Send { to: 1 }, 2, &[1])),
            &[],
        ),
        ("a call without elements that has some", Frame::CallOnly(issued(sum, 3, &[1])), &[0; 4]),
        (
            "a call without elements to another rank",
            Frame::CallOnly(issued(Op::Send { to: 1 }, 2, &[1])),
            &[],
        ),
        ("more than a queue holds", Frame::Call(issued(Op::Send { to: 0 }, 2, &[full.len() / 4])), &full),
    ] {
        let error = end_after(&[(frame, body)]);
        assert_eq!(error.kind(), Kind::PeerLost, "{what}: {error}");
        assert_eq!(error.message(), "rank 1 sent a malformed message; rank 0 stops too", "{what}");
    }
    let failure = Failure { error: Error::new(Kind::Io, "no disk"), origin: 1, affected: vec![4] };
    let error = end_after(&[(Frame::Failed(failure), &[])]);
    assert_eq!(
        error.message(),
        "rank 1 sent a malformed message; rank 0 stops too",
        "a rank outside of the mesh"
    );
}

#[test]
fn more_announced_messages_than_a_queue_can_list_are_an_error() {
    let mut message = issued(Op::Send { to: 0 }, 2, &[1 << 30]);
    message.recent_inputs = "x".repeat(QUEUE_BYTES_MAX / 3);
    let announced = |number: u64| {
        let mut message = message.clone();
        message.number = number;
        (Frame::ReadyToSend(message), &[][..])
    };
    let error = end_after(&[announced(1), announced(2), announced(3)]);
    let why =
        "rank 1 has sent too many messages that rank 0 has not received: #3 send f32[1073741824] to rank 0";
    assert!(error.kind() == Kind::PeerLost && error.message().starts_with(why), "{error}");
}

#[test]
fn errors_of_another_process_are_printed_without_control_characters() {
    let error = Error::new(Kind::Io, "no\x1b[2J disk\r\nerror: all is well").detail("help\x07", "\x1b]0;x");
    let failed = |affected: &[usize]| {
        let failure = Failure { error: error.clone(), origin: 1, affected: affected.to_vec() };
        let end = end_after(&[(Frame::Failed(failure), &[])]);
        let text = end.to_string();
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text}");
        text
    };
    let short = failed(&[]);
    assert_eq!(short, r"rank 1 failed: no\u{1b}[2J disk\r\nerror: all is well; rank 0 stops too");
    let whole = failed(&[0, 1]);
    assert!(whole.starts_with(r"no\u{1b}[2J disk\r\nerror: all is well"), "{whole}");
    assert!(whole.contains(r"help\u{7}") && whole.contains(r"\u{1b}]0;x"), "{whole}");
    let mut gone = issued(Op::AllGather, 3, &[1; 4]);
    gone.recent_inputs = "\x1b[2J at x".to_string();
    let waits = [(Frame::Waiting(gone), &[][..]), (Frame::ReducedChunk(9), &[])];
    let text = end_after(&waits).to_string();
    assert!(text.contains("last call  #1 all_gather f32[4] over tp,dp at"), "{text}");
}
