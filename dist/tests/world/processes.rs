//! Worlds of processes: connecting, and the errors on other ranks when one rank ends, fails or becomes unresponsive.

use crate::support::{free_port, in_parallel, joined, mesh, on, up};
use crate::wire::{INSECURE, Peer, TOKEN};
use shardgrad_dist::{Error, Kind, Mesh, Process, Rank, ReduceOp, Rendezvous, Result, Token, World};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A world with a timeout of a minute, which no test here reaches.
fn world(text: &str) -> World {
    World::new(mesh(text)).timeout(Duration::from_secs(60)).threads(1)
}

/// A world whose ranks wait for five seconds: in vain, but long enough for ranks to connect on a busy machine.
fn hasty_world(text: &str) -> World {
    world(text).timeout(Duration::from_secs(5))
}

fn barrier(rank: &Rank) -> Result<usize> {
    rank.barrier(&on(rank, "tp")).map(|()| rank.index())
}

fn contains(error: &Error, kind: Kind, parts: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} in:\n{text}");
}

#[test]
fn mesh_of_another_size_is_an_error_before_connecting() {
    let port = free_port();
    let process = move |rank: usize| Process::new(rank, 3, "127.0.0.1", port).unwrap();
    let why = "mesh(tp=2) has 2 ranks, but 3 processes were started";
    let rendezvous = Rendezvous::open(&process(0)).unwrap();
    let error = world("tp=2").join_at(&rendezvous, barrier).unwrap_err();
    contains(&error, Kind::Config, &[why]);
    // Ranks that connect afterwards, as rank 0 waits for them, get its error.
    let others = [1, 2].map(|rank| thread::spawn(move || world("tp=3").join(&process(rank), barrier)));
    rendezvous.fail(&error);
    for other in others {
        contains(&other.join().unwrap().unwrap_err(), Kind::Config, &["rank 0 refused to start: ", why]);
    }
    let alone = Process::new(0, 1, "nowhere.invalid", 1).unwrap();
    assert_eq!(World::new(Mesh::single()).join(&alone, |rank| Ok(rank.index())).unwrap(), 0);
}

pub(crate) fn missing_ranks_are_named_on_all_others() {
    let (port, unused) = (free_port(), free_port());
    let start = Instant::now();
    let one = |rank: usize, port: u16| {
        let process = Process::new(rank, 4, "127.0.0.1", port).unwrap();
        hasty_world("tp=4").join(&process, barrier).unwrap_err()
    };
    let lonely = thread::spawn(move || one(1, unused));
    let other = thread::spawn(move || one(2, port));
    for error in [one(0, port), other.join().unwrap()] {
        let why = format!("ranks 1, 3 did not connect to rank 0 (127.0.0.1:{port}) within 5 s");
        let help = "check that every rank was started; raise the timeout with --timeout";
        contains(&error, Kind::Timeout, &[&why, help]);
    }
    let lonely = lonely.join().unwrap();
    let why = format!("rank 1 did not connect to rank 0 (127.0.0.1:{unused}) within 5 s: Connection refused");
    contains(&lonely, Kind::Timeout, &[&why, "MASTER_ADDR", "--timeout"]);
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

pub(crate) fn port_in_use_is_named() {
    // Another program at the port closes its connections, every second one after it has sent junk.
    let program = || {
        let (taken, is_over) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::new(AtomicBool::new(false)));
        let (port, over) = (taken.local_addr().unwrap().port(), is_over.clone());
        let thread = thread::spawn(move || {
            let mut num_asked = 0;
            for turn in 0.. {
                let (mut stream, _) = taken.accept().unwrap();
                if over.load(Ordering::SeqCst) {
                    break;
                }
                num_asked += usize::from(stream.read(&mut [0; 64]).is_ok_and(|count| count > 0));
                if turn % 2 == 1 {
                    let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
                }
            }
            num_asked
        });
        let end = move || {
            is_over.store(true, Ordering::SeqCst);
            TcpStream::connect(("127.0.0.1", port)).unwrap();
            thread.join().unwrap()
        };
        (port, end)
    };
    in_parallel([(0, false), (0, true), (1, false), (1, true)], |(rank, has_token)| {
        let (port, end) = program();
        let process = match has_token {
            true => crate::wire::process(rank, 2, port),
            false => Process::new(rank, 2, "127.0.0.1", port).unwrap(),
        };
        let error = hasty_world("tp=2").join(&process, barrier).unwrap_err();
        let (kind, why, help) = match rank {
            0 => (Kind::Io, format!("rank 0 cannot listen on port {port}: "), "SHARDGRAD_PORT"),
            _ => (Kind::Timeout, "rank 1 did not connect to rank 0 (127.0.0.1:".to_string(), "--timeout"),
        };
        contains(&error, kind, &[&why, help]);
        assert_eq!(end() > 0, has_token, "rank {rank} opens a handshake with a program if it has a token");
    });
}

