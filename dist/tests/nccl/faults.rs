//! Every call of NCCL with every fault that it may have on one of two ranks: what each rank reports, and that none hangs. Further faults of
//! ranks, whose calls of NCCL are in order, are in `main.rs`.

use super::fake_gpu::{self, CALLS, FakeGpu};
use super::{call, join, meet, succeeded};
use shardgrad_dist::{Error, Kind, Mesh, Rank, ReduceOp, Result};
use shardgrad_kernels::{Buffer, DType, download, upload};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;
use std::{fs, thread};

/// A fault of a call, with its code in `refuse.txt` (`Misbehavior` of `kernels/src/cuda/fake/nccl.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The call returns an error, "invalid usage".
    Refused = 5,
    /// The process ends.
    ProcessEnds = -1,
    /// The call returns late.
    Late = -2,
    /// What the call begins never ends. If it begins nothing, it never returns.
    Stuck = -3,
    /// The operation differs from that of the other ranks, which only the GPUs notice.
    Unlike = -4,
    /// The question for the state of a communicator fails itself.
    Unanswered = -5,
}

/// The calls that begin work of GPUs.
const OPERATIONS: [&str; 7] = [
    "ncclGroupEnd",
    "ncclAllReduce",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclBroadcast",
    "ncclSend",
    "ncclRecv",
];
/// The timeout of ranks that wait for what never ends. The ranks join within it too, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(4);
/// How long one case may last on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
/// The pairs of processes among which the table is divided. Most of them wait for timeouts.
const NUM_PAIRS: usize = 6;

/// A call and its fault.
#[derive(Clone, Copy, Debug)]
struct Case {
    call: &'static str,
    fault: Fault,
}

/// All cases in which no process ends.
fn cases() -> Vec<Case> {
    let with = |fault: Fault, applies: fn(&str) -> bool| {
        CALLS.into_iter().filter(move |call| applies(call)).map(move |call| Case { call, fault })
    };
    // These two begin nothing and wait for nobody, so that they always return. Only operations have a peer that may differ.
    let begins = |call: &str| !["ncclGetUniqueId", "ncclGroupStart"].contains(&call);
    let all = with(Fault::Refused, |_| true).chain(with(Fault::Late, |_| true));
    let all = all
        .chain(with(Fault::Stuck, begins))
        .chain(with(Fault::Unlike, |call| OPERATIONS.contains(&call)))
        .chain(with(Fault::Unanswered, |call| call == "ncclCommGetAsyncError"));
    let mut cases: Vec<Case> = all.collect();
    // The last of their processes, which do not use the GPU again.
    cases.sort_by_key(|case| case.gives_up_the_gpu());
    cases
}

impl Case {
    /// The rank that has the fault. Rank 0 alone makes the id.
    fn rank(self) -> usize {
        usize::from(self.call != "ncclGetUniqueId")
    }

    fn gives_up_the_gpu(self) -> bool {
        self.call == "ncclCommAbort" && [Fault::Refused, Fault::Stuck].contains(&self.fault)
    }

