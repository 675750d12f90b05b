//! A model folder, written: its config, and its weights in one file, or in several of at most a certain size and the index
//! that names them.

use super::commit::{clear_unfinished, commit, shard_name};
use super::companion::{Beside, Companion};
use super::digest::Digest;
use super::disk::{Pending, is_taken, read_text, refuse, sealed_text};
use super::fields::{CONFIG_BYTES_MAX, CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE};
use super::files::TensorWriter;
use super::header::DIGEST;
use super::stacks::{apart, is_stack, part};
use super::turn::Turn;
use serde_json::json;
use shardgrad_tensor::{DType, Result};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};

/// Name, dtype and shape of a tensor.
pub type Entry = (String, DType, Vec<usize>);

/// Writes the tensors of a list into a folder, in its order. All files have other names (`*.tmp-` and the number of the
/// process) until the last one is whole, and the folder holds the model that it held; dropped before that, nothing is left.
/// [`WeightsWriter::finish`] then puts them in the place of that model.
#[derive(Debug)]
pub struct WeightsWriter {
    dir: PathBuf,
    /// What is still to be written, file by file.
    files: VecDeque<(String, Vec<Entry>)>,
    open: Option<TensorWriter>,
    /// How many tensors are still to come in the open file.
    left: usize,
    /// The config, if it is not that of the folder.
    config: Option<Pending>,
    /// What goes with the model.
    beside: Beside,
    /// What is written, with the digests of those that are several.
    sealed: Vec<(Pending, Option<String>)>,
    /// What the index is to tell, where there is one.
    index: Option<Index>,
    /// After which step of a run this is saved, where files are to tell.
    step: Option<u64>,
    /// Ends behind the last file.
    _turn: Turn,
}

#[derive(Debug)]
struct Index {
    bytes: u64,
    /// The file of each tensor.
    map: BTreeMap<String, String>,
    /// The files in the order in which they are written.
    names: Vec<String>,
}

/// Refuses two tensors of one name, in whichever files they would lie: the index could tell of one of them only.
fn check_names(dir: &Path, entries: &[Entry]) -> Result<()> {
    let mut names = HashSet::new();
    match entries.iter().find(|(name, ..)| !names.insert(name)) {
        None => Ok(()),
        Some((name, ..)) => {
            let error = refuse(dir, format_args!("tensor `{name}` is given twice"));
            Err(error.detail("help", "give each tensor of the model a name of its own"))
        }
    }
}

impl WeightsWriter {
    /// For the text of a config, if there is one, and the tensors of a list, in files of at most `bytes_max` bytes of tensors;
    /// one that is larger has a file of its own. What is not whole of saves that have ended is removed first. Another save into
    /// the folder is waited for; one of the same thread would wait for itself.
    ///
    /// # Errors
    /// `Kind::Checkpoint` for two tensors of one name; `Kind::Io` if another save takes more than ten minutes; if something that is no file (a link, a folder, a device) has a
    /// name that is to be written or removed; what [`TensorWriter::create`] reports of the first file.
    pub fn create(
        dir: &Path,
        config: Option<&str>,
        entries: &[Entry],
        bytes_max: u64,
    ) -> Result<WeightsWriter> {
        WeightsWriter::begin(dir, config, entries, bytes_max, None)
    }

    /// [`WeightsWriter::create`] of files that tell their digest, and the step of the run after which they are saved.
    pub(crate) fn of_step(
        dir: &Path,
        config: Option<&str>,
        entries: &[Entry],
        bytes_max: u64,
        step: u64,
    ) -> Result<WeightsWriter> {
        WeightsWriter::begin(dir, config, entries, bytes_max, Some(step))
    }

