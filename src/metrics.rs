//! The record of a run: `metrics.jsonl`, one JSON object a step.

mod earlier;
mod unwritten;

pub(crate) use earlier::Earlier;
use unwritten::Unwritten;

use crate::behind::Behind;
use crate::outputs::{OutFolder, cannot, place};
use serde::{Deserialize, Deserializer, Serialize};
use shardgrad::{Error, Result};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// What one step did. In the file, a number that is not finite is `null`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepMetrics {
    /// The step, counted from 1: how many batches were read.
    pub(crate) step: u64,
    /// The mean next-token cross-entropy of the global batch, in nats, before the update.
    #[serde(deserialize_with = "number")]
    pub(crate) loss: f64,
    /// The norm of the whole gradient before clipping.
    #[serde(deserialize_with = "number")]
    pub(crate) grad_norm: f64,
    /// The learning rate of the update.
    #[serde(deserialize_with = "number")]
    pub(crate) lr: f64,
    /// Tokens of the global batch over the time of this step.
    #[serde(deserialize_with = "number")]
    pub(crate) tokens_per_s: f64,
    /// Seconds since the run began.
    #[serde(deserialize_with = "number")]
    pub(crate) seconds: f64,
    /// In f16: what the loss was multiplied by before its backward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) loss_scale: Option<f64>,
    /// In f16: whether the update was left out, since a gradient of the scaled loss was not finite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<bool>,
    /// The mean loss over all windows of the held-out split after this step, where it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) val_loss: Option<f64>,
}

/// A number, or what stands for one that is not finite.
fn number<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Option::deserialize(from).map(|number| number.unwrap_or(f64::NAN))
}

/// How a line ends.
const END: &[u8] = b"}\n";

/// The steps of a run, and their file. What is known goes to the system at once, on a thread of its own, so that a run that is
/// killed leaves whole lines, but for the last one at most, and a disk that stalls holds up nothing else. Lines that the disk refuses
/// are kept and written when it takes them, at the latest by [`Metrics::end`].
#[derive(Debug)]
pub(crate) struct Metrics {
    record: Record,
    file: Arc<Mutex<Option<File>>>,
    unwritten: Arc<Mutex<Unwritten>>,
    disk: Behind,
    steps: Vec<StepMetrics>,
    /// The lines with which the file begins, where the run goes on, and how many of the steps are theirs.
    earlier: (Arc<[u8]>, usize),
    /// How many bytes of a line are written that is not whole yet.
    begun: usize,
}

/// Where the file is.
#[derive(Clone, Debug)]
enum Record {
    /// In the folder of a run, which may be moved.
    InFolder(OutFolder),
    /// At a path of its own.
    #[cfg(test)]
    At(PathBuf),
}

impl Record {
    fn path(&self) -> PathBuf {
        match self {
            Record::InFolder(out) => out.join("metrics.jsonl"),
            #[cfg(test)]
            Record::At(path) => path.clone(),
        }
    }

    /// As [`OutFolder::verify`].
    fn verify(&self) -> Result<Option<Error>> {
        match self {
            Record::InFolder(out) => out.verify(),
            #[cfg(test)]
            Record::At(_) => Ok(None),
        }
    }
}

impl Metrics {
    /// Goes on with a record, which may be empty. An older file of this name stays as it is until there is a step to write; then
    /// the earlier lines take its place.
    pub(crate) fn new(out: &OutFolder, earlier: Earlier) -> Metrics {
        Metrics::of(Record::InFolder(out.clone()), earlier)
    }

    fn of(record: Record, earlier: Earlier) -> Metrics {
        let (file, unwritten, disk) = (Arc::default(), Arc::default(), Behind::start());
        let (count, Earlier { lines, steps, .. }) = (earlier.steps.len(), earlier);
        let earlier = (lines.into(), count);
        Metrics { record, file, unwritten, disk, steps, earlier, begun: 0 }
    }

    /// Begins one step whose held-out loss, its last field, is about to be measured.
    ///
    /// # Errors
    /// As [`Metrics::add`].
    pub(crate) fn begin(&mut self, step: &StepMetrics) -> Result<()> {
        self.steps.push(step.clone());
        let mut line = self.line(step)?;
        line.truncate(line.len() - END.len());
        self.begun = line.len();
        self.write(&line)
    }

