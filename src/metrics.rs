//! Metrics of a run: the [`Log`] of the command line, with one JSON object per step in `metrics.jsonl`.

mod previous;

pub(crate) use previous::PreviousMetrics;

use crate::background::BackgroundWorker;
use crate::outputs::OutFolder;
use serde::{Deserialize, Deserializer, Serialize};
use shardgrad::Result;
use shardgrad::nn::{ExpertLoad, Log, Scalar, StateHash, StepReport};
use std::path::PathBuf;
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
    /// With experts: how far their load is from even.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) experts: Option<ExpertMetrics>,
    /// The hash of weights and optimizer state after this step, if `--state-hash` asks for it.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "hash_digits")]
    pub(crate) state_hash: Option<StateHash>,
    /// In the first step of a process whose collectives run over NCCL: its version, the variables by which it chooses algorithm and protocol,
    /// and who adds. The bits of sums depend on them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) nccl: Option<String>,
    /// The mean loss over the validation split after this step, if evaluated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) val_loss: Option<f64>,
}

/// The load of the experts in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ExpertMetrics {
    /// The tokens of the expert with most tokens divided by the mean over the experts of its layer; mean over the layers.
    pub(crate) expert_imbalance: f64,
    /// The largest imbalance of a layer.
    pub(crate) expert_imbalance_max: f64,
    /// The fewest tokens of an expert of any layer.
    pub(crate) expert_tokens_min: f64,
    /// The most tokens of an expert of any layer.
    pub(crate) expert_tokens_max: f64,
    /// The tokens of each expert, a list for each layer in the order of the model; empty in files of earlier versions. Not among the
    /// scalars of TensorBoard: one for each expert of each layer would be too many.
    #[serde(default)]
    pub(crate) tokens_per_expert: Vec<Vec<u64>>,
}

impl ExpertMetrics {
    /// Returns the metrics of a step; `None` without experts.
    pub(crate) fn of(report: &StepReport) -> Option<ExpertMetrics> {
        let load = ExpertLoad::of(report)?;
        let [expert_tokens_min, expert_tokens_max] = load.token_range();
        let (expert_imbalance, expert_imbalance_max) = (load.mean_imbalance(), load.max_imbalance());
        // Sums of ones are whole numbers.
        let whole = |tokens: &Vec<f64>| tokens.iter().map(|n| *n as u64).collect();
        let tokens_per_expert = load.layers.iter().map(|(_, tokens)| whole(tokens)).collect();
        Some(ExpertMetrics {
            expert_imbalance,
            expert_imbalance_max,
            expert_tokens_min,
            expert_tokens_max,
            tokens_per_expert,
        })
    }

    fn scalars(&self) -> [(&'static str, Scalar); 5] {
        [
            ("expert_imbalance", self.expert_imbalance.into()),
            ("expert_imbalance_max", self.expert_imbalance_max.into()),
            ("expert_tokens_min", self.expert_tokens_min.into()),
            ("expert_tokens_max", self.expert_tokens_max.into()),
            ("tokens_per_expert", self.tokens_per_expert.clone().into()),
        ]
    }
}

/// Deserializes a number; `null` becomes NaN.
fn number_or_nan<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Option::deserialize(from).map(|number| number.unwrap_or(f64::NAN))
}

/// A hash as its digits.
mod hash_digits {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
    use shardgrad::nn::StateHash;

    pub(super) fn serialize<S: Serializer>(hash: &Option<StateHash>, to: S) -> Result<S::Ok, S::Error> {
        hash.map(|hash| hash.to_string()).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<StateHash>, D::Error> {
        let digits = Option::<String>::deserialize(from)?;
        digits.map(|digits| digits.parse().map_err(D::Error::custom)).transpose()
    }
}

impl StepMetrics {
    /// The scalars of the log that are known before the validation.
    fn scalars(&self) -> Vec<(&'static str, Scalar)> {
        let numbers = [
            ("loss", self.loss),
            ("grad_norm", self.grad_norm),
            ("lr", self.lr),
            ("tokens_per_s", self.tokens_per_s),
            ("seconds", self.seconds),
        ];
        let scale = self.loss_scale.map(|scale| ("loss_scale", scale.into()));
        let skipped = self.skipped.map(|skipped| ("skipped", skipped.into()));
        let experts = self.experts.iter().flat_map(ExpertMetrics::scalars);
        let hash = self.state_hash.map(|hash| ("state_hash", hash.into()));
        let nccl = self.nccl.clone().map(|text| ("nccl", text.into()));
        let numbers = numbers.map(|(name, number)| (name, number.into())).into_iter();
        numbers.chain(scale).chain(skipped).chain(experts).chain(hash).chain(nccl).collect()
    }