    fn begin(
        dir: &Path,
        config: Option<&str>,
        entries: &[Entry],
        bytes_max: u64,
        step: Option<u64>,
    ) -> Result<WeightsWriter> {
        let entries = &apart(entries)[..];
        check_names(dir, entries)?;
        let turn = Turn::wait(dir)?;
        let bytes = |e: &Entry| (e.2.iter().product::<usize>() * e.1.size()) as u64;
        let mut groups: Vec<Vec<Entry>> = vec![Vec::new()];
        let mut sum = 0;
        for entry in entries {
            if sum > 0 && sum + bytes(entry) > bytes_max {
                groups.push(Vec::new());
                sum = 0;
            }
            sum += bytes(entry);
            groups.last_mut().expect("there is a first group").push(entry.clone());
        }
        let count = groups.len();
        let name = |i: usize| if count == 1 { WEIGHTS_FILE.to_string() } else { shard_name(i + 1, count) };
        let files: VecDeque<_> = groups.into_iter().enumerate().map(|(i, g)| (name(i), g)).collect();
        let index = (count > 1).then(|| {
            let of_file = |(name, group): &(String, Vec<Entry>)| -> Vec<(String, String)> {
                group.iter().map(|e| (e.0.clone(), name.clone())).collect()
            };
            Index {
                bytes: entries.iter().map(bytes).sum(),
                map: files.iter().flat_map(of_file).collect(),
                names: files.iter().map(|(name, _)| name.clone()).collect(),
            }
        });
        let names = files.iter().map(|(name, _)| name.as_str()).chain([CONFIG_FILE]);
        names.map(|name| dir.join(name)).try_for_each(|path| is_taken(&path).map(drop))?;
        // Where there is no model, what an interrupted save left may be all that there is of one.
        if is_taken(&dir.join(INDEX_FILE))? | is_taken(&dir.join(WEIGHTS_FILE))? {
            clear_unfinished(dir, &[])?;
        }
        let is_new =
            |text: &&str| read_text(dir, CONFIG_FILE, CONFIG_BYTES_MAX).ok().as_deref() != Some(*text);
        let config =
            config.filter(is_new).map(|text| sealed_text(&dir.join(CONFIG_FILE), text)).transpose()?;
        let dir = dir.to_path_buf();
        let (sealed, beside) = (Vec::new(), Beside::default());
        let (open, left) = (None, 0);
        let mut writer =
            WeightsWriter { dir, files, open, left, config, beside, sealed, index, step, _turn: turn };
        writer.next()?;
        Ok(writer)
    }

    /// With files that go with the model: copied now, under other names, and put in the place of those that the folder has in
    /// the moment at which it has no model, so that no reader finds one model with the files of another.
    ///
    /// # Errors
    /// `Kind::Io` if something that is no file has the name of one of them, or if the system refuses.
    pub fn beside(mut self, companions: &[Companion<'_>]) -> Result<WeightsWriter> {
        self.beside = Beside::prepare(&self.dir, companions)?;
        Ok(self)
    }

    /// Begins the next file, if one is left.
    fn next(&mut self) -> Result<()> {
        if let Some((name, entries)) = self.files.pop_front() {
            let path = self.dir.join(name);
            self.open = Some(match (self.step, &self.index) {
                (Some(step), _) => TensorWriter::of_step(&path, &entries, step)?,
                (None, Some(_)) => TensorWriter::with_digest(&path, &entries)?,
                (None, None) => TensorWriter::create(&path, &entries)?,
            });
            self.left = entries.len();
        }
        Ok(())
    }

    /// Writes the next tensor of the list, whole; of one that is read as one ([`Weights::get`](super::Weights::get)) all parts.
    ///
    /// # Errors
    /// What [`TensorWriter::append`] and [`TensorWriter::create`] report.
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if !is_stack(name) {
            return self.append_one(name, bytes);
        }
        let (mut rest, mut place) = (bytes, 0);
        while !rest.is_empty() {
            self.turn_page()?;
            let next = self.open.as_ref().and_then(TensorWriter::expected);
            let size = next.map_or(rest.len(), |t| (t.bytes.end - t.bytes.start) as usize);
            let (one, behind) = rest.split_at(size.clamp(1, rest.len()));
            self.append_one(&part(name, place), one)?;
            (rest, place) = (behind, place + 1);
        }
        Ok(())
    }

