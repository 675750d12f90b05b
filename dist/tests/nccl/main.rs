//! Ranks as processes that communicate by NCCL, on fake GPUs: results of all collectives over all groups next to those of threads, and
//! failures, each of which ends on every rank with its cause.

#[path = "../../../nccl/tests/fake_gpu/mod.rs"]
mod fake_gpu;
mod faults;
mod messages;

use approx::relative_eq;
use fake_gpu::{FakeGpu, own_folder, refuse_in, scenario_of_this_process, succeeded};
use shardgrad_dist::{
    AxisSet, Call, Error, Kind, Mesh, Origin, Phase, Process, Rank, ReduceOp, Result, Token, World,
};
use shardgrad_kernels::cuda::{CudaDevice, SearchPaths};
use shardgrad_kernels::{Buffer, DType, download, upload};
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::panic::Location;
use std::path::Path;
use std::process::Output;
use std::thread;
use std::time::{Duration, Instant};

/// Elements of a small call, which every member reduces, and of a large one, which members reduce in chunks; both uneven.
const NUMELS: [usize; 2] = [11, 20_003];

fn call(axes: AxisSet, dtype: DType) -> Call<'static> {
    let (path, origin, site) = ("", Origin::default(), Location::caller());
    Call { axes, dtype, phase: Phase::Forward, path, origin, site }
}

/// The bytes of `numel` elements that differ from rank to rank: small integers, so that every sum is exact and all orders agree,
/// or fractions.
fn elements(rank: usize, dtype: DType, numel: usize, is_exact: bool) -> Vec<u8> {
    let at = |i: usize| ((i * 7 + rank * 13) % 19) as f32 - 9.0;
    let value = |i: usize| if is_exact { at(i) } else { at(i) * 0.37 + 0.013 * i as f32 };
    let one = |i: usize| match dtype {
        DType::F64 => f64::from(value(i)).to_le_bytes().to_vec(),
        DType::F32 => value(i).to_le_bytes().to_vec(),
        DType::BF16 => (value(i).to_bits() >> 16).to_le_bytes()[..2].to_vec(),
        DType::F16 => half::f16::from_f32(value(i)).to_le_bytes().to_vec(),
        DType::I64 => (at(i) as i64).to_le_bytes().to_vec(),
        DType::U8 => vec![(at(i) + 9.0) as u8],
        DType::Bool => vec![u8::from(at(i) > 0.0)],
    };
    (0..numel).flat_map(one).collect()
}

/// Parts of `numel` elements for `size` members, one of them empty.
fn uneven(numel: usize, size: usize) -> Vec<usize> {
    let mut counts = vec![numel / size; size];
    counts[size - 1] += numel % size + counts[0];
    counts[0] = 0;
    counts
}

/// Makes every collective over every set of axes in every dtype. Returns names and bytes of the results.
fn all_calls(rank: &Rank, is_exact: bool) -> Result<Vec<(String, Vec<u8>)>> {
    let (backend, mesh, mut results) = (&**rank.backend(), rank.mesh().clone(), Vec::new());
    for bits in 1..1u16 << mesh.num_axes() {
        let axes: AxisSet = mesh.axes().filter(|axis| bits >> axis.0 & 1 == 1).collect();
        let size = mesh.group_size(axes);
        for (dtype, numel) in DType::ALL.into_iter().flat_map(|dtype| NUMELS.map(|numel| (dtype, numel))) {
            let (call, bytes) = (call(axes, dtype), |numel: usize| numel * dtype.size());
            let x = upload(backend, &elements(rank.index(), dtype, numel, is_exact))?;
            let mut add = |name: &str, y: &Buffer, numel: usize| -> Result<()> {
                let bytes = download::<u8>(backend, y, bytes(numel))?;
                results.push((format!("{name} {dtype}[{numel}] over {}", mesh.names(axes)), bytes));
                Ok(())
            };
            let group_rank = rank.group_rank(axes);
            for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
                if dtype != DType::Bool || op != ReduceOp::Sum {
                    add(&format!("all_reduce({op})"), &rank.all_reduce(&call, &x, numel, op)?, numel)?;
                }
            }
            for counts in [uneven(numel, size), vec![numel / size; size]] {
                let mine = counts[group_rank];
                if dtype != DType::Bool {
                    add("reduce_scatter", &rank.reduce_scatter(&call, &x, &counts)?, mine)?;
                }
                add("all_gather", &rank.all_gather(&call, &x, &counts)?, counts.iter().sum())?;
                let received: Vec<usize> = vec![mine; size];
                let y = rank.all_to_all(&call, &x, &counts, &received)?;
                add("all_to_all", &y, mine * size)?;
            }
            for root in 0..size {
                let y = rank.broadcast(&call, (root == group_rank).then_some(&x), numel, root)?;
                add("broadcast", &y, numel)?;
            }
            // A ring: every rank sends before it receives.
            rank.send(&call, &x, numel, (group_rank + 1) % size)?;
            add("recv", &rank.recv(&call, numel, (group_rank + size - 1) % size)?, numel)?;
            add("none", &rank.all_reduce(&call, &x, 0, ReduceOp::Max)?, 0)?;
            rank.barrier(&call)?;
        }
    }
    Ok(results)
}

