//! The log of a run: scalars by step and name, in `metrics.jsonl` and in an event file of TensorBoard.

mod appended_file;
mod event_file;
#[cfg(test)]
mod tests;

use appended_file::AppendedFile;
use serde::Deserialize;
use shardgrad_tensor::{Error, Kind, Rank, Result, StateHash, StepReport};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The file with one JSON object per step.
const LINES_FILE: &str = "metrics.jsonl";
/// The end of a line.
const LINE_END: &[u8] = b"}\n";

/// A logged value.
#[derive(Clone, Debug, PartialEq)]
pub enum Scalar {
    /// A number. In `metrics.jsonl`, a number that is not finite is `null`.
    Number(f64),
    /// Whether something is so; 0 or 1 in an event file.
    Flag(bool),
    /// A hash, which `metrics.jsonl` has as its digits, and an event file does not have.
    Hash(StateHash),
    /// A text, which an event file does not have.
    Text(String),
    /// Lists of counts, as the tokens of the experts of each layer, which an event file does not have.
    Counts(Vec<Vec<u64>>),
}

impl From<f64> for Scalar {
    fn from(number: f64) -> Scalar {
        Scalar::Number(number)
    }
}

impl From<bool> for Scalar {
    fn from(flag: bool) -> Scalar {
        Scalar::Flag(flag)
    }
}

impl From<String> for Scalar {
    fn from(text: String) -> Scalar {
        Scalar::Text(text)
    }
}

impl From<Vec<Vec<u64>>> for Scalar {
    fn from(counts: Vec<Vec<u64>>) -> Scalar {
        Scalar::Counts(counts)
    }
}

impl From<StateHash> for Scalar {
    fn from(hash: StateHash) -> Scalar {
        Scalar::Hash(hash)
    }
}

impl Scalar {
    fn json(&self) -> String {
        match self {
            Scalar::Number(number) => serde_json::to_string(number).unwrap_or_else(|_| "null".to_string()),
            Scalar::Flag(flag) => flag.to_string(),
            Scalar::Hash(hash) => format!("\"{hash}\""),
            Scalar::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
            Scalar::Counts(counts) => serde_json::Value::from(counts.clone()).to_string(),
        }
    }

    /// The value in an event file.
    fn number(&self) -> Option<f64> {
        match self {
            Scalar::Number(number) => Some(*number),
            Scalar::Flag(flag) => Some(f64::from(u8::from(*flag))),
            Scalar::Hash(_) | Scalar::Text(_) | Scalar::Counts(_) => None,
        }
    }
}

/// The log of a run in a folder: `metrics.jsonl` has one JSON object per step, and a file `events.out.tfevents.*` has the same scalars
/// for TensorBoard (`tensorboard --logdir FOLDER`). Rank 0 writes.
///
/// ```
/// use shardgrad_nn::{AdamW, Linear, Log, Model, Optimizer, Plan};
/// use shardgrad_tensor::{DType, Elementwise, Mesh, Reduction, Tensor, Value, World};
/// # fn main() -> shardgrad_tensor::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("shardgrad-log-{}", std::process::id()));
/// let (log, plan) = (Log::to(&folder)?, Plan::data_parallel("dp"));
/// World::run(Mesh::parse("dp=2")?, |rank| {
///     let model = Model::new(rank, Linear::new(2, 1), &plan, 1)?;
///     let mut optim = AdamW::new(0.1);
///     let x = Tensor::normal(rank, &plan.batch_layout(rank.mesh(), DType::F32, &[4, 2])?, 7, 0, 1.0)?;
///     for step in 1..=3 {
///         let tape = model.tape();
///         let loss = model.forward(&tape.constant(x.clone())).square().mean();
///         loss.backward()?;
///         let report = optim.update(&model, tape.gradients())?;
///         log.scalars(rank, step, &[("loss", loss.item()?), ("grad_norm", report.grad_norm)])?;
///     }
///     Ok(())
/// })?;
/// drop(log);
/// let lines = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
/// assert_eq!(lines.lines().count(), 3);
/// assert!(lines.starts_with("{\"step\":1,\"loss\":"));
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok(())
/// # }
/// ```
///
/// # Steps
///
/// Calls with the same step add to its object; steps do not decrease. The object is completed when the next step begins, by
/// [`Log::end_step`], and when the log is dropped.
///
/// # Earlier runs
///
/// The first step that a log writes decides what stays of an earlier log in the folder: a run that resumes at step 101 keeps the objects
/// of steps before 101, and a run that begins at step 1 replaces the file. TensorBoard drops the same steps of earlier event files.
/// Until the first write nothing in the folder changes.
///
/// # Interruptions
///
/// Each call hands its bytes to the system, so a killed program loses at most the object of its last step; [`Log::sync`] waits for the disk.
/// What a full disk refuses is an error of the call, and is kept and written by the next call that succeeds.
#[doc(alias = "SummaryWriter")]
#[doc(alias = "add_scalar")]
#[doc(alias = "wandb")]
#[doc(alias = "TensorBoardLogger")]
#[derive(Debug)]
pub struct Log(Mutex<LogFiles>);

