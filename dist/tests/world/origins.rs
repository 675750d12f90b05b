//! What the elements of a call come from is compared like its other parts, where both ranks know it.

use crate::support::{mesh, on, up};
use shardgrad_dist::{Call, Kind, Origin, Rank, ReduceOp, Result, World};

/// Two ranks sum elements of these origins.
fn summed(marks: [u64; 2]) -> Result<Vec<()>> {
    World::run(mesh("tp=2"), |rank: &Rank| {
        let given = ["f32[4] at a.rs:1", "f32[6] at b.rs:2"][rank.index()];
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
fn what_is_not_known_or_the_same_agrees_whatever_was_given_last() {
    for marks in [[0, 4], [3, 0], [0, 0], [5, 5]] {
        summed(marks).unwrap();
    }
}
