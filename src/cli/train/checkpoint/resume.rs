//! Resuming a run: which checkpoint to resume from, and whether it belongs to the same run.

use super::save::{KEEP, MODEL_SAVED};
use super::sound_checkpoint::SoundCheckpoint;
use crate::cli::args::TrainArgs;
use crate::cli::ranks::is_rank_zero;
use crate::cli::report_unverified;
use crate::cli::train::Dataset;
use crate::metrics::PreviousMetrics;
use crate::outputs::{OutFolder, resolve_path};
use shardgrad::nn::ModelConfig;
use shardgrad::nn::checkpoint::{Checkpoints, RunState, STATE_FILE, Weights};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Key of the data fingerprint in the notes.
const DATA: &str = "data";
/// Maximum number of differing config lines in an error.
const LINES_MAX: usize = 5;

/// The checkpoint that a run resumes from.
#[derive(Debug)]
pub(crate) struct ResumePoint {
    pub(crate) dir: PathBuf,
    pub(crate) step: usize,
    /// The number of checkpoints that its run kept.
    pub(crate) keep: Option<usize>,
}

/// Returns the notes of a checkpoint: the recorded options, and a fingerprint of the data.
///
/// # Errors
/// As [`Sampler::fingerprint`](crate::data::Sampler::fingerprint).
pub(crate) fn notes(args: &TrainArgs, rows: &Dataset) -> Result<BTreeMap<String, String>> {
    let recorded = args.recorded_options(rows.rows.seq()).into_iter().flatten();
    let mut notes: BTreeMap<String, String> =
        recorded.map(|(name, value)| (name.to_string(), value)).collect();
    notes.insert(DATA.to_string(), rows.rows.fingerprint()?);
    Ok(notes)
}

/// Where a run starts.
#[derive(Debug)]
pub(crate) enum StartPoint {
    /// At the first step.
    FirstStep,
    /// After a checkpoint, with the metrics of the steps before; without any step if only the model must be written.
    Checkpoint(ResumePoint, PreviousMetrics),
    /// Nothing to do: all steps are done, and the model exists.
    Done,
}

/// Determines where the run starts. With --resume: after the newest checkpoint, or at the first step if there is none; or nothing to do after
/// the last step if the model exists, so that a scheduler can repeat one command until the run is done.
///
/// # Errors
/// `Kind::Checkpoint` if the folder of `--resume DIR` has no checkpoint, or a damaged one; `Kind::Config` with one line per difference
/// for a checkpoint of another run; `Kind::Io` if the run folder has checkpoints of another run or of later steps.
pub(crate) fn start_point(
    args: &TrainArgs,
    (config, notes): (&ModelConfig, &BTreeMap<String, String>),
    out: &OutFolder,
) -> Result<StartPoint> {
    let Some(named) = args.checkpoints.resume() else {
        return check_no_other_checkpoints(out, None, &[]).map(|()| StartPoint::FirstStep);
    };
    let is_exact = args.checkpoints.is_exact();
    let SoundCheckpoint { dir, damaged } = match named {
        Some(dir) if is_checkpoint(dir)? => {
            SoundCheckpoint::named(dir).map_err(|e| with_other_checkpoint(e, dir))?
        }
        Some(dir) => newest_sound(dir, is_exact)?.ok_or_else(|| no_checkpoint_in(dir))?,
        None => match newest_sound(&args.out, is_exact)? {
            Some(newest) => newest,
            None => {
                check_no_other_checkpoints(out, None, &[])?;
                if is_rank_zero() {
                    eprintln!("no checkpoint in {} yet: starting from scratch", args.out.display());
                }
                return Ok(StartPoint::FirstStep);
            }
        },
    };
    let RunState { step, notes: checkpoint_notes, .. } = RunState::read(&dir)?;
    check_same_run(args, (config, notes), (&dir, &checkpoint_notes))?;
    let keep = checkpoint_notes.get(KEEP).and_then(|keep| keep.parse().ok());
    let from = ResumePoint { step: step as usize, dir, keep };
    if from.step >= args.steps.steps {
        let (dir, steps) = (from.dir.display(), args.steps.steps);
        let is_done = has_model(&out.join("model"), &checkpoint_notes);
        let suffix = if is_done { "" } else { " except writing the model" };
        eprintln!("nothing left to do{suffix}: {dir} is of step {step}, and --steps is {steps}");
        if is_done {
            return Ok(StartPoint::Done);
        }
    }
    check_no_other_checkpoints(out, Some(&from), &damaged)?;
    if is_rank_zero() {
        rename_damaged(out, &damaged)?;
        report_unverified(&from.dir);
    }
    let record = from.dir.parent().unwrap_or(Path::new("")).join("metrics.jsonl");
    let earlier = PreviousMetrics::read(&record, step)?;
    if earlier.count() < step {
        eprintln!("{} has metrics of {} of the {step} earlier steps", record.display(), earlier.count());
    }
    if earlier.num_dropped() > 0 {
        let (record, lines) = (record.display(), earlier.num_dropped());
        let lines = if lines == 1 { "1 line".to_string() } else { format!("{lines} lines") };
        eprintln!("{record}: dropped {lines} of metrics: later than step {step}, or damaged");
    }
    Ok(StartPoint::Checkpoint(from, earlier))
}

