//! Metrics of a run: `metrics.jsonl`, one JSON object per step.

mod previous;
mod pending;

use pending::PendingLines;
pub(crate) use previous::PreviousMetrics;

use crate::background::BackgroundWorker;
use crate::outputs::{OutFolder, io_error, resolve_path};
use serde::{Deserialize, Deserializer, Serialize};
use shardgrad::{Error, Result};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The metrics of a step. In the file, non-finite numbers are `null`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepMetrics {
    /// The step, counted from 1.
    pub(crate) step: u64,
    /// The mean next-token cross-entropy of the global batch, in nats, before the update.
    #[serde(deserialize_with = "number_or_nan")]
    pub(crate) loss: f64,
    /// The global gradient norm before clipping.
    #[serde(deserialize_with = "number_or_nan")]
    pub(crate) grad_norm: f64,
    /// The learning rate of the update.
    #[serde(deserialize_with = "number_or_nan")]
    pub(crate) lr: f64,
    /// Tokens of the global batch divided by the time of this step.
    #[serde(deserialize_with = "number_or_nan")]
    pub(crate) tokens_per_s: f64,
    /// Seconds since the run began.
    #[serde(deserialize_with = "number_or_nan")]
    pub(crate) seconds: f64,
    /// With f16: the loss scale of the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) loss_scale: Option<f64>,
    /// With f16: whether the update was skipped because gradients overflowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<bool>,
    /// The mean loss over the validation split after this step, if evaluated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) val_loss: Option<f64>,
}

/// Deserializes a number; `null` becomes NaN.
fn number_or_nan<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Option::deserialize(from).map(|number| number.unwrap_or(f64::NAN))
}

/// The end of a line.
const LINE_END: &[u8] = b"}\n";

/// The metrics of all steps of a run, and their file. Lines are written immediately in a background thread, so that a killed run leaves complete
/// lines except possibly the last, and a stalled disk does not delay training. Lines that the disk refuses are kept and written later, at the
/// latest by [`Metrics::finish`].
#[derive(Debug)]
pub(crate) struct Metrics {
    record: MetricsFile,
    file: Arc<Mutex<Option<File>>>,
    pending: Arc<Mutex<PendingLines>>,
    writer: BackgroundWorker,
    steps: Vec<StepMetrics>,
    /// Of a resumed run: the lines of earlier steps, and their number.
    earlier: (Arc<[u8]>, usize),
    /// Number of written bytes of an incomplete line.
    partial_bytes: usize,
}

/// The path of the file.
#[derive(Clone, Debug)]
enum MetricsFile {
    /// In a run folder, which may be moved.
    InFolder(OutFolder),
    /// At a fixed path.
    #[cfg(test)]
    At(PathBuf),
}

impl MetricsFile {
    fn path(&self) -> PathBuf {
        match self {
            MetricsFile::InFolder(out) => out.join("metrics.jsonl"),
            #[cfg(test)]
            MetricsFile::At(path) => path.clone(),
        }
    }

    /// As [`OutFolder::verify`].
    fn verify(&self) -> Result<Option<Error>> {
        match self {
            MetricsFile::InFolder(out) => out.verify(),
            #[cfg(test)]
            MetricsFile::At(_) => Ok(None),
        }
    }
}

impl Metrics {
    /// Continues earlier metrics, which may be empty. An existing file stays unchanged until the first step is written; then it is replaced by the
    /// earlier lines.
    pub(crate) fn new(out: &OutFolder, earlier: PreviousMetrics) -> Metrics {
        Metrics::of(MetricsFile::InFolder(out.clone()), earlier)
    }

    fn of(record: MetricsFile, earlier: PreviousMetrics) -> Metrics {
        let (file, pending, writer) = (Arc::default(), Arc::default(), BackgroundWorker::start());
        let (count, PreviousMetrics { lines, steps, .. }) = (earlier.steps.len(), earlier);
        let earlier = (lines.into(), count);
        Metrics { record, file, pending, writer, steps, earlier, partial_bytes: 0 }
    }

    /// Writes the metrics of a step except the validation loss, its last field, which follows with [`Metrics::add`].
    ///
    /// # Errors
    /// As [`Metrics::add`].
    pub(crate) fn begin_step(&mut self, step: &StepMetrics) -> Result<()> {
        self.steps.push(step.clone());
        let mut line = self.line(step)?;
        line.truncate(line.len() - LINE_END.len());
        self.partial_bytes = line.len();
        self.write(&line)
    }

