//! Overhead per op besides its kernel: small ops without a mesh and on a 1 x 2 mesh without communication. Two cores are busy in both cases.

use super::measurement::{Bench, Work, check};
use shardgrad::prelude::*;

/// An op on two tensors with equal local shapes on both meshes, so that only the overhead differs.
struct Case {
    name: &'static str,
    /// Local shapes, and the states of the arguments on the sharded axis.
    shapes: [&'static [usize]; 2],
    states: [Placement; 2],
    call: fn(&Var, &Var) -> Var,
    plain: fn(&Tensor, &Tensor) -> Tensor,
}

const CASES: [Case; 2] = [
    Case {
        name: "add of 16 floats",
        shapes: [&[16], &[16]],
        states: [Placement::Shard(0), Placement::Shard(0)],
        call: |x, y| x.add(y),
        plain: |x, y| x.add(y),
    },
    Case {
        name: "matmul 8x8",
        shapes: [&[8, 8], &[8, 8]],
        states: [Placement::Shard(0), Placement::Replicate],
        call: |x, y| x.matmul(y),
        plain: |x, y| x.matmul(y),
    },
];

/// Calls per sample.
const CALLS: usize = 500;

/// The times of a case on one mesh.
struct Times {
    tensor: f64,
    tape: f64,
    backward: f64,
}

/// Checks and measures every case; prints the additional cost on the mesh.
pub(super) fn run(bench: &Bench) -> Result<()> {
    for case in &CASES {
        let mut plain: Option<Times> = None;
        for mesh in ["", "dp=1,tp=2"] {
            let world = World::new(Mesh::parse(mesh)?).threads(1);
            let times = match mesh {
                "" => side_by_side(|| world.clone().launch(|rank| measure(bench, rank, case)))?,
                _ => world.launch(|rank| measure(bench, rank, case))?,
            };
            let times = times.into_iter().next().expect("a world has a rank");
            for (what, seconds) in [
                ("forward", times.tensor),
                ("forward, on a tape", times.tape),
                ("with backward", times.backward),
            ] {
                bench.report("tape", &format!("{}, {what}", case.name), mesh, seconds, Work::Call);
            }
            if let (Some(plain), false) = (&plain, bench.json) {
                let more =
                    [times.tensor - plain.tensor, times.tape - plain.tape, times.backward - plain.backward];
                let [tensor, tape, backward] = more.map(|s| s * 1e9);
                println!(
                    "{:12} {}: {tensor:+.0} ns forward, {tape:+.0} ns on a tape, {backward:+.0} ns with backward on {mesh}",
                    "", case.name
                );
            }
            plain.get_or_insert(times);
        }
    }
    Ok(())
}

/// Runs the function on two threads at once and returns one result: a core is faster while the other is idle, and on the mesh both are busy.
fn side_by_side<T: Send>(run: impl Fn() -> Result<T> + Sync) -> Result<T> {
    std::thread::scope(|scope| {
        let other = scope.spawn(&run);
        let own = run();
        let other = other.join().expect("a launch catches panics");
        other.and(own)
    })
}

fn measure(bench: &Bench, rank: &Rank, case: &Case) -> Result<Times> {
    let axis = rank.mesh().axis("tp");
    let arg = |i: usize| {
        let mut shape = case.shapes[i].to_vec();
        if let (Some(axis), Placement::Shard(d)) = (axis, case.states[i]) {
            shape[d] *= rank.mesh().size(axis);
        }
        let layout = Layout::invariant(rank.mesh(), DType::F32, &shape);
        let layout = axis.map_or(layout.clone(), |a| layout.with_placement(a, case.states[i]));
        let data: Vec<f32> = (0..layout.numel()).map(|i| (i % 7) as f32 - 3.0).collect();
        Tensor::from_global(rank, &layout, &data)
    };
    let (x, y) = (arg(0)?, arg(1)?);
    let want = oracle(case, &x.to_f64()?, &y.to_f64()?);
    check(case.name, &(case.plain)(&x, &y).to_f64()?, &want, 0.0)?;
    let backward = || -> Result<shardgrad::autograd::Gradients> {
        let tape = Tape::new(rank);
        (case.call)(&tape.leaf(0, &x), &tape.leaf(1, &y)).sum().backward()?;
        Ok(tape.gradients())
    };
    let taped = Tape::new(rank);
    let forward = (case.call)(&taped.leaf(0, &x), &taped.leaf(1, &y));
    check(case.name, &forward.tensor().to_f64()?, &want, 0.0)?;
    drop((forward, taped));
    check(case.name, &backward()?[&0].to_f64()?, &gradient(case, want.len(), &y.to_f64()?), 0.0)?;
    // The number of calls is equal on all ranks, so that both are busy throughout.
    let sample = Bench { limit: std::time::Duration::ZERO, ..*bench };
    let tensor = sample.best_seconds(CALLS, || {
        let _ = (case.plain)(&x, &y);
        Ok(())
    })?;
    let tape = sample.best_seconds(CALLS, || {
        let tape = Tape::new(rank);
        let _ = (case.call)(&tape.leaf(0, &x), &tape.leaf(1, &y));
        Ok(())
    })?;
    let backward = sample.best_seconds(CALLS, || backward().map(|_| ()))?;
    Ok(Times { tensor, tape, backward })
}

/// Returns the gradient of the sum of all results with respect to x.
fn gradient(case: &Case, len: usize, y: &[f64]) -> Vec<f64> {
    if case.shapes[0].len() == 1 {
        return vec![1.0; len];
    }
    y.chunks(8).map(|row| row.iter().sum()).cycle().take(len).collect()
}

fn oracle(case: &Case, x: &[f64], y: &[f64]) -> Vec<f64> {
    if case.shapes[0].len() == 1 {
        return x.iter().zip(y).map(|(x, y)| x + y).collect();
    }
    let row = |row: &[f64]| (0..8).map(|j| (0..8).map(|k| row[k] * y[k * 8 + j]).sum()).collect::<Vec<f64>>();
    x.chunks(8).flat_map(row).collect()
}
