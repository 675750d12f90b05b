//! A run whose world failed loses no weights: each rank keeps what it holds of them, and the ranks of a second world save it.

use super::{Ended, Job, not_saved, save};
use crate::cli::PATIENCE;
use crate::cli::ranks::Ranks;
use shardgrad::nn::{LanguageModel, Rescued};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

/// What ranks held when their world failed, by their numbers.
#[derive(Default)]
pub(super) struct Kept(Mutex<BTreeMap<usize, Result<Rescued>>>);

/// Runs a part of a run; where it fails, in whatever way, the rank keeps its weights. It communicates nothing then: the others
/// may have gone.
pub(super) fn keeping<'t>(
    trainer: &mut Trainer<'t, LanguageModel>,
    job: &Job,
    part: impl FnOnce(&mut Trainer<'t, LanguageModel>) -> Result<Ended>,
) -> Result<Ended> {
    let done = catch_unwind(AssertUnwindSafe(|| part(trainer)));
    if !matches!(done, Ok(Ok(_))) {
        let (rank, held) = (trainer.rank().world().index(), trainer.rescue());
        job.kept.0.lock().unwrap_or_else(PoisonError::into_inner).insert(rank, held);
    }
    done.unwrap_or_else(|payload| resume_unwind(payload))
}

/// Saves what was kept, after good steps, and gives back why the world failed, with why nothing was saved.
pub(super) fn save_kept(ranks: &Ranks, job: &Job, failed: Error) -> Error {
    if ranks.are_processes() {
        // Each holds what is its own, and those that are left meet nobody any more.
        return failed;
    }
    let kept = std::mem::take(&mut *job.kept.0.lock().unwrap_or_else(PoisonError::into_inner));
    let steps = kept.values().flatten().map(Rescued::step).max().unwrap_or(0) as usize;
    // What a disk or the weights refused is refused again; a second world has no optimizer and waits longer.
    let may_go_well = matches!(failed.kind(), Kind::OutOfMemory | Kind::Timeout | Kind::PeerLost);
    if steps <= job.first() || job.saving.load(Ordering::SeqCst) && !may_go_well {
        return failed;
    }
    let parts = job.out.verify().and_then(|_| whole(kept, steps, job.num_ranks));
    match parts.and_then(|parts| save_parts(ranks, job, steps, parts)) {
        Ok(None) => failed,
        Ok(Some(refused)) => failed.detail("saved otherwise", refused.message()),
        Err(why) => not_saved(failed, &why),
    }
}

/// The parts of all ranks, if they are of one step.
fn whole(
    kept: BTreeMap<usize, Result<Rescued>>,
    steps: usize,
    num_ranks: usize,
) -> Result<Vec<Mutex<Option<Rescued>>>> {
    let lacks = |rank: usize, why: &str| {
        Error::new(Kind::PeerLost, format!("rank {rank} has no weights of step {steps}: {why}"))
    };
    if let Some(gone) = (0..num_ranks).find(|rank| !kept.contains_key(rank)) {
        return Err(lacks(gone, "it ended before the others"));
    }
    let own = |(rank, held): (usize, Result<Rescued>)| {
        let held = held.map_err(|why| lacks(rank, why.message()))?;
        match held.step() as usize {
            step if step == steps => Ok(Mutex::new(Some(held))),
            step => Err(lacks(rank, &format!("it has those of step {step}"))),
        }
    };
    kept.into_iter().map(own).collect()
}

