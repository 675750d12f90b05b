//! Launching worlds: coordinates, threads, pinning, memory limits, nesting, and rejected calls.

use crate::support::{down, mesh, on, over, up};
use shardgrad_dist::{Error, Kind, Mesh, Process, Rank, ReduceOp, Result, World};
use shardgrad_kernels::DType;
use shardgrad_kernels::cpu::simd::LIMIT_VARIABLE;
use std::cell::Cell;
use std::env;
use std::process::Command;

#[test]
fn ranks_know_their_coordinates() {
    let places = World::run(mesh("dp=2,tp=3"), |rank| {
        let (dp, tp) = (rank.mesh().axis("dp").unwrap(), rank.mesh().axis("tp").unwrap());
        let both = rank.mesh().all_axes();
        assert_eq!(rank.mesh().group(rank.index(), both)[rank.group_rank(both)], rank.index());
        assert_eq!(rank.group_rank(both.without(dp)), rank.coordinate(tp));
        assert!(!rank.is_dry_run() && rank.backend().num_threads() >= 1);
        Ok((rank.index(), rank.coordinate(dp), rank.coordinate(tp), rank.group_rank(both)))
    })
    .unwrap();
    assert_eq!(places[4], (4, 1, 1, 4));
    assert_eq!(places.len(), 6);
}

#[test]
fn backend_has_the_requested_threads() {
    let seen = World::new(mesh("tp=2")).threads(3).launch(|rank| Ok(rank.backend().num_threads())).unwrap();
    assert_eq!(seen, [3, 3]);
}

#[cfg(target_os = "linux")]
#[test]
fn pinned_threads_have_a_core_each_and_other_threads_are_not_pinned() {
    use shardgrad_kernels::cpu::cores::{allowed, choose};
    let cores = allowed();
    let seen = World::new(Mesh::single()).threads(1).pin_threads().launch(|_| Ok(allowed())).unwrap();
    assert_eq!(seen, [choose(1)]);
    let one_each = Mesh::new(&[("dp", cores.len())]).unwrap();
    let seen = World::new(one_each.clone()).threads(1).pin_threads().launch(|_| Ok(allowed())).unwrap();
    assert_eq!(seen.concat(), choose(cores.len()));
    assert_eq!(World::new(one_each.clone()).threads(1).launch(|_| Ok(allowed())).unwrap()[0], cores);
    let error = World::new(one_each).threads(2).pin_threads().launch(|_| Ok(())).unwrap_err();
    assert_eq!(error.kind(), Kind::Config);
    let why = format!("{0} ranks of 2 threads cannot be pinned to {0} cores", cores.len());
    assert!(error.to_string().contains(&why), "{error}");
}

#[test]
fn extensions_are_one_per_type_and_rank() {
    #[derive(Default)]
    struct Count(Cell<usize>);
    World::run(mesh("tp=2"), |rank| {
        rank.extension::<Count>().0.set(rank.index() + 7);
        let again = rank.clone().extension::<Count>().clone();
        assert_eq!(again.0.get(), rank.index() + 7);
        assert_eq!(rank.extension::<Cell<u8>>().get(), 0);
        assert!(rank.clone() == *rank);
        Ok(())
    })
    .unwrap();
}

#[test]
fn memory_beyond_the_limit_is_an_error_of_the_allocating_rank() {
    let error = World::new(mesh("tp=2"))
        .memory_limit(1 << 20)
        .launch(|rank| {
            let x = up(rank, &vec![1f32; if rank.index() == 0 { 200_000 } else { 10 }]);
            let call = on(rank, "tp");
            let counts = if rank.index() == 0 { [200_000, 0] } else { [10, 0] };
            rank.all_gather(&call, &x, &counts)
        })
        .unwrap_err();
    assert_eq!(error.kind(), Kind::OutOfMemory, "{error}");
    assert!(error.to_string().contains("0 (tp=0) of mesh(tp=2)"), "{error}");
}

#[test]
fn ranks_have_a_deep_stack() {
    fn deep(n: usize) -> usize {
        let frame = std::hint::black_box([n; 64]);
        if n == 0 { frame[0] } else { deep(n - 1) + frame[63] - frame[62] }
    }
    World::run(mesh("tp=2"), |_| Ok(deep(4_000))).unwrap();
}

