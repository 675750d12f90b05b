//! Tests of the thread transport with shared buffers that are shorter than their calls state: an error on every rank.

#![cfg(not(loom))]

use super::Transport;
use super::thread::{Shared, ThreadTransport};
use crate::call::{Call, GroupPosition, Op, Origin, Phase, ReduceOp, Request};
use crate::error::{Error, Kind};
use crate::mesh::{Axis, AxisSet, Mesh};
use crate::world_state::WorldState;
use shardgrad_kernels::{Cpu, DType, Device};
use std::panic::Location;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const RANKS: usize = 3;

/// Makes a call on three ranks, with a buffer of `bytes` bytes on rank 1 and a long enough buffer on the others. Returns each rank's
/// error.
fn ends(op: Op, counts: &[usize], bytes: usize) -> Vec<Option<Error>> {
    let mesh = Mesh::new(&[("tp", RANKS)]).unwrap();
    let limit = Duration::from_secs(30);
    let shared = Arc::new(Shared::new(WorldState::new(mesh.clone()), limit, Duration::ZERO, None));
    let live = |rank: usize| {
        let (axes, site) = (AxisSet::one(Axis(0)), Location::caller());
        let (phase, origin) = (Phase::Control, Origin::default());
        let call = Call { axes, dtype: DType::F32, phase, path: "", origin, site };
        let (position, backend) = (GroupPosition::new(&mesh, rank, axes), Cpu::backend(1));
        assert_eq!(backend.device(), Device::Cpu);
        let x = backend.alloc(if rank == 1 { bytes } else { 1 << 20 }).unwrap();
        let received = if op == Op::AllToAll { counts } else { &[] };
        let op = match (op, rank) {
            (Op::Send { .. }, 0) => Op::Recv { from: 1 },
            _ => op,
        };
        let x = (!matches!(op, Op::Recv { .. })).then_some(&x);
        let request = Request { call: &call, op, position: &position, number: 1, counts, received, x };
        ThreadTransport::new(shared.clone(), rank).run(&*backend, &request).err()
    };
    thread::scope(|scope| {
        let live = &live;
        let ranks: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || live(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

#[test]
fn short_buffer_is_an_error_on_all_ranks() {
    let sum = Op::AllReduce(ReduceOp::Sum);
    for (op, counts, due) in [
        (sum, &[3000][..], 12_000),
        (sum, &[30_000], 120_000),
        (Op::AllGather, &[3000, 2000, 1000], 8000),
        (Op::ReduceScatter, &[3000, 2000, 1000], 24_000),
        (Op::AllToAll, &[2000, 2000, 2000], 24_000),
        (Op::Broadcast { root: 1 }, &[3000], 12_000),
    ] {
        assert!(ends(op, counts, due).iter().all(Option::is_none), "{op:?}");
        for bytes in [due - 1, due / 2, 0] {
            for (rank, end) in ends(op, counts, bytes).into_iter().enumerate() {
                let error = end.unwrap_or_else(|| panic!("{op:?} of {bytes} bytes: rank {rank} goes on"));
                assert_eq!(error.kind(), Kind::PeerLost, "{error}");
                assert!(error.message().contains("rank 1 sent a malformed message: "), "{error}");
            }
        }
    }
}