    /// The collective of [`every_call`] that makes the call first, as errors describe it.
    fn operation(self) -> &'static str {
        match self.call {
            "ncclGroupEnd" | "ncclAllReduce" => "#1 all_reduce(sum) f32[2] over dp",
            "ncclReduceScatter" => "#2 reduce_scatter f32[2] over dp",
            "ncclAllGather" => "#3 all_gather f32[2] over dp",
            _ => "a message",
        }
    }

    /// Checks how a rank ends.
    fn check(self, rank: usize, outcome: &Result<()>) {
        let Case { call, fault } = self;
        let refusal = format!("invalid usage (5): the fake refuses {call}");
        let fails = |kinds: &[Kind], parts: &[&str]| {
            let Err(error) = outcome else { panic!("{self:?}: rank {rank} succeeds") };
            let (text, message) = (error.to_string(), error.message());
            let has_all = parts.iter().all(|part| text.contains(part));
            assert!(
                kinds.contains(&error.kind()) && has_all,
                "{self:?} on rank {rank}: {parts:?} in:\n{error:?}"
            );
            assert!(!message.contains('\n'), "{self:?} on rank {rank}: one line: {message}");
        };
        let succeeds = || assert!(outcome.is_ok(), "{self:?} on rank {rank}: {outcome:?}");
        let is_faulty = rank == self.rank();
        match (call, fault) {
            // Calls that differ, which abort operations in flight.
            ("ncclCommAbort", _) => {
                fails(
                    &[Kind::Collective],
                    &[
                        "collective mismatch: rank 0 called #1 all_reduce(sum) f32[5] over dp",
                        "rank 1 called #1 all_reduce(sum) f32[4] over dp",
                    ],
                );
                match fault {
                    Fault::Refused if is_faulty => fails(
                        &[Kind::Collective],
                        &["GPU        given up, with all operations on it: ncclCommAbort: ", &refusal],
                    ),
                    Fault::Stuck if is_faulty => fails(
                        &[Kind::Collective],
                        &[
                            "GPU        given up, with all operations on it: ncclCommAbort: no answer within 4s",
                        ],
                    ),
                    _ => assert!(
                        !outcome.as_ref().unwrap_err().to_string().contains("given up"),
                        "{outcome:?}"
                    ),
                }
            }
            (_, Fault::Late) => succeeds(),
            // The other rank needs nothing of this one, but may still read its results when it hears of the error.
            ("ncclCommDestroy", _) if !is_faulty && outcome.is_ok() => {}
            ("ncclCommDestroy", _) if !is_faulty => {
                fails(&[Kind::PeerLost], &["rank 1 failed: ncclCommDestroy: "]);
            }
            ("ncclCommDestroy", Fault::Stuck) => {
                fails(&[Kind::Device], &["ncclCommDestroy: no answer within 4s", "rank       1 (dp=1) of"]);
            }
            (_, Fault::Refused) if is_faulty => {
                // The state of a communicator is that of what is in progress.
                let why =
                    if call == "ncclCommGetAsyncError" { refusal } else { format!("{call}: {refusal}") };
                fails(&[Kind::Device], &[&why, &format!("rank       {rank} (dp={rank}) of")]);
            }
            (_, Fault::Refused) => {
                fails(&[Kind::PeerLost], &[&format!("rank {} failed: nccl", self.rank()), &refusal]);
            }
            (_, Fault::Unanswered) if is_faulty => fails(
                &[Kind::Device],
                &[
                    "ncclCommGetAsyncError: unhandled system error (2): the fake does not answer",
                    "rank       1 (dp=1) of",
                ],
            ),
            (_, Fault::Unanswered) => {
                fails(&[Kind::PeerLost], &["rank 1 failed: ncclCommGetAsyncError: ", "does not answer"]);
            }
            ("ncclCommInitRankConfig" | "ncclCommSplit", Fault::Stuck) => fails(
                &[Kind::Timeout, Kind::PeerLost],
                &["waited more than 4s for the others to join the communicators of NCCL"],
            ),
            // Rank 1 submits its first call, or rank 0 waits for it in the second.
            ("ncclCommGetAsyncError", Fault::Stuck) => {
                fails(&[Kind::Timeout, Kind::PeerLost], &["waited more than 4s ", " over dp"]);
            }
            // The root may be done, and waits for the next call of the other rank.
            ("ncclBroadcast", Fault::Stuck | Fault::Unlike) => fails(
                &[Kind::Timeout, Kind::PeerLost],
                &[" waited more than 4s ", " broadcast f32[2] from rank "],
            ),
            (_, Fault::Stuck | Fault::Unlike) => fails(
                &[Kind::Timeout, Kind::PeerLost],
                &["the GPU of rank ", " waited more than 4s for other GPUs in ", self.operation()],
            ),
            (_, Fault::ProcessEnds) => {
                fails(
                    &[Kind::PeerLost],
                    &[&format!("rank {}'s process ended (killed or crashed)", self.rank())],
                );
            }
        }
    }

    /// Runs it as one of two ranks. Returns how the rank ends.
    fn run(self, folder: &Path, mesh: &Mesh, rank: usize) -> Result<()> {
        let Case { call, fault } = self;
        let (is_faulty, own) = (rank == self.rank(), fake_gpu::own_folder());
        let begin = || {
            // A call that is late once is late; the state of a communicator is asked for many times.
            let times = if fault == Fault::Late { 1 } else { 1_000_000 };
            if is_faulty {
                fake_gpu::refuse_in(&own, call, times, fault as i32);
            }
        };
        // Communicators are asked for their state while they are made, too.
        let is_begun_later = call == "ncclCommGetAsyncError";
        if !is_begun_later {
            begin();
        }
        let is_endless = [Fault::Stuck, Fault::Unlike].contains(&fault);
        let limit = if is_endless { TIMEOUT } else { LIMIT };
        let outcome = join(
            folder,
            mesh,
            rank,
            |world| world.timeout(limit),
            |rank| {
                if is_begun_later {
                    begin();
                }
                if call == "ncclCommAbort" { unlike_calls(rank) } else { every_call(rank) }
            },
        );
        let _ = fs::remove_file(own.join("refuse.txt"));
        outcome
    }
}

