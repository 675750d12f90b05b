//! Strangers at the ports of a run: they take no rank, learn nothing and delay nobody.

use crate::support::{free_port, in_parallel, mesh, on, up};
use crate::wire::{HANDSHAKE_BYTES, TOKEN, connect, first_message, process};
use shardgrad_dist::{Error, Kind, Process, Rank, ReduceOp, Rendezvous, Result, Token, World};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const OTHER_TOKEN: &str = "another token: 0123456789abcdef";

fn world(text: &str) -> World {
    World::new(mesh(text)).timeout(Duration::from_secs(30)).threads(1)
}

/// A sum over all ranks, as a proof that these are the right ones.
fn sum(rank: &Rank) -> Result<f32> {
    let x = up(rank, &[rank.index() as f32 + 1.0]);
    let y = rank.all_reduce(&on(rank, "tp"), &x, 1, ReduceOp::Sum)?;
    Ok(crate::support::down::<f32>(&y, 1)[0])
}

/// What strangers send: other programs, the protocol of earlier versions with a right and a wrong rank, processes with another token.
fn openings() -> Vec<Vec<u8>> {
    let old = |version: &[u8], rank: u64| {
        let hello =
            [&1u64.to_le_bytes()[..], &rank.to_le_bytes(), &[0; 8], &5u64.to_le_bytes(), b"0.1.0"].concat();
        [version, &(hello.len() as u64).to_le_bytes(), &hello].concat()
    };
    vec![
        b"GET / HTTP/1.1\r\nHost: \x1b[2J\r\n\r\n".repeat(4),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".repeat(9),
        old(b"shardgrad ranks 2\n", 1),
        old(b"shardgrad ranks 2\n", 77),
        old(b"shardgrad ranks 9\n", 1),
        vec![0; HANDSHAKE_BYTES],
        vec![0xff; 100_000],
        first_message(OTHER_TOKEN),
        [first_message(OTHER_TOKEN), vec![0; 528]].concat(),
    ]
}

/// Sends an opening and returns what the other end answers until it closes the connection.
fn answer(mut stream: TcpStream, opening: &[u8]) -> Vec<u8> {
    let mut answer = Vec::new();
    // The other end may close the connection before it has read all.
    let _ = stream.write_all(opening);
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
    match stream.read_to_end(&mut answer) {
        Err(e) if e.kind() != ErrorKind::ConnectionReset => panic!("the connection stays open: {e}"),
        _ => answer,
    }
}

#[test]
fn strangers_before_during_and_after_the_rendezvous_change_nothing() {
    let (port, lines) = (free_port(), Arc::new(Mutex::new(Vec::new())));
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    let rendezvous = Rendezvous::open(&process(0, 3, port)).unwrap();
    // Before rank 0 waits for anybody.
    for opening in openings() {
        assert_eq!(answer(connect(port), &opening), b"", "{:?}", String::from_utf8_lossy(&opening));
    }
    // During the rendezvous: a flood, and connections that stay open and silent, or stop in the middle of a message.
    let is_over = AtomicBool::new(false);
    let silent: Vec<TcpStream> = (0..150).map(|_| connect(port)).collect();
    let partial: Vec<TcpStream> = (0..50)
        .map(|_| {
            let mut stream = connect(port);
            stream.write_all(&first_message(TOKEN)[..HANDSHAKE_BYTES - 1]).unwrap();
            stream
        })
        .collect();
    let (sums, num_strangers) = thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let mut count = 0;
            for opening in openings().iter().cycle().take_while(|_| !is_over.load(Ordering::SeqCst)) {
                let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) else { break };
                assert_eq!(answer(stream, opening), b"");
                count += 1;
            }
            count
        });
        let keep = lines.clone();
        let zero = scope.spawn(|| {
            let hook = move |line: &str| keep.lock().unwrap().push(line.to_string());
            world("tp=3").on_wait(Duration::from_millis(50), hook).join_at(&rendezvous, |rank| {
                let first = sum(rank)?;
                // After the rendezvous nothing listens any more.
                let refused = TcpStream::connect(("127.0.0.1", port)).unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
                Ok(first + sum(rank)?)
            })
        });
        thread::sleep(Duration::from_millis(300));
        // The line names the ranks that are missing, so they start after it.
        while lines.lock().unwrap().is_empty() && !zero.is_finished() {
            thread::sleep(Duration::from_millis(2));
        }
        let others = [1, 2].map(|rank| {
            scope.spawn(move || {
                world("tp=3").join(&process(rank, 3, port), |rank| Ok(sum(rank)? + sum(rank)?))
            })
        });
        let sums = [vec![zero.join().unwrap().unwrap()], others.map(|o| o.join().unwrap().unwrap()).to_vec()];
        is_over.store(true, Ordering::SeqCst);
        (sums.concat(), flood.join().unwrap())
    });
    assert_eq!(sums, [12.0; 3]);
    assert!(num_strangers > 10, "{num_strangers} strangers came");
    let line = format!("waiting for ranks 1, 2 to connect to rank 0 (127.0.0.1:{port}) (");
    let lines = lines.lock().unwrap().clone();
    assert!(lines.len() == 1 && lines[0].starts_with(&line), "{lines:?}");
    drop((silent, partial));
}