pub(crate) fn rank_zero_behind_a_virtual_address_listens_where_it_is_told_to() {
    let port = free_port();
    // An address for documentation stands for that of a Service, which no machine has.
    let behind = Process::new(0, 2, "198.51.100.1", port)
        .unwrap()
        .token(Token::Text(TOKEN.to_string()))
        .encrypt(false);
    let parts = ["198.51.100.1 is not an address of this machine", "--listen", "SHARDGRAD_LISTEN", "0.0.0.0"];
    let not_here = ["203.0.113.1 is not an address of this machine", "--listen"];
    let refused = [(behind.clone(), &parts[..]), (behind.clone().listen("203.0.113.1"), &not_here)];
    in_parallel(refused, |(process, parts)| {
        contains(&world("tp=2").join(&process, barrier).unwrap_err(), Kind::Io, parts);
    });
    for address in ["127.0.0.1", "0.0.0.0"] {
        let behind = behind.clone().listen(address);
        let first = thread::spawn(move || world("tp=2").join(&behind, barrier));
        let other = world("tp=2").join(&crate::wire::process(1, 2, port), barrier);
        assert_eq!((first.join().unwrap().unwrap(), other.unwrap()), (0, 1), "{address}");
    }
}

#[test]
fn different_meshes_or_counts_are_an_error_on_all() {
    let meet =
        |of: &(dyn Fn(usize) -> World + Sync)| joined(2, |p| of(p.rank()).join(p, barrier).unwrap_err());
    for error in meet(&|rank| world(if rank == 0 { "tp=2" } else { "dp=2" })) {
        let why = "ranks got different meshes: mesh(tp=2) on rank 0, mesh(dp=2) on rank 1";
        contains(&error, Kind::Config, &[why, "of rank 1: 127.0.0.1"]);
    }
    // Started with different counts, each with a mesh that fits.
    let port = free_port();
    let one = move |rank: usize, count: usize, text: &str| {
        world(text).join(&Process::new(rank, count, "127.0.0.1", port).unwrap(), barrier).unwrap_err()
    };
    let other = thread::spawn(move || one(1, 3, "tp=3"));
    for error in [one(0, 2, "tp=2"), other.join().unwrap()] {
        let why = "ranks were started with different counts: 2 on rank 0, 3 on rank 1";
        contains(&error, Kind::Config, &[why]);
    }
}

#[test]
fn foreign_connections_are_rejected_without_delay() {
    let port = free_port();
    let process =
        move |rank: usize, run: &str| Process::new(rank, 2, "127.0.0.1", port).unwrap().with_run_id(run);
    let first = thread::spawn(move || world("tp=2").join(&process(0, "a"), barrier));
    let connect = || loop {
        if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
            return stream;
        }
        thread::sleep(Duration::from_millis(2));
    };
    let (_silent, mut junk, mut long) = (connect(), connect(), connect());
    junk.write_all(&[0xff; 4000]).unwrap();
    long.write_all(&[0xff; 47]).unwrap();
    let strange = world("tp=2").join(&process(1, "b"), barrier).unwrap_err();
    contains(
        &strange,
        Kind::Config,
        &["rank 1 belongs to run `b`, but rank 0 at", "belongs to run `a`", "SHARDGRAD_PORT"],
    );
    let twice = world("tp=2").join(&process(1, "a").with_local_rank(0, 1).unwrap(), |rank| {
        barrier(rank)?;
        Ok(rank.index())
    });
    assert_eq!((first.join().unwrap().unwrap(), twice.unwrap()), (0, 1));
    assert_eq!(junk.read(&mut [0; 16]).unwrap_or(0), 0, "junk gets no answer");
}

