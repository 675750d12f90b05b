//! A process that ends in a call of NCCL, whichever it is: the other rank names it.

use super::fake_gpu::{FakeGpu, refuse_in};
use super::{call, join, succeeded};
use shardgrad_dist::{Error, Kind, Mesh, Rank, ReduceOp, Result};
use shardgrad_kernels::{Buffer, DType, download, upload};
use std::path::{Path, PathBuf};
use std::thread;

/// The code with which the fake ends the process (`Misbehavior` of `kernels/src/cuda/fake/nccl.h`).
const PROCESS_ENDS: i32 = -1;

/// The calls in which rank 1 ends. Rank 0 alone makes the id; communicators are destroyed after the results.
const CALLS: [&str; 11] = [
    "ncclCommInitRankConfig",
    "ncclCommSplit",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclCommGetAsyncError",
    "ncclAllReduce",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclBroadcast",
    "ncclSend",
    "ncclRecv",
];

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

/// What each rank does: every call, in one of which rank 1 ends.
pub(super) fn scenario(call: &str, folder: &Path, mesh: &Mesh, rank: usize) {
    if rank == 1 {
        let own = PathBuf::from(std::env::var_os("SHARDGRAD_NCCL_PATH").unwrap());
        refuse_in(&own, call, 1, PROCESS_ENDS);
    }
    let error = join(folder, mesh, rank, |world| world, every_call).unwrap_err();
    let text = error.message();
    assert!(
        error.kind() == Kind::PeerLost && text.contains("rank 1's process ended (killed or crashed)"),
        "{error}"
    );
    assert!(!text.contains('\n'), "one line: {text}");
}

#[test]
fn loss_of_a_rank_in_every_call_is_named_by_the_other() {
    thread::scope(|scope| {
        for half in CALLS.chunks(CALLS.len().div_ceil(2)) {
            scope.spawn(move || {
                for call in half {
                    let Some(gpu) = FakeGpu::new(&format!("dist-lost-{call}"), "") else { return };
                    let outputs = gpu.run(&format!("lost {call} dp=2"), 2);
                    assert_eq!(outputs[1].status.code(), Some(9), "{call}");
                    succeeded(&outputs[0]);
                }
            });
        }
    });
}