#[derive(Debug)]
struct LogFiles {
    folder: PathBuf,
    lines: AppendedFile,
    events: AppendedFile,
    /// Lines to begin with, in place of those in the folder.
    earlier: Option<Vec<u8>>,
    /// Event files of other folders to begin with.
    earlier_events: Vec<PathBuf>,
    first_step: u64,
    last: Option<LastStep>,
}

/// The step of the last line.
#[derive(Debug)]
struct LastStep {
    step: u64,
    names: Vec<String>,
    is_complete: bool,
}

impl Log {
    /// Creates the folder if necessary. Call it before the ranks start or on each rank, and pass the rank to [`Log::scalars`].
    ///
    /// # Errors
    /// `Kind::Io` naming the folder, if it cannot be created or is a file.
    pub fn to(folder: impl AsRef<Path>) -> Result<Log> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(|e| cannot_write(folder, &e))?;
        Ok(Log(Mutex::new(LogFiles {
            folder: folder.to_path_buf(),
            lines: AppendedFile::default(),
            events: AppendedFile::default(),
            earlier: None,
            earlier_events: Vec::new(),
            first_step: 0,
            last: None,
        })))
    }

    /// Begins `metrics.jsonl` with these lines in place of those in the folder, for a run that resumes from another folder.
    #[must_use]
    pub fn with_earlier_lines(self, lines: Vec<u8>) -> Log {
        self.files().earlier = Some(lines);
        self
    }

    /// Copies the event files of another folder with the first write, for a run that resumes from there: TensorBoard then shows the earlier
    /// steps too. Files that the folder of the log has stay as they are.
    #[must_use]
    pub fn with_earlier_events(self, folder: &Path) -> Log {
        self.files().earlier_events = Log::event_files(folder);
        self
    }

    /// Logs scalars of a step on rank 0; other ranks do nothing. Compute values that need a collective, such as `loss.item()?`, on every
    /// rank.
    ///
    /// # Errors
    /// As [`Log::write`].
    pub fn scalars(&self, rank: &Rank, step: u64, scalars: &[(&str, f64)]) -> Result<()> {
        if rank.index() != 0 {
            return Ok(());
        }
        let scalars: Vec<_> = scalars.iter().map(|(name, number)| (*name, Scalar::from(*number))).collect();
        self.write(step, &scalars)
    }

    /// Logs the report of a training step on rank 0: `loss`, `grad_norm`, `lr`, with a loss scale `loss_scale` and `skipped`, and the
    /// auxiliary outputs of the loss by their names ([`Loss::also`](crate::Loss::also)).
    ///
    /// # Errors
    /// As [`Log::write`]; `Kind::Config` for an auxiliary output with the name of another scalar of the step.
    pub fn report(&self, rank: &Rank, step: u64, report: &StepReport) -> Result<()> {
        if rank.index() != 0 {
            return Ok(());
        }
        let mut scalars = vec![
            ("loss", Scalar::from(report.loss)),
            ("grad_norm", Scalar::from(report.grad_norm)),
            ("lr", Scalar::from(report.lr)),
        ];
        if let Some(scale) = report.loss_scale {
            scalars.extend([("loss_scale", Scalar::from(scale)), ("skipped", Scalar::from(report.skipped))]);
        }
        scalars.extend(report.auxiliary.iter().map(|(name, value)| (name.as_str(), Scalar::from(*value))));
        self.write(step, &scalars)
    }

    /// Logs scalars of a step, on whatever rank calls it.
    ///
    /// # Errors
    /// `Kind::Config` if an earlier call was for a later step, or for this step with the same name, or the step is complete; nothing is
    /// written then. `Kind::Io` naming the file if the system refuses to write; the scalars are kept and written by the next call that
    /// succeeds.
    pub fn write(&self, step: u64, scalars: &[(&str, Scalar)]) -> Result<()> {
        let mut files = self.files();
        files.check(step, scalars)?;
        files.add(step, scalars);
        files.write_pending()
    }

    /// Completes the object of the last step.
    ///
    /// # Errors
    /// `Kind::Io` as [`Log::write`].
    pub fn end_step(&self) -> Result<()> {
        let mut files = self.files();
        files.complete_line();
        files.write_pending()
    }

    /// Waits until everything that was logged is on the disk (fsync).
    ///
    /// # Errors
    /// `Kind::Io` as [`Log::write`].
    pub fn sync(&self) -> Result<()> {
        let mut files = self.files();
        files.write_pending()?;
        let synced = files.lines.sync().and_then(|()| files.events.sync());
        synced.map_err(|e| cannot_write(&files.folder.join(LINES_FILE), &e))
    }

    /// Tells the log that its folder was moved: files that are not open yet are created there.
    pub fn set_folder(&self, folder: &Path) {
        self.files().folder = folder.to_path_buf();
    }

    /// Whether `metrics.jsonl` was written and is not in the folder any more.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        let files = self.files();
        files.lines.file.is_some() && !files.folder.join(LINES_FILE).exists()
    }

    /// Returns the event files that logs have written to a folder, in the order in which they were begun.
    #[must_use]
    pub fn event_files(folder: &Path) -> Vec<PathBuf> {
        let is_event_file = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(event_file::NAME_START))
        };
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_event_file).collect();
        files.sort();
        files
    }

    fn files(&self) -> MutexGuard<'_, LogFiles> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LogFiles {
    fn check(&self, step: u64, scalars: &[(&str, Scalar)]) -> Result<()> {
        let refuse = |text: String, help: &str| Err(Error::new(Kind::Config, text).detail("help", help));
        let known: &[String] = match &self.last {
            Some(last) if last.step > step => {
                let text = format!("step {step} is logged after step {}", last.step);
                return refuse(text, "log the scalars of a step before those of later steps");
            }
            Some(last) if last.step == step && last.is_complete => {
                return refuse(
                    format!("step {step} is logged again after its end"),
                    "log its scalars before Log::end_step",
                );
            }
            Some(last) if last.step == step => &last.names,
            _ => &[],
        };
        for (i, (name, _)) in scalars.iter().enumerate() {
            let is_again = known.iter().any(|known| known == name)
                || scalars[..i].iter().any(|(other, _)| other == name);
            if is_again || *name == "step" {
                return refuse(
                    format!("`{name}` of step {step} is logged twice"),
                    "give each scalar of a step a name of its own",
                );
            }
        }
        Ok(())
    }

    fn add(&mut self, step: u64, scalars: &[(&str, Scalar)]) {
        if self.last.as_ref().is_none_or(|last| last.step < step) {
            self.complete_line();
            self.lines.push(format!("{{\"step\":{step}").as_bytes());
            if self.last.is_none() {
                self.first_step = step;
                self.events.push(&event_file::first_records(step));
            }
            self.last = Some(LastStep { step, names: Vec::new(), is_complete: false });
        }
        for (name, scalar) in scalars {
            let name = serde_json::Value::from(*name);
            self.lines.push(format!(",{name}:{}", scalar.json()).as_bytes());
        }
        let mut numbers =
            scalars.iter().filter_map(|(name, scalar)| Some((*name, scalar.number()?))).peekable();
        if numbers.peek().is_some() {
            self.events.push(&event_file::scalars(step, numbers));
        }
        if let Some(last) = &mut self.last {
            last.names.extend(scalars.iter().map(|(name, _)| name.to_string()));
        }
    }

    fn complete_line(&mut self) {
        if let Some(last) = self.last.as_mut().filter(|last| !last.is_complete) {
            last.is_complete = true;
            self.lines.push(LINE_END);
        }
    }

    /// Writes to both files, also if one fails; returns the first error.
    fn write_pending(&mut self) -> Result<()> {
        let (folder, path) = (&self.folder, self.folder.join(LINES_FILE));
        let (earlier, first_step) = (self.earlier.as_deref(), self.first_step);
        let lines = self.lines.write_pending(|| {
            fs::create_dir_all(folder)?;
            open_lines(&path, earlier, first_step)
        });
        let events = self.events.write_pending(|| {
            fs::create_dir_all(folder)?;
            event_file::copy_missing(&self.earlier_events, folder)?;
            event_file::create(folder)
        });
        let lines = lines.map_err(|e| cannot_write(&path, &e));
        lines.and(events.map_err(|e| cannot_write(&folder.join(event_file::NAME_START), &e)))
    }
}

