//! A run that goes on: which checkpoint it goes on from, and whether it is the same run.

use super::Rows;
use super::checkpoints::{KEEP, MODEL_SAVED};
use super::newest::Newest;
use crate::cli::args::TrainArgs;
use crate::cli::ranks::leads;
use crate::cli::report_unverified;
use crate::metrics::Earlier;
use crate::outputs::{OutFolder, place};
use shardgrad::nn::ModelConfig;
use shardgrad::nn::hf::Weights;
use shardgrad::nn::resume::{Checkpoints, RunState, STATE_FILE};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The name of the fingerprint of the data among the notes.
const DATA: &str = "data";
/// No more lines of a config than these are told that differ.
const LINES_MAX: usize = 5;

/// What a run goes on from.
#[derive(Debug)]
pub(super) struct From {
    pub(super) dir: PathBuf,
    pub(super) step: usize,
    /// How many checkpoints its run kept.
    pub(super) keep: Option<usize>,
}

/// What a checkpoint notes of a run, by the names of options: by what another is told apart, and what a run that goes on is told
/// that it changes.
///
/// # Errors
/// As [`Sampler::fingerprint`](crate::data::Sampler::fingerprint).
pub(super) fn notes(args: &TrainArgs, rows: &Rows) -> Result<BTreeMap<String, String>> {
    let told = args.told(rows.rows.seq()).into_iter().flatten();
    let mut notes: BTreeMap<String, String> = told.map(|(name, value)| (name.to_string(), value)).collect();
    notes.insert(DATA.to_string(), rows.rows.fingerprint()?);
    Ok(notes)
}

/// Where a run begins.
#[derive(Debug)]
pub(super) enum Begin {
    /// With its first step.
    Anew,
    /// Behind a checkpoint, with the record of the steps before: with no step at all where only the model is to be written.
    After(From, Earlier),
    /// Nowhere: all of its steps were taken, and there is a model.
    Over,
}

/// Where the run begins: with --resume behind a checkpoint, unless there is none yet, and not at all behind the last step, if the
/// model is there, so that one command may be given again and again until a run is done.
///
/// # Errors
/// `Kind::Checkpoint` if there is no checkpoint in a folder that is named, or one that cannot be read; `Kind::Config`, with one line
/// for each difference, for one of another run; `Kind::Io` for checkpoints of another run, or of later steps, in the folder of this
/// one.
pub(super) fn begin(
    args: &TrainArgs,
    (config, notes): (&ModelConfig, &BTreeMap<String, String>),
    out: &OutFolder,
) -> Result<Begin> {
    let Some(named) = args.checkpoints.resume() else {
        return check_free(out, None, &[]).map(|()| Begin::Anew);
    };
    let is_exact = args.checkpoints.is_exact();
    let Newest { dir, damaged } = match named {
        Some(dir) if is_one(dir)? => Newest::named(dir).map_err(|e| with_older(e, dir))?,
        Some(dir) => newest(dir, is_exact)?.ok_or_else(|| none_in(dir))?,
        None => match newest(&args.out, is_exact)? {
            Some(newest) => newest,
            None => {
                check_free(out, None, &[])?;
                if leads() {
                    eprintln!("there is no checkpoint in {} yet: the run begins anew", args.out.display());
                }
                return Ok(Begin::Anew);
            }
        },
    };
    let RunState { step, notes: of_run, .. } = RunState::read(&dir)?;
    check_same(args, (config, notes), (&dir, &of_run))?;
    let keep = of_run.get(KEEP).and_then(|keep| keep.parse().ok());
    let from = From { step: step as usize, dir, keep };
    if from.step >= args.steps.steps {
        let (dir, steps) = (from.dir.display(), args.steps.steps);
        let is_done = has_model(&out.join("model"), &of_run);
        let but = if is_done { "" } else { " but to write the model" };
        eprintln!("nothing is left to do{but}: {dir} is of step {step}, and --steps is {steps}");
        if is_done {
            return Ok(Begin::Over);
        }
    }
    check_free(out, Some(&from), &damaged)?;
    if leads() {
        set_aside(out, &damaged)?;
        report_unverified(&from.dir);
    }
    let record = from.dir.parent().unwrap_or(Path::new("")).join("metrics.jsonl");
    let earlier = Earlier::read(&record, step)?;
    if earlier.count() < step {
        eprintln!("{} has {} of the {step} steps before", record.display(), earlier.count());
    }
    if earlier.left_out() > 0 {
        let (record, lines) = (record.display(), earlier.left_out());
        let lines = if lines == 1 { "1 line".to_string() } else { format!("{lines} lines") };
        eprintln!("{record}: dropped {lines} of metrics: later than step {step}, or damaged");
    }
    Ok(Begin::After(from, earlier))
}