/// Makes every call of a transport, and reads each result.
fn every_call(rank: &Rank) -> Result<()> {
    let (backend, all, me) = (&**rank.backend(), rank.mesh().all_axes(), rank.index());
    let (call, x) = (call(all, DType::F32), upload(backend, &[1.5f32, 2.5])?);
    let read = |y: &Buffer, numel: usize| Ok::<_, Error>(download::<f32>(backend, y, numel)?);
    assert_eq!(read(&rank.all_reduce(&call, &x, 2, ReduceOp::Sum)?, 2)?, [3.0, 5.0]);
    assert_eq!(read(&rank.reduce_scatter(&call, &x, &[1, 1])?, 1)?, [[3.0f32], [5.0]][me]);
    assert_eq!(read(&rank.all_gather(&call, &x, &[1, 1])?, 2)?, [1.5, 1.5]);
    for root in 0..2 {
        assert_eq!(read(&rank.broadcast(&call, (root == me).then_some(&x), 2, root)?, 2)?, [1.5, 2.5]);
    }
    rank.send(&call, &x, 2, 1 - me)?;
    assert_eq!(read(&rank.recv(&call, 2, 1 - me)?, 2)?, [1.5, 2.5]);
    Ok(())
}

/// Waits for a sum whose operands have other lengths on the other rank, so that its operation is in flight when the world fails.
fn unlike_calls(rank: &Rank) -> Result<()> {
    let (backend, numel) = (&**rank.backend(), 5 - rank.index());
    let (call, x) = (call(rank.mesh().all_axes(), DType::F32), upload(backend, &[1.0f32; 5])?);
    let y = rank.all_reduce(&call, &x, numel, ReduceOp::Sum)?;
    let read = download::<f32>(backend, &y, numel)?;
    panic!("rank {} read {read:?}", rank.index())
}

/// Ends the process, and so the test, if a case hangs.
fn with_limit(case: Case, run: impl FnOnce()) {
    let (done, has_ended) = mpsc::channel::<()>();
    #[allow(clippy::print_stderr, reason = "the test that started the process shows it")]
    let watch = thread::spawn(move || {
        if has_ended.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{case:?} hangs");
            std::process::abort();
        }
    });
    run();
    drop(done);
    watch.join().unwrap();
}

/// What each rank does: some of the cases.
pub(super) fn scenario(name: &str, folder: &Path, mesh: &Mesh, rank: usize) {
    let meant: Vec<Case> = match name.split_once(' ').unwrap() {
        ("share", share) => cases().into_iter().skip(share.parse().unwrap()).step_by(NUM_PAIRS).collect(),
        (call, fault) => {
            let ends = CALLS.map(|call| Case { call, fault: Fault::ProcessEnds });
            let all = cases().into_iter().chain(ends);
            all.filter(|case| case.call == call && format!("{:?}", case.fault) == fault).collect()
        }
    };
    assert!(!meant.is_empty(), "no case {name}");
    for case in meant {
        let own = folder.join(format!("{}-{:?}", case.call, case.fault));
        fs::create_dir_all(&own).unwrap();
        meet(&own, rank, 2);
        with_limit(case, || case.check(rank, &case.run(&own, mesh, rank)));
    }
}

#[test]
fn every_fault_of_every_call_is_reported_on_both_ranks() {
    thread::scope(|scope| {
        for share in 0..NUM_PAIRS {
            scope.spawn(move || {
                let Some(gpu) = FakeGpu::new(&format!("dist-fault-{share}"), "") else { return };
                gpu.succeeds(&format!("fault share {share} dp=2"), 2);
            });
        }
    });
}

#[test]
fn operation_that_never_ends_on_a_gpu_is_a_timeout() {
    let Some(gpu) = FakeGpu::new("dist-endless", "") else { return };
    gpu.succeeds("fault ncclAllReduce Stuck dp=2", 2);
}

#[test]
fn loss_of_a_rank_in_every_call_is_named_by_the_other() {
    thread::scope(|scope| {
        for half in CALLS.chunks(CALLS.len().div_ceil(2)) {
            scope.spawn(move || {
                for call in half {
                    let Some(gpu) = FakeGpu::new(&format!("dist-lost-{call}"), "") else { return };
                    let outputs = gpu.run(&format!("fault {call} ProcessEnds dp=2"), 2);
                    let lost = Case { call, fault: Fault::ProcessEnds }.rank();
                    assert_eq!(outputs[lost].status.code(), Some(9), "{call}");
                    succeeded(&outputs[1 - lost]);
                }
            });
        }
    });
}