#[test]
fn process_with_another_token_takes_no_rank() {
    let other = |rank: usize, port: u16| {
        Process::new(rank, 2, "127.0.0.1", port).unwrap().token(Token::Text(OTHER_TOKEN.to_string()))
    };
    let short = || World::new(mesh("tp=2")).timeout(Duration::from_secs(1)).threads(1);
    let stranger_alone = || {
        let port = free_port();
        // Rank 0 listens until the stranger has given up: its last attempt is refused by rank 0, not by the port.
        let longer = move || short().timeout(Duration::from_millis(1800));
        let alone = thread::spawn(move || longer().join(&process(0, 2, port), sum).unwrap_err());
        let strange: Error = short().join(&other(1, port), sum).unwrap_err();
        let alone = alone.join().unwrap();
        assert_eq!((alone.kind(), strange.kind()), (Kind::Timeout, Kind::Timeout));
        let text = alone.to_string();
        assert!(text.contains("rank 1 did not connect to rank 0"), "{text}");
        assert!(text.contains("connections without the token of this run"), "{text}");
        let text = strange.to_string();
        assert!(
            text.contains("the process there has another token, or is not a rank of shardgrad"),
            "{text}"
        );
    };
    // The rendezvous goes on while the stranger keeps trying.
    let stranger_first = || {
        let port = free_port();
        let zero = thread::spawn(move || world("tp=2").join(&process(0, 2, port), sum));
        let strange = thread::spawn(move || short().join(&other(1, port), sum));
        thread::sleep(Duration::from_millis(500));
        let one = world("tp=2").join(&process(1, 2, port), sum);
        assert_eq!((zero.join().unwrap().unwrap(), one.unwrap()), (3.0, 3.0));
        assert!(strange.join().unwrap().is_err());
    };
    // A rank 0 with another token is not believed either.
    let strange_rank_zero = || {
        let port = free_port();
        let listener = thread::spawn(move || short().join(&other(0, port), sum).unwrap_err());
        let one = short().join(&process(1, 2, port), sum).unwrap_err();
        assert_eq!((one.kind(), listener.join().unwrap().kind()), (Kind::Timeout, Kind::Timeout));
    };
    let cases: [&(dyn Fn() + Sync); 3] = [&stranger_alone, &stranger_first, &strange_rank_zero];
    in_parallel(cases, |case| case());
}

#[test]
fn recorded_rendezvous_is_worth_nothing() {
    let (port, relay) = (free_port(), TcpListener::bind("127.0.0.1:0").unwrap());
    let relay_port = relay.local_addr().unwrap().port();
    // Record what rank 1 sends in a whole run, and what it is sent.
    let recorder = thread::spawn(move || {
        let (from, to) = (relay.accept().unwrap().0, connect(port));
        let record = |mut from: TcpStream, mut to: TcpStream| {
            thread::spawn(move || {
                let (mut bytes, mut part) = (Vec::new(), [0; 1 << 16]);
                while let Ok(count) = from.read(&mut part).map(|count| count.min(1 << 16)) {
                    bytes.extend_from_slice(&part[..count]);
                    if count == 0 || to.write_all(&part[..count]).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(Shutdown::Write);
                bytes
            })
        };
        let back = record(to.try_clone().unwrap(), from.try_clone().unwrap());
        [record(from, to).join().unwrap(), back.join().unwrap()]
    });
    let zero = thread::spawn(move || world("tp=2").join(&process(0, 2, port), sum));
    let one = world("tp=2").join(&process(1, 2, relay_port), sum);
    assert_eq!((zero.join().unwrap().unwrap(), one.unwrap()), (3.0, 3.0));
    let [sent, received] = recorder.join().unwrap();
    assert!(sent.len() > 1000 && received.len() > 200, "{} and {} bytes", sent.len(), received.len());
    // Replay it in the next run, which has the same token: a reply to the first message, and the end.
    let port = free_port();
    let rendezvous = Rendezvous::open(&process(0, 2, port)).unwrap();
    for replayed in [&sent[..], &sent[..HANDSHAKE_BYTES + 528], &received] {
        let reply = answer(connect(port), replayed);
        assert!(reply.len() <= HANDSHAKE_BYTES, "{} bytes", reply.len());
        assert!(replayed == received || reply != received[..HANDSHAKE_BYTES]);
    }
    let zero = thread::spawn(move || world("tp=2").join_at(&rendezvous, sum));
    let one = world("tp=2").join(&process(1, 2, port), sum);
    assert_eq!((zero.join().unwrap().unwrap(), one.unwrap()), (3.0, 3.0));
    // Replayed to rank 1, the recorded answers of rank 0 are none.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let is_over = Arc::new(AtomicBool::new(false));
    let over = is_over.clone();
    listener.set_nonblocking(true).unwrap();
    let false_zero = thread::spawn(move || {
        let mut kept = Vec::new();
        while !over.load(Ordering::SeqCst) {
            if let Ok((mut stream, _)) = listener.accept() {
                let _ = stream.write_all(&received);
                kept.push(stream);
            }
            thread::sleep(Duration::from_millis(5));
        }
    });
    let start = Instant::now();
    let short = World::new(mesh("tp=2")).timeout(Duration::from_secs(1)).threads(1);
    let error = short.join(&process(1, 2, port), sum).unwrap_err();
    is_over.store(true, Ordering::SeqCst);
    false_zero.join().unwrap();
    assert!(error.kind() == Kind::Timeout && start.elapsed() < Duration::from_secs(10), "{error}");
    assert!(error.message().contains("its reply does not verify"), "{error}");
}
