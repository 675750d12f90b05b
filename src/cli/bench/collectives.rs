//! Benchmarks of collectives (as layout changes) between ranks that are threads, or processes of a launcher, and of the protection of
//! connections between processes.

use super::measurement::{Bench, Work, check};
use crate::cli::ranks::{Ranks, is_rank_zero, process};
use shardgrad::dist::Process;
use shardgrad::prelude::*;
use shardgrad::tensor::training_step::control::world_sum;
use std::net::TcpListener;
use std::panic::Location;
use std::thread;
use std::time::Instant;

/// A collective: layouts before and after it, and the least fraction of the tensor's bytes that a rank moves.
struct Case {
    name: &'static str,
    from: fn(&Layout) -> Placement,
    to: Placement,
    part: fn(f64) -> f64,
}

const CASES: [Case; 4] = [
    Case {
        name: "all_reduce",
        from: |_| Placement::Partial,
        to: Placement::Invariant,
        part: |n| 2.0 * (n - 1.0) / n,
    },
    Case {
        name: "reduce_scatter",
        from: |_| Placement::Partial,
        to: Placement::Shard(0),
        part: |n| (n - 1.0) / n,
    },
    Case {
        name: "all_gather",
        from: |_| Placement::Shard(0),
        to: Placement::Invariant,
        part: |n| (n - 1.0) / n,
    },
    Case {
        name: "all_to_all",
        from: |_| Placement::Shard(0),
        to: Placement::Shard(1),
        part: |n| (n - 1.0) / n / n,
    },
];

/// The calls that warm caches and allocators, and whose time determines the number of calls.
const NUM_WARM_UP_CALLS: usize = 2;
/// Maximum bytes per sample, unless a sample is one call.
const CALLS_BYTES: usize = 1 << 28;
/// Maximum calls per sample. With much fewer calls, samples end before the scheduler has spread the ranks over cores.
const CALLS_MAX: usize = 2000;
/// Shapes of the tensors, f32.
const SHAPES: [[usize; 2]; 3] = [[4, 4], [64, 64], [1024, 1024]];

/// The samples of a measurement, if there is time for them; the median counts.
const NUM_SAMPLES: usize = 5;
/// Rounds over the kinds of links, if there is time for them: each round measures each kind, so that a change of the machine's load meets
/// all of them.
const NUM_LINK_ROUNDS: usize = 3;
/// Shapes of the tensors over links, f32: 64 B to 64 MiB.
const LINK_SHAPES: [[usize; 2]; 4] = [[4, 4], [64, 64], [1024, 1024], [4096, 4096]];

