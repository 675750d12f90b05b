//! Members of a group compare the origins of their elements, if both know them.

use crate::support::{mesh, on, up};
use shardgrad_dist::{Call, Kind, Origin, Rank, ReduceOp, Result, World};

/// All-reduce over two ranks, with elements of origins with these hashes.
fn summed(hashes: [u64; 2]) -> Result<Vec<()>> {
    summed_of(hashes, ["f32[4] at a.rs:1", "f32[6] at b.rs:2"])
}

/// All-reduce over two ranks, with origins with these hashes and recent inputs.
fn summed_of(hashes: [u64; 2], given: [&str; 2]) -> Result<Vec<()>> {
    World::run(mesh("tp=2"), |rank: &Rank| {
        let given = given[rank.index()];
        let call =
            Call { origin: Origin { hash: hashes[rank.index()], recent_inputs: given }, ..on(rank, "tp") };
        rank.all_reduce(&call, &up(rank, &[1.0f32; 8]), 8, ReduceOp::Sum).map(drop)
    })
}

#[test]
fn different_origins_are_an_error() {
    let error = summed([3, 4]).unwrap_err();
    assert_eq!(error.kind(), Kind::Collective);
    let text = error.to_string();
    for part in [
        "rank 0 called #1 all_reduce(sum) f32[8]",
        "rank 1 called #1 all_reduce(sum) f32[8]",
        "differs    global shapes",
        "given      rank 0: f32[4] at a.rs:1",
        "given      rank 1: f32[6] at b.rs:2",
        "the same global shape",
    ] {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
}

/// As with `item()` on one rank alone.
#[test]
fn calls_of_different_lines_are_not_blamed_on_shapes() {
    let result = World::run(mesh("tp=2"), |rank: &Rank| {
        let origin = Origin { hash: 3 + rank.index() as u64, recent_inputs: "f32[4] at a.rs:1" };
        let call = Call { origin, ..on(rank, "tp") };
        if rank.index() == 0 {
            return rank.all_reduce(&call, &up(rank, &[1.0f32]), 1, ReduceOp::Sum).map(drop);
        }
        let call = Call { origin, ..on(rank, "tp") };
        rank.all_reduce(&call, &up(rank, &[1.0f32; 8]), 8, ReduceOp::Sum).map(drop)
    });
    let text = result.unwrap_err().to_string();
    assert!(text.contains("all ranks of a group must make the same calls in the same order"), "{text}");
    assert!(!text.contains("same global shape") && !text.contains("given"), "{text}");
}

#[test]
fn error_shows_the_inputs_of_the_line_where_shapes_differ() {
    for (given, shown) in [
        // A mask of the same shape everywhere came after the batch.
        (["m[9] at m.rs:3\nf32[4] at a.rs:1", "m[9] at m.rs:3\nf32[6] at a.rs:1"], ["f32[4]", "f32[6]"]),
        // Each rank had a short batch once; the newest batches differ.
        (["f32[4] at a.rs:1\nf32[3] at a.rs:1", "f32[3] at a.rs:1\nf32[4] at a.rs:1"], ["f32[4]", "f32[3]"]),
        // One rank has an input of its own.
        (["own[1] at o.rs:7\nf32[4] at a.rs:1", "f32[6] at a.rs:1"], ["f32[4]", "f32[6]"]),
    ] {
        let error = summed_of([3, 4], given).unwrap_err().to_string();
        for (rank, shape) in shown.iter().enumerate() {
            let part = format!("given      rank {rank}: {shape} at a.rs:1");
            assert!(error.contains(&part), "no `{part}` in: {error}");
        }
    }
    // No line differs: the newest inputs are shown.
    let error =
        summed_of([3, 4], ["m[9] at m.rs:3\nx[1] at x.rs:1", "m[9] at m.rs:3"]).unwrap_err().to_string();
    assert!(error.contains("rank 0: m[9] at m.rs:3") && error.contains("rank 1: m[9] at m.rs:3"), "{error}");
}

#[test]
fn unknown_or_equal_origins_match_whatever_the_inputs() {
    for hashes in [[0, 4], [3, 0], [0, 0], [5, 5]] {
        summed(hashes).unwrap();
    }
}