    /// The validation loss as a scalar of the log.
    fn validation(&self) -> Vec<(&'static str, Scalar)> {
        self.val_loss.map(|loss| ("val_loss", loss.into())).into_iter().collect()
    }
}

/// The metrics of all steps of a run, and their log. Scalars are written immediately in a background thread, so that a killed run leaves
/// complete lines except possibly the last, and a stalled disk does not delay training. What the disk refuses is kept and written later, at
/// the latest by [`Metrics::finish`].
#[derive(Debug)]
pub(crate) struct Metrics {
    log: Arc<Mutex<StepLog>>,
    writer: BackgroundWorker,
    steps: Vec<StepMetrics>,
    /// Of a resumed run: the number of earlier steps.
    num_earlier: usize,
    /// Whether the line of the last step waits for its validation loss.
    is_begun: bool,
    /// [`StepMetrics::nccl`], until the first step.
    nccl: Option<String>,
}

/// The log in a run folder, which may be moved. Used by the background thread.
#[derive(Debug)]
struct StepLog {
    out: OutFolder,
    /// The lines of the steps before a resumed checkpoint.
    earlier: Vec<u8>,
    /// The folder of the resumed run, whose event files the log begins with.
    earlier_folder: PathBuf,
    /// `None` before the first step.
    log: Option<Log>,
    /// Whether the current failure to write has been reported.
    is_failure_reported: bool,
}

impl StepLog {
    /// Writes to the log after verifying its folder. A disk that refuses is only a warning.
    ///
    /// # Errors
    /// As [`OutFolder::verify`].
    fn write(&mut self, write: impl FnOnce(&Log) -> Result<()>) -> Result<()> {
        let moved = self.out.verify()?;
        let written = self.open().and_then(write);
        self.report(written);
        moved.map_or(Ok(()), Err)
    }

    /// Returns the log; creates it with the earlier lines on first use. A log follows its folder.
    fn open(&mut self) -> Result<&Log> {
        let folder = self.out.join("");
        let log = match self.log.take() {
            Some(log) => log,
            None => Log::to(&folder)?
                .with_earlier_lines(self.earlier.clone())
                .with_earlier_events(&self.earlier_folder),
        };
        log.set_folder(&folder);
        Ok(self.log.insert(log))
    }

    /// Writes what the disk has refused so far; all steps, if the file was removed.
    ///
    /// # Errors
    /// As [`OutFolder::verify`] and [`Log::write`].
    fn finish(&mut self, steps: &[StepMetrics]) -> Result<()> {
        let moved = self.out.verify()?;
        let written = self.open()?.end_step();
        if !self.open()?.is_removed() {
            return written.and(moved.map_or(Ok(()), Err));
        }
        (self.log, self.earlier) = (None, Vec::new());
        let log = self.open()?;
        for step in steps {
            log.write(step.step, &[step.scalars(), step.validation()].concat())?;
        }
        log.end_step()?;
        moved.map_or(Ok(()), Err)
    }

    /// Reports a failed write, once until a write succeeds.
    fn report(&mut self, written: Result<()>) {
        match written {
            Ok(()) => self.is_failure_reported = false,
            Err(e) => {
                if !self.is_failure_reported {
                    eprintln!(
                        "warning: {}; training continues, the metrics are written when the disk accepts them",
                        e.message()
                    );
                }
                self.is_failure_reported = true;
            }
        }
    }
}

impl Metrics {
    /// Continues earlier metrics, which may be empty. An existing file stays unchanged until the first step is written; then it is replaced by the
    /// earlier lines.
    pub(crate) fn new(out: &OutFolder, earlier: PreviousMetrics) -> Metrics {
        let PreviousMetrics { lines, steps, folder, .. } = earlier;
        let log = StepLog {
            out: out.clone(),
            earlier: lines,
            earlier_folder: folder,
            log: None,
            is_failure_reported: false,
        };
        let (log, num_earlier) = (Arc::new(Mutex::new(log)), steps.len());
        Metrics { log, writer: BackgroundWorker::start(), steps, num_earlier, is_begun: false, nccl: None }
    }

    /// Describes the NCCL of this process, for the line of its first step.
    #[cfg(feature = "nccl")]
    pub(crate) fn describe_nccl(&mut self, text: String) {
        self.nccl = Some(text);
    }