pub(crate) fn ranks_that_return_early_report_later_failures() {
    let ends = joined(3, |process| {
        world("tp=3").join(process, |rank| match rank.index() {
            2 => {
                thread::sleep(Duration::from_millis(1500));
                Err(Error::new(Kind::Data, "row 7 is empty"))
            }
            index => Ok(index),
        })
    });
    for (rank, end) in ends.into_iter().enumerate() {
        let error = end.unwrap_err();
        match rank {
            2 => contains(&error, Kind::Data, &["row 7 is empty"]),
            _ => {
                let short = format!("rank 2 failed: row 7 is empty; rank {rank} stops too");
                assert_eq!((error.kind(), error.to_string()), (Kind::PeerLost, short));
            }
        }
    }
}

/// Connects as rank 1 of two, up to the end of the rendezvous.
fn rendezvous_as_rank_one(port: u16, token: &str) -> Peer {
    let mut peer = Peer::hello(port, 1, 2, token, u64::from(token != INSECURE));
    peer.ready(1, &mesh("tp=2"));
    while peer.receive()[0] != 2 {}
    peer.send(&[3, 0, 0, 0, 0, 0, 0, 0]);
    while peer.receive()[0] != 3 {}
    peer
}

/// Rank 0 of two with the token of [`rendezvous_as_rank_one`].
fn rank_zero(port: u16, token: &str) -> Process {
    if token == INSECURE {
        Process::new(0, 2, "127.0.0.1", port).unwrap().insecure()
    } else {
        crate::wire::process(0, 2, port)
    }
}

/// The error of rank 0, which waits in a barrier with a long timeout, while `other` acts as rank 1.
fn error_with_peer(token: &str, other: impl FnOnce(&mut TcpStream)) -> Error {
    let port = free_port();
    let process = rank_zero(port, token);
    let zero = thread::spawn(move || {
        hasty_world("tp=2")
            .join(&process, |rank| rank.with_timeout(Duration::from_secs(600), || barrier(rank)))
    });
    let mut peer = rendezvous_as_rank_one(port, token);
    other(&mut peer.stream);
    let ended = zero.join().unwrap();
    drop(peer);
    ended.unwrap_err()
}

pub(crate) fn unresponsive_or_malformed_peer_is_lost_despite_a_long_timeout() {
    type Action = fn(&mut TcpStream);
    const MALFORMED: &[&str] =
        &["rank 1 sent a malformed message; rank 0 stops too", "help       ", "connection "];
    let tampered =
        "the connection from rank 1 to rank 0 was tampered with: record 5 does not verify; rank 0 stops too";
    let cases: [(&str, Action, &[&str]); 7] = [
        (INSECURE, |stream| stream.write_all(&[9; 40]).unwrap(), MALFORMED),
        (INSECURE, |stream| stream.write_all(&[1; 17]).unwrap(), MALFORMED),
        (INSECURE, |stream| stream.write_all(&[255; 17]).unwrap(), MALFORMED),
        (INSECURE, |stream| stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap(), MALFORMED),
        (
            TOKEN,
            |stream| stream.write_all(&[0; 49]).unwrap(),
            &[tampered, "connection of rank 0 to rank 1 (127.0.0.1:"],
        ),
        (
            TOKEN,
            |stream| stream.shutdown(Shutdown::Both).unwrap(),
            &["rank 1's process ended (killed or crashed); rank 0 stops too"],
        ),
        (
            TOKEN,
            |_| (),
            &["nothing received from rank 1 for 10 s: the network may be down", "; rank 0 stops too"],
        ),
    ];
    in_parallel(cases, |(token, action, parts)| {
        let start = Instant::now();
        contains(&error_with_peer(token, action), Kind::PeerLost, parts);
        let waited = start.elapsed();
        assert!(waited < Duration::from_secs(60), "{parts:?} after {waited:?}");
    });
}

