//! Tests of flow control between ranks over TCP: in every state of the receiver its queue stays below the limit, and no ranks that send
//! before they receive stop each other. A queue in these tests holds 1 MiB.

#![cfg(not(loom))]

use super::flow_control::QUEUE_BYTES_MAX;
use super::link::Link;
use super::{Endpoint, TcpTransport};
use crate::call::{Call, Origin, Phase, ReduceOp};
use crate::error::{Error, Kind, Result};
use crate::mesh::Mesh;
use crate::rank::Rank;
use shardgrad_kernels::{Cpu, DType, download, upload};
use std::net::{TcpListener, TcpStream};
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The bytes of a message: a quarter of a queue.
const BYTES: usize = QUEUE_BYTES_MAX / 4;
/// The number of messages that a rank sends ahead: four times what a queue holds.
const AHEAD: usize = 16;
const TIMEOUT: Duration = Duration::from_secs(30);

/// The result of each rank of a mesh, and the most bytes of elements that its queue for each other rank has held.
fn run(
    mesh: &Mesh,
    timeout: Duration,
    program: impl Fn(&Rank) -> Result<()> + Sync,
) -> Vec<(Result<()>, Vec<usize>)> {
    let size = mesh.num_ranks();
    let mut links: Vec<Vec<Option<Link>>> = (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    for (one, other) in (0..size).flat_map(|one| (0..one).map(move |other| (one, other))) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        links[one][other] = Some(Link::unprotected(near));
        links[other][one] = Some(Link::unprotected(listener.accept().unwrap().0));
    }
    let one = |(rank, links): (usize, Vec<Option<Link>>)| {
        let endpoint = Endpoint::new(mesh, rank, links, timeout).unwrap();
        let transport = Box::new(TcpTransport::new(endpoint.clone(), timeout, Duration::ZERO));
        let own = Rank::new(mesh.clone(), rank, Cpu::backend(1), transport);
        let ended = program(&own).and_then(|()| endpoint.finish());
        let ended = ended.map_err(|error| {
            endpoint.fail(error.clone());
            endpoint.abort(error)
        });
        (ended, (0..size).map(|from| endpoint.view.queued_peak(from)).collect())
    };
    std::thread::scope(|scope| {
        let one = &one;
        let ranks = links.into_iter().enumerate();
        let ranks: Vec<_> = ranks.map(|ends| scope.spawn(move || one(ends))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

/// A call over the axis `tp`, or over all axes. A second axis of one rank gives every pair of ranks two queues.
fn call(rank: &Rank, axes: &str) -> Call<'static> {
    let mesh = rank.mesh();
    let axes = if axes == "tp" { mesh.axis("tp").into_iter().collect() } else { mesh.all_axes() };
    let (site, origin) = (Location::caller(), Origin::default());
    Call { axes, dtype: DType::U8, phase: Phase::Control, path: "", origin, site }
}

fn mesh(size: usize) -> Mesh {
    Mesh::new(&[("dp", 1), ("tp", size)]).unwrap()
}

/// Sends a message whose elements are all `value`.
fn send(rank: &Rank, axes: &str, to: usize, bytes: usize, value: usize) -> Result<()> {
    rank.send(&call(rank, axes), &upload(&**rank.backend(), &vec![value as u8; bytes])?, bytes, to)
}

/// Receives a message whose elements are all `value`.
fn recv(rank: &Rank, axes: &str, from: usize, bytes: usize, value: usize) -> Result<()> {
    let x = rank.recv(&call(rank, axes), bytes, from)?;
    let x = download::<u8>(&**rank.backend(), &x, bytes)?;
    assert!(x.iter().all(|element| usize::from(*element) == value), "message {value} of rank {from}");
    Ok(())
}

fn send_ahead(rank: &Rank, to: usize) -> Result<()> {
    (0..AHEAD).try_for_each(|i| send(rank, "tp", to, BYTES, i))
}

fn recv_ahead(rank: &Rank, from: usize) -> Result<()> {
    (0..AHEAD).try_for_each(|i| recv(rank, "tp", from, BYTES, i))
}

fn pause() {
    std::thread::sleep(Duration::from_millis(300));
}

/// What rank 0 does while rank 1 sends it four times what a queue holds.
#[derive(Clone, Copy, Debug)]
enum State {
    Computes,
    WaitsForAnotherRank,
    WaitsForAnotherMessage,
    WaitsInCollective,
    SendsToSender,
    SendsToAnotherRank,
    Receives,
}

/// Runs a rank of three; in the end rank 0 has received everything.
fn run_state(rank: &Rank, state: State) -> Result<()> {
    match (rank.index(), state) {
        (0, State::Computes) => pause(),
        (0, State::WaitsForAnotherRank) => recv(rank, "tp", 2, 1, 7)?,
        (0, State::WaitsForAnotherMessage) => recv(rank, "all", 1, 1, 8)?,
        (0, State::SendsToSender) => send_ahead(rank, 1)?,
        (0, State::SendsToAnotherRank) => send_ahead(rank, 2)?,
        (1, _) => send_ahead(rank, 0)?,
        (2, State::WaitsForAnotherRank) => {
            pause();
            send(rank, "tp", 0, 1, 7)?;
        }
        (2, State::SendsToAnotherRank) => {
            pause();
            recv_ahead(rank, 0)?;
        }
        _ => {}
    }
    match (rank.index(), state) {
        (1, State::WaitsForAnotherMessage) => send(rank, "all", 0, 1, 8)?,
        (1, State::SendsToSender) => recv_ahead(rank, 0)?,
        (_, State::WaitsInCollective) => {
            let numel = 6 * BYTES;
            let x = upload(&**rank.backend(), &vec![rank.index() as u8; numel])?;
            let y = rank.all_reduce(&call(rank, "tp"), &x, numel, ReduceOp::Max)?;
            assert!(download::<u8>(&**rank.backend(), &y, numel)?.iter().all(|max| *max == 2));
        }
        _ => {}
    }
    if rank.index() == 0 { recv_ahead(rank, 1) } else { Ok(()) }
}

#[test]
fn queue_stays_below_its_limit_whatever_the_receiver_does() {
    for state in [
        State::Computes,
        State::WaitsForAnotherRank,
        State::WaitsForAnotherMessage,
        State::WaitsInCollective,
        State::SendsToSender,
        State::SendsToAnotherRank,
        State::Receives,
    ] {
        let ended = run(&mesh(3), TIMEOUT, |rank| run_state(rank, state));
        ended.iter().for_each(|(end, _)| assert!(end.is_ok(), "{state:?}: {end:?}"));
        // One message more may be what the rank has asked for.
        let (peak, least) = (ended[0].1[1], if matches!(state, State::Receives) { 1 } else { 3 * BYTES });
        assert!((least..=QUEUE_BYTES_MAX + BYTES).contains(&peak), "{state:?}: {peak} bytes were queued");
    }
}

#[test]
fn queue_of_a_rank_that_has_returned_stays_below_its_limit() {
    let ended = run(&mesh(2), TIMEOUT, |rank| if rank.index() == 1 { send_ahead(rank, 0) } else { Ok(()) });
    let error = ended[0].0.as_ref().unwrap_err();
    let text = error.to_string();
    assert!(text.contains("rank 1 called #1 send u8[262144] to rank 0 over tp at"), "{text}");
    assert!(text.contains("rank 0 returned without receiving it"), "{text}");
    assert!((3 * BYTES..=QUEUE_BYTES_MAX).contains(&ended[0].1[1]), "{} bytes were queued", ended[0].1[1]);
}

#[test]
fn ranks_that_send_more_than_queues_hold_before_they_receive_go_on() {
    const LARGE: usize = 8 * QUEUE_BYTES_MAX;
    // In a ring of two, of four, and all to all.
    for (size, steps) in [(2, 1..2), (4, 1..2), (3, 1..3)] {
        let ended = run(&mesh(size), TIMEOUT, |rank| {
            let (me, peer) = (rank.index(), |step: usize| (rank.index() + step) % size);
            for step in steps.clone() {
                send(rank, "tp", peer(step), LARGE, me)?;
                send_ahead(rank, peer(step))?;
            }
            for step in steps.clone() {
                let from = peer(size - step);
                recv(rank, "tp", from, LARGE, from)?;
                recv_ahead(rank, from)?;
            }
            Ok(())
        });
        for (rank, (end, peaks)) in ended.iter().enumerate() {
            assert!(end.is_ok(), "{size} ranks: {end:?}");
            let limit = QUEUE_BYTES_MAX + LARGE;
            assert!(peaks.iter().all(|peak| *peak <= limit), "{peaks:?} bytes were queued on rank {rank}");
        }
    }
}

#[test]
fn pipeline_takes_many_microbatches_that_were_sent_ahead() {
    let sent = AtomicUsize::new(0);
    let ended = run(&mesh(3), TIMEOUT, |rank| {
        let me = rank.index();
        for i in 0..4 * AHEAD {
            match me {
                0 => {
                    send(rank, "tp", 1, BYTES, i)?;
                    sent.fetch_add(1, Ordering::SeqCst);
                }
                // The second stage is the slowest: the first waits for it.
                1 if i == 0 => {
                    pause();
                    let sent = sent.load(Ordering::SeqCst);
                    assert!((1..=4).contains(&sent), "{sent} microbatches were sent ahead");
                }
                _ => {}
            }
            if me > 0 {
                recv(rank, "tp", me - 1, BYTES, i)?;
            }
            if me == 1 {
                send(rank, "tp", 2, BYTES, i)?;
            }
        }
        // Backward, in one message each.
        for i in 0..4 * AHEAD {
            if me < 2 {
                recv(rank, "tp", me + 1, BYTES, i)?;
            }
            if me > 0 {
                send(rank, "tp", me - 1, BYTES, i)?;
            }
        }
        Ok(())
    });
    for (end, peaks) in ended {
        assert!(
            end.is_ok() && peaks.iter().all(|peak| *peak <= QUEUE_BYTES_MAX + BYTES),
            "{end:?} {peaks:?}"
        );
    }
}

#[test]
fn receiver_that_takes_nothing_is_a_timeout_of_the_send() {
    let ended = run(&mesh(2), Duration::from_millis(200), |rank| {
        if rank.index() == 1 {
            return send_ahead(rank, 0);
        }
        std::thread::sleep(Duration::from_millis(900));
        rank.barrier(&call(rank, "tp"))
    });
    let error = ended[1].0.as_ref().unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout, "{error}");
    let text = error.to_string();
    assert!(text.contains("waited more than 200ms for rank 0 to receive the data of #4 send"), "{text}");
    assert!(text.contains("receiver   rank 0: computing, no call yet"), "{text}");
}

#[test]
fn failure_of_a_third_rank_ends_a_send_that_waits_for_room() {
    let ended = run(&mesh(3), TIMEOUT, |rank| match rank.index() {
        0 => {
            std::thread::sleep(Duration::from_secs(1));
            rank.barrier(&call(rank, "tp"))
        }
        1 => send_ahead(rank, 0),
        _ => {
            pause();
            Err(Error::new(Kind::Data, "row 7 is empty"))
        }
    });
    let error = ended[1].0.as_ref().unwrap_err();
    assert_eq!(error.message(), "rank 2 failed: row 7 is empty; rank 1 stops too");
}

#[test]
fn message_that_a_returned_rank_has_not_sent_is_an_error_although_it_keeps_others() {
    let ended = run(&mesh(2), TIMEOUT, |rank| {
        if rank.index() == 1 {
            return send_ahead(rank, 0);
        }
        recv(rank, "all", 1, 1, 0)
    });
    let error = ended[0].0.as_ref().unwrap_err();
    assert_eq!(error.kind(), Kind::PeerLost, "{error}");
    assert!(error.message().contains("rank 1 left"), "{error}");
}
