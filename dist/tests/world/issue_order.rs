//! One issue order of collectives over all groups: proved on traces of dry runs, refuted by planted swaps.

use crate::support::{mesh, on};
use shardgrad_dist::{Error, Kind, Rank, Record, ReduceOp, Result, World, check_issue_order};
use shardgrad_kernels::Buffer;
use std::panic::Location;

/// The check of the traces of all ranks of a mesh.
fn check(text: &str, program: impl Fn(&Rank) -> Result<()>) -> Result<()> {
    let trace = |index| {
        World::new(mesh(text)).dry_run(index, |rank| {
            program(rank)?;
            Ok(rank.trace().take())
        })
    };
    let traces: Vec<Vec<Record>> = (0..mesh(text).num_ranks()).map(trace).collect::<Result<_>>()?;
    check_issue_order(&mesh(text), &traces)
}

/// The error of the check, which contains these parts.
fn refused(text: &str, parts: &[&str], program: impl Fn(&Rank) -> Result<()>) -> Error {
    let error = check(text, program).unwrap_err();
    assert_eq!(error.kind(), Kind::Collective, "{error}");
    let shown = error.to_string();
    assert!(parts.iter().all(|part| shown.contains(part)), "{parts:?} in:\n{shown}");
    error
}

fn sum(rank: &Rank, over: &str, numel: usize) -> Result<()> {
    rank.all_reduce(&on(rank, over), &Buffer::without_memory(4 * numel), numel, ReduceOp::Sum).map(drop)
}

/// Messages along pp, sums over dp and tp, and over both: the calls of one rank of a training step.
fn step(rank: &Rank) -> Result<()> {
    let pp = rank.mesh().axis("pp").unwrap();
    let (stage, x) = (rank.coordinate(pp), Buffer::without_memory(32));
    for _ in 0..3 {
        if stage > 0 {
            rank.recv(&on(rank, "pp"), 8, stage - 1)?;
        }
        sum(rank, "tp", 8)?;
        if stage < 2 {
            rank.send(&on(rank, "pp"), &x, 8, stage + 1)?;
        }
    }
    rank.reduce_scatter_async(&on(rank, "dp"), &x, &[3, 5])?;
    sum(rank, "tp", 2)?;
    sum(rank, "pp,dp,tp", 1)
}

#[test]
fn calls_in_one_order_are_accepted() {
    check("pp=3,dp=2,tp=2", step).unwrap();
    check("dp=2,tp=2", |_| Ok(())).unwrap();
}

/// What the ranks of a world find from the traces of their dry twins, and the calls that each makes for that.
fn compare(text: &str, program: impl Fn(&Rank) -> Result<bool> + Sync) -> Result<Vec<(bool, u64)>> {
    World::run(mesh(text), |rank| {
        let twin = rank.dry_twin();
        assert!(twin.is_dry_run() && twin.index() == rank.index());
        let trace = program(&twin)?.then(|| twin.trace().take());
        let is_proved = rank.check_issue_order(trace.as_deref(), Location::caller())?;
        Ok((is_proved, rank.trace().num_collectives()))
    })
}

#[test]
fn ranks_of_a_world_compare_the_traces_of_their_twins() {
    let proved = |calls: u64, ranks: usize| vec![(true, calls); ranks];
    let sums = |rank: &Rank| ["dp", "tp", "dp,tp"].iter().try_for_each(|over| sum(rank, over, 4));
    assert_eq!(compare("dp=2,tp=2", |rank| sums(rank).map(|()| true)).unwrap(), proved(1, 4));
    // Ranks of a pipeline have traces of their own, with messages.
    assert_eq!(compare("pp=3,dp=2,tp=2", |rank| step(rank).map(|()| true)).unwrap(), proved(3, 12));
    let without_trace = compare("dp=2,tp=2", |rank| Ok(rank.index() != 3)).unwrap();
    assert_eq!(without_trace, vec![(false, 1); 4]);
    assert_eq!(compare("dp=1", |_| Ok(true)).unwrap(), [(false, 0)]);
    let swapped = |rank: &Rank| {
        let order = if rank.index() == 2 { ["dp,tp", "dp"] } else { ["dp", "dp,tp"] };
        order.iter().try_for_each(|over| sum(rank, over, 4))
    };
    let error = compare("dp=2,tp=2", |rank| swapped(rank).map(|()| true)).unwrap_err();
    let shown = error.to_string();
    assert_eq!(error.kind(), Kind::Collective, "{shown}");
    for part in [
        "the collectives of mesh(dp=2, tp=2) have no common issue order",
        "rank 2 issues #1 all_reduce(sum) f32[4] over dp,tp at ",
        " before #1 all_reduce(sum) f32[4] over dp at ",
        "issue_order.rs:",
        "one order on all ranks that share them",
    ] {
        assert!(shown.contains(part), "no `{part}` in:\n{shown}");
    }
}

#[test]
fn planted_swap_of_two_groups_is_found() {
    // The groups over dp and over dp,tp share two ranks.
    let parts = [
        "the collectives of mesh(dp=2, tp=2) have no common issue order",
        "rank 0",
        "issues #1 all_reduce(sum) f32[3] over dp at ",
        " before #1 all_reduce(sum) f32[5] over dp,tp at ",
        "rank 2",
        "issues #1 all_reduce(sum) f32[5] over dp,tp at ",
        "issue_order.rs:",
        "one order on all ranks that share them",
    ];
    let swap = |swapped: usize| {
        move |rank: &Rank| {
            let calls = [("dp", 3), ("dp,tp", 5)];
            let order = if rank.index() == swapped { [1, 0] } else { [0, 1] };
            order.iter().try_for_each(|at| sum(rank, calls[*at].0, calls[*at].1))
        }
    };
    refused("dp=2,tp=2", &parts, swap(2));
    check("dp=2,tp=2", swap(4)).unwrap();
}

#[test]
fn cycle_over_three_groups_is_found_although_no_two_ranks_share_two_groups() {
    // Of a square of ranks, each rank issues its row first or its column first, so that each waits for the next.
    let program = |rank: &Rank| {
        let first = if [0, 3].contains(&rank.index()) { ["b", "a"] } else { ["a", "b"] };
        first.iter().try_for_each(|axis| sum(rank, axis, 4))
    };
    refused("a=2,b=2", &["no common issue order", "rank 0", "rank 1", "rank 2", "rank 3"], program);
}

#[test]
fn swapped_messages_and_receives_are_found() {
    refused("pp=2", &["no common issue order", "recv f32[8] from rank 1 over pp"], |rank| {
        let other = 1 - rank.index();
        rank.recv(&on(rank, "pp"), 8, other)?;
        rank.send(&on(rank, "pp"), &Buffer::without_memory(32), 8, other)
    });
}

#[test]
fn calls_that_differ_or_are_missing_are_found() {
    let parts = [
        "recorded collectives differ: rank 0 issues #1 all_reduce(sum) f32[4] over dp",
        "rank 1 issues #1 all_reduce(sum) f32[5]",
    ];
    refused("dp=2", &parts, |rank| sum(rank, "dp", 4 + rank.index()));
    let parts = ["rank 0 issues #2 all_reduce(sum) f32[1] over dp at ", "but rank 1 issues no such call"];
    refused("dp=2", &parts, |rank| (rank.index()..2).try_for_each(|_| sum(rank, "dp", 1)));
    let error = check_issue_order(&mesh("dp=2"), &[vec![]]).unwrap_err();
    assert_eq!(
        (error.kind(), error.message()),
        (Kind::Mesh, "1 traces for mesh(dp=2): give one trace per rank")
    );
}
