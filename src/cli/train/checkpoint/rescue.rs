//! Saving the weights of a failed run: each rank keeps its local weights, and the ranks of a second world save them.

use crate::cli::DISK_TIMEOUT;
use crate::cli::ranks::Ranks;
use crate::cli::train::{Job, not_saved, save};
use shardgrad::nn::{LanguageModel, WeightSnapshot};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Local weights of the ranks when their world failed, by rank.
#[derive(Default)]
pub(crate) struct RescuedWeights(Mutex<BTreeMap<usize, Result<WeightSnapshot>>>);

/// Runs `part`; if it returns an error or panics, keeps the weights of this rank. Does not communicate then, because other ranks may be gone.
pub(crate) fn rescue_on_failure<'t, T>(
    trainer: &mut Trainer<'t, LanguageModel>,
    job: &Job,
    part: impl FnOnce(&mut Trainer<'t, LanguageModel>) -> Result<T>,
) -> Result<T> {
    let done = catch_unwind(AssertUnwindSafe(|| part(trainer)));
    if !matches!(done, Ok(Ok(_))) {
        let (rank, snapshot) = (trainer.rank().world().index(), trainer.rescue());
        job.state.rescued.0.lock().unwrap_or_else(PoisonError::into_inner).insert(rank, snapshot);
    }
    done.unwrap_or_else(|payload| resume_unwind(payload))
}

/// Saves the rescued weights if at least one step was completed. Returns the error of the world, extended by why nothing was saved.
pub(crate) fn save_rescued(ranks: &Ranks, job: &Job, failed: Error) -> Error {
    // Processes can connect again only if all are left: a rank that ran out of memory is, a killed rank is not.
    if ranks.are_processes() && failed.cause_kind() != Kind::OutOfMemory {
        return failed;
    }
    let here = ranks.local_ranks(job.spec.num_ranks);
    let mut rescued = job.state.rescued.0.lock().unwrap_or_else(PoisonError::into_inner);
    let snapshots: BTreeMap<_, _> =
        here.clone().filter_map(|rank| Some((rank, rescued.remove(&rank)?))).collect();
    drop(rescued);
    let steps = snapshots.values().flatten().map(WeightSnapshot::step).max().unwrap_or(0) as usize;
    // A save that failed by I/O or non-finite weights would fail again; a second world has more memory (no optimizer) and waits longer.
    let may_succeed = matches!(failed.kind(), Kind::OutOfMemory | Kind::Timeout | Kind::PeerLost);
    if steps <= job.spec.num_steps_before() || job.state.saving.load(Ordering::SeqCst) && !may_succeed {
        return failed;
    }
    let parts = job.state.out.verify().and_then(|_| complete_snapshots(snapshots, steps, here));
    match parts.and_then(|parts| save_parts(ranks, job, steps, parts)) {
        Ok(None) => failed,
        Ok(Some(refused)) => failed.detail("saved in another dtype", refused.message()),
        Err(why) => not_saved(failed, &why),
    }
}

/// Snapshots of the ranks of this process, by rank; each rank takes its own.
type Snapshots = BTreeMap<usize, Mutex<Option<WeightSnapshot>>>;

/// Returns the snapshots of all ranks of this process, if all are of the same step.
fn complete_snapshots(
    snapshots: BTreeMap<usize, Result<WeightSnapshot>>,
    steps: usize,
    here: Range<usize>,
) -> Result<Snapshots> {
    let missing_weights = |rank: usize, why: &str| {
        Error::new(Kind::PeerLost, format!("rank {rank} has no weights of step {steps}: {why}"))
    };
    if let Some(missing) = here.into_iter().find(|rank| !snapshots.contains_key(rank)) {
        return Err(missing_weights(missing, "it ended before the others"));
    }
    let own = |(rank, snapshot): (usize, Result<WeightSnapshot>)| {
        let snapshot = snapshot.map_err(|why| missing_weights(rank, why.message()))?;
        match snapshot.step() as usize {
            step if step == steps => Ok((rank, Mutex::new(Some(snapshot)))),
            step => Err(missing_weights(rank, &format!("it has those of step {step}"))),
        }
    };
    snapshots.into_iter().map(own).collect()
}