    /// Goes on to the next file where the open one has all its tensors.
    fn turn_page(&mut self) -> Result<()> {
        if self.left == 0 && !self.files.is_empty() {
            self.close()?;
            self.next()?;
        }
        Ok(())
    }

    fn append_one(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.turn_page()?;
        self.left = self.left.saturating_sub(1);
        match &mut self.open {
            Some(open) => open.append(name, bytes),
            None => Ok(()),
        }
    }

    fn close(&mut self) -> Result<()> {
        let sealed = self.open.take().map(TensorWriter::seal).transpose()?;
        self.sealed.extend(sealed);
        Ok(())
    }

    /// Puts the files in the place of the model that the folder held, and removes what earlier saves left there: files of
    /// weights under names that saves give, and files that they never finished.
    ///
    /// Until the first file gets its name, that model is as it was. It is replaced at once if config and names of files
    /// allow; else there is a moment at which the folder has none, and is refused by [`Weights::open`](super::Weights::open).
    ///
    /// # Errors
    /// `Kind::Checkpoint` if bytes are missing; `Kind::Io` if the system refuses, or as [`WeightsWriter::create`].
    pub fn finish(self) -> Result<()> {
        self.finish_telling().map(drop)
    }

    /// [`WeightsWriter::finish`]; gives the digest of the files too, if they tell theirs.
    pub(crate) fn finish_telling(mut self) -> Result<Option<String>> {
        self.close()?;
        if let Some((name, _)) = self.files.front() {
            return Err(refuse(&self.dir.join(name), "its tensors are missing"));
        }
        let config = self.config.take();
        let (mut files, digests): (Vec<Pending>, Vec<_>) =
            std::mem::take(&mut self.sealed).into_iter().unzip();
        let own: Option<Vec<String>> = digests.iter().cloned().collect();
        let last = match &self.index {
            Some(Index { bytes, map, names }) => {
                let digests: BTreeMap<_, _> = names.iter().zip(digests).collect();
                let metadata = json!({"total_size": bytes, DIGEST: digests});
                let text = format!("{:#}\n", json!({"metadata": metadata, "weight_map": map}));
                Some(sealed_text(&self.dir.join(INDEX_FILE), &text)?)
            }
            None => files.pop(),
        };
        last.map_or(Ok(()), |last| commit(&self.dir, config, self.beside, files, last))?;
        Ok(own.and_then(|own| Digest::of_files(&own)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk::scratch::Scratch;
    use super::super::folder::Weights;
    use super::*;
    use shardgrad_tensor::{Error, Kind};
    use std::fs;

    const OLD: &str = "{\"old\": 1}";
    const NEW: &str = "{\"new\": 1}";

    /// Begins a save of tensors of so many bytes, all of which are `byte`; all are given, none has its name.
    fn begin(
        dir: &Path,
        (config, byte): (&str, u8),
        sizes: &[usize],
        bytes_max: u64,
    ) -> Result<WeightsWriter> {
        let entry = |(i, n): (usize, &usize)| (format!("t{i}"), DType::U8, vec![*n]);
        let entries: Vec<Entry> = sizes.iter().enumerate().map(entry).collect();
        let mut writer = WeightsWriter::create(dir, Some(config), &entries, bytes_max)?;
        for (name, _, shape) in &entries {
            writer.append(name, &vec![byte; shape[0]])?;
        }
        Ok(writer)
    }

    fn write(dir: &Path, what: (&str, u8), sizes: &[usize], bytes_max: u64) -> Result<()> {
        begin(dir, what, sizes, bytes_max)?.finish()
    }

    /// The bytes of all tensors, and the config, of a folder.
    fn read(dir: &Path) -> Result<(Vec<u8>, String)> {
        let weights = Weights::open(dir)?;
        let tensors: Vec<Vec<u8>> =
            (0..weights.tensors().count()).map(|i| weights.read(&format!("t{i}"))).collect::<Result<_>>()?;
        Ok((tensors.concat(), fs::read_to_string(dir.join(CONFIG_FILE)).unwrap()))
    }

    fn temporary(name: &str) -> String {
        format!("{name}.tmp-{}", std::process::id())
    }

    #[test]
    fn files_are_filled_in_order_and_read_back() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        write(dir, (OLD, 7), &[3, 3, 9, 1, 0, 4], 6).unwrap();
        let names = ["1", "2", "3"].map(|i| format!("model-0000{i}-of-00003.safetensors"));
        assert_eq!(
            scratch.names(),
            [&[CONFIG_FILE.to_string()], &names[..], &[INDEX_FILE.to_string()]].concat()
        );
        assert_eq!(read(dir).unwrap(), (vec![7; 20], OLD.to_string()));
        let index: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(dir.join(INDEX_FILE)).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], 20);
        assert_eq!(index["weight_map"]["t2"], names[1].as_str());
        let entries = ["a", "b"].map(|name| (name.to_string(), DType::U8, vec![2]));
        let mut lacking = WeightsWriter::create(dir, None, &entries, 2).unwrap();
        lacking.append("a", &[1, 2]).unwrap();
        let error = lacking.finish().unwrap_err();
        assert!(error.message().ends_with("model-00002-of-00002.safetensors: its tensors are missing"));
        assert_eq!(read(dir).unwrap(), (vec![7; 20], OLD.to_string()));
    }