    /// Adds a step, or completes the one that was begun.
    ///
    /// # Errors
    /// Errors of tasks of [`Metrics::enqueue`] since the last call. A failed write of the line is only a warning.
    pub(crate) fn add(&mut self, step: &StepMetrics) -> Result<()> {
        if self.steps.last().is_some_and(|last| last.step == step.step) {
            self.steps.pop();
        }
        self.steps.push(step.clone());
        let line = self.line(step)?;
        let partial_bytes = std::mem::take(&mut self.partial_bytes);
        self.write(&line[partial_bytes..])
    }

    /// Runs a task in the writer thread after the lines so far.
    pub(crate) fn enqueue(&self, task: impl FnOnce() -> Result<()> + Send + 'static) {
        self.writer.submit(task);
    }

    /// Completes the step that was begun, if any, and waits until all lines are written. If the file is missing, all steps are written again.
    ///
    /// # Errors
    /// As [`Metrics::add`]; `Kind::Io` naming the file if lines still cannot be written.
    pub(crate) fn finish(&mut self) -> Result<()> {
        let ended = if std::mem::take(&mut self.partial_bytes) > 0 { self.write(LINE_END) } else { Ok(()) };
        let lines = self.steps.iter().map(|step| self.line(step)).collect::<Result<Vec<_>>>();
        let (record, file) = (self.record.clone(), Arc::clone(&self.file));
        let (earlier, pending) = (Arc::clone(&self.earlier.0), Arc::clone(&self.pending));
        self.writer.submit(move || {
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
            let moved = record.verify()?;
            let path = record.path();
            if file.is_none() && pending.bytes.is_empty() {
                return moved.map_or(Ok(()), Err);
            }
            let mut before: &[u8] = &earlier;
            if file.is_some() && !path.exists() {
                *file = None;
                (before, pending.bytes) = (&[], lines?.concat());
            }
            let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
            folder.map_err(|e| io_error("write", &path, &e))?;
            append(&path, &mut file, (before, &mut pending))?;
            moved.map_or(Ok(()), Err)
        });
        ended.and(self.writer.wait())
    }

    fn line(&self, step: &StepMetrics) -> Result<Vec<u8>> {
        let mut line =
            serde_json::to_vec(step).map_err(|e| io_error("write", &self.record.path(), &e.into()))?;
        line.push(b'\n');
        Ok(line)
    }

    /// Enqueues bytes to be written; returns earlier errors.
    fn write(&self, bytes: &[u8]) -> Result<()> {
        let (record, file, bytes) = (self.record.clone(), Arc::clone(&self.file), bytes.to_vec());
        let (earlier, pending) = (Arc::clone(&self.earlier.0), Arc::clone(&self.pending));
        self.writer.submit(move || {
            let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
            pending.bytes.extend(bytes);
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            let moved = record.verify()?;
            // An open file moves with its folder; a new file would lack the earlier lines.
            if file.is_some() || moved.is_none() {
                let done = append(&record.path(), &mut file, (&earlier, &mut pending));
                pending.report(done);
            }
            moved.map_or(Ok(()), Err)
        });
        self.writer.take_error()
    }

    /// Waits until all lines so far are on disk (fsync). Errors are only warnings.
    pub(crate) fn sync(&self) {
        let (record, file, pending) =
            (self.record.clone(), Arc::clone(&self.file), Arc::clone(&self.pending));
        self.writer.submit(move || {
            let file = file.lock().unwrap_or_else(PoisonError::into_inner);
            let synced = file.as_ref().map_or(Ok(()), File::sync_data);
            let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
            // Pending lines were reported before, and a sync does not cover them.
            if pending.bytes.is_empty() {
                pending.report(synced.map_err(|e| io_error("write", &record.path(), &e)));
            }
            Ok(())
        });
        self.writer.drain();
    }

    /// Returns the metrics of all steps, earlier ones included.
    #[must_use]
    pub(crate) fn steps(&self) -> &[StepMetrics] {
        &self.steps
    }

    /// Returns the number of steps of this process.
    #[must_use]
    pub(crate) fn num_new_steps(&self) -> usize {
        self.steps.len() - self.earlier.1
    }
}