/// Returns whether the model folder holds an undamaged model of this step. A checkpoint notes if that model was not saved.
fn has_model(dir: &Path, checkpoint_notes: &BTreeMap<String, String>) -> bool {
    let is_earlier = checkpoint_notes.get(MODEL_SAVED).is_some_and(|saved| saved == "false");
    let is_sound = |weights: Weights| weights.verify_share(0, 1).is_ok();
    !is_earlier && ModelConfig::read(dir).is_ok() && Weights::open(dir).is_ok_and(is_sound)
}

/// Returns whether a folder is a checkpoint, after completing a save that was killed before its last rename.
fn is_checkpoint(dir: &Path) -> Result<bool> {
    if dir.join(STATE_FILE).exists() {
        return Ok(true);
    }
    let is_done = Checkpoints::recover(dir)?;
    if is_done {
        report_completed(dir);
    }
    Ok(is_done)
}

fn report_completed(dir: &Path) {
    eprintln!("{} was complete under a temporary name after a killed save; restored", dir.display());
}

/// Returns the newest undamaged checkpoint of a folder, if it has any checkpoint.
fn newest_sound(dir: &Path, is_exact: bool) -> Result<Option<SoundCheckpoint>> {
    Checkpoints::recover_all(dir)?.iter().for_each(|path| report_completed(path));
    SoundCheckpoint::find(dir, is_exact)
}

/// Renames damaged checkpoints in the run folder, so that they do not count for --keep.
fn rename_damaged(out: &OutFolder, damaged: &[PathBuf]) -> Result<()> {
    let here = resolve_path(&out.join("x"));
    for path in damaged.iter().filter(|path| resolve_path(&path.with_file_name("x")) == here) {
        eprintln!("{} is renamed to {}", path.display(), Checkpoints::mark_damaged(path)?.display());
    }
    Ok(())
}

/// Returns the error of `--resume DIR` without a checkpoint.
fn no_checkpoint_in(dir: &Path) -> Error {
    let text = format!("no checkpoint in {}", dir.display());
    let help = "name a checkpoint or a run folder with checkpoints; --resume without DIR starts from scratch if --out has none";
    Error::new(Kind::Checkpoint, text).detail("help", help)
}

/// Adds another checkpoint to try to the error of a damaged one.
fn with_other_checkpoint(e: Error, dir: &Path) -> Error {
    let found = dir.parent().map(Checkpoints::find).and_then(Result::ok).unwrap_or_default();
    let older = found.complete.iter().rev().find(|(_, path)| path.file_name() != dir.file_name());
    match older {
        Some((_, path)) => {
            e.detail("help", format!("resume from another checkpoint: --resume {}", path.display()))
        }
        None => e,
    }
}