pub(crate) fn timeout_names_a_peer_without_heartbeats() {
    let port = free_port();
    let zero = thread::spawn(move || {
        // More than the two seconds without heartbeats after which a rank counts as silent.
        hasty_world("tp=2").join(&rank_zero(port, TOKEN), barrier)
    });
    let peer = rendezvous_as_rank_one(port, TOKEN);
    let error = zero.join().unwrap().unwrap_err();
    drop(peer);
    contains(
        &error,
        Kind::Timeout,
        &[
            "rank 0 waited more than 5s in #1 barrier",
            "absent     no heartbeat from rank 1 for ",
            " s; it has made no call yet",
            "help       the network may be down, or the process stopped",
        ],
    );
}

/// The error kind and the printed error of each process.
fn printed(text: &str, program: impl Fn(&Rank) -> Result<()> + Sync) -> Vec<(Kind, String)> {
    let ends = joined(mesh(text).num_ranks(), |process| hasty_world(text).join(process, &program));
    ends.into_iter().map(Result::unwrap_err).map(|error| (error.kind(), error.to_string())).collect()
}

/// Asserts that one process reports an error of a kind with its details, and all others one line that ends in "stops too".
fn is_reported_once(ended: &[(Kind, String)], kind: Kind, whole: &str) {
    let (short, reports): (Vec<_>, Vec<_>) = ended
        .iter()
        .enumerate()
        .partition(|(rank, (_, text))| text.ends_with(&format!("; rank {rank} stops too")));
    assert!(ended.iter().all(|(k, _)| *k == kind || *k == Kind::PeerLost), "{ended:?}");
    assert!(short.iter().all(|(_, (_, text))| text.lines().count() == 1 && text.len() < 300), "{ended:?}");
    assert!(reports.len() == 1 && reports[0].1.0 == kind && reports[0].1.1.contains(whole), "{ended:?}");
}

#[test]
fn independent_failures_of_all_processes_are_reported() {
    // With the same message, then with different messages.
    in_parallel(0..20, |_| {
        let same = printed("tp=3", |rank| {
            barrier(rank)?;
            Err(Error::new(Kind::NotFinite, "the loss is NaN").detail("help", "a smaller --lr"))
        });
        is_reported_once(&same, Kind::NotFinite, "help       a smaller --lr");
    });
    let different = printed("tp=3", |rank| {
        let index = barrier(rank)?;
        thread::sleep(Duration::from_millis(50));
        Err(Error::new(Kind::Data, format!("row {index} is empty")).detail("help", "look"))
    });
    assert!(different.iter().any(|(_, text)| text.contains("help       look")), "{different:?}");
}

pub(crate) fn failure_of_all_processes_is_reported_by_one() {
    let counts = printed("tp=3", |rank| {
        let len = if rank.index() == 2 { 5 } else { 4 };
        rank.all_reduce(&on(rank, "tp"), &up(rank, &[0f32; 5]), len, ReduceOp::Sum).map(|_| ())
    });
    is_reported_once(&counts, Kind::Collective, "differs    counts");
    let deadlock = printed("dp=2,tp=2", |rank| {
        let first = if [0, 3].contains(&rank.index()) { "tp" } else { "dp" };
        rank.barrier(&on(rank, first))
    });
    is_reported_once(&deadlock, Kind::Collective, "help       ranks that share groups must");
    let late = printed("tp=3", |rank| {
        if rank.index() == 0 {
            // Until the others have timed out.
            loop {
                rank.check();
                thread::sleep(Duration::from_millis(2));
            }
        }
        barrier(rank).map(|_| ())
    });
    is_reported_once(&late, Kind::Timeout, "absent     rank 0: computing, no call yet");
    let gone = printed("tp=3", |rank| if rank.index() == 0 { Ok(()) } else { barrier(rank).map(|_| ()) });
    is_reported_once(&gone, Kind::PeerLost, "help       all ranks of a group must make the same calls");
}

#[test]
fn large_payloads_in_both_directions_do_not_block() {
    let len = 3_000_000;
    let ends = joined(2, |process| {
        World::new(mesh("tp=2")).join(process, |rank| {
            let call = on(rank, "tp");
            let x = up(rank, &vec![1.5f32; len]);
            for _ in 0..2 {
                rank.send(&call, &x, len, 1 - rank.index())?;
            }
            let y = rank.all_reduce(&call, &x, len, ReduceOp::Sum)?;
            for _ in 0..2 {
                rank.recv(&call, len, 1 - rank.index())?;
            }
            Ok(crate::support::down::<f32>(&y, len).iter().all(|sum| *sum == 3.0))
        })
    });
    assert!(ends.into_iter().all(|end| end.unwrap()));
}

