//! Dry runs record the same calls as real runs.

use crate::support::{mesh, on, up};
use shardgrad_dist::{Kind, Phase, Rank, Record, ReduceOp, Result, World};

/// A program with every collective, and uneven counts.
fn program(rank: &Rank) -> Result<Vec<Record>> {
    rank.trace().enable();
    let x = up(rank, &[1f32; 60]);
    let (tp, group_rank) = (on(rank, "tp"), rank.coordinate(rank.mesh().axis("tp").unwrap()));
    let both = on(rank, "dp,tp");
    let gathered = rank.all_gather(&tp, &x, &[3, 4, 5])?;
    assert_eq!(gathered.bytes(), 48);
    let named = shardgrad_dist::Call { phase: Phase::Backward, path: "h.1.mlp", ..both };
    assert_eq!(rank.all_reduce(&named, &x, 10, ReduceOp::Sum)?.bytes(), 40);
    assert_eq!(rank.reduce_scatter(&tp, &x, &[1, 0, 7])?.bytes(), [4, 0, 28][group_rank]);
    let sent = |i: usize, j: usize| i + 2 * j;
    let send: Vec<usize> = (0..3).map(|j| sent(group_rank, j)).collect();
    let recv: Vec<usize> = (0..3).map(|i| sent(i, group_rank)).collect();
    rank.all_to_all(&tp, &x, &send, &recv)?;
    assert_eq!(rank.broadcast(&tp, (group_rank == 1).then_some(&x), 60, 1)?.bytes(), 240);
    let dp = on(rank, "dp");
    let other = 1 - rank.group_rank(dp.axes);
    rank.send(&dp, &x, 6, other)?;
    assert_eq!(rank.recv(&dp, 6, other)?.bytes(), 24);
    rank.barrier(&both)?;
    rank.all_reduce(&on(rank, ""), &x, 60, ReduceOp::Max)?;
    assert_eq!(rank.trace().num_collectives(), 9);
    let records = rank.trace().take();
    assert_eq!(rank.trace().bytes(), records.iter().map(|r| r.bytes).sum::<u64>());
    Ok(records)
}

#[test]
fn dry_run_records_the_calls_of_a_real_run() {
    let mesh = mesh("dp=2,tp=3");
    let real = World::run(mesh.clone(), program).unwrap();
    for (index, real) in real.iter().enumerate() {
        let dry = World::new(mesh.clone()).dry_run(index, |rank| {
            assert!(rank.is_dry_run() && rank.index() == index);
            program(rank)
        });
        assert_eq!(&dry.unwrap(), real, "rank {index}");
    }
}

#[test]
fn recorded_bytes_by_hand() {
    let records = World::new(mesh("dp=2,tp=3")).dry_run(4, program).unwrap();
    let bytes: Vec<(&str, u64)> = records.iter().map(|r| (r.op, r.bytes)).collect();
    // Rank 4 is at dp=1, tp=1. All elements are f32.
    assert_eq!(
        bytes,
        [
            ("all_gather", 4 * 8),
            ("all_reduce", 4 * 2 * (10 - 2)),
            ("reduce_scatter", 4 * 8),
            ("all_to_all", 4 * (9 - 3)),
            ("broadcast", 4 * 60),
            ("send", 4 * 6),
            ("recv", 4 * 6),
            ("barrier", 0),
            ("all_reduce", 0),
        ]
    );
    assert_eq!((records[1].path.as_str(), records[1].phase, records[1].seq), ("h.1.mlp", Phase::Backward, 1));
    assert_eq!((records[7].seq, records[4].peer, records[1].reduction), (2, Some(1), Some(ReduceOp::Sum)));
    assert!(records[0].site.file().ends_with("dry.rs"));
}

#[test]
fn records_are_off_by_default() {
    World::run(mesh("tp=2"), |rank| {
        rank.barrier(&on(rank, "tp"))?;
        assert!(rank.trace().take().is_empty() && rank.trace().num_collectives() == 1);
        Ok(())
    })
    .unwrap();
}

#[test]
fn dry_run_returns_errors_and_panics_like_a_launch() {
    let world = || World::new(mesh("dp=1,tp=2"));
    assert_eq!(world().dry_run(2, |_| Ok(())).unwrap_err().kind(), Kind::Mesh);
    let error = world()
        .dry_run(1, |rank| -> Result<()> {
            let error = rank.all_gather(&on(rank, "tp"), &up(rank, &[0f32]), &[1]).unwrap_err();
            error.raise()
        })
        .unwrap_err();
    assert_eq!(
        error.message(),
        "all_gather: 1 counts for a group of 2 ranks: give one count per rank of the group"
    );
    assert_eq!(error.details(), [("rank", "1 (dp=0, tp=1) of mesh(dp=1, tp=2)".to_string())]);
    let error =
        world().dry_run(0, |_| -> Result<()> { std::panic::resume_unwind(Box::new("no")) }).unwrap_err();
    assert_eq!((error.kind(), error.message()), (Kind::Panic, "rank 0 panicked: no"));
}