/// Rejects checkpoints in the run folder that belong to another run, or to later steps than the resumed one. Damaged checkpoints are ignored.
fn check_no_other_checkpoints(
    out: &OutFolder,
    from: Option<&ResumePoint>,
    damaged: &[PathBuf],
) -> Result<()> {
    let here = resolve_path(&out.join("x")).parent().map(Path::to_path_buf);
    let parent_of = |dir: &Path| dir.parent().map(Path::to_path_buf);
    // The checkpoint may be a link to one elsewhere.
    let is_in_run_folder = |from: &&ResumePoint| {
        let beside = from.dir.parent().map(|dir| resolve_path(&dir.join("x")));
        parent_of(&resolve_path(&from.dir)) == here || beside.is_some_and(|beside| parent_of(&beside) == here)
    };
    let step = from.filter(is_in_run_folder).map(|from| from.step as u64);
    let found = Checkpoints::find(&out.join(""))?;
    if let Some(path) = found.not_replaceable().next() {
        let text = format!("{} is named like a checkpoint but is not one", path.display());
        let help = "remove it, or use another folder with --out DIR";
        return Err(Error::new(Kind::Io, text).detail("help", help));
    }
    let is_later = |(other, path): &(u64, PathBuf)| {
        step.is_none_or(|step| *other > step)
            && !damaged.iter().any(|one| one.file_name() == path.file_name())
    };
    let Some((_, path)) = found.complete.into_iter().rev().find(is_later) else {
        return Ok(());
    };
    let (what, help) = match step {
        None => ("another run", "resume it with --resume, remove the checkpoints"),
        Some(_) => ("later steps", "remove it"),
    };
    let text = format!("{} is of {what} and would be mixed with the checkpoints of this run", path.display());
    let help = format!("{help}, or use another folder with --out DIR");
    Err(Error::new(Kind::Io, text).detail("help", help))
}

/// Rejects a checkpoint of another run, and reports options that changed.
fn check_same_run(
    args: &TrainArgs,
    (config, notes): (&ModelConfig, &BTreeMap<String, String>),
    (dir, checkpoint_notes): (&Path, &BTreeMap<String, String>),
) -> Result<()> {
    let recorded = |notes: &BTreeMap<String, String>, name: &str| {
        notes.get(name).map_or("not recorded".to_string(), Clone::clone)
    };
    let differs = |name: &str| {
        let (current, saved) = (recorded(notes, name), recorded(checkpoint_notes, name));
        (current != saved).then(|| format!("--{name} {current} (checkpoint: {saved})"))
    };
    let [must_match, may_change] = args
        .recorded_options(0)
        .map(|recorded| recorded.into_iter().map(|(name, _)| name).collect::<Vec<_>>());
    let [mut faults, dropped] = config_differences(dir, config)?;
    // The fingerprint depends on the sequence length, which is compared separately.
    let is_other =
        notes.get("seq") == checkpoint_notes.get("seq") && notes.get(DATA) != checkpoint_notes.get(DATA);
    faults.extend(is_other.then(|| "the data differs from that of the checkpoint".to_string()));
    faults.extend(must_match.into_iter().filter_map(differs));
    if !faults.is_empty() {
        let error = Error::new(Kind::Config, format!("{} belongs to another run", dir.display()));
        let error = faults.into_iter().fold(error, |error, fault| error.detail("differs", fault));
        let help = "repeat the model, data and options of that run with --resume; --steps, learning rate, mesh and --dtype may change";
        return Err(error.detail("help", help));
    }
    for change in may_change.into_iter().filter_map(differs).chain(dropped).filter(|_| is_rank_zero()) {
        eprintln!("resuming with a changed option: {change}");
    }
    Ok(())
}

/// Returns the differences between the config of a checkpoint and of the model: those that are errors, and those in dropout only.
fn config_differences(dir: &Path, config: &ModelConfig) -> Result<[Vec<String>; 2]> {
    let saved = ModelConfig::read(dir).map_err(|e| with_other_checkpoint(e, dir))?;
    // Written and parsed like a file, so that fields that are not in files do not differ.
    let current = ModelConfig::parse(dir, &config.to_json())?;
    let [current, saved] = [current, saved].map(|config| config.with_dtype(DType::F32));
    let plain = |config: &ModelConfig| config.clone().with_dropout(0.0).to_json();
    let faults = differing_lines(&plain(&current), &plain(&saved));
    let dropped =
        if faults.is_empty() { differing_lines(&current.to_json(), &saved.to_json()) } else { Vec::new() };
    Ok([faults, dropped])
}

/// Returns the differing lines of two configs.
fn differing_lines(current: &str, saved: &str) -> Vec<String> {
    let line = |line: &str| line.trim().trim_end_matches(',').to_string();
    let lines = current.lines().zip(saved.lines()).filter(|(current, saved)| current != saved);
    let lines =
        lines.map(|(current, saved)| format!("config.json {} (checkpoint: {})", line(current), line(saved)));
    lines.take(LINES_MAX).collect()
}
