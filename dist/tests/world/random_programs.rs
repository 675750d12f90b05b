//! Random programs give the same bits with random delays, on threads and on processes.

use crate::support::{RankKind, down, hash, in_parallel, mesh, over, up};
use shardgrad_dist::{AxisSet, Mesh, Rank, ReduceOp, Result, World};
use shardgrad_kernels::DType;
use std::time::Duration;

/// Runs a program drawn from a seed and returns the rank's state as bits. Sums of its numbers are rounded, so a change of their
/// order would change bits.
fn program(rank: &Rank, seed: u64) -> Result<Vec<u32>> {
    let len = if seed.is_multiple_of(8) { 9000 } else { 24 };
    let mut state: Vec<f32> = (0..len).map(|e| start(rank.index(), e)).collect();
    for step in 0..6 {
        let draw = hash(seed * 64 + step);
        let axes: AxisSet = rank.mesh().axes().filter(|a| draw >> (8 + a.0) & 1 == 1).collect();
        let call = over(axes, DType::F32);
        let (k, group_rank) = (rank.mesh().group_size(axes), rank.group_rank(axes));
        let x = up(rank, &state);
        // A split of the state by the floor rule, shifted by one element for uneven parts.
        let counts: Vec<usize> = (0..k).map(|i| (i + 1) * len / k - i * len / k).collect();
        let start: usize = counts[..group_rank].iter().sum();
        match draw % 6 {
            0 => state = down(&rank.all_reduce(&call, &x, len, ReduceOp::Sum)?, len),
            1 => state = down(&rank.all_reduce(&call, &x, len, ReduceOp::Max)?, len),
            2 => {
                let part = rank.reduce_scatter(&call, &x, &counts)?;
                state = down(&rank.all_gather(&call, &part, &counts)?, len);
                state[start] += 0.1;
            }
            3 => {
                let received = vec![counts[group_rank]; k];
                let y = rank.all_to_all(&call, &x, &counts, &received)?;
                let pieces = down::<f32>(&y, counts[group_rank] * k);
                pieces.iter().enumerate().for_each(|(e, v)| state[e % len] += v);
            }
            4 => {
                let root = (draw >> 20) as usize % k;
                state = down(&rank.broadcast(&call, Some(&x), len, root)?, len);
                state[group_rank % len] *= 1.5;
            }
            _ => {
                rank.send(&call, &x, len, (group_rank + 1) % k)?;
                let y = down::<f32>(&rank.recv(&call, len, (group_rank + k - 1) % k)?, len);
                state.iter_mut().zip(y).for_each(|(s, y)| *s = 0.7 * *s + 0.3 * y);
            }
        }
        state.iter_mut().for_each(|s| *s = (*s / 3.0).sin());
    }
    Ok(state.iter().map(|s| s.to_bits()).collect())
}

fn start(rank: usize, e: usize) -> f32 {
    (hash((rank * 10_000 + e) as u64) % 10_007) as f32 / 10_007.0
}

/// Runs 200 programs, or as many as PROPTEST_CASES states.
#[test]
fn random_programs_have_the_same_bits_with_random_delays() {
    let meshes: Vec<Mesh> = ["tp=2", "tp=3", "dp=2,tp=2", "dp=3,tp=2", "dp=5"].map(mesh).into();
    let cases = std::env::var("PROPTEST_CASES").map_or(200, |n| n.parse().expect("a number of cases"));
    for seed in 0..cases {
        let mesh = &meshes[seed as usize % meshes.len()];
        let undelayed = World::new(mesh.clone()).launch(|rank| program(rank, seed)).unwrap();
        let delayed =
            World::new(mesh.clone()).random_delays(seed).launch(|rank| program(rank, seed)).unwrap();
        assert!(undelayed == delayed, "program {seed} on {mesh}");
    }
}

#[test]
fn random_programs_have_the_same_bits_on_processes() {
    in_parallel(["tp=2", "tp=3", "dp=2,tp=2", "dp=3,tp=2", "dp=5"].into_iter().zip(0..), |(text, seed)| {
        let of = |kind: RankKind| {
            let some = |rank: &Rank| (0..8).map(|n| program(rank, seed * 8 + n)).collect::<Result<Vec<_>>>();
            kind.run(text, some).unwrap()
        };
        assert!(of(RankKind::Threads) == of(RankKind::Processes), "programs of {text}");
    });
}

#[test]
fn late_ranks_are_no_deadlock() {
    // Processes send probes later than threads build the wait-for graph.
    in_parallel([(RankKind::Threads, 30), (RankKind::Processes, 250)], |(kind, nap_ms)| {
        kind.launch("dp=2,cp=2,tp=2", |world| world.random_delays(3), |rank| late(rank, nap_ms)).unwrap();
    });
}

/// A program with ranks that are late by tens of milliseconds, so that waiting ranks check for deadlocks while others send and return.
fn late(rank: &Rank, nap_ms: u64) -> Result<()> {
    let draw = |rank: usize, step: u64, bound: u64| hash(rank as u64 * 97 + step) % bound;
    for step in 0..12 {
        if draw(rank.index(), step, 4) == 0 {
            std::thread::sleep(Duration::from_millis(draw(rank.index(), step + 500, nap_ms)));
        }
        let axes = rank.mesh().axes().filter(|a| hash(step) >> a.0 & 1 == 1).collect();
        let (call, k) = (over(axes, DType::F32), rank.mesh().group_size(axes));
        let x = up(rank, &[1f32]);
        if step % 3 == 2 {
            let group_rank = rank.group_rank(axes);
            rank.send(&call, &x, 1, (group_rank + 1) % k)?;
            rank.recv(&call, 1, (group_rank + k - 1) % k)?;
        } else {
            assert_eq!(down::<f32>(&rank.all_reduce(&call, &x, 1, ReduceOp::Sum)?, 1), [k as f32]);
        }
    }
    Ok(())
}

#[test]
fn slice_behaves_like_a_world_of_its_own() {
    for (whole, axis, part) in
        [("pp=2,tp=3", "pp", "tp=3"), ("dp=2,pp=2,tp=2", "pp", "dp=2,tp=2"), ("tp=2,pp=3", "pp", "tp=2")]
    {
        for seed in 0..20 {
            let alone = World::run(mesh(part), |rank| program(rank, seed)).unwrap();
            let sliced = World::run(mesh(whole), |rank| {
                let slice = rank.slice(rank.mesh().axis(axis).unwrap());
                assert_eq!((slice.mesh(), slice.world()), (&mesh(part), rank));
                assert_eq!(slice.describe(), rank.describe());
                Ok((slice.index(), program(&slice, seed)?))
            });
            for (index, bits) in sliced.unwrap() {
                assert!(bits == alone[index], "program {seed} on a slice of {whole} differs");
            }
        }
    }
}

#[test]
fn mismatch_in_a_slice_names_the_axes_of_the_world() {
    let error = World::run(mesh("pp=2,tp=2"), |rank| {
        let slice = rank.slice(rank.mesh().axis("pp").unwrap());
        let call = over(slice.mesh().all_axes(), DType::F32);
        slice.all_reduce(&call, &up(rank, &[1.0f32; 4]), 1 + rank.index() % 2, ReduceOp::Sum)?;
        Ok(())
    });
    let text = error.unwrap_err().to_string();
    assert!(text.contains("all_reduce(sum) f32[2] over tp") && text.contains("mesh(pp=2, tp=2)"), "{text}");
}
