//! Asynchronous collectives on a communication thread: the results and the errors of blocking ones, while the rank goes on.

use crate::support::{RANK_KINDS, RankKind, axes, hash, in_parallel, mesh, on, over, up};
use shardgrad_dist::{Call, Kind, Rank, ReduceOp, Result};
use shardgrad_kernels::{Buffer, DType, download};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// An all-reduce, blocking or not.
fn sum(rank: &Rank, call: &Call<'_>, x: &Buffer, numel: usize, is_async: bool) -> Result<Buffer> {
    match is_async {
        true => rank.all_reduce_async(call, x, numel, ReduceOp::Sum)?.wait(),
        false => rank.all_reduce(call, x, numel, ReduceOp::Sum),
    }
}

fn bits(rank: &Rank, buffer: &Buffer, numel: usize) -> Vec<u32> {
    let values = download::<f32>(&**rank.backend(), buffer, numel).unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// Random values of a rank.
fn values(rank: &Rank, numel: usize, seed: u64) -> Vec<f32> {
    let of = |i: usize| hash(seed << 40 | (rank.index() as u64) << 32 | i as u64) as f32 / 1e12;
    (0..numel).map(of).collect()
}

#[test]
fn results_have_the_bits_of_blocking_calls_in_any_order_of_waits() {
    let groups = ["dp", "tp", "dp,tp"];
    // Inline, direct and chunked, with uneven and empty parts.
    let sizes = [0, 1, 7, 1000, 100_003];
    let program = |is_async: bool| {
        move |rank: &Rank| {
            let (mut pending, mut results) = (Vec::new(), Vec::new());
            for (seed, numel) in (0..3).flat_map(|round| sizes.map(|size| (round, size))) {
                for names in groups {
                    let (call, data) = (on(rank, names), values(rank, numel, seed));
                    let x = up(rank, &data);
                    let members = rank.mesh().group_size(call.axes);
                    let mut counts = vec![numel / members; members];
                    counts[0] += numel % members;
                    if numel % 2 == 1 {
                        // An empty part.
                        counts[1] += std::mem::take(&mut counts[0]);
                    }
                    let own = counts[rank.group_rank(call.axes)];
                    // The first elements of x.
                    let parts = counts.iter().map(|count| count / 2).collect::<Vec<_>>();
                    let whole = parts.iter().sum();
                    if is_async {
                        pending.push((rank.all_reduce_async(&call, &x, numel, ReduceOp::Sum)?, numel));
                        pending.push((rank.reduce_scatter_async(&call, &x, &counts)?, own));
                        pending.push((rank.all_gather_async(&call, &x, &parts)?, whole));
                    } else {
                        results.push(bits(rank, &rank.all_reduce(&call, &x, numel, ReduceOp::Sum)?, numel));
                        results.push(bits(rank, &rank.reduce_scatter(&call, &x, &counts)?, own));
                        results.push(bits(rank, &rank.all_gather(&call, &x, &parts)?, whole));
                    }
                }
                // A call that blocks, over groups that have calls in the queue.
                let max =
                    rank.all_reduce(&on(rank, "tp"), &up(rank, &[rank.index() as f32]), 1, ReduceOp::Max)?;
                results.push(bits(rank, &max, 1));
            }
            // The last result first.
            let waited: Vec<_> =
                pending.into_iter().rev().map(|(p, n)| Ok(bits(rank, &p.wait()?, n))).collect();
            let waited: Result<Vec<_>> = waited.into_iter().rev().collect();
            results.extend(waited?);
            results.sort();
            Ok(results)
        }
    };
    let expected = RankKind::Threads.run("dp=2,tp=2", program(false)).unwrap();
    for kind in RANK_KINDS {
        for seed in 0..3 {
            let delays = |world: shardgrad_dist::World| world.random_delays(seed);
            assert!(kind.launch("dp=2,tp=2", delays, program(true)).unwrap() == expected, "{kind:?}");
        }
    }
}

#[test]
fn rank_computes_while_its_call_waits_for_others() {
    for kind in RANK_KINDS {
        let computed = AtomicBool::new(false);
        let sums = kind.run("dp=2", |rank| {
            let x = up(rank, &vec![1f32; 1 << 16]);
            if rank.index() == 1 {
                // Rank 0 gets here only if its call does not block.
                while !computed.load(Ordering::SeqCst) {
                    rank.check();
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            let pending = rank.all_reduce_async(&on(rank, "dp"), &x, 1 << 16, ReduceOp::Sum)?;
            computed.store(true, Ordering::SeqCst);
            Ok(bits(rank, &pending.wait()?, 1 << 16))
        });
        assert_eq!(sums.unwrap(), vec![vec![2f32.to_bits(); 1 << 16]; 2], "{kind:?}");
    }
}

#[test]
fn argument_has_one_handle_after_the_wait_and_dropped_results_still_take_place() {
    for kind in RANK_KINDS {
        kind.run("dp=2", |rank| {
            let mut x = up(rank, &[1f32; 5000]);
            drop(rank.all_reduce_async(&on(rank, "dp"), &x, 5000, ReduceOp::Sum)?);
            let pending = rank.all_reduce_async(&on(rank, "dp"), &x, 5000, ReduceOp::Sum)?;
            assert!(pending.is_async());
            drop(pending.wait()?);
            assert!(x.is_unique(), "the communication thread holds the argument");
            assert_eq!(rank.trace().num_collectives(), 2);
            // The rank ends with a call in the queue.
            drop(rank.all_reduce_async(&on(rank, "dp"), &x, 5000, ReduceOp::Sum)?);
            Ok(())
        })
        .unwrap();
    }
}

/// A program with a fault, whose calls block or not.
type Program = fn(&Rank, bool) -> Result<()>;

/// The programs with a fault in an asynchronous call. Calls of one line have the same text in either form.
const FAULTS: [(&str, &str, Program, &str); 7] = [
    (
        "different counts",
        "dp=2",
        |rank, is_async| {
            let x = up(rank, &[1f32; 64]);
            sum(rank, &on(rank, "dp"), &x, 8 + rank.index(), is_async).map(drop)
        },
        "collective mismatch",
    ),
    (
        "another op",
        "dp=2",
        |rank, is_async| {
            let (x, call) = (up(rank, &[1f32; 64]), on(rank, "dp"));
            match rank.index() {
                0 => sum(rank, &call, &x, 8, is_async).map(drop),
                _ => rank.all_gather(&call, &x, &[4, 4]).map(drop),
            }
        },
        "collective mismatch",
    ),
    (
        "a rank that returns early",
        "dp=2",
        |rank, is_async| {
            let x = up(rank, &[1f32; 64]);
            if rank.index() == 1 {
                return Ok(());
            }
            sum(rank, &on(rank, "dp"), &x, 8, is_async).map(drop)
        },
        "rank 1 left (returned without a call) while rank 0 waits in #1 all_reduce",
    ),
    (
        "a rank that fails",
        "dp=2",
        |rank, is_async| {
            if rank.index() == 1 {
                let nan = shardgrad_dist::Error::new(Kind::NotFinite, "the loss is nan");
                return Err(nan);
            }
            sum(rank, &on(rank, "dp"), &up(rank, &[1f32; 64]), 8, is_async).map(drop)
        },
        "the loss is nan",
    ),
    (
        "a deadlock over two groups",
        "dp=2,tp=2",
        |rank, is_async| {
            let (x, groups) = (up(rank, &[1f32; 64]), [on(rank, "dp"), on(rank, "dp,tp")]);
            let order = if rank.index() == 2 { [1, 0] } else { [0, 1] };
            order.iter().try_for_each(|at| sum(rank, &groups[*at], &x, 8, is_async).map(drop))
        },
        "deadlock",
    ),
    (
        "a message that is never sent",
        "pp=2",
        |rank, is_async| {
            let (x, call) = (up(rank, &[1f32; 64]), on(rank, "pp"));
            match rank.index() {
                0 => {
                    sum(rank, &call, &x, 8, is_async)?;
                    rank.send(&call, &x, 8, 1)
                }
                _ => rank.recv(&call, 8, 0).map(drop),
            }
        },
        "deadlock",
    ),
    (
        "memory that is not there",
        "dp=2",
        |rank, is_async| {
            let numel = 1 << 22;
            sum(rank, &on(rank, "dp"), &up(rank, &vec![1f32; numel]), numel, is_async).map(drop)
        },
        "memory",
    ),
];

#[test]
fn errors_have_the_sentences_of_blocking_calls() {
    let cases = RANK_KINDS.into_iter().flat_map(|kind| FAULTS.map(|fault| (kind, fault)));
    in_parallel(cases, |(kind, (fault, mesh, program, part))| {
        let shown = [false, true].map(|is_async| {
            let (ends, start) = (Mutex::new(Vec::new()), Instant::now());
            let limit = |world: shardgrad_dist::World| match part {
                "memory" => world.memory_limit(20 << 20),
                _ => world,
            };
            let error = kind.launch(mesh, limit, |rank| {
                let end = program(rank, is_async);
                let text = end.as_ref().err().map(|error| (error.kind(), error.message().to_string()));
                ends.lock().unwrap().push((rank.index(), text));
                end
            });
            let error = error.map(drop).unwrap_err();
            assert!(start.elapsed() < Duration::from_secs(20), "{kind:?}, {fault}: {:?}", start.elapsed());
            let mut ends = ends.into_inner().unwrap();
            ends.sort_by_key(|(rank, _)| *rank);
            (error.kind(), error.message().to_string(), ends)
        });
        assert!(shown[0].1.contains(part), "{kind:?}, {fault}: {shown:?}");
        // Of a failed allocation either rank may be first, of a deadlock any member.
        if !["memory", "deadlock"].contains(&part) {
            assert_eq!(shown[0], shown[1], "{kind:?}, {fault}");
        }
        assert_eq!(shown[0].0, shown[1].0, "{kind:?}, {fault}: {shown:?}");
        assert!(shown[1].1.contains(part), "{kind:?}, {fault}: {shown:?}");
    });
}

#[test]
fn error_of_a_queued_call_comes_from_the_next_call_and_from_a_check() {
    for kind in RANK_KINDS {
        for at_check in [false, true] {
            let error = kind.run("dp=2", |rank| {
                let x = up(rank, &[1f32; 64]);
                let call = on(rank, "dp");
                drop(rank.all_reduce_async(&call, &x, 8 + rank.index(), ReduceOp::Sum)?);
                if !at_check {
                    return rank.barrier(&call);
                }
                loop {
                    rank.check();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let error = error.unwrap_err();
            assert!(error.message().contains("collective mismatch: rank 0 called #1"), "{kind:?}: {error}");
            assert!(error.to_string().contains("async_calls.rs:"), "{kind:?}: {error}");
        }
    }
}

#[test]
fn rank_that_unwinds_ends_its_communication_thread() {
    for kind in RANK_KINDS {
        let start = Instant::now();
        let error = kind.run("dp=2", |rank| {
            let x = up(rank, &[1f32; 64]);
            let _pending = (rank.index() == 0)
                .then(|| rank.all_reduce_async(&on(rank, "dp"), &x, 8, ReduceOp::Sum))
                .transpose()?;
            if rank.index() == 0 {
                std::panic::resume_unwind(Box::new("out of coffee"));
            }
            loop {
                rank.check();
                std::thread::sleep(Duration::from_millis(1));
            }
            #[expect(unreachable_code, reason = "the type of the function")]
            Ok(())
        });
        let error = error.unwrap_err();
        assert_eq!(
            (error.kind(), error.message()),
            (Kind::Panic, "rank 0 panicked: out of coffee"),
            "{kind:?}"
        );
        assert!(start.elapsed() < Duration::from_secs(20), "{kind:?}: {:?}", start.elapsed());
    }
}

pub(crate) fn queued_call_has_the_timeout_of_its_issue() {
    // Processes also connect within the timeout of the world.
    let limits = [Duration::from_secs(20), Duration::ZERO];
    let kinds = [(RankKind::Threads, 100), (RankKind::Processes, 3000)];
    in_parallel(
        kinds.into_iter().flat_map(|kind| limits.map(|limit| (kind, limit))),
        |((kind, timeout), limit)| {
            let timeout = Duration::from_millis(timeout);
            let run = |limit: Duration| {
                kind.launch(
                    "dp=2",
                    |world| world.timeout(timeout),
                    move |rank| {
                        let x = up(rank, &[1f32; 64]);
                        // Past the timeout; if rank 0 is to time out, until it has.
                        let nap = match limit {
                            Duration::ZERO => Duration::from_secs(60),
                            _ => timeout + Duration::from_millis(700),
                        };
                        let start = Instant::now();
                        while rank.index() == 1 && start.elapsed() < nap {
                            rank.check();
                            std::thread::sleep(Duration::from_millis(2));
                        }
                        let issue = || rank.all_reduce_async(&on(rank, "dp"), &x, 8, ReduceOp::Sum);
                        rank.with_timeout(limit, issue)?.wait().map(drop)
                    },
                )
            };
            let failure = run(limit).err().map(|error| error.kind());
            assert_eq!(failure, (limit == Duration::ZERO).then_some(Kind::Timeout), "{kind:?}");
        },
    );
}

#[test]
fn delayed_calls_take_their_latency_and_give_the_same_results() {
    let latency = Duration::from_millis(20);
    for kind in RANK_KINDS {
        let delayed = |world: shardgrad_dist::World| world.delay_calls(latency);
        let waited = kind.launch("dp=2", delayed, |rank| {
            let (start, x) = (Instant::now(), up(rank, &[3f32]));
            let y = rank.all_reduce(&on(rank, "dp"), &x, 1, ReduceOp::Sum)?;
            let z =
                rank.all_reduce_async(&over(axes(&mesh("dp=2"), "dp"), DType::F32), &x, 1, ReduceOp::Sum)?;
            assert_eq!([bits(rank, &y, 1), bits(rank, &z.wait()?, 1)], [[6f32.to_bits()], [6f32.to_bits()]]);
            Ok(start.elapsed())
        });
        assert!(waited.unwrap().iter().all(|waited| *waited >= 2 * latency), "{kind:?}");
    }
}