impl Drop for LogFiles {
    fn drop(&mut self) {
        self.complete_line();
        if self.lines.has_pending() || self.events.has_pending() {
            // Nobody is left to return the error to.
            drop(self.write_pending());
        }
    }
}

/// Opens the file of lines to append to it, with the given lines or those of earlier steps.
fn open_lines(path: &Path, earlier: Option<&[u8]>, first_step: u64) -> io::Result<File> {
    // A missing file has no lines, and a device or a pipe keeps none.
    let present = if path.is_file() { fs::read(path)? } else { Vec::new() };
    let kept = earlier.map_or_else(|| lines_before(first_step, &present), <[u8]>::to_vec);
    match kept.is_empty() {
        true => appended_file::create(path),
        false if kept == present => appended_file::open_at_end(path),
        false => appended_file::replace(path, &kept),
    }
}

/// Returns the lines of steps before one, in increasing order of steps; lines that are incomplete are dropped.
fn lines_before(step: u64, lines: &[u8]) -> Vec<u8> {
    #[derive(Deserialize)]
    struct Line {
        step: u64,
    }
    let (mut kept, mut next) = (Vec::new(), 0);
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        let Ok(Line { step: of_line }) = serde_json::from_slice(line) else { continue };
        if (next..step).contains(&of_line) {
            kept.extend(line.strip_suffix(b"\n").unwrap_or(line));
            kept.push(b'\n');
            next = of_line + 1;
        }
    }
    kept
}

fn cannot_write(path: &Path, e: &io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot write {}: {e}", path.display()))
}