/// Whether there is a model, unless a checkpoint notes that the one of its step was not saved: what is there is an earlier one.
fn has_model(dir: &Path, of_run: &BTreeMap<String, String>) -> bool {
    let is_earlier = of_run.get(MODEL_SAVED).is_some_and(|saved| saved == "false");
    let is_sound = |weights: Weights| weights.verify_share(0, 1).is_ok();
    !is_earlier && ModelConfig::read(dir).is_ok() && Weights::open(dir).is_ok_and(is_sound)
}

/// Whether a folder is a checkpoint, or is to be one that lies whole under another name, and is one now.
fn is_one(dir: &Path) -> Result<bool> {
    if dir.join(STATE_FILE).exists() {
        return Ok(true);
    }
    let is_done = Checkpoints::complete(dir)?;
    if is_done {
        tell_completed(dir);
    }
    Ok(is_done)
}

fn tell_completed(dir: &Path) {
    eprintln!("{} lay whole under another name, as a killed save leaves it", dir.display());
}

/// The newest sound checkpoint of a folder, if it holds any checkpoint.
fn newest(dir: &Path, is_exact: bool) -> Result<Option<Newest>> {
    Checkpoints::complete_all(dir)?.iter().for_each(|path| tell_completed(path));
    Newest::find(dir, is_exact)
}

/// Renames damaged checkpoints in the folder of the run, so that they do not count among those that stay.
fn set_aside(out: &OutFolder, damaged: &[PathBuf]) -> Result<()> {
    let here = place(&out.join("x"));
    for path in damaged.iter().filter(|path| place(&path.with_file_name("x")) == here) {
        eprintln!("{} is renamed to {}", path.display(), Checkpoints::set_aside(path)?.display());
    }
    Ok(())
}

/// For a folder that is named and holds no checkpoint.
fn none_in(dir: &Path) -> Error {
    let text = format!("there is no checkpoint in {}", dir.display());
    let help =
        "name a checkpoint, or a folder with some; --resume alone begins anew where --out has none yet";
    Error::new(Kind::Checkpoint, text).detail("help", help)
}

/// With what to do about a checkpoint that cannot be read.
fn with_older(e: Error, dir: &Path) -> Error {
    let found = dir.parent().map(Checkpoints::find).and_then(Result::ok).unwrap_or_default();
    let older = found.whole.iter().rev().find(|(_, path)| path.file_name() != dir.file_name());
    match older {
        Some((_, path)) => {
            e.detail("help", format!("resume from another checkpoint: --resume {}", path.display()))
        }
        None => e,
    }
}