    /// Writes the metrics of a step except the validation loss, its last field, which follows with [`Metrics::add`].
    ///
    /// # Errors
    /// As [`Metrics::add`].
    pub(crate) fn begin_step(&mut self, step: &StepMetrics) -> Result<()> {
        let step = StepMetrics { nccl: self.nccl.take(), ..step.clone() };
        let (number, scalars) = (step.step, step.scalars());
        self.steps.push(step);
        self.is_begun = true;
        self.submit(move |log| log.write(|log| log.write(number, &scalars)));
        self.writer.take_error()
    }

    /// Adds a step, or completes the one that was begun.
    ///
    /// # Errors
    /// Errors of tasks of [`Metrics::enqueue`] since the last call. A failed write of the line is only a warning.
    pub(crate) fn add(&mut self, step: &StepMetrics) -> Result<()> {
        let begun = self.steps.pop_if(|_| std::mem::take(&mut self.is_begun));
        let is_begun = begun.is_some();
        let nccl = begun.map_or_else(|| self.nccl.take(), |begun| begun.nccl);
        let step = StepMetrics { nccl, ..step.clone() };
        let scalars = match is_begun {
            true => step.validation(),
            false => [step.scalars(), step.validation()].concat(),
        };
        let number = step.step;
        self.steps.push(step);
        self.submit(move |log| {
            log.write(|log| {
                let written = log.write(number, &scalars);
                log.end_step().and(written)
            })
        });
        self.writer.take_error()
    }

    /// Runs a task in the writer thread after the lines so far.
    pub(crate) fn enqueue(&self, task: impl FnOnce() -> Result<()> + Send + 'static) {
        self.writer.submit(task);
    }

    /// Completes the step that was begun, if any, and waits until all lines are written. If the file is missing, all steps are written again.
    /// Without a step of this process no file changes.
    ///
    /// # Errors
    /// As [`Metrics::add`]; `Kind::Io` naming the file if lines still cannot be written.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.is_begun = false;
        if self.num_new_steps() > 0 {
            let steps = self.steps.clone();
            self.submit(move |log| log.finish(&steps));
        } else {
            self.submit(|log| log.out.verify()?.map_or(Ok(()), Err));
        }
        self.writer.wait()
    }

    /// Runs a task on the log in the writer thread.
    fn submit(&self, task: impl FnOnce(&mut StepLog) -> Result<()> + Send + 'static) {
        let log = Arc::clone(&self.log);
        self.writer.submit(move || task(&mut log.lock().unwrap_or_else(PoisonError::into_inner)));
    }

