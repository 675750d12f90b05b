//! Messages between ranks over NCCL: their order, their contents next to those of threads, and their failures.

use super::fake_gpu::{FakeGpu, own_folder, refuse_in};
use super::{call, contains, elements, join};
use shardgrad_dist::{Axis, AxisSet, Kind, Mesh, Rank, Record, ReduceOp, Result, World, check_issue_order};
use shardgrad_kernels::{DType, download, upload};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Messages between all pairs of ranks of each axis and of the whole mesh, many before the first is received, and collectives between them.
/// Returns the trace, and the bytes of all results.
fn exchange(rank: &Rank) -> Result<(Vec<Record>, Vec<Vec<u8>>)> {
    let (backend, mesh, mut results) = (&**rank.backend(), rank.mesh().clone(), Vec::new());
    rank.trace().enable();
    let sets = mesh.axes().map(AxisSet::one).chain([mesh.all_axes()]);
    for (axes, dtype) in sets.flat_map(|axes| [(axes, DType::F32), (axes, DType::BF16)]) {
        let (call, size, me) = (call(axes, dtype), mesh.group_size(axes), rank.group_rank(axes));
        let numel = |from: usize, to: usize, number: usize| (from * 5 + to * 3 + number * 1001) % 3000;
        for number in 0..3 {
            for to in 0..size {
                let n = numel(me, to, number);
                let x = upload(backend, &elements(rank.index() + number, dtype, n, false))?;
                rank.send(&call, &x, n, to)?;
            }
            let x = upload(backend, &elements(rank.index(), dtype, 7, true))?;
            let y = rank.all_reduce(&call, &x, 7, ReduceOp::Sum)?;
            results.push(download(backend, &y, 7 * dtype.size())?);
            // The sum is sent on as it is.
            rank.send(&call, &y, 7, (me + 1) % size)?;
        }
        for from in (0..size).rev() {
            for number in 0..3 {
                let n = numel(from, me, number);
                let y = rank.recv(&call, n, from)?;
                results.push(download(backend, &y, n * dtype.size())?);
                if (from + 1) % size == me {
                    let y = rank.recv(&call, 7, from)?;
                    // A received buffer is sent on and reduced, in both orders, without a kernel between.
                    let send_on = || rank.send(&call, &y, 7, (me + 1) % size);
                    if number == 1 {
                        send_on()?;
                    }
                    let sum = rank.all_reduce(&call, &y, 7, ReduceOp::Max)?;
                    if number != 1 {
                        send_on()?;
                    }
                    results.push(download(backend, &sum, 7 * dtype.size())?);
                }
            }
        }
        for _ in 0..3 {
            let y = rank.recv(&call, 7, (me + size - 1) % size)?;
            results.push(download(backend, &y, 7 * dtype.size())?);
        }
    }
    Ok((rank.trace().take(), results))
}

fn one_message(rank: &Rank) -> Result<()> {
    let (backend, call) = (&**rank.backend(), call(rank.mesh().all_axes(), DType::F32));
    let x = upload(backend, &[rank.index() as f32; 5])?;
    rank.send(&call, &x, 5, 1 - rank.index())?;
    let y = rank.recv(&call, 5, 1 - rank.index())?;
    assert_eq!(download::<f32>(backend, &y, 5)?, [1.0 - rank.index() as f32; 5]);
    Ok(())
}

