//! What the elements of a call come from is compared like its other parts, where both ranks know it.

use crate::support::{mesh, on, up};
use shardgrad_dist::{Call, Kind, Origin, Rank, ReduceOp, Result, World};

/// Two ranks sum elements of these origins.
fn summed(marks: [u64; 2]) -> Result<Vec<()>> {
    summed_of(marks, ["f32[4] at a.rs:1", "f32[6] at b.rs:2"])
}

/// The same, where each was given these.
fn summed_of(marks: [u64; 2], given: [&str; 2]) -> Result<Vec<()>> {
    World::run(mesh("tp=2"), |rank: &Rank| {
        let given = given[rank.index()];
        let call = Call { origin: Origin { mark: marks[rank.index()], given }, ..on(rank, "tp") };
        rank.all_reduce(&call, &up(rank, &[1.0f32; 8]), 8, ReduceOp::Sum).map(drop)
    })
}

#[test]
fn elements_of_unlike_origins_are_not_added() {
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

#[test]
fn what_was_given_at_one_line_in_unlike_shapes_is_told_whatever_came_last() {
    for (given, told) in [
        // A mask that all make alike came after the batch.
        (["m[9] at m.rs:3\nf32[4] at a.rs:1", "m[9] at m.rs:3\nf32[6] at a.rs:1"], ["f32[4]", "f32[6]"]),
        // The batches of both were short once, and that of one is now.
        (["f32[4] at a.rs:1\nf32[3] at a.rs:1", "f32[3] at a.rs:1\nf32[4] at a.rs:1"], ["f32[4]", "f32[3]"]),
        // One rank looks at something by itself.
        (["own[1] at o.rs:7\nf32[4] at a.rs:1", "f32[6] at a.rs:1"], ["f32[4]", "f32[6]"]),
    ] {
        let error = summed_of([3, 4], given).unwrap_err().to_string();
        for (rank, shape) in told.iter().enumerate() {
            let part = format!("given      rank {rank}: {shape} at a.rs:1");
            assert!(error.contains(&part), "no `{part}` in: {error}");
        }
    }
    // No line tells them apart: what came last is told.
    let error =
        summed_of([3, 4], ["m[9] at m.rs:3\nx[1] at x.rs:1", "m[9] at m.rs:3"]).unwrap_err().to_string();
    assert!(error.contains("rank 0: m[9] at m.rs:3") && error.contains("rank 1: m[9] at m.rs:3"), "{error}");
}

#[test]
fn what_is_not_known_or_the_same_agrees_whatever_was_given_last() {
    for marks in [[0, 4], [3, 0], [0, 0], [5, 5]] {
        summed(marks).unwrap();
    }
}
