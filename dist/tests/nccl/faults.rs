//! Every call of NCCL with every fault that it may have on one of two ranks: each ends on both ranks, with one message or with success.

use super::fake_gpu::{FakeGpu, refuse_in};
use super::{call, join, succeeded};
use shardgrad_dist::{Error, Kind, Mesh, Rank, ReduceOp, Result, World};
use shardgrad_kernels::{Buffer, DType, download, upload};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// What happens in a call of rank 1 (`Misbehavior` of `kernels/src/cuda/fake/nccl.h`).
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The call returns an error.
    Error,
    /// The process ends.
    Lost,
    /// The call returns late.
    Late,
    /// What the call begins never ends, and is aborted in flight.
    Stuck,
    /// The call does not match that of the other rank, of which only the GPUs know.
    Unlike,
}

impl Fault {
    fn code(self) -> i32 {
        match self {
            Fault::Error => 5,
            Fault::Lost => -1,
            Fault::Late => -2,
            Fault::Stuck => -3,
            Fault::Unlike => -4,
        }
    }
}

const ANY: &[Fault] = &[Fault::Error, Fault::Late];
const ENDLESS: &[Fault] = &[Fault::Error, Fault::Late, Fault::Stuck];
const OPERATION: &[Fault] = &[Fault::Error, Fault::Late, Fault::Stuck, Fault::Unlike];

/// The calls and their faults. Those of one line share a pair of processes; a loss ends its process, and has one for itself.
const CALLS: [&[(&str, &[Fault])]; 5] = [
    &[("ncclCommInitRankConfig", ENDLESS), ("ncclCommSplit", ENDLESS), ("ncclGroupStart", ANY)],
    &[("ncclGroupEnd", OPERATION), ("ncclCommGetAsyncError", ENDLESS), ("ncclGetUniqueId", ANY)],
    &[("ncclAllReduce", OPERATION), ("ncclReduceScatter", OPERATION), ("ncclCommDestroy", ANY)],
    &[("ncclAllGather", OPERATION), ("ncclBroadcast", OPERATION)],
    &[("ncclSend", OPERATION), ("ncclRecv", OPERATION)],
];

/// The timeout of ranks that wait for what never ends.
const TIMEOUT: Duration = Duration::from_secs(4);

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

/// Checks how a rank ends after a fault of rank 1, or of rank 0 in the call that only rank 0 makes.
fn expect(call: &str, fault: Fault, rank: usize, outcome: Result<()>) {
    let (faulty, case) =
        (usize::from(call != "ncclGetUniqueId"), format!("{fault:?} of {call} on rank {rank}"));
    let text = outcome.as_ref().err().map(|error| (error.kind(), error.message().to_string()));
    let fits = match (fault, &text) {
        (Fault::Late, text) => text.is_none(),
        // The communicators of this rank are gone, but its results are there; the other rank may have returned already.
        (Fault::Error, None) if call == "ncclCommDestroy" => rank == 0,
        (_, None) => false,
        (Fault::Error, Some((kind, text))) => {
            // The state of a communicator is reported by what is in progress.
            let why = if call == "ncclCommGetAsyncError" {
                ": invalid usage (5)".to_string()
            } else {
                format!("{call}: invalid usage (5): the fake refuses {call}")
            };
            let cause = format!("rank {faulty} failed: ");
            match rank == faulty {
                true => *kind == Kind::Device && text.contains(&why),
                false => {
                    *kind == Kind::PeerLost && text.contains(&cause) && text.contains("invalid usage (5)")
                }
            }
        }
        (Fault::Lost, Some((kind, text))) => {
            *kind == Kind::PeerLost && text.contains("rank 1's process ended (killed or crashed)")
        }
        (Fault::Stuck | Fault::Unlike, Some((kind, text))) => {
            [Kind::Timeout, Kind::PeerLost].contains(kind) && text.contains(&format!("{TIMEOUT:?}"))
        }
    };
    assert!(fits, "{case} ends as {text:?}");
    assert!(text.is_none_or(|(_, text)| !text.contains('\n')), "{case}: one line");
}

/// What each rank does: the faults of a line of the table but losses, or one loss.
pub(super) fn scenario(name: &str, folder: &Path, mesh: &Mesh, rank: usize) {
    let own = PathBuf::from(std::env::var_os("SHARDGRAD_NCCL_PATH").unwrap());
    let run = |call: &str, fault: Fault| {
        let case = folder.join(format!("{call}-{fault:?}"));
        fs::create_dir_all(&case).unwrap();
        if rank == usize::from(call != "ncclGetUniqueId") {
            // A late call need not be late each time.
            let times = if fault == Fault::Late { 3 } else { 1_000_000 };
            refuse_in(&own, call, times, fault.code());
        }
        let is_endless = [Fault::Stuck, Fault::Unlike].contains(&fault);
        let limit = if is_endless { TIMEOUT } else { Duration::from_secs(60) };
        let (start, set_up) = (Instant::now(), |world: World| world.timeout(limit));
        let outcome = join(&case, mesh, rank, set_up, every_call);
        let _ = fs::remove_file(own.join("refuse.txt"));
        expect(call, fault, rank, outcome);
        assert!(start.elapsed() < Duration::from_secs(60), "{call} {fault:?}: {:?}", start.elapsed());
    };
    match name.strip_prefix("lost ") {
        Some(call) => run(call, Fault::Lost),
        None => {
            let line: usize = name.parse().unwrap();
            let faults = CALLS[line].iter().flat_map(|(call, faults)| faults.iter().map(|f| (*call, *f)));
            faults.for_each(|(call, fault)| run(call, fault));
        }
    }
}

#[test]
fn every_fault_of_every_call_ends_on_both_ranks() {
    thread::scope(|scope| {
        for line in 0..CALLS.len() {
            scope.spawn(move || {
                let Some(gpu) = FakeGpu::new(&format!("dist-fault-{line}"), "") else { return };
                gpu.succeeds(&format!("fault {line} dp=2"), 2);
            });
        }
    });
}

#[test]
fn loss_of_a_rank_in_every_call_is_named_by_the_other() {
    // Rank 0 alone makes the id; communicators are destroyed after the results.
    let without = ["ncclGetUniqueId", "ncclCommDestroy"];
    let calls: Vec<&str> = CALLS
        .iter()
        .flat_map(|line| line.iter().map(|(call, _)| *call))
        .filter(|c| !without.contains(c))
        .collect();
    thread::scope(|scope| {
        for half in calls.chunks(calls.len().div_ceil(2)) {
            scope.spawn(move || {
                for call in half {
                    let Some(gpu) = FakeGpu::new(&format!("dist-lost-{call}"), "") else { return };
                    let outputs = gpu.run(&format!("fault lost {call} dp=2"), 2);
                    assert_eq!(outputs[1].status.code(), Some(9), "{call}");
                    succeeded(&outputs[0]);
                }
            });
        }
    });
}
