//! The rendezvous of processes: values that must be equal, and failures that end the start on all ranks at once.

use crate::support::{free_port, in_parallel, joined, mesh, on};
use crate::wire::{Peer, TOKEN, number, process, text};
use shardgrad_dist::{Error, Kind, Rank, Rendezvous, Result, World};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A world with a timeout of a minute; no test here lasts that long.
fn world(text: &str) -> World {
    World::new(mesh(text)).timeout(Duration::from_secs(60)).threads(1)
}

fn barrier(rank: &Rank) -> Result<usize> {
    rank.barrier(&on(rank, "tp")).map(|()| rank.index())
}

/// Asserts the kind of an error, and parts of its text.
#[track_caller]
fn has(error: &Error, kind: Kind, parts: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} in:\n{text}");
}

/// Asserts that no rank waited for the timeout of the rendezvous.
#[track_caller]
fn was_at_once(start: Instant) {
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

/// Connects to rank 0 and names a rank.
fn hello(port: u16, rank: u64, count: u64) -> Peer {
    Peer::hello(port, rank, count, TOKEN, 1)
}

/// Waits for the refusal of rank 0, then closes the connection, as a rank does: rank 0 waits for that.
fn refused(mut peer: Peer) {
    while peer.receive()[0] != 4 {}
}

#[test]
fn different_values_are_an_error_on_all_ranks_with_both_values() {
    let options = |lr: &str, seed: &str| {
        [("--lr", lr), ("--seed", seed)].map(|(name, value)| (name.to_string(), value.to_string()))
    };
    let start = Instant::now();
    let ends = joined(3, |p| {
        let lr = if p.rank() == 2 { "0.1" } else { "0.002" };
        // A line break in a value is escaped on both sides, so it is no difference.
        let world = world("tp=3").check_consistent("options", options(lr, "a\nb"));
        world.check_consistent("inputs", [("data".to_string(), lr.to_string())]).join(p, barrier).unwrap_err()
    });
    for error in &ends {
        has(error, Kind::Config, &["address    of rank 2: 127.0.0.1"]);
        let why = "ranks got different options: --lr is 0.002 on rank 0, 0.1 on rank 2";
        assert_eq!(error.message(), why);
    }
    let inputs = |hash: &str| [("the training data".to_string(), hash.to_string())];
    for error in joined(2, |p| {
        let world = world("tp=2").check_consistent("options", options("1", "0"));
        world.check_consistent("inputs", inputs(["aa", "bb"][p.rank()])).join(p, barrier).unwrap_err()
    }) {
        let why = "ranks got different inputs: the training data is aa on rank 0, bb on rank 1";
        assert_eq!(error.message(), why);
    }
    let same =
        joined(2, |p| world("tp=2").check_consistent("options", options("1", "a\nb")).join(p, barrier));
    assert!(same.into_iter().all(|end| end.is_ok()));
    was_at_once(start);
}

#[test]
fn reported_error_ends_the_start_on_all() {
    for failing in [0, 1] {
        let start = Instant::now();
        let ends = joined(3, |p| {
            let rendezvous = Rendezvous::open(p).unwrap();
            if p.rank() == failing {
                let error = Error::new(Kind::Data, "no file \u{1b}[2J").detail("help", "give one");
                rendezvous.fail(&error);
                return error;
            }
            world("tp=3").join_at(&rendezvous, barrier).inspect_err(|e| rendezvous.fail(e)).unwrap_err()
        });
        for (rank, error) in ends.iter().enumerate().filter(|(rank, _)| *rank != failing) {
            let why = format!("rank {failing} refused to start: no file \\u{{1b}}[2J");
            assert_eq!(error.message(), why, "rank {rank}");
            has(error, Kind::Data, &["help       give one"]);
        }
        was_at_once(start);
    }
}

#[test]
fn failure_of_a_rank_reaches_ranks_that_connect_later() {
    let (port, start) = (free_port(), Instant::now());
    let zero = thread::spawn(move || {
        let rendezvous = Rendezvous::open(&process(0, 3, port)).unwrap();
        let error = world("tp=3").join_at(&rendezvous, barrier).unwrap_err();
        rendezvous.fail(&error);
        error
    });
    let failing = Rendezvous::open(&process(1, 3, port)).unwrap();
    failing.fail(&Error::new(Kind::Config, "no such option"));
    // The late rank opens its rendezvous after the failure, and joins later still.
    thread::sleep(Duration::from_millis(100));
    let late = Rendezvous::open(&process(2, 3, port)).unwrap();
    thread::sleep(Duration::from_millis(500));
    for error in [zero.join().unwrap(), world("tp=3").join_at(&late, barrier).unwrap_err()] {
        has(&error, Kind::Config, &["rank 1 refused to start: no such option"]);
    }
    was_at_once(start);
}

#[test]
fn two_processes_with_one_rank_end_the_start_on_all() {
    let (port, start) = (free_port(), Instant::now());
    let ends = [0, 1, 1, 2]
        .map(|rank| thread::spawn(move || world("tp=3").join(&process(rank, 3, port), barrier).unwrap_err()));
    for end in ends {
        let error = end.join().unwrap();
        has(&error, Kind::Config, &["two processes were started as rank 1", "a rank of its own (RANK)"]);
    }
    let ends = [0, 0, 1].map(|rank| {
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(200 * rank as u64));
            world("tp=2").join(&process(rank, 2, port), barrier).unwrap_err()
        })
    });
    for end in ends {
        has(&end.join().unwrap(), Kind::Config, &["two processes were started as rank 0"]);
    }
    was_at_once(start);
}

