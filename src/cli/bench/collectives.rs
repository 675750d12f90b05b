//! Collectives between ranks of this process, or of several that a launcher started, as changes of layout.

use super::line::{Bench, Work, check};
use crate::cli::ranks::{Ranks, leads, process};
use shardgrad::prelude::*;
use std::panic::Location;

/// A collective, as the layouts before and after it, and the part of the whole tensor's bytes that a rank moves at least.
struct Case {
    name: &'static str,
    from: fn(&Layout) -> State,
    to: State,
    part: fn(f64) -> f64,
}

const CASES: [Case; 4] = [
    Case {
        name: "all_reduce",
        from: |_| State::Partial,
        to: State::Invariant,
        part: |n| 2.0 * (n - 1.0) / n,
    },
    Case { name: "reduce_scatter", from: |_| State::Partial, to: State::Shard(0), part: |n| (n - 1.0) / n },
    Case { name: "all_gather", from: |_| State::Shard(0), to: State::Invariant, part: |n| (n - 1.0) / n },
    Case { name: "all_to_all", from: |_| State::Shard(0), to: State::Shard(1), part: |n| (n - 1.0) / n / n },
];

/// A sample moves so many bytes at most, or is one call.
const CALLS_BYTES: usize = 1 << 28;
/// But no more calls than this; of fewer, all samples are over before ranks have come to cores of their own.
const CALLS_MAX: usize = 2000;
/// Rows and columns of what is moved, f32.
const SHAPES: [[usize; 2]; 3] = [[4, 4], [64, 64], [1024, 1024]];

/// Checks and measures every collective on 2 and on 4 ranks, or on as many as there are processes.
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
                if !leads() {
                    continue;
                }
                let bytes = (case.part)(num_ranks as f64) * (4 * shape[0] * shape[1]) as f64;
                let name = format!("{} f32[{}, {}]", case.name, shape[0], shape[1]);
                bench.tell(group, &name, &format!("x={num_ranks}"), times[0], Work::Bytes(bytes));
            }
        }
    }
    Ok(())
}

/// Checks, measures and tells a sum over two ranks; gives its seconds.
pub(super) fn all_reduce(bench: &Bench, numel: usize) -> Result<f64> {
    let times = World::run(Mesh::parse("x=2")?, |rank| measure(bench, rank, &CASES[0], &[numel]))?;
    let name = format!("{} f32[{numel}]", CASES[0].name);
    bench.tell("growth", &name, "x=2", times[0], Work::Bytes((4 * numel) as f64));
    Ok(times[0])
}

fn measure(bench: &Bench, rank: &Rank, case: &Case, shape: &[usize]) -> Result<f64> {
    let axis = rank.mesh().axes().next().expect("the mesh has one axis");
    let whole = Layout::invariant(rank.mesh(), DType::F32, shape);
    let (from, to) = (whole.with_state(axis, (case.from)(&whole)), whole.with_state(axis, case.to));
    let data: Vec<f32> = (0..shape.iter().product()).map(|i| (i % 1009) as f32).collect();
    let x = Tensor::from_global(rank, &from, &data)?;
    let moved = || x.to_layout_at(&to, Location::caller());
    check(case.name, &moved()?.to_f64()?, &data.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 0.0)?;
    // Every rank makes as many calls as the others: the number must not depend on a clock.
    let calls = (CALLS_BYTES / (4 * data.len())).clamp(1, CALLS_MAX);
    let sample = Bench { limit: std::time::Duration::ZERO, ..*bench };
    sample.seconds(calls, || moved().map(|_| ()))
}
