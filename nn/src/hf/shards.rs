//! A model folder, written: its config, and its weights in one file, or in several of at most a certain size and the index
//! that names them.

use super::commit::{clear_unfinished, commit, shard_name};
use super::companion::{Beside, Companion};
use super::digest::Digest;
use super::disk::{Pending, check_space, is_taken, read_text, refuse, sealed_text};
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
        check_space(dir, entries.iter().map(bytes).sum())?;
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
mod tests;