    /// Waits until all lines so far are on disk (fsync). Errors are only warnings.
    pub(crate) fn sync(&self) {
        self.submit(|log| {
            if let Some(synced) = log.log.as_ref().map(Log::sync) {
                log.report(synced);
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
        self.steps.len() - self.num_earlier
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;
    use shardgrad::{Error, Kind};
    use std::fs;
    use std::path::Path;
    use std::time::Duration;

    /// The metrics of a run in a folder, and the path of their file.
    fn metrics_in(dir: &Path, earlier: PreviousMetrics) -> (Metrics, PathBuf) {
        (Metrics::new(&OutFolder::open(dir).unwrap(), earlier), dir.join("metrics.jsonl"))
    }

    fn step(step: u64, val_loss: Option<f64>) -> StepMetrics {
        let loss = 5.5 / step as f64;
        let (loss_scale, skipped) = (val_loss.map(|_| 32_768.0), val_loss.map(|_| false));
        let experts = val_loss.map(|_| ExpertMetrics {
            expert_imbalance: 1.5,
            expert_imbalance_max: 2.0,
            expert_tokens_min: 0.0,
            expert_tokens_max: 8.0,
            tokens_per_expert: vec![vec![2, 2], vec![0, 8]],
        });
        StepMetrics {
            step,
            loss,
            grad_norm: 0.125,
            lr: 3e-4,
            tokens_per_s: 1e4,
            seconds: 0.5,
            loss_scale,
            skipped,
            experts,
            state_hash: val_loss.and("0123456789abcdef0123456789abcdef".parse().ok()),
            nccl: None,
            val_loss,
        }
    }

    #[test]
    fn old_metrics_file_stays_until_the_first_step() {
        let dir = Scratch::new();
        dir.file("metrics.jsonl", "of an earlier run");
        let (mut metrics, path) = metrics_in(&dir.path(""), PreviousMetrics::default());
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
        let load = "\"expert_imbalance\":1.5,\"expert_imbalance_max\":2.0,\"expert_tokens_min\":0.0,\"expert_tokens_max\":8.0,\"tokens_per_expert\":[[2,2],[0,8]]";
        let hash = "\"state_hash\":\"0123456789abcdef0123456789abcdef\"";
        let end = format!("\"loss_scale\":32768.0,\"skipped\":false,{load},{hash},\"val_loss\":2.5}}\n");
        assert!(rest.ends_with(&end), "{rest}");
        assert_eq!((metrics.steps().len(), &metrics.steps()[0]), (2, &step(1, None)));
        assert_eq!(Log::event_files(&dir.path("")).len(), 1);
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
        let (mut metrics, path) = metrics_in(&dir.path(""), earlier);
        metrics.finish().unwrap();
        assert_eq!(Log::event_files(&dir.path("")).len(), 0);
        assert_eq!((fs::read_to_string(&path).unwrap(), metrics.num_new_steps()), (before, 0));
        metrics.add(&step(4, None)).unwrap();
        metrics.sync();
        metrics.finish().unwrap();
        let last = serde_json::to_string(&step(4, None)).unwrap() + "\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), lines(&[1]) + &second + &lines(&[3]) + &last);
        assert!(
            metrics.steps().len() == 4 && metrics.num_new_steps() == 1 && metrics.steps()[1].loss.is_nan()
        );
        // The lock, the metrics and the event file: no temporary file is left.
        assert_eq!(
            (fs::read_dir(dir.path("")).unwrap().count(), Log::event_files(&dir.path("")).len()),
            (3, 1)
        );
        let none = PreviousMetrics::read(&dir.path("none"), 3).unwrap();
        assert_eq!((none.count(), none.num_dropped()), (0, 0));
    }

    #[test]
    fn metrics_in_another_folder_begin_with_those_of_the_resumed_run() {
        let dir = Scratch::new();
        let (mut first, path) = metrics_in(&dir.path("first"), PreviousMetrics::default());
        (1..=3).for_each(|number| first.add(&step(number, None)).unwrap());
        first.finish().unwrap();
        let earlier = PreviousMetrics::read(&path, 2).unwrap();
        let (mut second, path) = metrics_in(&dir.path("second"), earlier);
        second.add(&step(3, None)).unwrap();
        second.finish().unwrap();
        assert_eq!(fs::read_to_string(path).unwrap().lines().count(), 3);
        let [old, new] = ["first", "second"].map(|name| Log::event_files(&dir.path(name)));
        assert_eq!((old.len(), new.len()), (1, 2));
        assert_eq!(
            (old[0].file_name(), fs::read(&old[0]).unwrap()),
            (new[0].file_name(), fs::read(&new[0]).unwrap())
        );
    }

    #[test]
    fn sync_waits_for_the_disk_and_leaves_errors_to_the_next_call() {
        let dir = Scratch::new();
        let (mut metrics, path) = metrics_in(&dir.path(""), PreviousMetrics::default());
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
        let (known, whole) = (StepMetrics { val_loss: None, ..step(1, Some(0.0)) }, step(1, Some(2.5)));
        let (mut metrics, path) = metrics_in(&dir.path(""), PreviousMetrics::default());
        let text = || fs::read_to_string(&path).unwrap();
        metrics.begin_step(&known).unwrap();
        metrics.writer.wait().unwrap();
        assert!(
            text().ends_with(
                "\"tokens_per_expert\":[[2,2],[0,8]],\"state_hash\":\"0123456789abcdef0123456789abcdef\""
            ),
            "{}",
            text()
        );
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
        let out = dir.path("out");
        let (mut metrics, path) = metrics_in(&out, PreviousMetrics::default());
        metrics.add(&step(1, None)).unwrap();
        metrics.begin_step(&step(2, None)).unwrap();
        metrics.writer.wait().unwrap();
        fs::remove_file(&path).unwrap();
        metrics.add(&step(2, Some(2.5))).unwrap();
        metrics.finish().unwrap();
        let lines = [step(1, None), step(2, Some(2.5))].map(|s| serde_json::to_string(&s).unwrap() + "\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), lines.concat());
        // A file of another run stays, and without a step no file is created.
        fs::write(&path, "of another run").unwrap();
        metrics.finish().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "of another run");
        drop(metrics);
        fs::remove_file(&path).unwrap();
        let (mut metrics, path) = metrics_in(&out, PreviousMetrics::default());
        metrics.finish().unwrap();
        assert!(!path.exists());
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
    fn disk_full_at_the_end_is_an_error() {
        let dir = Scratch::new();
        let (mut full, path) = metrics_in(&dir.path("out"), PreviousMetrics::default());
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        (1..=2).for_each(|number| full.add(&step(number, None)).unwrap());
        let error = full.finish().unwrap_err();
        assert_eq!((error.kind(), full.steps().len()), (Kind::Io, 2));
        assert_eq!(
            error.message().split(" (").next().unwrap(),
            format!("cannot write {}: No space left on device", path.display())
        );
    }
}