/// How long a process waits for the others to connect again.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Saves the snapshots of all ranks as one model, in a new world, in which ranks wait long for the disk.
fn save_parts(ranks: &Ranks, job: &Job, steps: usize, parts: Snapshots) -> Result<Option<Error>> {
    let step = ("step".to_string(), steps.to_string());
    let world = |world: World| world.timeout(RECONNECT_TIMEOUT).check_consistent("rescued weights", [step]);
    let outcome = ranks.with(world).reconnected().launch(|rank| {
        let part = parts[&rank.index()].lock().unwrap_or_else(PoisonError::into_inner).take();
        let part = part.expect("each rank takes its own part, once");
        let model = part.model(rank, LanguageModel::new(&job.spec.config), &job.spec.plan)?;
        rank.with_timeout(DISK_TIMEOUT, || save(&model, steps, job))
    })?;
    Ok(outcome.into_iter().flatten().next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{Command, config};
    use crate::cli::train::{Steps, StepsOutcome, launch, prepare, run_steps};
    use crate::data::scratch::Scratch;
    use crate::train::Prefetcher;
    use shardgrad::dist::Process;
    use shardgrad::nn::checkpoint::RunState;
    use shardgrad::tensor::training_step::control::world_sum;
    use std::fs;
    use std::net::TcpListener;
    use std::panic::Location;

    /// Memory limit of a rank; more than these runs need.
    const MEMORY: usize = 64 << 20;

    /// Returns three steps and their ranks, without an output of earlier ones.
    fn prepared(dir: &Scratch, mesh: &str) -> (Job, Ranks) {
        let (data, out) = (dir.file("text", "The quick brown fox. ".repeat(60)), dir.path("out"));
        let _ = fs::remove_dir_all(&out);
        let given = ["--steps", "3", "--batch", "4", "--seq", "16", "--mesh", mesh, "--save-dtype", "f32"];
        let named = [
            "shardgrad",
            "train",
            "--preset",
            "nano",
            "--data",
            data.to_str().unwrap(),
            "--out",
            out.to_str().unwrap(),
        ];
        let cli = config::parse(named.iter().chain(&given).map(Into::into).collect()).unwrap();
        let Command::Train(args) = cli.command else { panic!("train") };
        let ranks = args.run.training_world(&args.mesh(), &args.parallelism).unwrap();
        (prepare(&args).unwrap().unwrap(), ranks)
    }

    fn saved_weights(dir: &Scratch) -> Option<Vec<u8>> {
        fs::read(dir.path("out").join("model/model.safetensors")).ok()
    }

    /// Runs three steps; returns the error and the saved weights.
    fn run(dir: &Scratch, mesh: &str, steps: &Steps) -> (Option<Error>, Option<Vec<u8>>) {
        let (job, ranks) = prepared(dir, mesh);
        let (_, failed) = launch(&ranks.with(|world| world.memory_limit(MEMORY)), &job, steps);
        (failed, saved_weights(dir))
    }

    #[test]
    fn failure_on_one_rank_after_good_steps_saves_the_weights() {
        let dir = Scratch::new();
        for mesh in ["dp=1", "dp=2", "tp=2", "pp=2", "dp=2,pp=2"] {
            let (failed, whole) = run(&dir, mesh, &run_steps);
            assert!(failed.is_none() && whole.is_some(), "{mesh}: {failed:?}");
            // An error raised in an op, a returned error, a panic; the other ranks wait in a collective.
            for way in 0..3 {
                let (failed, saved) = run(&dir, mesh, &move |trainer, prefetcher, is_rank_zero, job| {
                    run_steps(trainer, prefetcher, is_rank_zero, job)?;
                    let world = trainer.rank().world().clone();
                    if world.index() + 1 < world.mesh().num_ranks() {
                        world_sum(&world, &[0.0], Location::caller())?;
                    }
                    let error = Error::new(Kind::OutOfMemory, "no memory for an evaluation");
                    match way {
                        0 => error.raise(),
                        1 => Err(error),
                        _ => panic!("no memory for an evaluation"),
                    }
                });
                let failed = failed.unwrap();
                assert!(failed.message().contains("no memory for an evaluation"), "{mesh}: {failed}");
                assert!(saved == whole, "{mesh}, failure {way}: {failed}");
            }
        }
    }

    /// Runs three steps on ranks that connect as processes do; rank 1 then fails. Returns the errors, and the saved weights.
    fn run_connected(dir: &Scratch, mesh: &str, kind: Kind) -> (Vec<Error>, Option<Vec<u8>>) {
        let (job, world) = prepared(dir, mesh);
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let failing = move |trainer: &mut Trainer<'_, LanguageModel>,
                            prefetcher: &Prefetcher<'_>,
                            is_rank_zero: bool,
                            job: &Job| {
            run_steps(trainer, prefetcher, is_rank_zero, job)?;
            match is_rank_zero {
                true => world_sum(trainer.rank().world(), &[0.0], Location::caller())
                    .map(|_| StepsOutcome::default()),
                false => Err(Error::new(kind, "no memory for an evaluation")),
            }
        };
        let failed = std::thread::scope(|scope| {
            let start = |rank: usize| {
                let ranks = world.with_process(Process::new(rank, 2, "127.0.0.1", port).unwrap());
                let (job, failing) = (&job, &failing);
                scope.spawn(move || launch(&ranks, job, failing).1.unwrap())
            };
            [0, 1].map(start).map(|rank| rank.join().unwrap()).to_vec()
        });
        (failed, saved_weights(dir))
    }

    #[test]
    fn processes_connect_again_to_save_the_weights_after_out_of_memory() {
        let dir = Scratch::new();
        for mesh in ["dp=2", "tp=2", "pp=2"] {
            let (failed, whole) = run(&dir, mesh, &run_steps);
            assert!(failed.is_none() && whole.is_some(), "{mesh}: {failed:?}");
            let (failed, saved) = run_connected(&dir, mesh, Kind::OutOfMemory);
            for error in &failed {
                assert!(error.message().contains("no memory for an evaluation"), "{mesh}: {error}");
                assert!(error.details().iter().all(|(label, _)| *label != "not saved"), "{mesh}: {error}");
            }
            assert!(saved == whole, "{mesh}: {failed:?}");
        }
        // After another error a process may be gone, so the processes do not reconnect.
        let (_, saved) = run_connected(&dir, "dp=2", Kind::Data);
        assert_eq!(saved, None);
    }

    #[test]
    fn weights_are_saved_after_out_of_memory_in_a_save() {
        let dir = Scratch::new();
        for mesh in ["dp=1", "tp=2", "pp=2"] {
            let (failed, whole) = run(&dir, mesh, &run_steps);
            assert!(failed.is_none() && whole.is_some(), "{mesh}: {failed:?}");
            let (failed, saved) = run(&dir, mesh, &|trainer, prefetcher, is_rank_zero, job| {
                let outcome = run_steps(trainer, prefetcher, is_rank_zero, job)?;
                let rank = trainer.rank().world();
                for bytes in [1 << 20, 1 << 14, 1 << 10, 8] {
                    while let Ok(filled) = rank.backend().alloc(bytes) {
                        std::mem::forget(filled);
                    }
                }
                Ok(outcome)
            });
            assert_eq!(failed.unwrap().kind(), Kind::OutOfMemory, "{mesh}");
            assert!(saved == whole, "{mesh}");
        }
    }

    #[test]
    fn weights_of_different_steps_are_not_mixed() {
        let dir = Scratch::new();
        let (failed, saved) = run(&dir, "dp=2", &|trainer, _, is_rank_zero, _| {
            trainer.step()?;
            if !is_rank_zero {
                trainer.set_state(&RunState { step: 2, ..trainer.state() });
            }
            Err(Error::new(Kind::OutOfMemory, "no room"))
        });
        let failed = failed.unwrap().to_string();
        assert!(failed.contains("rank 0 has no weights of step 2: it has those of step 1"), "{failed}");
        assert_eq!(saved, None);
        let (failed, saved) = run(&dir, "dp=2", &|_, _, _, _| Err(Error::new(Kind::OutOfMemory, "no room")));
        assert!(failed.unwrap().to_string().starts_with("no room") && saved.is_none(), "nothing was trained");
    }
}