/// Sums of f32, and of f64 to the precision of f32, in another order.
fn is_near(name: &str, a: &[u8], b: &[u8]) -> bool {
    let value = |x: &[u8]| match x.len() {
        8 => f64::from_le_bytes(x.try_into().unwrap()),
        _ => f64::from(f32::from_le_bytes(x.try_into().unwrap())),
    };
    let size = if name.contains("f64") { 8 } else { 4 };
    a.len() == b.len()
        && a.chunks(size)
            .zip(b.chunks(size))
            .all(|(a, b)| relative_eq!(value(a), value(b), epsilon = 1e-5, max_relative = 1e-5))
}

/// Compares the results of this rank with those of threads on the CPU. Returns the names of those that differ by the order of a sum.
fn compare(mesh: &Mesh, rank: usize, results: &[(String, Vec<u8>)], is_exact: bool) -> Vec<String> {
    let of_threads = World::new(mesh.clone()).threads(1).allow_unoptimized();
    let due = of_threads.launch(|rank| all_calls(rank, is_exact)).unwrap().swap_remove(rank);
    assert_eq!(results.len(), due.len());
    let mut differing = Vec::new();
    for ((name, bytes), (due_name, due)) in results.iter().zip(&due) {
        assert_eq!(name, due_name);
        // NCCL sums these, in its own order.
        let is_summed =
            ["all_reduce(sum) f32", "all_reduce(sum) f64", "reduce_scatter f32", "reduce_scatter f64"]
                .iter()
                .any(|sum| name.starts_with(sum));
        let fits = bytes == due || !is_exact && is_summed && is_near(name, bytes, due);
        assert!(fits, "{name} on rank {rank} of {mesh}");
        if bytes != due {
            differing.push(name.clone());
        }
    }
    differing
}

