//! Writing a model folder: its config, and its weights in one file, or in several files of limited size and an index.

use super::digest::Digest;
use super::safetensors_file::TensorWriter;
use super::safetensors_header::{DIGEST, TensorSpec};
use super::stacked_experts::{is_stacked_name, member_name, unstack};
use crate::checkpoint::atomic::atomic_file::{AtomicFile, write_temporary_text};
use crate::checkpoint::atomic::commit::{commit, remove_stale_temporaries};
use crate::checkpoint::atomic::disk::{check_space, file_error, is_existing_file, read_text};
use crate::checkpoint::atomic::folder_lock::FolderLock;
use crate::checkpoint::atomic::sidecar::{SidecarChanges, SidecarFile};
use crate::checkpoint::file_names::{CONFIG_BYTES_MAX, CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, shard_name};
use serde_json::json;
use shardgrad_tensor::Result;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};

/// Writes a list of tensors into a folder, in order. All files have temporary names (`*.tmp-` and the process id)
/// until the last one is complete, and the folder keeps the model that it had; dropped before that, the new files are
/// removed. [`WeightsWriter::finish`] then replaces the old model.
#[doc(alias = "max_shard_size")]
#[doc(alias = "save_pretrained")]
#[derive(Debug)]
pub struct WeightsWriter {
    dir: PathBuf,
    /// Files still to be written, with their tensors.
    files: VecDeque<(String, Vec<TensorSpec>)>,
    open_file: Option<TensorWriter>,
    /// Number of tensors still to come in the open file.
    tensors_left: usize,
    /// The config, if it differs from that of the folder.
    config: Option<AtomicFile>,
    /// Sidecar files.
    sidecars: SidecarChanges,
    /// Finished files, with their digests if there are several.
    finished: Vec<(AtomicFile, Option<String>)>,
    /// Contents of the index, if there is one.
    index: Option<Index>,
    /// Step of the run, for files that contain it.
    step: Option<u64>,
    /// Released last.
    _lock: FolderLock,
}

#[derive(Debug)]
struct Index {
    bytes: u64,
    /// The file of each tensor.
    map: BTreeMap<String, String>,
    /// The files in the order in which they are written.
    names: Vec<String>,
}

/// Refuses two tensors of one name, in whichever files: the index could name only one.
fn check_names(dir: &Path, entries: &[TensorSpec]) -> Result<()> {
    let mut names = HashSet::new();
    match entries.iter().find(|(name, ..)| !names.insert(name)) {
        None => Ok(()),
        Some((name, ..)) => {
            let error = file_error(dir, format_args!("tensor `{name}` is given twice"));
            Err(error.detail("help", "give each tensor a unique name"))
        }
    }
}

impl WeightsWriter {
    /// Begins a save: `config` is the text of `config.json`, if there is one; the tensors go into files of at most
    /// `bytes_max` bytes of tensors, and a larger tensor into a file of its own. First removes temporary files of
    /// saves that have ended. Waits while another save writes into the folder (a second writer on the same thread
    /// would wait for itself).
    ///
    /// # Errors
    /// `Kind::Checkpoint` for two tensors of one name; `Kind::Io` if another save takes more than ten minutes, or if
    /// something that is not a regular file (a symlink, a folder, a device) has a name that is to be written or
    /// removed; as [`TensorWriter::create`] for the first file.
    pub fn create(
        dir: &Path,
        config: Option<&str>,
        entries: &[TensorSpec],
        bytes_max: u64,
    ) -> Result<WeightsWriter> {
        WeightsWriter::begin(dir, config, entries, bytes_max, None)
    }