    #[test]
    fn what_was_written_last_is_what_is_read_and_nothing_else_is_left() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        let others = ["model-00001-of-00004.bin", "tokenizer.json", "x.safetensors", "x.tmp-4294967295"];
        others.iter().for_each(|name| drop(scratch.file(name, b"other")));
        let dead = [CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, "model-00002-of-00009.safetensors"];
        for (i, (count, bytes_max, what)) in [
            (2, 100, OLD),
            (3, 2, OLD),
            (5, 2, NEW),
            (3, 2, NEW),
            (3, 2, OLD),
            (1, 100, OLD),
            (4, 100, NEW),
            (0, 9, NEW),
        ]
        .into_iter()
        .enumerate()
        {
            dead.iter().for_each(|name| drop(scratch.file(&format!("{name}.tmp-4294967295"), b"half")));
            let byte = i as u8 + 1;
            write(dir, (what, byte), &vec![2; count], bytes_max).unwrap();
            assert_eq!(read(dir).unwrap(), (vec![byte; 2 * count], what.to_string()));
            let files = if bytes_max == 2 { count + 1 } else { 1 };
            let found = scratch.names();
            assert_eq!(found.len(), others.len() + 1 + files, "{found:?}");
            assert!(others.iter().all(|name| found.contains(&name.to_string())));
        }
    }

    #[test]
    fn saves_into_one_folder_wait_for_each_other() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        write(dir, (OLD, 9), &[2, 2], 2).unwrap();
        let first = begin(dir, (NEW, 1), &[2, 2, 2], 2).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| write(dir, (OLD, 2), &[2, 2, 2], 100));
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert!(!second.is_finished(), "it writes among the files of another save");
            first.finish().unwrap();
            second.join().unwrap().unwrap();
        });
        assert_eq!(read(dir).unwrap(), (vec![2; 6], OLD.to_string()));
        assert_eq!(scratch.names(), [CONFIG_FILE, WEIGHTS_FILE]);
    }

    /// A name that cannot be had stands for a full disk: whatever is written last when it is full.
    #[test]
    fn a_save_that_fails_leaves_the_old_model_whole() {
        for (old_max, new_max, blocked) in [
            (2, 2, "model-00002-of-00003.safetensors"),
            (2, 2, "model-00003-of-00003.safetensors"),
            (2, 2, INDEX_FILE),
            (2, 100, WEIGHTS_FILE),
            (100, 2, "model-00002-of-00003.safetensors"),
            (100, 100, WEIGHTS_FILE),
            (100, 100, CONFIG_FILE),
        ] {
            let scratch = Scratch::new();
            let dir = &scratch.path("");
            write(dir, (OLD, 1), &[2, 2, 2], old_max).unwrap();
            fs::create_dir(dir.join(temporary(blocked))).unwrap();
            let before = scratch.names();
            let error = write(dir, (NEW, 2), &[2, 2, 2], new_max).unwrap_err();
            assert_eq!((error.kind(), scratch.names()), (Kind::Io, before), "{blocked}: {error}");
            assert_eq!(read(dir).unwrap(), (vec![1; 6], OLD.to_string()), "{blocked}");
            fs::remove_dir(dir.join(temporary(blocked))).unwrap();
            write(dir, (NEW, 3), &[2, 2, 2], new_max).unwrap();
            assert_eq!(read(dir).unwrap(), (vec![3; 6], NEW.to_string()));
        }
    }

    /// A file that is taken away before it gets its name stops a save there, as a kill would.
    #[test]
    fn a_save_that_stops_between_two_names_leaves_the_old_model_or_none() {
        let part = |count| shard_name(2, count);
        // By what the new files replace: another config, files of their names, or nothing.
        for (what, count, is_kept) in [(NEW, 4, false), (OLD, 3, false), (OLD, 4, true)] {
            for old_max in [2, 100] {
                let is_kept = is_kept || what == OLD && old_max == 100;
                let scratch = Scratch::new();
                let dir = &scratch.path("");
                write(dir, (OLD, 1), &[2; 3], old_max).unwrap();
                let writer = begin(dir, (what, 2), &vec![2; count], 2).unwrap();
                fs::remove_file(dir.join(temporary(&part(count)))).unwrap();
                let error = writer.finish().unwrap_err();
                if is_kept {
                    assert!(error.to_string().contains("what was there is as it was"), "{error}");
                    assert_eq!(read(dir).unwrap(), (vec![1; 6], OLD.to_string()));
                } else {
                    let names = scratch.names();
                    assert!(!names.contains(&INDEX_FILE.to_string()), "the index comes last: {names:?}");
                    assert!(
                        names.contains(&temporary(INDEX_FILE)) && error.to_string().contains("save again")
                    );
                    let error = read(dir).unwrap_err();
                    assert_eq!(error.kind(), Kind::Checkpoint);
                    assert!(
                        error.message().ends_with("holds a save that was interrupted, or is not done yet")
                    );
                    assert!(
                        error.details()[0].1.starts_with("save again; what it wrote lies in model"),
                        "{error}"
                    );
                }
                write(dir, (what, 3), &[2; 3], 2).unwrap();
                assert_eq!(read(dir).unwrap(), (vec![3; 6], what.to_string()));
                assert_eq!(scratch.names().len(), 5, "nothing is left: {:?}", scratch.names());
            }
        }
    }

    /// In a folder that held no model.
    #[test]
    fn a_first_save_that_stops_between_two_names_keeps_what_it_wrote() {
        for (bytes_max, taken, kept) in [
            (100, CONFIG_FILE, WEIGHTS_FILE),
            (2, CONFIG_FILE, INDEX_FILE),
            (2, &shard_name(1, 3), INDEX_FILE),
        ] {
            let scratch = Scratch::new();
            let dir = &scratch.path("");
            let writer = begin(dir, (NEW, 1), &[2; 3], bytes_max).unwrap();
            fs::remove_file(dir.join(temporary(taken))).unwrap();
            let error = writer.finish().unwrap_err();
            let left = scratch.names();
            assert!(left.contains(&temporary(kept)), "{left:?}");
            assert!(error.to_string().contains("the new files lie in"), "{error}");
            let error = read(dir).unwrap_err();
            assert!(error.message().contains("holds a save that was interrupted"), "{error}");
            write(dir, (NEW, 2), &[2; 3], bytes_max).unwrap();
            assert_eq!(read(dir).unwrap(), (vec![2; 6], NEW.to_string()));
            assert!(scratch.names().iter().all(|name| !name.contains("tmp")), "{:?}", scratch.names());
        }
    }

    #[test]
    fn names_that_fall_together_are_refused_before_anything_is_written() {
        let scratch = Scratch::new();
        let entries = ["a", "same", "same"].map(|name| (name.to_string(), DType::U8, vec![2]));
        for bytes_max in [2, 100] {
            let error = WeightsWriter::create(&scratch.path(""), Some(NEW), &entries, bytes_max).unwrap_err();
            assert_eq!(error.kind(), Kind::Checkpoint);
            assert!(error.message().ends_with("tensor `same` is given twice"), "{error}");
            assert_eq!(error.details()[0].1, "give each tensor of the model a name of its own");
            assert_eq!(scratch.names(), [""; 0]);
        }
    }

    #[test]
    fn files_of_two_saves_are_told_apart() {
        let (one, two) = (Scratch::new(), Scratch::new());
        let (dir, name) = (&one.path(""), shard_name(2, 3));
        write(dir, (OLD, 1), &[2, 2, 2], 2).unwrap();
        write(&two.path(""), (OLD, 2), &[2, 2, 2], 2).unwrap();
        fs::copy(two.path(&name), dir.join(&name)).unwrap();
        let told = |error: Error| error.details()[0].1.clone();
        assert_eq!(told(read(dir).unwrap_err()), format!("{name} is of another save than the index"));
        // Another program's index says nothing of saves.
        let index = fs::read_to_string(dir.join(INDEX_FILE)).unwrap();
        let mut index: serde_json::Value = serde_json::from_str(&index).unwrap();
        for metadata in [json!({"total_size": 6}), json!(null), json!([1]), json!({DIGEST: {"x": "y"}})] {
            index["metadata"] = metadata;
            fs::write(dir.join(INDEX_FILE), index.to_string()).unwrap();
            assert_eq!(read(dir).unwrap().0, [1, 1, 2, 2, 1, 1]);
        }
        // What is saved twice is the same twice.
        write(dir, (OLD, 2), &[2, 2, 2], 2).unwrap();
        for name in one.names() {
            assert_eq!(fs::read(one.path(&name)).unwrap(), fs::read(two.path(&name)).unwrap(), "{name}");
        }
    }

    #[test]
    fn the_files_of_a_step_tell_it_and_one_digest() {
        let save = |bytes_max, byte| {
            let (scratch, entries) = (Scratch::new(), ["a", "b"].map(|n| (n.into(), DType::U8, vec![2])));
            let dir = &scratch.path("");
            let mut writer = WeightsWriter::of_step(dir, None, &entries, bytes_max, 7).unwrap();
            entries.iter().for_each(|(name, ..)| writer.append(name, &[byte; 2]).unwrap());
            let (told, save) = (writer.finish_telling().unwrap(), Weights::open(dir).unwrap().save());
            assert!(told.is_some() && save.digest == told && save.step.as_deref() == Some("7"), "{save:?}");
            told
        };
        for max in [2, 100] {
            assert!(save(max, 1) == save(max, 1) && save(max, 1) != save(max, 2));
        }
    }

    #[test]
    fn links_are_not_replaced() {
        let (blobs, scratch) = (Scratch::new(), Scratch::new());
        let blob = blobs.file("blob", b"shared");
        for name in [WEIGHTS_FILE, INDEX_FILE, CONFIG_FILE] {
            std::os::unix::fs::symlink(&blob, scratch.path(name)).unwrap();
            for bytes_max in [2, 100] {
                let error = write(&scratch.path(""), (NEW, 1), &[2, 2], bytes_max).unwrap_err();
                assert!(error.message().ends_with("it is a link, which is not replaced"), "{error}");
                assert_eq!(scratch.names(), [name]);
            }
            fs::remove_file(scratch.path(name)).unwrap();
        }
        assert_eq!(fs::read(&blob).unwrap(), b"shared");
    }
}