#[test]
fn worlds_can_be_nested_and_repeated() {
    for _ in 0..20 {
        let sums = World::run(mesh("tp=2"), |outer| {
            let inner = World::run(mesh("tp=3"), |rank| {
                let y = rank.all_reduce(&on(rank, "tp"), &up(rank, &[1f32]), 1, ReduceOp::Sum)?;
                Ok(down::<f32>(&y, 1)[0])
            })?;
            let y = outer.all_reduce(&on(outer, "tp"), &up(outer, &inner), 3, ReduceOp::Sum)?;
            Ok(down::<f32>(&y, 3))
        });
        assert_eq!(sums.unwrap(), [[6.0; 3], [6.0; 3]]);
    }
}

#[test]
fn world_of_one_rank_returns_errors_without_rank_details() {
    let fail = |_: &Rank| -> Result<()> { Error::new(Kind::Shape, "does not fit").raise() };
    let error = World::run(mesh(""), fail).unwrap_err();
    assert_eq!(error.to_string(), "does not fit");
}

#[test]
fn invalid_calls_are_rejected_with_their_line() {
    World::run(mesh("tp=2"), |rank| {
        let (call, x) = (on(rank, "tp"), up(rank, &[0f32; 4]));
        let line = format!("launch.rs:{}", call.site.line());
        let refused = [
            rank.all_reduce(&call, &x, 5, ReduceOp::Sum).unwrap_err(),
            rank.all_gather(&call, &x, &[1]).unwrap_err(),
            rank.reduce_scatter(&call, &x, &[4, 4]).unwrap_err(),
            rank.all_to_all(&call, &x, &[1, 1], &[1, 1, 1]).unwrap_err(),
            rank.broadcast(&call, Some(&x), 4, 2).unwrap_err(),
            rank.broadcast(&call, None, 4, rank.index()).unwrap_err(),
            rank.send(&call, &x, 4, 7).unwrap_err(),
            rank.recv(&call, 4, 2).unwrap_err(),
        ];
        for error in refused {
            assert_eq!(error.kind(), Kind::Collective);
            assert!(error.to_string().contains(&line), "{error}");
        }
        let truths = over(call.axes, DType::Bool);
        let error = rank.all_reduce(&truths, &x, 4, ReduceOp::Sum).unwrap_err();
        assert_eq!(error.kind(), Kind::DType);
        let any = up(rank, &[rank.index() as u8, 0]);
        assert_eq!(down::<u8>(&rank.all_reduce(&truths, &any, 2, ReduceOp::Max)?, 2), [1, 0]);
        let elsewhere = shardgrad_dist::AxisSet::one(shardgrad_dist::Axis(3));
        let error = rank.barrier(&shardgrad_dist::Call { axes: elsewhere, ..call }).unwrap_err();
        assert_eq!(error.kind(), Kind::Mesh);
        // None of these calls was issued: the group still works.
        rank.barrier(&call)
    })
    .unwrap();
}

/// In a process of its own: a test must not change the environment of others.
#[test]
fn unknown_instruction_set_is_an_error_before_ranks_start() {
    const UNKNOWN: &str = "sse9";
    if env::var_os(LIMIT_VARIABLE).is_none_or(|limit| limit != UNKNOWN) {
        let name = "launch::unknown_instruction_set_is_an_error_before_ranks_start";
        let mut process = Command::new(env::current_exe().unwrap());
        let output = process.args(["--exact", name]).env(LIMIT_VARIABLE, UNKNOWN).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let start = |_: &Rank| -> Result<()> { panic!("a rank starts") };
    let alone = Process::new(0, 1, "nowhere.invalid", 1).unwrap();
    for outcome in [World::run(mesh("dp=2"), start).map(drop), World::new(Mesh::single()).join(&alone, start)]
    {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert_eq!(error.message(), "SHARDGRAD_CPU_ISA=sse9 is not one of baseline, avx2, avx512");
        assert!(error.to_string().contains("unset SHARDGRAD_CPU_ISA"), "{error}");
    }
}