    /// [`WeightsWriter::create`]; with the step of a run, the files contain it and their digest.
    pub(crate) fn begin(
        dir: &Path,
        config: Option<&str>,
        entries: &[TensorSpec],
        bytes_max: u64,
        step: Option<u64>,
    ) -> Result<WeightsWriter> {
        let entries = &unstack(entries)[..];
        check_names(dir, entries)?;
        let lock = FolderLock::acquire(dir)?;
        let bytes = |e: &TensorSpec| (e.2.iter().product::<usize>() * e.1.size()) as u64;
        check_space(dir, entries.iter().map(bytes).sum())?;
        let mut groups: Vec<Vec<TensorSpec>> = vec![Vec::new()];
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
            let of_file = |(name, group): &(String, Vec<TensorSpec>)| -> Vec<(String, String)> {
                group.iter().map(|e| (e.0.clone(), name.clone())).collect()
            };
            Index {
                bytes: entries.iter().map(bytes).sum(),
                map: files.iter().flat_map(of_file).collect(),
                names: files.iter().map(|(name, _)| name.clone()).collect(),
            }
        });
        let names = files.iter().map(|(name, _)| name.as_str()).chain([CONFIG_FILE]);
        names.map(|name| dir.join(name)).try_for_each(|path| is_existing_file(&path).map(drop))?;
        // Without a readable model, the files of an interrupted save may be the only copy: keep them.
        if is_existing_file(&dir.join(INDEX_FILE))? | is_existing_file(&dir.join(WEIGHTS_FILE))? {
            remove_stale_temporaries(dir, &[])?;
        }
        let is_new =
            |text: &&str| read_text(dir, CONFIG_FILE, CONFIG_BYTES_MAX).ok().as_deref() != Some(*text);
        let config = config
            .filter(is_new)
            .map(|text| write_temporary_text(&dir.join(CONFIG_FILE), text))
            .transpose()?;
        let mut writer = WeightsWriter {
            dir: dir.to_path_buf(),
            files,
            open_file: None,
            tensors_left: 0,
            config,
            sidecars: SidecarChanges::default(),
            finished: Vec::new(),
            index,
            step,
            _lock: lock,
        };
        writer.next()?;
        Ok(writer)
    }

    /// Adds sidecar files: copied now, under temporary names, and renamed into place at the moment at which the
    /// folder has no readable model, so that no reader finds one model with the files of another.
    ///
    /// # Errors
    /// `Kind::Io` if something that is not a regular file has the name of a sidecar, or if the system refuses.
    pub fn with_sidecars(mut self, sidecar_files: &[SidecarFile<'_>]) -> Result<WeightsWriter> {
        self.sidecars = SidecarChanges::prepare(&self.dir, sidecar_files)?;
        Ok(self)
    }

    /// Opens the next file, if there is one.
    fn next(&mut self) -> Result<()> {
        if let Some((name, entries)) = self.files.pop_front() {
            let path = self.dir.join(name);
            let has_digest = self.step.is_some() || self.index.is_some();
            self.open_file = Some(match has_digest {
                true => TensorWriter::with_digest(&path, &entries, self.step)?,
                false => TensorWriter::create(&path, &entries)?,
            });
            self.tensors_left = entries.len();
        }
        Ok(())
    }

    /// Writes the next tensor of the list, whole; for a stacked tensor ([`Weights::get`](crate::checkpoint::Weights::get)) all of
    /// its parts.
    ///
    /// # Errors
    /// As [`TensorWriter::append`] and [`TensorWriter::create`].
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if !is_stacked_name(name) {
            return self.append_one(name, bytes);
        }
        let (mut rest, mut index) = (bytes, 0);
        while !rest.is_empty() {
            self.advance_file()?;
            let next = self.open_file.as_ref().and_then(TensorWriter::expected);
            let size = next.map_or(rest.len(), |t| (t.bytes.end - t.bytes.start) as usize);
            let (part, tail) = rest.split_at(size.clamp(1, rest.len()));
            self.append_one(&member_name(name, index), part)?;
            (rest, index) = (tail, index + 1);
        }
        Ok(())
    }

    /// Advances to the next file if the open one has all its tensors.
    fn advance_file(&mut self) -> Result<()> {
        if self.tensors_left == 0 && !self.files.is_empty() {
            self.close()?;
            self.next()?;
        }
        Ok(())
    }

    fn append_one(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.advance_file()?;
        self.tensors_left = self.tensors_left.saturating_sub(1);
        match &mut self.open_file {
            Some(file) => file.append(name, bytes),
            None => Ok(()),
        }
    }

    fn close(&mut self) -> Result<()> {
        let finished = self.open_file.take().map(TensorWriter::finish_unnamed).transpose()?;
        self.finished.extend(finished);
        Ok(())
    }

    /// Replaces the model that the folder held, and removes what earlier saves left there: files of weights under
    /// names that saves use, and temporary files.
    ///
    /// The old model is unchanged until the first file is renamed. The replacement is atomic if config and file names
    /// allow; otherwise the folder has no model for a moment, in which [`Weights::open`](crate::checkpoint::Weights::open)
    /// refuses it.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if bytes are missing; `Kind::Io` if the system refuses, or as [`WeightsWriter::create`].
    pub fn finish(self) -> Result<()> {
        self.finish_with_digest().map(drop)
    }

    /// [`WeightsWriter::finish`]; returns the digest of the files, if they have digests.
    pub(crate) fn finish_with_digest(mut self) -> Result<Option<String>> {
        self.close()?;
        if let Some((name, _)) = self.files.front() {
            return Err(file_error(&self.dir.join(name), "its tensors are missing"));
        }
        let config = self.config.take();
        let (mut files, digests): (Vec<AtomicFile>, Vec<_>) =
            std::mem::take(&mut self.finished).into_iter().unzip();
        let digests_of_files: Option<Vec<String>> = digests.iter().cloned().collect();
        let last = match &self.index {
            Some(Index { bytes, map, names }) => {
                let digests: BTreeMap<_, _> = names.iter().zip(digests).collect();
                let metadata = json!({"total_size": bytes, DIGEST: digests});
                let text = format!("{:#}\n", json!({"metadata": metadata, "weight_map": map}));
                Some(write_temporary_text(&self.dir.join(INDEX_FILE), &text)?)
            }
            None => files.pop(),
        };
        last.map_or(Ok(()), |last| commit(&self.dir, config, self.sidecars, files, last))?;
        Ok(digests_of_files.and_then(|digests| Digest::of_files(&digests)))
    }
}

#[cfg(test)]
mod tests;
