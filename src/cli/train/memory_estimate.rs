//! Tests of the peak-memory estimate against the peak that the allocators measure.

use crate::cli::args::{Command, config};
use crate::cli::explain::{PeakMemory, StepSpec};
use crate::cli::memory::bytes_under_limit;
use crate::cli::train::{Job, launch, prepare, run_steps};
use crate::data::TokenOrder;
use crate::data::scratch::Scratch;
use shardgrad::Result;
use shardgrad::dist::Mesh;
use std::sync::{Arc, Mutex};

/// Options of the runs, mostly of preset nano: along each axis, in 16 bits, with microbatches (whose matmuls keep prepacked weights), with
/// evaluation and checkpoints between steps.
const RUNS: [&str; 19] = [
    "--preset nano --mesh dp=1 --batch 4",
    "--preset nano --mesh dp=2 --batch 8",
    "--preset nano --mesh tp=2 --batch 4",
    "--preset nano --mesh cp=2 --batch 4",
    "--preset nano --mesh cp=2 --context ring --batch 4",
    "--preset nano --mesh pp=2 --batch 8",
    "--preset nano --mesh pp=2,dp=2 --batch 8",
    "--preset nano --mesh dp=2 --batch 8 --dtype bf16",
    "--preset nano --mesh dp=1 --batch 8 --microbatches 4",
    "--preset nano --mesh dp=2 --batch 8 --microbatches 2 --dtype bf16",
    "--preset nano --mesh dp=2 --batch 4 --eval-every 1 --save-every 1",
    "--preset nano --mesh tp=4 --batch 2 --save-every 2",
    "--preset llama-nano --mesh tp=2 --batch 4",
    "--preset nano --mesh dp=2 --zero 1 --batch 8",
    "--preset nano --mesh dp=2 --zero 2 --batch 8 --microbatches 2 --dtype bf16",
    "--preset nano --mesh dp=2 --zero 3 --batch 8 --microbatches 2",
    "--preset nano --mesh dp=2,fsdp=2 --batch 8 --eval-every 1 --save-every 1",
    "--preset nano --mesh pp=2,fsdp=2 --batch 8",
    "--preset mixtral-nano --mesh ep=2 --batch 4",
];

/// Prepares a run in an empty folder.
fn job(dir: &Scratch, given: &str, limit: Option<u64>) -> (Mesh, crate::cli::ranks::Ranks, Job) {
    let (data, out) = (dir.file("text", "The quick brown fox. ".repeat(300)), dir.path("out"));
    let _ = std::fs::remove_dir_all(&out);
    let named = ["shardgrad", "train", "--data", data.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let limit = limit.map(|bytes| format!("--memory-limit={bytes}"));
    let given = given.split(' ').chain(["--steps", "2", "--threads", "1"]).chain(limit.as_deref());
    let given = if given.clone().any(|word| word == "--eval-every") {
        given.map(String::from).collect::<Vec<_>>()
    } else {
        given.chain(["--eval-every", "0"]).map(String::from).collect()
    };
    let cli =
        config::parse(named.map(String::from).into_iter().chain(given).map(Into::into).collect()).unwrap();
    let Command::Train(args) = cli.command else { panic!("train") };
    let job = prepare(&args).unwrap().unwrap();
    (args.mesh(), args.run.training_world(&args.mesh(), &args.parallelism).unwrap(), job)
}

/// Calls a function with the step specification of a job.
fn with_spec<T>(job: &Job, mesh: &Mesh, f: impl FnOnce(&StepSpec<'_>) -> Result<T>) -> T {
    let train_config = &job.spec.train_config;
    let (batch, seq, microbatches) = (train_config.batch, train_config.seq, train_config.microbatches);
    let (precision, deterministic) = (train_config.precision, train_config.deterministic);
    let (config, plan) = (&job.spec.config, &job.spec.plan);
    let token_order = TokenOrder::of_training(config, plan, mesh);
    let rank_memory_bytes = None;
    f(&StepSpec {
        config,
        plan,
        batch,
        seq,
        token_order,
        microbatches,
        precision,
        deterministic,
        rank_memory_bytes,
    })
    .unwrap()
}

#[test]
fn memory_estimate_matches_measured_peak() {
    let dir = Scratch::new();
    for given in RUNS {
        let (mesh, ranks, job) = job(&dir, given, None);
        let backends = Arc::new(Mutex::new(Vec::new()));
        let seen = backends.clone();
        let (_, failed) = launch(&ranks, &job, &move |trainer, prefetcher, is_rank_zero, job| {
            let rank = trainer.rank().world().clone();
            seen.lock().unwrap().push((rank.index(), rank.backend().clone()));
            run_steps(trainer, prefetcher, is_rank_zero, job)
        });
        assert!(failed.is_none(), "{given}: {failed:?}");
        for (rank, backend) in std::mem::take(&mut *backends.lock().unwrap()) {
            let peak = with_spec(&job, &mesh, |step| step.dry_run(&mesh, rank, 0, PeakMemory::measure));
            let estimate = (peak.buffers + peak.in_flight) as f64;
            let measured = backend.memory().peak_bytes as f64;
            let outcome = format!("{given}, rank {rank}: estimate {estimate}, measured {measured}");
            assert!(measured <= estimate && estimate <= 1.15 * measured, "{outcome}");
        }
    }
}

#[test]
fn run_fits_the_smallest_accepted_memory_limit() {
    let dir = Scratch::new();
    for given in RUNS {
        let (mesh, _, outline) = job(&dir, given, None);
        let least = with_spec(&outline, &mesh, |step| bytes_under_limit(&mesh, step, 1));
        drop(outline);
        let (_, ranks, job) = job(&dir, given, Some(least));
        let (_, failed) = launch(&ranks, &job, &run_steps);
        assert!(failed.is_none(), "{given}, {least} bytes: {failed:?}");
    }
}