#[test]
fn process_that_ends_during_the_rendezvous_ends_the_start_on_all() {
    let start = Instant::now();
    in_parallel([false, true], |is_ready| {
        let port = free_port();
        let others = [0, 2].map(|rank| {
            thread::spawn(move || world("tp=3").join(&process(rank, 3, port), barrier).unwrap_err())
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut gone = hello(port, 1, 3);
        if is_ready {
            // Rank 2 may connect to rank 1 before that ends.
            gone.ready(listener.local_addr().unwrap().port().into(), &mesh("tp=3"));
        }
        gone.receive();
        drop(gone);
        // The listener of a process ends with it. Here it stays until rank 0 has noticed the end of the connection.
        thread::sleep(Duration::from_millis(300));
        drop(listener);
        for other in others {
            let why = "rank 1's process ended before all ranks had connected";
            has(&other.join().unwrap(), Kind::PeerLost, &[why]);
        }
    });
    // Rank 0 ends after its first reply.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let other = thread::spawn(move || world("tp=2").join(&process(1, 2, port), barrier).unwrap_err());
    let mut rank_one = Peer::accept(&listener);
    rank_one.receive();
    rank_one.send(&number(1));
    drop(rank_one);
    let why = "rank 0's process ended before all ranks had connected";
    has(&other.join().unwrap(), Kind::PeerLost, &[why, &format!("127.0.0.1:{port}")]);
    was_at_once(start);
}

#[test]
fn unreachable_rank_ends_the_start_on_all() {
    let (port, start) = (free_port(), Instant::now());
    let nobody = free_port();
    let others = [0, 2]
        .map(|rank| thread::spawn(move || world("tp=3").join(&process(rank, 3, port), barrier).unwrap_err()));
    let mut one = hello(port, 1, 3);
    one.ready(nobody.into(), &mesh("tp=3"));
    refused(one);
    for other in others {
        let why = format!("rank 2 cannot connect to rank 1 (127.0.0.1:{nobody}): Connection refused");
        has(&other.join().unwrap(), Kind::Io, &[&why, "firewalls"]);
    }
    was_at_once(start);
}

#[test]
fn long_wait_calls_the_hook_once_with_address_and_reason() {
    let said = |rank: usize| {
        let (lines, port) = (Arc::new(Mutex::new(Vec::new())), free_port());
        let keep = lines.clone();
        let world = World::new(mesh("tp=3")).timeout(Duration::from_millis(1200));
        let world = world
            .on_wait(Duration::from_millis(100), move |line| keep.lock().unwrap().push(line.to_string()));
        world.join(&process(rank, 3, port), barrier).unwrap_err();
        let lines = lines.lock().unwrap().clone();
        (port, lines)
    };
    in_parallel([0, 1], |rank| {
        let (port, lines) = said(rank);
        let line = match rank {
            0 => format!("waiting for ranks 1, 2 to connect to rank 0 (127.0.0.1:{port}) ("),
            _ => format!("waiting for rank 0 (127.0.0.1:{port}): Connection refused"),
        };
        assert!(lines.len() == 1 && lines[0].starts_with(&line), "{lines:?}");
        assert!(lines[0].ends_with(" s so far)"), "{lines:?}");
    });
}

#[test]
fn texts_of_other_processes_are_escaped() {
    let port = free_port();
    let zero = thread::spawn(move || {
        World::new(mesh("tp=2"))
            .timeout(Duration::from_secs(60))
            .join(&process(0, 2, port), barrier)
            .unwrap_err()
    });
    let mut one = hello(port, 1, 2);
    let error = [number(11), text("bad\u{1b}]0;x\u{7}"), number(1), text("he\u{8}lp"), text("\u{1b}[2J")];
    one.send(&[number(4), error.concat()].concat());
    refused(one);
    let error = zero.join().unwrap().to_string();
    assert!(!error.chars().any(|c| c.is_control() && c != '\n'), "{error:?}");
    assert!(error.contains("rank 1 refused to start: bad\\u{1b}]0;x\\u{7}"), "{error}");
}