/// A free port below the range of ephemeral ports, which connections of other tests take.
fn free_port() -> u16 {
    loop {
        let port = 10_000 + (RandomState::new().hash_one(0) % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn port(folder: &Path, rank: usize) -> u16 {
    let file = folder.join("port");
    if rank == 0 {
        let port = free_port();
        fs::write(folder.join("draft"), port.to_string()).unwrap();
        fs::rename(folder.join("draft"), &file).unwrap();
        return port;
    }
    wait_for(&file);
    fs::read_to_string(&file).unwrap().parse().unwrap()
}

/// Waits until a file is there.
fn wait_for(file: &Path) {
    let start = Instant::now();
    while !file.exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "another rank does not write {}", file.display());
        thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until all ranks have come as far.
fn meet(folder: &Path, rank: usize, size: usize) {
    let file = |rank: usize| folder.join(format!("arrived-{rank}"));
    fs::write(file(rank), "").unwrap();
    (0..size).for_each(|rank| wait_for(&file(rank)));
}

/// Joins the world of a test as one process on its GPU.
fn join<T: Send>(
    folder: &Path,
    mesh: &Mesh,
    rank: usize,
    set_up: impl Fn(World) -> World,
    f: impl FnOnce(&Rank) -> Result<T> + Send,
) -> Result<T> {
    let token = Token::Text("0123456789abcdef".to_string());
    let process = Process::new(rank, mesh.num_ranks(), "127.0.0.1", port(folder, rank))?.token(token);
    let device = CudaDevice::open(&SearchPaths::from_env(), rank)?;
    let world = World::new(mesh.clone()).threads(1).timeout(Duration::from_secs(60)).allow_unoptimized();
    set_up(world.on_device(device)).join(&process, f)
}

fn contains(error: &Error, kind: Kind, parts: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} in:\n{text}");
}

fn sum(rank: &Rank, numel: usize) -> Result<Vec<f32>> {
    let backend = &**rank.backend();
    let x = upload(backend, &vec![1.0f32; numel])?;
    let call = call(rank.mesh().all_axes(), DType::F32);
    let y = rank.all_reduce(&call, &x, numel, ReduceOp::Sum)?;
    Ok(download(backend, &y, numel)?)
}

/// Makes calls that end as an error, whose results are never read.
fn failing_calls(rank: &Rank, name: &str) -> Result<()> {
    let (backend, mesh, index) = (&**rank.backend(), rank.mesh().clone(), rank.index());
    let axes = |name: &str| AxisSet::one(mesh.axis(name).unwrap());
    let x = upload(backend, &[1.0f64; 8])?;
    let sum = |axes: AxisSet, dtype: DType, numel: usize| -> Result<Buffer> {
        rank.all_reduce(&call(axes, dtype), &x, numel, ReduceOp::Sum)
    };
    let all = mesh.all_axes();
    // Two calls in an order that only some ranks have; both groups make the same calls.
    let both = |first: AxisSet, second: AxisSet| -> Result<Buffer> {
        sum(first, DType::F32, 5)?;
        sum(second, DType::F32, 5)
    };
    let last = match name {
        // More calls follow before a result is read.
        "unlike count" => {
            let y = sum(all, DType::F32, 5)?;
            sum(all, DType::F32, 5 + index)?;
            (0..20).try_for_each(|_| sum(all, DType::F32, 5).map(drop))?;
            y
        }
        "unlike op" if index == 0 => rank.all_gather(&call(all, DType::F32), &x, &[5, 5])?,
        "unlike op" => sum(all, DType::F32, 5)?,
        "unlike dtype" => sum(all, if index == 0 { DType::F32 } else { DType::I64 }, 5)?,
        "order" if index < 2 => both(all, axes("dp"))?,
        "order" => both(axes("dp"), all)?,
        // Each pair of ranks has one group, and orders in a cycle.
        "cycle" if index == 0 || index == 3 => both(axes("tp"), axes("dp"))?,
        "cycle" => both(axes("dp"), axes("tp"))?,
        "message" if index == 0 => {
            let y = sum(all, DType::F32, 5)?;
            rank.send(&call(all, DType::F32), &x, 5, 1)?;
            y
        }
        "message" => {
            rank.recv(&call(all, DType::F32), 5, 0)?;
            sum(all, DType::F32, 5)?
        }
        "timeout" if index == 1 => {
            let end = Instant::now() + Duration::from_secs(30);
            while Instant::now() < end {
                rank.check();
                thread::sleep(Duration::from_millis(5));
            }
            panic!("rank 0 does not end the wait")
        }
        "returned" if index == 1 => return Ok(()),
        // The last call of the rank: its end waits for the comparison.
        "returned" => return sum(all, DType::F32, 5).map(drop),
        _ => sum(all, DType::F32, 5)?,
    };
    let read = download::<f32>(backend, &last, 5)?;
    panic!("rank {index} read {read:?}")
}

/// Compares the error of a rank with the cause, which is the same over NCCL and over TCP.
fn expect_cause(name: &str, rank: usize, error: &Error) {
    let (text, message) = (error.to_string(), error.message());
    let has = |parts: &[&str]| assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} in:\n{text}");
    match name {
        "unlike count" => has(&[
            "collective mismatch: rank 0 called #2 all_reduce(sum) f32[5] over dp at",
            "rank 1 called #2",
        ]),
        "unlike op" => has(&["collective mismatch: rank 0 called #1 all_gather f32[10] over dp at"]),
        "unlike dtype" => has(&["collective mismatch: rank 0 called #1 all_reduce(sum) f32[5] over dp at"]),
        "order" | "cycle" => {
            has(&["deadlock: rank "]);
            assert!(message.contains(" waits for rank "), "{text}");
        }
        "message" => has(&["deadlock: rank ", " waits for rank ", "#1 "]),
        "timeout" if rank == 0 => has(&["rank 0 waited more than 4s in #1 all_reduce(sum) f32[5] over dp"]),
        "timeout" => has(&["rank 0 waited more than 4s in #1"]),
        _ => has(&["rank 1 left (", "while rank 0 waits in #1 all_reduce(sum) f32[5]"]),
    }
    let fits = match (name, error.kind()) {
        ("timeout", kind) => kind == Kind::Timeout,
        ("returned", kind) => kind == Kind::PeerLost,
        // Not every rank is part of the cycle.
        ("order" | "cycle", kind) => [Kind::Collective, Kind::PeerLost].contains(&kind),
        (_, kind) => kind == Kind::Collective,
    };
    assert!(fits, "{text}");
}

/// What each rank of a scenario does.
fn scenario(name: &str, folder: &Path, rank: usize, size: usize) {
    let start = Instant::now();
    let (name, mesh) = name.rsplit_once(' ').unwrap();
    let mesh = Mesh::parse(mesh).unwrap();
    assert_eq!(mesh.num_ranks(), size);
    if let Some(name) = name.strip_prefix("fault ") {
        return faults::scenario(name, folder, &mesh, rank);
    }
    if let Some(name) = name.strip_prefix("messages ") {
        return messages::scenario(name, folder, &mesh, rank);
    }
    let joined = |f: &(dyn Fn(&Rank) -> Result<()> + Sync)| join(folder, &mesh, rank, |world| world, f);
    match name {
        "parity" => {
            let both = |rank: &Rank| Ok([true, false].map(|is_exact| all_calls(rank, is_exact).unwrap()));
            let [exact, inexact] = join(folder, &mesh, rank, |world| world, both).unwrap();
            assert!(compare(&mesh, rank, &exact, true).is_empty());
            // Two summands have one order.
            let differing = compare(&mesh, rank, &inexact, false);
            assert_eq!(differing.iter().any(|name| name.contains("sum) f32")), size > 2, "{differing:?}");
        }
        "tree" => {
            let calls = |rank: &Rank| all_calls(rank, false);
            let results = join(folder, &mesh, rank, World::tree_sums, calls).unwrap();
            assert_eq!(compare(&mesh, rank, &results, false), Vec::<String>::new());
        }
        // Ranks arrive in each order, some time after each other.
        "orders" => {
            let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
            for (number, order) in orders.iter().enumerate() {
                let own = folder.join(format!("order-{number}"));
                fs::create_dir_all(&own).unwrap();
                thread::sleep(Duration::from_millis(50 * order[rank]));
                let sums = join(&own, &mesh, rank, |world| world, |rank| sum(rank, 3));
                assert_eq!(sums.unwrap(), [3.0; 3], "{order:?}");
            }
        }
        "killed" => {
            let error = joined(&|rank| {
                sum(rank, 5)?;
                if rank.index() == 1 {
                    std::process::abort();
                }
                sum(rank, 5).map(|_| ())
            });
            contains(&error.unwrap_err(), Kind::PeerLost, &["rank 1's process ended (killed or crashed)"]);
        }
        "unlike count" | "unlike op" | "unlike dtype" | "order" | "cycle" | "message" | "timeout"
        | "returned" => {
            for is_over_tcp in [false, true] {
                let set_up = |world: World| {
                    let limit =
                        if name == "timeout" { Duration::from_secs(4) } else { Duration::from_secs(60) };
                    let world = world.timeout(limit);
                    if is_over_tcp { world.over_tcp() } else { world }
                };
                let folder = folder.join(if is_over_tcp { "tcp" } else { "nccl" });
                fs::create_dir_all(&folder).unwrap();
                let error = join(&folder, &mesh, rank, set_up, |rank| failing_calls(rank, name)).unwrap_err();
                expect_cause(name, rank, &error);
            }
        }
        // Results of calls that differ where NCCL does not see it stay on the GPU, although they are there.
        "unread" => {
            let error = joined(&|rank| {
                let (backend, mine) = (&**rank.backend(), upload(&**rank.backend(), &[1.0f32])?);
                let path = if rank.index() == 0 { "h.0" } else { "h.1" };
                let call = Call { path, ..call(rank.mesh().all_axes(), DType::F32) };
                if rank.index() == 1 {
                    thread::sleep(Duration::from_millis(300));
                }
                rank.all_reduce(&call, &mine, 0, ReduceOp::Sum)?;
                let read = download::<f32>(backend, &mine, 1)?;
                panic!("rank {} read {read:?} before its call was compared", rank.index())
            });
            let text = error.unwrap_err().to_string();
            assert!(text.contains("collective mismatch: rank 0 called #1 all_reduce(sum) f32[0]"), "{text}");
        }
        // Rank 0 runs ahead of rank 1, but not without bound.
        "ahead" => {
            let (ahead, begun) = (folder.join("ahead"), folder.join("begun"));
            let all = joined(&|rank| {
                let (backend, x) = (&**rank.backend(), upload(&**rank.backend(), &[1.0f32])?);
                let call = call(rank.mesh().all_axes(), DType::F32);
                if rank.index() == 1 {
                    while !ahead.exists() {
                        thread::sleep(Duration::from_millis(1));
                    }
                    thread::sleep(Duration::from_millis(300));
                    fs::write(&begun, "")?;
                }
                let mut last = x.clone();
                for number in 1..=400 {
                    last = rank.all_reduce(&call, &x, 1, ReduceOp::Sum)?;
                    if rank.index() == 0 && number == 200 {
                        fs::write(&ahead, "")?;
                    }
                }
                assert!(begun.exists(), "400 calls do not wait for their comparison");
                assert_eq!(download::<f32>(backend, &last, 1)?, [2.0]);
                Ok(())
            });
            all.unwrap();
        }
        // The GPU of rank 1 is lost in its next allocation from the driver.
        "gone" => {
            let error = joined(&|rank| {
                sum(rank, 5)?;
                if rank.index() == 1 {
                    refuse_in(&own_folder(), "cuMemAlloc_v2", 1_000_000, 719);
                }
                sum(rank, 100 << 20 >> 2).map(|_| ())
            });
            let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
            let why =
                format!("GPU 1 of host {} failed: cuMemAlloc_v2: CUDA_ERROR_LAUNCH_FAILED", host.trim());
            match rank {
                1 => contains(&error.unwrap_err(), Kind::Device, &[why.as_str(), "rank"]),
                _ => contains(&error.unwrap_err(), Kind::PeerLost, &[&format!("rank 1 failed: {why}")]),
            }
        }
        "same" => {
            let device = CudaDevice::open(&SearchPaths::from_env(), 0).unwrap();
            let set_up = |world: World| world.on_device(device.clone());
            let error = join(folder, &mesh, rank, set_up, |rank| sum(rank, 3)).unwrap_err();
            let why = "ranks 0 and 1 have the same GPU, GPU-00000000-0000-0000-0000-000000000001 of host ";
            contains(&error, Kind::Config, &[why, "CUDA_VISIBLE_DEVICES"]);
        }
        "shared" => {
            let device = CudaDevice::open(&SearchPaths::from_env(), 0).unwrap();
            let set_up = |world: World| world.on_device(device.clone()).share_gpu();
            assert_eq!(join(folder, &mesh, rank, set_up, |rank| sum(rank, 3)).unwrap(), [2.0; 3]);
        }
        "unlike-sums" => {
            let set_up = |world: World| if rank == 1 { world.tree_sums() } else { world };
            let error = join(folder, &mesh, rank, set_up, |rank| sum(rank, 5)).unwrap_err();
            let why = "ranks got different transports: sums is NCCL on rank 0, tree on rank 1";
            contains(&error, Kind::Config, &[why]);
        }
        // Rank 1 cannot submit, when rank 0 waits on its GPU already.
        "refused" => {
            let error = joined(&|rank| {
                // Aborted sums are not read.
                sum(rank, 5).map(|sums| panic!("rank {} got {sums:?}", rank.index()))
            });
            let error = error.unwrap_err();
            match rank {
                1 => contains(
                    &error,
                    Kind::Device,
                    &["ncclGroupEnd: invalid usage (5): the fake refuses ncclGroupEnd"],
                ),
                _ => contains(
                    &error,
                    Kind::PeerLost,
                    &["rank 1 failed: ncclGroupEnd: invalid usage (5)", "rank 0 stops too"],
                ),
            }
        }
        // An asynchronous error of rank 1, which has no other cause, reaches both.
        "asynchronous" => {
            let error = joined(&|rank| {
                sum(rank, 5)?;
                if rank.index() == 1 {
                    refuse_in(&own_folder(), "ncclCommGetAsyncError", 1_000_000, 2);
                }
                let end = Instant::now() + Duration::from_secs(30);
                while Instant::now() < end {
                    rank.check();
                    thread::sleep(Duration::from_millis(5));
                }
                Ok(())
            });
            match rank {
                1 => contains(&error.unwrap_err(), Kind::Device, &["unhandled system error (2)"]),
                _ => contains(
                    &error.unwrap_err(),
                    Kind::PeerLost,
                    &["rank 1 failed", "unhandled system error (2)"],
                ),
            }
        }
        "mixed" => {
            let set_up = |world: World| if rank == 1 { world.over_tcp() } else { world };
            let error = join(folder, &mesh, rank, set_up, |rank| sum(rank, 5)).unwrap_err();
            contains(
                &error,
                Kind::Config,
                &["ranks got different transports: transport is NCCL on rank 0, TCP on rank 1"],
            );
        }
        "tcp" => {
            let set_up = |world: World| world.over_tcp();
            assert_eq!(join(folder, &mesh, rank, set_up, |rank| sum(rank, 3)).unwrap(), [2.0; 3]);
        }
        _ => panic!("no scenario {name}"),
    }
    assert!(start.elapsed() < Duration::from_secs(300), "{:?}", start.elapsed());
}

/// What the processes of the other tests run; nothing without their variables.
#[test]
#[allow(clippy::print_stdout, reason = "the test that started the process reads it")]
fn process_of_a_test() {
    if let Some((name, folder, rank, size)) = scenario_of_this_process() {
        scenario(&name, &folder, rank, size);
        println!("done");
    }
}

#[test]
fn collectives_on_two_and_four_processes_give_the_results_of_threads() {
    for mesh in ["tp=2", "dp=2,tp=2"] {
        let Some(gpu) = FakeGpu::new(&format!("dist-parity-{}", mesh.len()), "") else { return };
        gpu.succeeds(&format!("parity {mesh}"), Mesh::parse(mesh).unwrap().num_ranks());
    }
}

#[test]
fn tree_sums_have_the_bits_of_threads() {
    let Some(gpu) = FakeGpu::new("dist-tree", "") else { return };
    gpu.succeeds("tree dp=2,tp=2", 4);
}

#[test]
fn ranks_join_in_every_order() {
    let Some(gpu) = FakeGpu::new("dist-orders", "") else { return };
    gpu.succeeds("orders dp=3", 3);
}

#[test]
fn lost_gpu_is_named_with_rank_and_host_on_all_ranks() {
    let Some(gpu) = FakeGpu::new("dist-gone", "") else { return };
    gpu.succeeds("gone dp=3", 3);
}

#[test]
fn processes_share_a_gpu_only_if_asked() {
    for name in ["same", "shared"] {
        let Some(gpu) = FakeGpu::new(&format!("dist-{name}"), "") else { return };
        gpu.succeeds(&format!("{name} dp=2"), 2);
    }
}

#[test]
fn killed_process_is_named_and_the_waits_on_gpus_end() {
    for options in ["", "silent-loss"] {
        let Some(gpu) = FakeGpu::new(&format!("dist-killed-{}", options.len()), options) else { return };
        let outputs: Vec<Output> = gpu.run("killed dp=3", 3);
        assert!(!outputs[1].status.success());
        [0, 2].iter().for_each(|rank| succeeded(&outputs[*rank]));
    }
}

#[test]
fn failures_end_on_every_rank_with_their_cause() {
    for name in ["unlike-sums", "refused", "asynchronous", "mixed", "tcp"] {
        let Some(gpu) = FakeGpu::new(&format!("dist-{name}"), "") else { return };
        if name == "refused" {
            gpu.refuse(1, "ncclGroupEnd", 5);
        }
        gpu.succeeds(&format!("{name} dp=2"), 2);
    }
}

#[test]
fn calls_compared_behind_their_submission_end_with_the_sentences_of_tcp() {
    for name in ["unread", "unlike count", "unlike op", "unlike dtype", "message", "timeout", "returned"] {
        let Some(gpu) = FakeGpu::new(&format!("dist-{}", name.replace(' ', "-")), "") else { return };
        gpu.succeeds(&format!("{name} dp=2"), 2);
    }
}

#[test]
fn operations_of_two_communicators_in_different_orders_are_a_deadlock_on_every_rank() {
    for name in ["order", "cycle"] {
        let Some(gpu) = FakeGpu::new(&format!("dist-{name}"), "") else { return };
        gpu.succeeds(&format!("{name} dp=2,tp=2"), 4);
    }
}

#[test]
fn rank_runs_ahead_of_the_comparison_of_its_calls_up_to_a_bound() {
    let Some(gpu) = FakeGpu::new("dist-ahead", "") else { return };
    gpu.succeeds("ahead dp=2", 2);
}