    /// Adds one step, or ends the one that was begun.
    ///
    /// # Errors
    /// What was handed over with [`Metrics::then`] and has failed since. A disk that refuses the line is a warning.
    pub(crate) fn add(&mut self, step: &StepMetrics) -> Result<()> {
        if self.steps.last().is_some_and(|last| last.step == step.step) {
            self.steps.pop();
        }
        self.steps.push(step.clone());
        let line = self.line(step)?;
        let begun = std::mem::take(&mut self.begun);
        self.write(&line[begun..])
    }

    /// Does something else on the same disk, behind what was written so far.
    pub(crate) fn then(&self, deed: impl FnOnce() -> Result<()> + Send + 'static) {
        self.disk.hand(deed);
    }

    /// Ends the step that was begun, if its held-out loss was never known, and waits until all is written. Where the file has gone
    /// since, with its folder perhaps, or could not be made, all steps are written anew.
    ///
    /// # Errors
    /// As [`Metrics::add`], of all that nobody was told of; `Kind::Io` naming the file if the system refuses lines still.
    pub(crate) fn end(&mut self) -> Result<()> {
        let ended = if std::mem::take(&mut self.begun) > 0 { self.write(END) } else { Ok(()) };
        let lines = self.steps.iter().map(|step| self.line(step)).collect::<Result<Vec<_>>>();
        let (record, file) = (self.record.clone(), Arc::clone(&self.file));
        let (earlier, unwritten) = (Arc::clone(&self.earlier.0), Arc::clone(&self.unwritten));
        self.disk.hand(move || {
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            let mut unwritten = unwritten.lock().unwrap_or_else(PoisonError::into_inner);
            let moved = record.verify()?;
            let path = record.path();
            if file.is_none() && unwritten.bytes.is_empty() {
                return moved.map_or(Ok(()), Err);
            }
            let mut before: &[u8] = &earlier;
            if file.is_some() && !path.exists() {
                *file = None;
                (before, unwritten.bytes) = (&[], lines?.concat());
            }
            let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
            folder.map_err(|e| cannot("write", &path, &e))?;
            append(&path, &mut file, (before, &mut unwritten))?;
            moved.map_or(Ok(()), Err)
        });
        ended.and(self.disk.wait())
    }

    fn line(&self, step: &StepMetrics) -> Result<Vec<u8>> {
        let mut line =
            serde_json::to_vec(step).map_err(|e| cannot("write", &self.record.path(), &e.into()))?;
        line.push(b'\n');
        Ok(line)
    }

    /// Has bytes written; what went wrong before is told.
    fn write(&self, bytes: &[u8]) -> Result<()> {
        let (record, file, bytes) = (self.record.clone(), Arc::clone(&self.file), bytes.to_vec());
        let (earlier, unwritten) = (Arc::clone(&self.earlier.0), Arc::clone(&self.unwritten));
        self.disk.hand(move || {
            let mut unwritten = unwritten.lock().unwrap_or_else(PoisonError::into_inner);
            unwritten.bytes.extend(bytes);
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            let moved = record.verify()?;
            // An open file has moved with its folder; one that is not open yet would be begun without the lines before.
            if file.is_some() || moved.is_none() {
                let done = append(&record.path(), &mut file, (&earlier, &mut unwritten));
                unwritten.report(done);
            }
            moved.map_or(Ok(()), Err)
        });
        self.disk.told()
    }

    /// Waits until what is written so far is on the disk itself. What the system refuses is a warning.
    pub(crate) fn sync(&self) {
        let (record, file, unwritten) =
            (self.record.clone(), Arc::clone(&self.file), Arc::clone(&self.unwritten));
        self.disk.hand(move || {
            let file = file.lock().unwrap_or_else(PoisonError::into_inner);
            let synced = file.as_ref().map_or(Ok(()), File::sync_data);
            let mut unwritten = unwritten.lock().unwrap_or_else(PoisonError::into_inner);
            // Lines that are not written yet were reported, and a sync says nothing of them.
            if unwritten.bytes.is_empty() {
                unwritten.report(synced.map_err(|e| cannot("write", &record.path(), &e)));
            }
            Ok(())
        });
        self.disk.settle();
    }

