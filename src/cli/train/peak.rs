//! The estimate of peak memory before a run, against what the allocators of its ranks measure.

use crate::cli::args::{Command, config};
use crate::cli::explain::{Outline, Peak};
use crate::cli::memory::need_under;
use crate::cli::train::{Job, launch, prepare, take_steps};
use crate::data::scratch::Scratch;
use shardgrad::Result;
use shardgrad::dist::Mesh;
use std::sync::{Arc, Mutex};

/// Runs of the tiny preset, but for the last ones: along each axis, in 16 bits, with microbatches, whose products keep prepacked weights,
/// with measurements and checkpoints between steps.
const RUNS: [&str; 13] = [
    "--mesh dp=1 --batch 4",
    "--mesh dp=2 --batch 8",
    "--mesh tp=2 --batch 4",
    "--mesh cp=2 --batch 4",
    "--mesh pp=2 --batch 8",
    "--mesh pp=2,dp=2 --batch 8",
    "--mesh dp=2 --batch 8 --dtype bf16",
    "--mesh dp=1 --batch 8 --microbatches 4",
    "--mesh dp=2 --batch 8 --microbatches 2 --dtype bf16",
    "--mesh dp=2 --batch 4 --eval-every 1 --save-every 1",
    "--mesh tp=4 --batch 2 --save-every 2",
    "--preset llama-tiny --mesh tp=2 --batch 4",
    "--preset mixtral-tiny --mesh ep=2 --batch 4",
];

/// A run in a folder of its own.
fn job(dir: &Scratch, given: &str, limit: Option<u64>) -> (Mesh, crate::cli::ranks::Ranks, Job) {
    let (data, out) = (dir.file("text", "The quick brown fox. ".repeat(300)), dir.path("out"));
    let _ = std::fs::remove_dir_all(&out);
    let named = ["shardgrad", "train", "--data", data.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let limit = limit.map(|bytes| format!("--memory-limit={bytes}"));
    let given = given.split(' ').chain(["--steps", "3", "--threads", "1"]).chain(limit.as_deref());
    let given = if given.clone().any(|word| word == "--eval-every") {
        given.map(String::from).collect::<Vec<_>>()
    } else {
        given.chain(["--eval-every", "0"]).map(String::from).collect()
    };
    let cli =
        config::parse(named.map(String::from).into_iter().chain(given).map(Into::into).collect()).unwrap();
    let Command::Train(args) = cli.command else { panic!("train") };
    let job = prepare(&args).unwrap().unwrap();
    (args.mesh(), args.run.train_world(&args.mesh()).unwrap(), job)
}

/// What a dry run tells of the steps of a job.
fn dry<T>(job: &Job, told: impl FnOnce(&Outline<'_>) -> Result<T>) -> T {
    let recipe = &job.recipe;
    let (batch, seq, microbatches) = (recipe.batch, recipe.seq, recipe.microbatches);
    let precision = recipe.precision;
    told(&Outline { config: &job.config, plan: &job.plan, batch, seq, microbatches, precision }).unwrap()
}

#[test]
fn the_estimate_is_the_peak_that_allocators_measure() {
    let dir = Scratch::new();
    for given in RUNS {
        let (mesh, ranks, job) = job(&dir, given, None);
        let backends = Arc::new(Mutex::new(Vec::new()));
        let seen = backends.clone();
        let (_, failed) = launch(&ranks, &job, &move |trainer, ahead, leads, job| {
            let rank = trainer.rank().world().clone();
            seen.lock().unwrap().push((rank.index(), rank.backend().clone()));
            take_steps(trainer, ahead, leads, job)
        });
        assert!(failed.is_none(), "{given}: {failed:?}");
        for (rank, backend) in std::mem::take(&mut *backends.lock().unwrap()) {
            let peak = dry(&job, |step| step.limited(&mesh, rank, 0, Peak::of));
            let estimate = (peak.buffers + peak.in_flight) as f64;
            let measured = backend.memory().peak_bytes as f64;
            let told = format!("{given}, rank {rank}: estimate {estimate}, measured {measured}");
            assert!(measured <= estimate && estimate <= 1.15 * measured, "{told}");
        }
    }
}

#[test]
fn a_run_ends_under_the_least_limit_that_the_check_accepts() {
    let dir = Scratch::new();
    for given in RUNS {
        let (mesh, _, outline) = job(&dir, given, None);
        let least = dry(&outline, |step| need_under(&mesh, step, 1));
        drop(outline);
        let (_, ranks, job) = job(&dir, given, Some(least));
        let (_, failed) = launch(&ranks, &job, &take_steps);
        assert!(failed.is_none(), "{given}, {least} bytes: {failed:?}");
    }
}
