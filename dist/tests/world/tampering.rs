//! A machine between two ranks that changes what they send: the world ends with an error, and no rank gets a wrong result.

use crate::support::{down, free_port, mesh, on, up};
use crate::wire::{HANDSHAKE_BYTES, process};
use shardgrad_dist::{Error, Rank, ReduceOp, Result, World};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// What is done to a segment, which is what one read returned: mostly one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Flip,
    Drop,
    Double,
    /// Sent after the next segment.
    Reorder,
    /// Half of it is sent, then the connection is closed.
    Cut,
    /// An earlier segment of the same direction is sent in its place.
    Replay,
    /// An earlier segment of the other direction is sent in its place.
    Reflect,
    /// A segment of an earlier run is sent in its place.
    ReplayRun,
}

const CHANGES: [Change; 8] = [
    Change::Flip,
    Change::Drop,
    Change::Double,
    Change::Reorder,
    Change::Cut,
    Change::Replay,
    Change::Reflect,
    Change::ReplayRun,
];

/// Segments of one connection: towards rank 0, and back.
type Segments = [Vec<Vec<u8>>; 2];

/// The bytes of each direction before which a process is not known: it may connect again.
const UNKNOWN_BYTES: [usize; 2] = [HANDSHAKE_BYTES + 528, HANDSHAKE_BYTES];

/// One trial: a change of one segment of one direction.
#[derive(Clone, Copy, Debug)]
struct Plan {
    change: Change,
    direction: usize,
    segment: usize,
    bit: usize,
}

/// A machine in the middle.
struct Middle {
    plan: Option<Plan>,
    earlier: Segments,
    segments: Mutex<Segments>,
    /// The offset of the changed segment in its direction; none if it was not reached.
    changed_at: Mutex<Option<usize>>,
    is_over: AtomicBool,
}

impl Middle {
    fn relay(self: Arc<Middle>, listener: &TcpListener, port: u16) {
        listener.set_nonblocking(true).unwrap();
        let mut pumps = Vec::new();
        while !self.is_over.load(Ordering::SeqCst) {
            let Ok((from, _)) = listener.accept() else {
                thread::sleep(Duration::from_millis(1));
                continue;
            };
            from.set_nonblocking(false).unwrap();
            let to = loop {
                match TcpStream::connect(("127.0.0.1", port)) {
                    Ok(stream) => break Some(stream),
                    Err(_) if self.is_over.load(Ordering::SeqCst) => break None,
                    Err(_) => thread::sleep(Duration::from_millis(2)),
                }
            };
            let Some(to) = to else { break };
            [&from, &to].into_iter().for_each(|stream| stream.set_nodelay(true).unwrap());
            let ends = [(from.try_clone().unwrap(), to.try_clone().unwrap()), (to, from)];
            for (direction, (from, to)) in ends.into_iter().enumerate() {
                let middle = self.clone();
                pumps.push(thread::spawn(move || middle.pump(direction, from, to)));
            }
        }
        pumps.into_iter().for_each(|pump| pump.join().unwrap());
    }