    /// The steps so far, earlier ones too.
    #[must_use]
    pub(crate) fn steps(&self) -> &[StepMetrics] {
        &self.steps
    }

    /// How many of the steps are this run's own.
    #[must_use]
    pub(crate) fn taken(&self) -> usize {
        self.steps.len() - self.earlier.1
    }
}

/// Appends to a file, which is made anew at first; where it has earlier lines, another takes its place that holds them.
fn append(path: &Path, file: &mut Option<File>, (earlier, bytes): (&[u8], &mut Unwritten)) -> Result<()> {
    let failed = |e| cannot("write", path, &e);
    let file = match file {
        Some(file) => file,
        none if earlier.is_empty() => none.insert(create(path).map_err(failed)?),
        none => none.insert(beginning(path, earlier).map_err(failed)?),
    };
    bytes.write_to(file).map_err(failed)
}

/// Makes an empty file, or empties one, and opens it to append: what somebody else cuts off leaves no gap.
fn create(path: &Path) -> io::Result<File> {
    File::create(path)?;
    File::options().append(true).open(path)
}

/// A file of some lines in the place of another: until it is whole, that one stays. A link stays too; what it leads to is replaced.
fn beginning(path: &Path, lines: &[u8]) -> io::Result<File> {
    if path.is_symlink() && !path.exists() {
        // A link that leads nowhere yet has a place once the file is made.
        File::create(path)?;
    }
    let path = &place(path);
    let temporary = path.with_extension(format!("jsonl.tmp-{}", std::process::id()));
    let mut file = create(&temporary)?;
    let begun = file.write_all(lines).and_then(|()| file.sync_all());
    begun.and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| drop(fs::remove_file(&temporary)))?;
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
    fn an_older_file_stays_until_there_is_a_step_and_lines_are_whole_at_once() {
        let dir = Scratch::new();
        let path = dir.file("metrics.jsonl", "of an earlier run");
        let mut metrics = Metrics::of(Record::At(path.clone()), Earlier::default());
        assert_eq!(fs::read_to_string(&path).unwrap(), "of an earlier run");
        metrics.add(&step(1, None)).unwrap();
        metrics.disk.wait().unwrap();
        let first = "{\"step\":1,\"loss\":5.5,\"grad_norm\":0.125,\"lr\":0.0003,\"tokens_per_s\":10000.0,\"seconds\":0.5}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), first);
        metrics.add(&StepMetrics { loss: f64::NAN, ..step(2, Some(2.5)) }).unwrap();
        metrics.end().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let rest = text.strip_prefix(first).unwrap();
        assert!(rest.starts_with("{\"step\":2,\"loss\":null,"), "{rest}");
        assert!(rest.ends_with("\"loss_scale\":32768.0,\"skipped\":false,\"val_loss\":2.5}\n"), "{rest}");
        assert_eq!((metrics.steps().len(), &metrics.steps()[0]), (2, &step(1, None)));
    }

    #[test]
    fn a_record_that_goes_on_is_that_of_one_run() {
        let dir = Scratch::new();
        let lines = |steps: &[u64]| -> String {
            steps.iter().map(|i| serde_json::to_string(&step(*i, Some(2.5))).unwrap() + "\n").collect()
        };
        // Steps after the checkpoint, one of them cut, and a loss that is no number.
        let second = lines(&[2]).replace("\"loss\":2.75", "\"loss\":null");
        let before = [&lines(&[1]), &second, &lines(&[3, 4]), &lines(&[5])[..30]].concat();
        let path = dir.file("metrics.jsonl", &before);
        let earlier = Earlier::read(&path, 3).unwrap();
        assert_eq!((earlier.count(), earlier.left_out(), earlier.seconds()), (3, 2, 0.5));
        let mut metrics = Metrics::of(Record::At(path.clone()), earlier);
        metrics.end().unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap(), metrics.taken()), (before, 0));
        metrics.add(&step(4, None)).unwrap();
        metrics.sync();
        metrics.end().unwrap();
        let last = serde_json::to_string(&step(4, None)).unwrap() + "\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), lines(&[1]) + &second + &lines(&[3]) + &last);
        assert!(metrics.steps().len() == 4 && metrics.taken() == 1 && metrics.steps()[1].loss.is_nan());
        assert_eq!(fs::read_dir(dir.path("")).unwrap().count(), 1, "nothing else is left");
        let none = Earlier::read(&dir.path("none"), 3).unwrap();
        assert_eq!((none.count(), none.left_out()), (0, 0));
    }

    #[test]
    fn a_link_stays_one_and_what_it_leads_to_goes_on() {
        let dir = Scratch::new();
        let first = serde_json::to_string(&step(1, None)).unwrap() + "\n";
        let target = dir.file("elsewhere/steps", first.repeat(2));
        let record = dir.file("record", &first);
        for target in [target, dir.path("elsewhere/none")] {
            let path = dir.path("metrics.jsonl");
            std::os::unix::fs::symlink(&target, &path).unwrap();
            let mut metrics = Metrics::of(Record::At(path.clone()), Earlier::read(&record, 1).unwrap());
            metrics.add(&step(2, None)).unwrap();
            metrics.end().unwrap();
            let second = serde_json::to_string(&step(2, None)).unwrap() + "\n";
            assert_eq!(fs::read_link(&path).unwrap(), target);
            assert_eq!(fs::read_to_string(&target).unwrap(), first.clone() + &second);
            fs::remove_file(&path).unwrap();
        }
        assert_eq!(fs::read_dir(dir.path("elsewhere")).unwrap().count(), 2, "nothing else is left");
    }

    #[test]
    fn who_syncs_waits_for_a_slow_disk_and_leaves_what_it_refuses_to_the_next_call() {
        let dir = Scratch::new();
        let path = dir.path("metrics.jsonl");
        let mut metrics = Metrics::of(Record::At(path.clone()), Earlier::default());
        metrics.then(|| {
            std::thread::sleep(Duration::from_millis(300));
            Ok(())
        });
        metrics.add(&step(1, None)).unwrap();
        metrics.sync();
        assert!(fs::read_to_string(&path).is_ok_and(|text| text.ends_with("}\n")), "it is there");
        metrics.then(|| Err(Error::new(Kind::Io, "no disk")));
        metrics.sync();
        assert_eq!(metrics.add(&step(2, None)).unwrap_err().message(), "no disk");
    }

    #[test]
    fn what_is_known_of_a_step_is_written_before_its_held_out_loss() {
        let dir = Scratch::new();
        let path = dir.path("metrics.jsonl");
        let (known, whole) = (StepMetrics { val_loss: None, ..step(1, Some(0.0)) }, step(1, Some(2.5)));
        let text = || fs::read_to_string(&path).unwrap();
        let mut metrics = Metrics::of(Record::At(path.clone()), Earlier::default());
        metrics.begin(&known).unwrap();
        metrics.disk.wait().unwrap();
        assert!(text().ends_with("\"skipped\":false"), "{}", text());
        metrics.add(&whole).unwrap();
        metrics.end().unwrap();
        assert_eq!(
            (text(), metrics.steps()),
            (format!("{}\n", serde_json::to_string(&whole).unwrap()), &[whole][..])
        );
        let next = StepMetrics { step: 2, ..known };
        metrics.begin(&next).unwrap();
        metrics.end().unwrap();
        let last = serde_json::to_string(&next).unwrap();
        assert_eq!(text().lines().nth(1).unwrap(), last);
        assert!(text().ends_with("}\n") && metrics.steps().len() == 2);
    }

    #[test]
    fn steps_whose_file_has_gone_are_written_anew_at_the_end() {
        let dir = Scratch::new();
        let path = dir.path("out/metrics.jsonl");
        fs::create_dir(dir.path("out")).unwrap();
        let mut metrics = Metrics::of(Record::At(path.clone()), Earlier::default());
        metrics.add(&step(1, None)).unwrap();
        metrics.begin(&step(2, None)).unwrap();
        metrics.disk.wait().unwrap();
        fs::remove_dir_all(dir.path("out")).unwrap();
        metrics.add(&step(2, Some(2.5))).unwrap();
        metrics.end().unwrap();
        let lines = [step(1, None), step(2, Some(2.5))].map(|s| serde_json::to_string(&s).unwrap() + "\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), lines.concat());
        // What another has put there stays, and without a step nothing is made.
        fs::write(&path, "of another run").unwrap();
        metrics.end().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "of another run");
        fs::remove_dir_all(dir.path("out")).unwrap();
        Metrics::of(Record::At(path.clone()), Earlier::default()).end().unwrap();
        assert!(!dir.path("out").exists());
    }

    #[test]
    fn a_file_that_is_cut_off_by_somebody_else_has_no_gap() {
        let dir = Scratch::new();
        let first = serde_json::to_string(&step(1, None)).unwrap() + "\n";
        for earlier in ["", &first] {
            let record = dir.file("record", earlier);
            let path = dir.path("metrics.jsonl");
            let mut metrics = Metrics::of(Record::At(path.clone()), Earlier::read(&record, 1).unwrap());
            metrics.add(&step(2, None)).unwrap();
            metrics.disk.wait().unwrap();
            File::create(&path).unwrap();
            metrics.add(&step(3, None)).unwrap();
            metrics.end().unwrap();
            let third = serde_json::to_string(&step(3, None)).unwrap() + "\n";
            assert_eq!(fs::read_to_string(&path).unwrap(), third);
        }
    }

    #[test]
    fn the_record_of_a_folder_that_is_moved_is_whole_at_its_new_place() {
        let lines = |steps: &[u64]| -> String {
            steps.iter().map(|i| serde_json::to_string(&step(*i, None)).unwrap() + "\n").collect()
        };
        for begun in [true, false] {
            let dir = Scratch::new();
            let (old, new) = (dir.path("old"), dir.path("new"));
            let out = OutFolder::open(&old).unwrap();
            let mut metrics = Metrics::new(&out, Earlier::default());
            if begun {
                metrics.add(&step(1, None)).unwrap();
                metrics.disk.wait().unwrap();
            } else {
                dir.file("old/metrics.jsonl", "of an earlier run");
            }
            fs::rename(&old, &new).unwrap();
            let other = dir.file("old/metrics.jsonl", "of another run");
            let added = metrics.add(&step(2, None));
            let error = added.and(metrics.end()).unwrap_err();
            assert!(error.message().contains("was moved to"), "{error}");
            let steps: &[u64] = if begun { &[1, 2] } else { &[2] };
            assert_eq!(fs::read_to_string(new.join("metrics.jsonl")).unwrap(), lines(steps));
            assert_eq!(fs::read_to_string(&other).unwrap(), "of another run");
        }
        // Where another run has the name, nothing is written.
        let dir = Scratch::new();
        let out = OutFolder::open(&dir.path("out")).unwrap();
        fs::remove_dir_all(dir.path("out")).unwrap();
        let other = dir.file("out/metrics.jsonl", "of another run");
        let mut metrics = Metrics::new(&out, Earlier::default());
        let added = metrics.add(&step(1, None));
        assert!(added.and(metrics.end()).is_err());
        assert_eq!(fs::read_to_string(&other).unwrap(), "of another run");
    }

    #[test]
    fn lines_that_a_full_disk_refuses_are_written_when_it_takes_them() {
        let dir = Scratch::new();
        let path = dir.file("metrics.jsonl", "");
        let full = || Some(File::options().write(true).open("/dev/full").unwrap());
        let mut metrics = Metrics::of(Record::At(path.clone()), Earlier::default());
        *metrics.file.lock().unwrap() = full();
        for number in 1..=2 {
            metrics.add(&step(number, None)).unwrap();
            metrics.sync();
        }
        metrics.begin(&StepMetrics { val_loss: None, ..step(3, Some(2.5)) }).unwrap();
        metrics.disk.wait().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
        *metrics.file.lock().unwrap() = Some(File::options().append(true).open(&path).unwrap());
        metrics.add(&step(3, Some(2.5))).unwrap();
        metrics.end().unwrap();
        let lines = [step(1, None), step(2, None), step(3, Some(2.5))];
        let lines = lines.map(|step| serde_json::to_string(&step).unwrap() + "\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), lines.concat());
    }

    #[test]
    fn a_disk_that_is_full_to_the_end_is_an_error_and_the_steps_are_kept() {
        let mut full = Metrics::of(Record::At("/dev/full".into()), Earlier::default());
        (1..=2).for_each(|number| full.add(&step(number, None)).unwrap());
        let error = full.end().unwrap_err();
        assert_eq!((error.kind(), full.steps().len()), (Kind::Io, 2));
        assert!(error.message().starts_with("cannot write /dev/full: No space left"), "{error}");
    }
}