/// A kind of link between two processes.
type Link = (&'static str, fn(Process) -> Process);

const LINKS: [Link; 3] = [
    ("plain", Process::insecure),
    ("authenticated", |process| process.encrypt(false)),
    ("encrypted", |process| process.encrypt(true)),
];

/// Checks and measures every collective on 2 and 4 ranks, or on all processes.
pub(super) fn run(bench: &Bench) -> Result<()> {
    let process = process()?;
    let (group, counts) = match &process {
        None => ("collectives", vec![2, 4]),
        Some(process) => ("processes", vec![process.num_ranks()]),
    };
    for num_ranks in counts {
        let mesh = Mesh::new(&[("x", num_ranks)])?;
        let ranks = Ranks::new(World::new(mesh.clone()), &mesh, process.clone())?;
        for shape in SHAPES {
            for case in &CASES {
                let times = ranks.launch(|rank| measure(bench, rank, case, &shape))?;
                if !is_rank_zero() {
                    continue;
                }
                let bytes = (case.part)(num_ranks as f64) * (4 * shape[0] * shape[1]) as f64;
                let name = format!("{} f32[{}, {}]", case.name, shape[0], shape[1]);
                bench.report(group, &name, &format!("x={num_ranks}"), times[0], Work::Bytes(bytes));
            }
        }
    }
    if process.is_none() { run_links(bench) } else { Ok(()) }
}

/// Checks and measures an all-reduce over each kind of link, between two threads of this process that connect as processes do.
fn run_links(bench: &Bench) -> Result<()> {
    for shape in LINK_SHAPES {
        let mut seconds = LINKS.map(|_| Vec::new());
        // The first round of large tensors may take longer than all rounds are given, because it also makes and checks them.
        let (start, limit) = (Instant::now(), bench.limit * (NUM_LINK_ROUNDS * LINKS.len()) as u32);
        for _ in (0..NUM_LINK_ROUNDS).take_while(|round| *round == 0 || start.elapsed() < limit) {
            for ((_, set_up), seconds) in LINKS.iter().zip(&mut seconds) {
                seconds.push(over_link(bench, *set_up, &shape)?);
            }
        }
        for ((name, _), mut seconds) in LINKS.into_iter().zip(seconds) {
            seconds.sort_by(f64::total_cmp);
            let name = format!("{} f32[{}, {}], {name}", CASES[0].name, shape[0], shape[1]);
            let bytes = (4 * shape[0] * shape[1]) as f64;
            bench.report("links", &name, "x=2", seconds[seconds.len() / 2], Work::Bytes(bytes));
        }
    }
    Ok(())
}

/// Returns the seconds of an all-reduce over a kind of link.
fn over_link(bench: &Bench, set_up: fn(Process) -> Process, shape: &[usize]) -> Result<f64> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let join = |rank: usize| {
        let process = set_up(Process::new(rank, 2, "127.0.0.1", port)?);
        World::new(Mesh::parse("x=2")?).join(&process, |rank| measure(bench, rank, &CASES[0], shape))
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        let seconds = join(0)?;
        other.join().expect("bug: a panic of a rank was not caught")?;
        Ok(seconds)
    })
}

/// Checks, measures and reports an all-reduce over two ranks; returns its seconds.
pub(super) fn all_reduce(bench: &Bench, numel: usize) -> Result<f64> {
    let times = World::run(Mesh::parse("x=2")?, |rank| measure(bench, rank, &CASES[0], &[numel]))?;
    let name = format!("{} f32[{numel}]", CASES[0].name);
    bench.report("growth", &name, "x=2", times[0], Work::Bytes((4 * numel) as f64));
    Ok(times[0])
}

fn measure(bench: &Bench, rank: &Rank, case: &Case, shape: &[usize]) -> Result<f64> {
    let axis = rank.mesh().axes().next().expect("the mesh has one axis");
    let whole = Layout::invariant(rank.mesh(), DType::F32, shape);
    let (from, to) = (whole.with_placement(axis, (case.from)(&whole)), whole.with_placement(axis, case.to));
    let data: Vec<f32> = (0..shape.iter().product()).map(|i| (i % 1009) as f32).collect();
    let x = Tensor::from_global(rank, &from, &data)?;
    let moved = || x.to_layout_at(&to, Location::caller());
    check(case.name, &moved()?.to_f64()?, &data.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 0.0)?;
    let sample = |calls: usize| -> Result<f64> {
        let start = Instant::now();
        (0..calls).try_for_each(|_| moved().map(drop))?;
        Ok(start.elapsed().as_secs_f64() / calls as f64)
    };
    // The number of calls must be equal on all ranks, so all compute it from the time of all.
    let once = world_sum(rank, &[sample(NUM_WARM_UP_CALLS)?], Location::caller())?[0];
    let affordable = bench.limit.as_secs_f64() / (once / rank.mesh().num_ranks() as f64);
    let most = (CALLS_BYTES / (4 * data.len())).clamp(1, CALLS_MAX);
    let calls = ((affordable / NUM_SAMPLES as f64) as usize).clamp(1, most);
    let num_samples = (affordable as usize / calls).clamp(1, NUM_SAMPLES);
    let mut seconds = (0..num_samples).map(|_| sample(calls)).collect::<Result<Vec<f64>>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[num_samples / 2])
}