/// Refuses checkpoints in the folder of a run that are of another one, or of later steps than that from which it goes on.
/// Those that are damaged count as none.
fn check_free(out: &OutFolder, from: Option<&From>, damaged: &[PathBuf]) -> Result<()> {
    let here = place(&out.join("x")).parent().map(Path::to_path_buf);
    let above = |dir: &Path| dir.parent().map(Path::to_path_buf);
    // The checkpoint may be a link to one elsewhere.
    let goes_on_here = |from: &&From| {
        let beside = from.dir.parent().map(|dir| place(&dir.join("x")));
        above(&place(&from.dir)) == here || beside.is_some_and(|beside| above(&beside) == here)
    };
    let step = from.filter(goes_on_here).map(|from| from.step as u64);
    let found = Checkpoints::find(&out.join(""))?;
    if let Some(path) = found.in_the_way().next() {
        let text = format!("{} has the name of a checkpoint and is none", path.display());
        let help = "remove it, or give another folder with --out DIR";
        return Err(Error::new(Kind::Io, text).detail("help", help));
    }
    let is_later = |(other, path): &(u64, PathBuf)| {
        step.is_none_or(|step| *other > step)
            && !damaged.iter().any(|one| one.file_name() == path.file_name())
    };
    let Some((_, path)) = found.whole.into_iter().rev().find(is_later) else {
        return Ok(());
    };
    let (what, help) = match step {
        None => ("another run", "go on from it with --resume, remove the checkpoints"),
        Some(_) => ("later steps", "remove it"),
    };
    let text = format!("{} is of {what}, and would be mixed with those of this one", path.display());
    let help = format!("{help}, or give another folder with --out DIR");
    Err(Error::new(Kind::Io, text).detail("help", help))
}

/// Refuses a checkpoint of another run, and tells what is changed on purpose.
fn check_same(
    args: &TrainArgs,
    (config, notes): (&ModelConfig, &BTreeMap<String, String>),
    (dir, of_run): (&Path, &BTreeMap<String, String>),
) -> Result<()> {
    let told = |notes: &BTreeMap<String, String>, name: &str| {
        notes.get(name).map_or("not recorded".to_string(), Clone::clone)
    };
    let differs = |name: &str| {
        let (here, there) = (told(notes, name), told(of_run, name));
        (here != there).then(|| format!("--{name} {here} (checkpoint: {there})"))
    };
    let [fixed, free] = args.told(0).map(|told| told.into_iter().map(|(name, _)| name).collect::<Vec<_>>());
    let [mut faults, dropped] = unlike(dir, config)?;
    // Windows of another length are others, whatever the data.
    let is_other = notes.get("seq") == of_run.get("seq") && notes.get(DATA) != of_run.get(DATA);
    faults.extend(is_other.then(|| "the data are not those of the checkpoint".to_string()));
    faults.extend(fixed.into_iter().filter_map(differs));
    if !faults.is_empty() {
        let error = Error::new(Kind::Config, format!("{} is of another run", dir.display()));
        let error = faults.into_iter().fold(error, |error, fault| error.detail("unlike", fault));
        let help = "give the model, data and options of that run with --resume; steps, rates, mesh and --dtype may change";
        return Err(error.detail("help", help));
    }
    for change in free.into_iter().filter_map(differs).chain(dropped).filter(|_| leads()) {
        eprintln!("resuming with a changed option: {change}");
    }
    Ok(())
}

/// In what the config of a checkpoint is not that of the model: but for dropout, and in that alone.
fn unlike(dir: &Path, config: &ModelConfig) -> Result<[Vec<String>; 2]> {
    let there = ModelConfig::read(dir).map_err(|e| with_older(e, dir))?;
    // Written and read too, so that fields that no file holds tell nothing.
    let here = ModelConfig::parse(dir, &config.to_json())?;
    let [here, there] = [here, there].map(|config| config.with_dtype(DType::F32));
    let plain = |config: &ModelConfig| config.clone().with_dropout(0.0).to_json();
    let faults = differing(&plain(&here), &plain(&there));
    let dropped = if faults.is_empty() { differing(&here.to_json(), &there.to_json()) } else { Vec::new() };
    Ok([faults, dropped])
}

/// The lines of two configs that differ.
fn differing(here: &str, there: &str) -> Vec<String> {
    let line = |line: &str| line.trim().trim_end_matches(',').to_string();
    let lines = here.lines().zip(there.lines()).filter(|(here, there)| here != there);
    let lines =
        lines.map(|(here, there)| format!("config.json {} (checkpoint: {})", line(here), line(there)));
    lines.take(LINES_MAX).collect()
}
