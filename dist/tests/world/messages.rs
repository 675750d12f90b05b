//! Sends and receives between two ranks, and their errors.

use crate::support::{RANK_KINDS, RankKind, down, mesh, on, over, up};
use shardgrad_dist::{Call, Error, Kind, Phase, Rank, Result, World};
use shardgrad_kernels::DType;
use std::time::{Duration, Instant};

/// Runs a faulty program on threads and on processes, asserts that both fail alike and soon, and returns the error of processes.
fn fault(text: &str, program: impl Fn(&Rank) -> Result<()> + Sync) -> Error {
    let [threads, processes] = RANK_KINDS.map(|kind| {
        let start = Instant::now();
        let error = kind.run(text, &program).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(3), "{kind:?}: released after {:?}", start.elapsed());
        error
    });
    assert_eq!(threads.kind(), processes.kind(), "{processes}");
    processes
}

fn contains(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    assert!(parts.iter().all(|p| text.contains(p)), "{parts:?} in:\n{text}");
}

#[test]
fn recv_without_a_send_is_an_error() {
    let error = fault("pp=2", |rank| {
        if rank.index() == 1 {
            rank.recv(&on(rank, "pp"), 4, 0)?;
        }
        Ok(())
    });
    assert_eq!(error.kind(), Kind::PeerLost);
    contains(
        &error,
        &["rank 0 left (returned without a call) while rank 1 waits in #1 recv f32[4] from rank 0 over pp"],
    );
}

#[test]
fn two_ranks_that_receive_first_are_deadlocked() {
    let error = fault("pp=2", |rank| {
        let (call, other) = (on(rank, "pp"), 1 - rank.index());
        rank.recv(&call, 4, other)?;
        rank.send(&call, &up(rank, &[0f32; 4]), 4, other)
    });
    assert_eq!(error.kind(), Kind::Collective);
    contains(&error, &["deadlock: ", "#1 recv f32[4] from rank 0", "#1 recv f32[4] from rank 1"]);
}

#[test]
fn recv_from_itself_without_a_send_is_a_deadlock() {
    let error = fault("pp=1", |rank| rank.recv(&on(rank, "pp"), 4, 0).map(|_| ()));
    contains(&error, &["rank 0 waits for itself in #1 recv f32[4] from rank 0 over pp"]);
    World::run(mesh("pp=2"), |rank| {
        let call = on(rank, "");
        rank.send(&call, &up(rank, &[7f32]), 1, 0)?;
        assert_eq!(down::<f32>(&rank.recv(&call, 1, 0)?, 1), [7.0]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn message_that_is_never_received_is_an_error() {
    let error = fault("pp=2", |rank| {
        if rank.index() == 0 {
            rank.send(&on(rank, "pp"), &up(rank, &[0f32; 4]), 4, 1)?;
        }
        rank.barrier(&on(rank, "pp"))
    });
    assert_eq!(error.kind(), Kind::Collective);
    contains(
        &error,
        &["rank 0 called #1 send f32[4] to rank 1 over pp at", "rank 1 returned without receiving it"],
    );
}

#[test]
fn message_that_does_not_match_its_recv_is_an_error() {
    let exchange = |send: fn(&Rank) -> Call<'static>, numel: usize| {
        fault("pp=2", move |rank| {
            if rank.index() == 0 {
                rank.send(&send(rank), &up(rank, &[0f32; 8]), numel, 1)
            } else {
                rank.recv(&Call { path: "mb0", ..on(rank, "pp") }, 4, 0).map(|_| ())
            }
        })
    };
    let error = exchange(|rank| on(rank, "pp"), 5);
    assert_eq!(error.kind(), Kind::Collective);
    contains(
        &error,
        &["rank 0 called #1 send f32[5] to rank 1", "rank 1 called #1 recv f32[4] from rank 0", "counts"],
    );
    let error = exchange(|rank| over(on(rank, "pp").axes, DType::I64), 4);
    contains(&error, &["send i64[4]", "differs    dtype"]);
    let error = exchange(|rank| Call { phase: Phase::Backward, ..on(rank, "pp") }, 4);
    contains(&error, &["differs    phase"]);
    let error = exchange(|rank| Call { path: "mb1", ..on(rank, "pp") }, 4);
    contains(&error, &["(mb1)", "(mb0)", "differs    path"]);
}

#[test]
fn many_messages_can_be_pending() {
    RANK_KINDS.into_iter().for_each(many_messages);
}

fn many_messages(kind: RankKind) {
    kind.run("dp=2,pp=3", |rank| {
        let (call, at) = (on(rank, "pp"), rank.group_rank(on(rank, "pp").axes));
        for i in 0..50 {
            if at < 2 {
                rank.send(&call, &up(rank, &[i as f32, rank.index() as f32]), 2, at + 1)?;
            }
        }
        for i in 0..50 {
            if at > 0 {
                assert_eq!(
                    down::<f32>(&rank.recv(&call, 2, at - 1)?, 2),
                    [i as f32, rank.index() as f32 - 1.0]
                );
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn message_of_a_returned_rank_can_be_received() {
    let late = |rank: &Rank| {
        if rank.index() == 0 {
            return rank.send(&on(rank, "pp"), &up(rank, &[3f32]), 1, 1);
        }
        std::thread::sleep(Duration::from_millis(40));
        assert_eq!(down::<f32>(&rank.recv(&on(rank, "pp"), 1, 0)?, 1), [3.0]);
        Ok(())
    };
    RANK_KINDS.into_iter().for_each(|kind| drop(kind.run("pp=2", late).unwrap()));
}