#[test]
fn links_of_every_protection_give_the_same_bits() {
    let results = [
        |process: Process| process.insecure(),
        |process: Process| process.encrypt(false),
        |process: Process| process.encrypt(true),
    ]
    .map(|set_up| {
        let ends = joined(3, |process| {
            World::new(mesh("tp=3")).threads(1).join(&set_up(process.clone()), |rank| {
                let mut bits = Vec::new();
                // Short and long messages, in one record and in several.
                for len in [1, 5, 4_000, 40_000, 300_000] {
                    let x: Vec<f32> = (0..len).map(|i| (i * (rank.index() + 3)) as f32 * 0.1).collect();
                    let y = rank.all_reduce(&on(rank, "tp"), &up(rank, &x), len, ReduceOp::Sum)?;
                    bits.extend(crate::support::down::<f32>(&y, len).into_iter().map(f32::to_bits));
                }
                Ok(bits)
            })
        });
        ends.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    });
    assert!(results[0] == results[1] && results[1] == results[2]);
    let different = joined(2, |process| {
        world("tp=2").join(&process.clone().encrypt(process.rank() == 1), barrier).unwrap_err()
    });
    for error in different {
        let why = "ranks protect their connections differently: authenticated on rank 0, encrypted on rank 1";
        contains(&error, Kind::Config, &[why, "--encrypt"]);
    }
}

#[test]
fn rank_that_runs_ahead_is_slowed_down_and_two_that_write_to_each_other_are_not() {
    const BYTES: usize = 24 << 20;
    const COUNT: usize = 6;
    let sent = AtomicUsize::new(0);
    let ends = joined(2, |process| {
        World::new(mesh("tp=2")).threads(1).join(process, |rank| {
            let (call, len) = (on(rank, "tp"), BYTES / 4);
            let x = up(rank, &vec![rank.index() as f32; len]);
            if rank.index() == 1 {
                for _ in 0..COUNT {
                    rank.send(&call, &x, len, 0)?;
                    sent.fetch_add(1, Ordering::SeqCst);
                }
            } else {
                // While this rank computes, two messages fill its queue; the third waits in its sender.
                while sent.load(Ordering::SeqCst) < 2 {
                    rank.check();
                    thread::sleep(Duration::from_millis(2));
                }
                thread::sleep(Duration::from_millis(700));
                let early = sent.load(Ordering::SeqCst);
                assert_eq!(early, 2, "messages of {BYTES} bytes sent");
                for _ in 0..COUNT {
                    rank.recv(&call, len, 1)?;
                }
            }
            // Each sends more than a queue holds before it receives anything.
            for _ in 0..COUNT {
                rank.send(&call, &x, len, 1 - rank.index())?;
            }
            let mut is_right = true;
            for _ in 0..COUNT {
                let y = rank.recv(&call, len, 1 - rank.index())?;
                is_right &=
                    crate::support::down::<f32>(&y, len).iter().all(|x| *x == (1 - rank.index()) as f32);
            }
            Ok(is_right)
        })
    });
    assert!(ends.into_iter().all(|end| end.unwrap()));
}

#[test]
fn ranks_that_wait_in_a_circle_behind_full_queues_go_on() {
    // Rank 0 cannot finish its sends to rank 1 before that has received from rank 2, which waits for rank 0.
    const LEN: usize = 6 << 20;
    let ends = joined(3, |process| {
        World::new(mesh("tp=3")).threads(1).join(process, |rank| {
            let call = on(rank, "tp");
            let x = up(rank, &vec![1f32; LEN]);
            match rank.index() {
                0 => {
                    for _ in 0..5 {
                        rank.send(&call, &x, LEN, 1)?;
                    }
                    rank.send(&call, &x, 1, 2)?;
                }
                1 => {
                    rank.recv(&call, 1, 2)?;
                    for _ in 0..5 {
                        rank.recv(&call, LEN, 0)?;
                    }
                }
                _ => {
                    rank.recv(&call, 1, 0)?;
                    rank.send(&call, &x, 1, 1)?;
                }
            }
            Ok(())
        })
    });
    ends.into_iter().for_each(|end| end.unwrap());
}