    fn pump(&self, direction: usize, mut from: TcpStream, mut to: TcpStream) {
        let (mut part, mut at, mut held) = (vec![0; 1 << 16], 0, None::<Vec<u8>>);
        while let Ok(count) = from.read(&mut part) {
            let segment = part[..count].to_vec();
            if count == 0 {
                break;
            }
            let (number, other) = {
                let mut segments = self.segments.lock().unwrap();
                segments[direction].push(segment.clone());
                (segments[direction].len() - 1, segments[1 - direction].len())
            };
            let is_due = |plan: &Plan| plan.direction == direction && plan.segment == number;
            let mut sent = vec![segment.clone()];
            if let Some(plan) = self.plan.filter(is_due) {
                *self.changed_at.lock().unwrap() = Some(at);
                let segments = self.segments.lock().unwrap();
                let pick = |from: &[Vec<u8>], limit: usize| {
                    let of = from.iter().take(limit).filter(|one| **one != segment);
                    of.cycle().nth(plan.bit % limit.max(1)).cloned().unwrap_or_default()
                };
                match plan.change {
                    Change::Flip => sent[0][plan.bit / 8 % count] ^= 1 << (plan.bit % 8),
                    Change::Drop => sent.clear(),
                    Change::Double => sent.push(segment),
                    Change::Reorder => held = sent.pop(),
                    Change::Cut => sent[0].truncate(count / 2),
                    Change::Replay => sent[0] = pick(&segments[direction], number),
                    Change::Reflect => sent[0] = pick(&segments[1 - direction], other),
                    Change::ReplayRun => {
                        sent[0] = pick(&self.earlier[direction], self.earlier[direction].len())
                    }
                }
            } else {
                sent.extend(held.take());
            }
            at += count;
            if sent.iter().any(|segment| to.write_all(segment).is_err()) {
                break;
            }
            let is_cut = |plan: &Plan| plan.change == Change::Cut && is_due(plan);
            if self.plan.as_ref().is_some_and(is_cut) {
                let _ = from.shutdown(Shutdown::Both);
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }
}

/// Calls of each kind, whose results are checked; one of them with a message of several records if it `is_long`.
fn program(rank: &Rank, is_long: bool) -> Result<()> {
    let call = on(rank, "tp");
    let ones = |len: usize| up(rank, &vec![1f32; len]);
    for round in 0..if is_long { 4 } else { 16 } {
        let x = up(rank, &[round as f32 + rank.index() as f32; 5]);
        let y = rank.all_reduce(&call, &x, 5, ReduceOp::Sum)?;
        assert_eq!(down::<f32>(&y, 5), [2.0 * round as f32 + 1.0; 5], "a wrong sum");
    }
    let len = if is_long { 100_000 } else { 60 };
    let y = rank.all_reduce(&call, &ones(len), len, ReduceOp::Sum)?;
    assert!(down::<f32>(&y, len).iter().all(|x| *x == 2.0), "a wrong sum");
    rank.send(&call, &ones(7), 7, 1 - rank.index())?;
    let y = rank.recv(&call, 7, 1 - rank.index())?;
    assert_eq!(down::<f32>(&y, 7), [1.0; 7], "a wrong message");
    (0..4).try_for_each(|_| rank.barrier(&call))
}

/// Runs the program on two ranks with a machine between them. Returns the results of both, the offset of the change, and the segments.
fn run(
    plan: Option<Plan>,
    [is_encrypted, is_long]: [bool; 2],
    earlier: &Segments,
) -> (Vec<Result<()>>, Option<usize>, Segments) {
    let (port, listener) = (free_port(), TcpListener::bind("127.0.0.1:0").unwrap());
    let between = listener.local_addr().unwrap().port();
    let middle = Arc::new(Middle {
        plan,
        earlier: earlier.clone(),
        segments: Mutex::default(),
        changed_at: Mutex::default(),
        is_over: AtomicBool::new(false),
    });
    let world = || World::new(mesh("tp=2")).timeout(Duration::from_secs(8)).threads(1);
    let ends = thread::scope(|scope| {
        let relay = scope.spawn(|| middle.clone().relay(&listener, port));
        let join = |rank: usize, port: u16| {
            scope.spawn(move || {
                world().join(&process(rank, 2, port).encrypt(is_encrypted), |rank| program(rank, is_long))
            })
        };
        let ends = [join(0, port), join(1, between)].map(|end| end.join().expect("no rank panics")).to_vec();
        middle.is_over.store(true, Ordering::SeqCst);
        relay.join().unwrap();
        ends
    });
    let (changed_at, segments) =
        (*middle.changed_at.lock().unwrap(), std::mem::take(&mut *middle.segments.lock().unwrap()));
    (ends, changed_at, segments)
}

/// Whether an error names the connection, or the rank at its other end.
fn names_the_connection(error: &Error) -> bool {
    let text = error.to_string();
    let parts = ["tampered with", "process ended", "connection", "did not connect", "address", "malformed"];
    parts.iter().any(|part| text.contains(part)) && text.contains("rank ")
}

/// Changes 192 runs, or as many as PROPTEST_CASES states: each change six times, in both directions, encrypted and not.
#[test]
#[allow(clippy::print_stdout, reason = "the counts are a result")]
fn changes_on_the_way_end_the_world_with_an_error() {
    let num_trials: usize =
        std::env::var("PROPTEST_CASES").map_or(192, |n| n.parse().expect("a number of cases"));
    let start = Instant::now();
    let undisturbed = [false, true].map(|is_encrypted| {
        let (ends, _, segments) = run(None, [is_encrypted, false], &Segments::default());
        assert!(ends.iter().all(Result::is_ok), "{ends:?}");
        assert!(segments.iter().all(|one| one.len() > 9), "{:?}", segments.each_ref().map(Vec::len));
        segments
    });
    let (next, ended, harmless) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    // Trials in which ranks wait for seconds come first: the others take place meanwhile.
    let (slow, fast): (Vec<_>, Vec<_>) = (0..num_trials).partition(|trial| [7, 49].contains(&(trial % 50)));
    let trials = [slow, fast].concat();
    let work = || {
        while let Some(&trial) = trials.get(next.fetch_add(1, Ordering::SeqCst)) {
            let random = crate::support::hash(trial as u64) as usize;
            let (is_encrypted, direction) = (trial & 1 == 1, trial >> 1 & 1);
            let earlier = &undisturbed[usize::from(is_encrypted)];
            // Ranks wait for seconds where bytes of the rendezvous or of a long message are missing: one trial in fifty each.
            let is_long = trial % 50 == 7;
            let segment = match trial % 50 {
                49 => random % 4,
                7 => 6 + random % 6,
                // A rank sends at most two frames before it needs one of the other, so there are at least ten segments.
                _ => 4 + random % 6,
            };
            let plan =
                Plan { change: CHANGES[trial / 4 % CHANGES.len()], direction, segment, bit: random >> 8 };
            let (ends, changed_at, segments) = run(Some(plan), [is_encrypted, is_long], earlier);
            let errors: Vec<&Error> = ends.iter().filter_map(|end| end.as_ref().err()).collect();
            let Some(at) = changed_at else {
                harmless.fetch_add(1, Ordering::SeqCst);
                continue;
            };
            // Nothing of the last segment is needed twice: all ranks have returned.
            let is_last = segment + 1 == segments[direction].len() && plan.change == Change::Double;
            if (at < UNKNOWN_BYTES[direction] || is_last) && errors.is_empty() {
                harmless.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            assert!(!errors.is_empty(), "trial {trial}, {plan:?} at byte {at}: nobody has noticed");
            assert!(errors.iter().any(|e| names_the_connection(e)), "trial {trial}, {plan:?}: {errors:?}");
            ended.fetch_add(1, Ordering::SeqCst);
        }
    };
    thread::scope(|scope| (0..16).for_each(|_| drop(scope.spawn(work))));
    let (ended, harmless) = (ended.into_inner(), harmless.into_inner());
    println!(
        "{ended} worlds ended with an error, {harmless} changes were harmless, in {:?}",
        start.elapsed()
    );
    assert!(ended > num_trials * 8 / 10, "{ended} of {num_trials} trials changed a world");
}