/// What each rank of a scenario does.
pub(super) fn scenario(name: &str, folder: &Path, mesh: &Mesh, rank: usize) {
    let set_up = |world: World| world.timeout(Duration::from_secs(60));
    match name {
        "exchange" => {
            let (trace, results) = join(folder, mesh, rank, set_up, exchange).unwrap();
            let of_threads = World::new(mesh.clone()).threads(1).allow_unoptimized();
            let (mut traces, due): (Vec<_>, Vec<_>) =
                of_threads.launch(exchange).unwrap().into_iter().unzip();
            assert_eq!(results, due[rank], "rank {rank} of {mesh}");
            // Those of the other ranks are as deterministic.
            assert_eq!(trace, traces[rank]);
            check_issue_order(mesh, &traces).unwrap();
            // No order fits if every rank receives first.
            for trace in &mut traces {
                let at = trace.iter().position(|record: &Record| record.op == "recv").unwrap();
                let first = trace.remove(at);
                trace.insert(0, first);
            }
            assert!(check_issue_order(mesh, &traces).is_err());
        }
        // A message is kept while its receiver computes, after its sender has returned too, and with the contents of the send.
        "late" => {
            let outcome = join(folder, mesh, rank, set_up, |rank| {
                let (backend, call) = (&**rank.backend(), call(AxisSet::one(Axis(0)), DType::F32));
                if rank.index() == 0 {
                    for number in 0..20 {
                        let x = upload(backend, &[number as f32; 300])?;
                        rank.send(&call, &x, 300, 1)?;
                    }
                    return Ok(());
                }
                thread::sleep(Duration::from_millis(300));
                for number in 0..20 {
                    let y = rank.recv(&call, 300, 0)?;
                    assert_eq!(download::<f32>(backend, &y, 300)?, [number as f32; 300]);
                }
                Ok(())
            });
            outcome.unwrap();
        }
        // A received buffer is sent on before the host of its rank knows that it has arrived.
        "forwarded" => {
            let outcome = join(folder, mesh, rank, set_up, |rank| {
                let (backend, call) = (&**rank.backend(), call(AxisSet::one(Axis(0)), DType::F32));
                if rank.index() == 1 {
                    let y = rank.recv(&call, 300, 0)?;
                    rank.send(&call, &y, 300, 0)?;
                    // Until the buffer has been read, no other work of this rank orders the two messages.
                    return rank.recv(&call, 300, 0).map(drop);
                }
                let x = upload(backend, &[7.0f32; 300])?;
                rank.send(&call, &x, 300, 1)?;
                let y = rank.recv(&call, 300, 1)?;
                assert_eq!(download::<f32>(backend, &y, 300)?, [7.0; 300]);
                rank.send(&call, &y, 300, 1)
            });
            outcome.unwrap();
        }
        "unreceived" => {
            let outcome = join(folder, mesh, rank, set_up, |rank| {
                let (backend, call) = (&**rank.backend(), call(rank.mesh().all_axes(), DType::F32));
                let x = upload(backend, &[1.0f32; 5])?;
                if rank.index() == 0 { rank.send(&call, &x, 5, 1) } else { Ok(()) }
            });
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("send f32[5] to rank 1"), "{text}");
        }
        "unlike" => {
            let outcome = join(folder, mesh, rank, set_up, |rank| {
                let (backend, call) = (&**rank.backend(), call(rank.mesh().all_axes(), DType::F32));
                let x = upload(backend, &[1.0f32; 5])?;
                if rank.index() == 0 {
                    rank.send(&call, &x, 5, 1)?;
                } else {
                    rank.recv(&call, 4, 0)?;
                }
                rank.barrier(&call)
            });
            let parts = ["collective mismatch: rank 0 called #1 send f32[5] to rank 1", "recv f32[4]"];
            contains(&outcome.unwrap_err(), Kind::Collective, &parts);
        }
        // Elements do not go through TCP.
        "refused" => {
            if rank == 1 {
                refuse_in(&own_folder(), "ncclSend", 1_000_000, 5);
            }
            let error = join(folder, mesh, rank, set_up, one_message).unwrap_err();
            let why = "ncclSend: invalid usage (5)";
            match rank {
                1 => contains(&error, Kind::Device, &[why]),
                _ => contains(&error, Kind::PeerLost, &["rank 1 failed", why]),
            }
        }
        _ => panic!("no scenario {name}"),
    }
}

#[test]
fn messages_have_the_contents_and_the_order_of_threads() {
    for mesh in ["pp=2", "dp=2,pp=2", "pp=3"] {
        let Some(gpu) = FakeGpu::new(&format!("dist-messages-{}", mesh.replace(',', "-")), "") else {
            return;
        };
        gpu.succeeds(&format!("messages exchange {mesh}"), Mesh::parse(mesh).unwrap().num_ranks());
    }
}

#[test]
fn messages_have_the_contents_of_buffers_that_have_arrived() {
    let Some(gpu) = FakeGpu::new("dist-messages-forwarded", "") else { return };
    gpu.succeeds("messages forwarded pp=2", 2);
}

#[test]
fn messages_are_kept_until_they_are_received() {
    for (name, mesh, size) in [("late", "pp=2", 2), ("unreceived", "pp=2", 2)] {
        let Some(gpu) = FakeGpu::new(&format!("dist-messages-{name}"), "") else { return };
        gpu.succeeds(&format!("messages {name} {mesh}"), size);
    }
}

#[test]
fn failures_of_messages_end_on_both_ranks() {
    for name in ["unlike", "refused"] {
        let Some(gpu) = FakeGpu::new(&format!("dist-messages-{name}"), "") else { return };
        gpu.succeeds(&format!("messages {name} pp=2"), 2);
    }
}