/// Appends to the file; creates it with the earlier lines on first use.
fn append(path: &Path, file: &mut Option<File>, (earlier, bytes): (&[u8], &mut PendingLines)) -> Result<()> {
    let failed = |e| io_error("write", path, &e);
    let file = match file {
        Some(file) => file,
        none if earlier.is_empty() => none.insert(create(path).map_err(failed)?),
        none => none.insert(create_with_lines(path, earlier).map_err(failed)?),
    };
    bytes.write_to(file).map_err(failed)
}

/// Creates or truncates a file and opens it in append mode, so that a truncation by another program leaves no gap.
fn create(path: &Path) -> io::Result<File> {
    File::create(path)?;
    File::options().append(true).open(path)
}

/// Replaces a file atomically by one with the given lines. A symlink stays; its target is replaced.
fn create_with_lines(path: &Path, lines: &[u8]) -> io::Result<File> {
    if path.is_symlink() && !path.exists() {
        // Creating the file gives a broken link a target.
        File::create(path)?;
    }
    let path = &resolve_path(path);
    let temporary = path.with_extension(format!("jsonl.tmp-{}", std::process::id()));
    let mut file = create(&temporary)?;
    let written = file.write_all(lines).and_then(|()| file.sync_all());
    written.and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| drop(fs::remove_file(&temporary)))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;
    use shardgrad::Kind;
    use std::time::Duration;

    fn step(step: u64, val_loss: Option<f64>) -> StepMetrics {
        let loss = 5.5 / step as f64;
        let (loss_scale, skipped) = (val_loss.map(|_| 32_768.0), val_loss.map(|_| false));
        StepMetrics {
            step,
            loss,
            grad_norm: 0.125,
            lr: 3e-4,
            tokens_per_s: 1e4,
            seconds: 0.5,
            loss_scale,
            skipped,
            val_loss,
        }
    }

    #[test]
    fn old_metrics_file_stays_until_the_first_step() {
        let dir = Scratch::new();
        let path = dir.file("metrics.jsonl", "of an earlier run");
        let mut metrics = Metrics::of(MetricsFile::At(path.clone()), PreviousMetrics::default());
        assert_eq!(fs::read_to_string(&path).unwrap(), "of an earlier run");
        metrics.add(&step(1, None)).unwrap();
        metrics.writer.wait().unwrap();
        let first = "{\"step\":1,\"loss\":5.5,\"grad_norm\":0.125,\"lr\":0.0003,\"tokens_per_s\":10000.0,\"seconds\":0.5}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), first);
        metrics.add(&StepMetrics { loss: f64::NAN, ..step(2, Some(2.5)) }).unwrap();
        metrics.finish().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let rest = text.strip_prefix(first).unwrap();
        assert!(rest.starts_with("{\"step\":2,\"loss\":null,"), "{rest}");
        assert!(rest.ends_with("\"loss_scale\":32768.0,\"skipped\":false,\"val_loss\":2.5}\n"), "{rest}");
        assert_eq!((metrics.steps().len(), &metrics.steps()[0]), (2, &step(1, None)));
    }

    #[test]
    fn resumed_metrics_continue_the_file() {
        let dir = Scratch::new();
        let lines = |steps: &[u64]| -> String {
            steps.iter().map(|i| serde_json::to_string(&step(*i, Some(2.5))).unwrap() + "\n").collect()
        };
        // Steps after the checkpoint, one of them truncated, and a non-finite loss.
        let second = lines(&[2]).replace("\"loss\":2.75", "\"loss\":null");
        let before = [&lines(&[1]), &second, &lines(&[3, 4]), &lines(&[5])[..30]].concat();
        let path = dir.file("metrics.jsonl", &before);
        let earlier = PreviousMetrics::read(&path, 3).unwrap();
        assert_eq!((earlier.count(), earlier.num_dropped(), earlier.seconds()), (3, 2, 0.5));
        let mut metrics = Metrics::of(MetricsFile::At(path.clone()), earlier);
        metrics.finish().unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap(), metrics.num_new_steps()), (before, 0));
        metrics.add(&step(4, None)).unwrap();
        metrics.sync();
        metrics.finish().unwrap();
        let last = serde_json::to_string(&step(4, None)).unwrap() + "\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), lines(&[1]) + &second + &lines(&[3]) + &last);
        assert!(
            metrics.steps().len() == 4 && metrics.num_new_steps() == 1 && metrics.steps()[1].loss.is_nan()
        );
        assert_eq!(fs::read_dir(dir.path("")).unwrap().count(), 1, "no temporary file is left");
        let none = PreviousMetrics::read(&dir.path("none"), 3).unwrap();
        assert_eq!((none.count(), none.num_dropped()), (0, 0));
    }

    #[test]
    fn metrics_symlink_is_followed() {
        let dir = Scratch::new();
        let first = serde_json::to_string(&step(1, None)).unwrap() + "\n";
        let target = dir.file("elsewhere/steps", first.repeat(2));
        let record = dir.file("record", &first);
        for target in [target, dir.path("elsewhere/none")] {
            let path = dir.path("metrics.jsonl");
            std::os::unix::fs::symlink(&target, &path).unwrap();
            let mut metrics =
                Metrics::of(MetricsFile::At(path.clone()), PreviousMetrics::read(&record, 1).unwrap());
            metrics.add(&step(2, None)).unwrap();
            metrics.finish().unwrap();
            let second = serde_json::to_string(&step(2, None)).unwrap() + "\n";
            assert_eq!(fs::read_link(&path).unwrap(), target);
            assert_eq!(fs::read_to_string(&target).unwrap(), first.clone() + &second);
            fs::remove_file(&path).unwrap();
        }
        assert_eq!(fs::read_dir(dir.path("elsewhere")).unwrap().count(), 2, "no temporary file is left");
    }

    #[test]
    fn sync_waits_for_the_disk_and_leaves_errors_to_the_next_call() {
        let dir = Scratch::new();
        let path = dir.path("metrics.jsonl");
        let mut metrics = Metrics::of(MetricsFile::At(path.clone()), PreviousMetrics::default());
        metrics.enqueue(|| {
            std::thread::sleep(Duration::from_millis(300));
            Ok(())
        });
        metrics.add(&step(1, None)).unwrap();
        metrics.sync();
        assert!(fs::read_to_string(&path).is_ok_and(|text| text.ends_with("}\n")), "it is there");
        metrics.enqueue(|| Err(Error::new(Kind::Io, "no disk")));
        metrics.sync();
        assert_eq!(metrics.add(&step(2, None)).unwrap_err().message(), "no disk");
    }

    #[test]
    fn step_metrics_are_written_before_validation() {
        let dir = Scratch::new();
        let path = dir.path("metrics.jsonl");
        let (known, whole) = (StepMetrics { val_loss: None, ..step(1, Some(0.0)) }, step(1, Some(2.5)));
        let text = || fs::read_to_string(&path).unwrap();
        let mut metrics = Metrics::of(MetricsFile::At(path.clone()), PreviousMetrics::default());
        metrics.begin_step(&known).unwrap();
        metrics.writer.wait().unwrap();
        assert!(text().ends_with("\"skipped\":false"), "{}", text());
        metrics.add(&whole).unwrap();
        metrics.finish().unwrap();
        assert_eq!(
            (text(), metrics.steps()),
            (format!("{}\n", serde_json::to_string(&whole).unwrap()), &[whole][..])
        );
        let next = StepMetrics { step: 2, ..known };
        metrics.begin_step(&next).unwrap();
        metrics.finish().unwrap();
        let last = serde_json::to_string(&next).unwrap();
        assert_eq!(text().lines().nth(1).unwrap(), last);
        assert!(text().ends_with("}\n") && metrics.steps().len() == 2);
    }

    #[test]
    fn removed_metrics_file_is_rewritten_at_the_end() {
        let dir = Scratch::new();
        let path = dir.path("out/metrics.jsonl");
        fs::create_dir(dir.path("out")).unwrap();
        let mut metrics = Metrics::of(MetricsFile::At(path.clone()), PreviousMetrics::default());
        metrics.add(&step(1, None)).unwrap();
        metrics.begin_step(&step(2, None)).unwrap();
        metrics.writer.wait().unwrap();
        fs::remove_dir_all(dir.path("out")).unwrap();
        metrics.add(&step(2, Some(2.5))).unwrap();
        metrics.finish().unwrap();
        let lines = [step(1, None), step(2, Some(2.5))].map(|s| serde_json::to_string(&s).unwrap() + "\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), lines.concat());
        // A file of another run stays, and without a step no file is created.
        fs::write(&path, "of another run").unwrap();
        metrics.finish().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "of another run");
        fs::remove_dir_all(dir.path("out")).unwrap();
        Metrics::of(MetricsFile::At(path.clone()), PreviousMetrics::default()).finish().unwrap();
        assert!(!dir.path("out").exists());
    }

    #[test]
    fn truncated_metrics_file_has_no_gap() {
        let dir = Scratch::new();
        let first = serde_json::to_string(&step(1, None)).unwrap() + "\n";
        for earlier in ["", &first] {
            let record = dir.file("record", earlier);
            let path = dir.path("metrics.jsonl");
            let mut metrics =
                Metrics::of(MetricsFile::At(path.clone()), PreviousMetrics::read(&record, 1).unwrap());
            metrics.add(&step(2, None)).unwrap();
            metrics.writer.wait().unwrap();
            File::create(&path).unwrap();
            metrics.add(&step(3, None)).unwrap();
            metrics.finish().unwrap();
            let third = serde_json::to_string(&step(3, None)).unwrap() + "\n";
            assert_eq!(fs::read_to_string(&path).unwrap(), third);
        }
    }

    #[test]
    fn metrics_follow_a_moved_folder() {
        let lines = |steps: &[u64]| -> String {
            steps.iter().map(|i| serde_json::to_string(&step(*i, None)).unwrap() + "\n").collect()
        };
        for has_step in [true, false] {
            let dir = Scratch::new();
            let (old, new) = (dir.path("old"), dir.path("new"));
            let out = OutFolder::open(&old).unwrap();
            let mut metrics = Metrics::new(&out, PreviousMetrics::default());
            if has_step {
                metrics.add(&step(1, None)).unwrap();
                metrics.writer.wait().unwrap();
            } else {
                dir.file("old/metrics.jsonl", "of an earlier run");
            }
            fs::rename(&old, &new).unwrap();
            let other = dir.file("old/metrics.jsonl", "of another run");
            let added = metrics.add(&step(2, None));
            let error = added.and(metrics.finish()).unwrap_err();
            assert!(error.message().contains("was moved to"), "{error}");
            let steps: &[u64] = if has_step { &[1, 2] } else { &[2] };
            assert_eq!(fs::read_to_string(new.join("metrics.jsonl")).unwrap(), lines(steps));
            assert_eq!(fs::read_to_string(&other).unwrap(), "of another run");
        }
        // If another run has the path, nothing is written.
        let dir = Scratch::new();
        let out = OutFolder::open(&dir.path("out")).unwrap();
        fs::remove_dir_all(dir.path("out")).unwrap();
        let other = dir.file("out/metrics.jsonl", "of another run");
        let mut metrics = Metrics::new(&out, PreviousMetrics::default());
        let added = metrics.add(&step(1, None));
        assert!(added.and(metrics.finish()).is_err());
        assert_eq!(fs::read_to_string(&other).unwrap(), "of another run");
    }

    #[test]
    fn lines_refused_by_a_full_disk_are_written_later() {
        let dir = Scratch::new();
        let path = dir.file("metrics.jsonl", "");
        let full = || Some(File::options().write(true).open("/dev/full").unwrap());
        let mut metrics = Metrics::of(MetricsFile::At(path.clone()), PreviousMetrics::default());
        *metrics.file.lock().unwrap() = full();
        for number in 1..=2 {
            metrics.add(&step(number, None)).unwrap();
            metrics.sync();
        }
        metrics.begin_step(&StepMetrics { val_loss: None, ..step(3, Some(2.5)) }).unwrap();
        metrics.writer.wait().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
        *metrics.file.lock().unwrap() = Some(File::options().append(true).open(&path).unwrap());
        metrics.add(&step(3, Some(2.5))).unwrap();
        metrics.finish().unwrap();
        let lines = [step(1, None), step(2, None), step(3, Some(2.5))];
        let lines = lines.map(|step| serde_json::to_string(&step).unwrap() + "\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), lines.concat());
    }

    #[test]
    fn disk_full_at_the_end_is_an_error() {
        let mut full = Metrics::of(MetricsFile::At("/dev/full".into()), PreviousMetrics::default());
        (1..=2).for_each(|number| full.add(&step(number, None)).unwrap());
        let error = full.finish().unwrap_err();
        assert_eq!((error.kind(), full.steps().len()), (Kind::Io, 2));
        assert!(error.message().starts_with("cannot write /dev/full: No space left"), "{error}");
    }
}
