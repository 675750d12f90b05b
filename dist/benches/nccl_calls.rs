//! Host time of a collective call between processes that communicate by NCCL, on fake GPUs: what the thread of the rank spends until the
//! call returns. Small all-reduces of f32 over one group, and over two groups by turns.
//!
//! Prints the median over bursts of the time per call, as elapsed time and as processor time of the thread, in microseconds. No burst fills
//! the queue of calls that are not compared yet.

#[path = "../../nccl/tests/fake_gpu/mod.rs"]
#[allow(dead_code, reason = "tests use the rest")]
mod fake_gpu;

use fake_gpu::{FakeGpu, scenario_of_this_process, succeeded};
use shardgrad_dist::{AxisSet, Call, Mesh, Origin, Phase, Process, Rank, ReduceOp, Result, Token, World};
use shardgrad_kernels::cuda::{CudaDevice, SearchPaths};
use shardgrad_kernels::{DType, upload};
use std::fs;
use std::net::TcpListener;
use std::panic::Location;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

const NUMEL: usize = 256;
const CALLS_PER_BURST: usize = 40;
const NUM_BURSTS: usize = 50;

/// Processor time of this thread in microseconds; 0 where Linux does not report it.
fn thread_us() -> f64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e3
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The elapsed and the processor time of a call, in microseconds, whose groups are those over `axes` by turns.
fn measure(rank: &Rank, axes: &[AxisSet]) -> Result<[f64; 2]> {
    let backend = &**rank.backend();
    let x = upload(backend, &vec![1.0f32; NUMEL])?;
    let (dtype, phase, origin, site) = (DType::F32, Phase::Backward, Origin::default(), Location::caller());
    let (mut elapsed, mut processor) = (Vec::new(), Vec::new());
    for burst in 0..=NUM_BURSTS {
        backend.synchronize()?;
        let (start, start_us) = (Instant::now(), thread_us());
        for axes in axes.iter().cycle().take(CALLS_PER_BURST) {
            let call = Call { axes: *axes, dtype, phase, path: "h.3.mlp.out", origin, site };
            rank.all_reduce(&call, &x, NUMEL, ReduceOp::Sum)?;
        }
        let per_call = |us: f64| us / CALLS_PER_BURST as f64;
        let times = [start.elapsed().as_secs_f64() * 1e6, thread_us() - start_us].map(per_call);
        // The first burst compiles kernels and fills caches.
        if burst > 0 {
            elapsed.push(times[0]);
            processor.push(times[1]);
        }
    }
    backend.synchronize()?;
    Ok([median(elapsed), median(processor)])
}

fn port(folder: &Path, rank: usize) -> u16 {
    let file = folder.join("port");
    if rank == 0 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        fs::write(folder.join("draft"), port.to_string()).expect("a writable folder");
        fs::rename(folder.join("draft"), &file).expect("a writable folder");
        return port;
    }
    loop {
        match fs::read_to_string(&file) {
            Ok(port) => return port.parse().expect("a port"),
            Err(_) => thread::sleep(Duration::from_millis(2)),
        }
    }
}

#[allow(clippy::print_stdout, reason = "the process that started this one reads it")]
fn run_rank(folder: &Path, mesh: &str, rank: usize) -> Result<()> {
    let mesh = Mesh::parse(mesh)?;
    let token = Token::Text("0123456789abcdef".to_string());
    let process = Process::new(rank, mesh.num_ranks(), "127.0.0.1", port(folder, rank))?.token(token);
    let device = CudaDevice::open(&SearchPaths::from_env(), rank)?;
    let world = World::new(mesh.clone()).threads(1).on_device(device).allow_unoptimized();
    let mut cases = vec![("one group", vec![mesh.all_axes()])];
    if mesh.num_axes() > 1 {
        cases.push(("groups by turns", mesh.axes().map(AxisSet::one).collect()));
    }
    let times = world.join(&process, |rank| {
        cases.iter().map(|(_, axes)| measure(rank, axes)).collect::<Result<Vec<[f64; 2]>>>()
    })?;
    for ((name, _), [elapsed, processor]) in cases.iter().zip(times) {
        println!("result {mesh}, {name}: {elapsed:.1} us elapsed, {processor:.1} us of the thread");
    }
    println!("done");
    Ok(())
}

#[allow(clippy::print_stdout, reason = "a benchmark")]
fn main() {
    if let Some((mesh, folder, rank, _)) = scenario_of_this_process() {
        return run_rank(&folder, &mesh, rank).expect("a rank");
    }
    for mesh in ["dp=2", "dp=2,tp=2"] {
        let Some(gpu) = FakeGpu::new(&format!("bench-{}", mesh.len()), "") else { return };
        let outputs = gpu.run(mesh, Mesh::parse(mesh).expect("a mesh").num_ranks());
        outputs.iter().for_each(succeeded);
        let text = String::from_utf8_lossy(&outputs[0].stdout);
        text.lines().filter_map(|line| line.strip_prefix("result ")).for_each(|line| println!("{line}"));
    }
}