/// Saves the parts as one model. What made ranks late before must not end this, so they wait for each other for long.
fn save_parts(
    ranks: &Ranks,
    job: &Job,
    steps: usize,
    parts: Vec<Mutex<Option<Rescued>>>,
) -> Result<Option<Error>> {
    let ended = ranks.with(|world| world.timeout(PATIENCE)).launch(|rank| {
        let part = parts[rank.index()].lock().unwrap_or_else(PoisonError::into_inner).take();
        let part = part.expect("each rank takes its own part, once");
        let model = part.model(rank, LanguageModel::new(&job.config), &job.plan)?;
        save(&model, steps, job)
    })?;
    Ok(ended.into_iter().flatten().next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{Command, config};
    use crate::cli::train::{Steps, launch, prepare, take_steps};
    use crate::data::scratch::Scratch;
    use shardgrad::nn::resume::RunState;
    use shardgrad::tensor::control::world_sum;
    use std::fs;
    use std::panic::Location;

    /// More than a rank of these runs takes.
    const MEMORY: usize = 64 << 20;

    /// The end of a run of three steps, and the weights that it saved.
    fn run(dir: &Scratch, mesh: &str, steps: &Steps) -> (Option<Error>, Option<Vec<u8>>) {
        let (data, out) = (dir.file("text", "The quick brown fox. ".repeat(60)), dir.path("out"));
        let _ = fs::remove_dir_all(&out);
        let given = ["--steps", "3", "--batch", "4", "--seq", "16", "--mesh", mesh, "--save-dtype", "f32"];
        let named = ["shardgrad", "train", "--data", data.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let cli = config::parse(named.iter().chain(&given).map(Into::into).collect()).unwrap();
        let Command::Train(args) = cli.command else { panic!("train") };
        let job = prepare(&args).unwrap().unwrap();
        let ranks = args.run.train_world(&args.mesh()).unwrap();
        let (_, failed) = launch(&ranks.with(|world| world.memory_limit(MEMORY)), &job, steps);
        (failed, fs::read(out.join("model/model.safetensors")).ok())
    }

    #[test]
    fn what_fails_on_one_rank_after_good_steps_loses_no_weights() {
        let dir = Scratch::new();
        for mesh in ["dp=1", "dp=2", "tp=2", "pp=2", "dp=2,pp=2"] {
            let (failed, whole) = run(&dir, mesh, &take_steps);
            assert!(failed.is_none() && whole.is_some(), "{mesh}: {failed:?}");
            // In an op, in an answer, in a panic: the others wait for it in a collective.
            for way in 0..3 {
                let (failed, saved) = run(&dir, mesh, &move |trainer, ahead, leads, job| {
                    take_steps(trainer, ahead, leads, job)?;
                    let world = trainer.rank().world().clone();
                    if world.index() + 1 < world.mesh().num_ranks() {
                        world_sum(&world, &[0.0], Location::caller())?;
                    }
                    let error = Error::new(Kind::OutOfMemory, "no room for a measurement");
                    match way {
                        0 => error.raise(),
                        1 => Err(error),
                        _ => panic!("no room for a measurement"),
                    }
                });
                let failed = failed.unwrap();
                assert!(failed.message().contains("no room for a measurement"), "{mesh}: {failed}");
                assert!(saved == whole, "{mesh}, way {way}: {failed}");
            }
        }
    }

    #[test]
    fn a_save_for_which_there_is_no_memory_is_made_where_there_is() {
        let dir = Scratch::new();
        for mesh in ["dp=1", "tp=2", "pp=2"] {
            let (failed, whole) = run(&dir, mesh, &take_steps);
            assert!(failed.is_none() && whole.is_some(), "{mesh}: {failed:?}");
            let (failed, saved) = run(&dir, mesh, &|trainer, ahead, leads, job| {
                let ended = take_steps(trainer, ahead, leads, job)?;
                let rank = trainer.rank().world();
                for bytes in [1 << 20, 1 << 14, 1 << 10, 8] {
                    while let Ok(filled) = rank.backend().alloc(bytes) {
                        std::mem::forget(filled);
                    }
                }
                Ok(ended)
            });
            assert_eq!(failed.unwrap().kind(), Kind::OutOfMemory, "{mesh}");
            assert!(saved == whole, "{mesh}");
        }
    }

    #[test]
    fn weights_of_several_steps_are_not_mixed() {
        let dir = Scratch::new();
        let (failed, saved) = run(&dir, "dp=2", &|trainer, _, leads, _| {
            trainer.step(&[])?;
            if !leads {
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
