//! Weights of a model folder, open for reading: one safetensors file, or an index and the files that it names.

use super::digest::Digest;
use super::safetensors_file::{SaveId, TensorFile};
use super::safetensors_header::{DIGEST, TensorInfo, UniqueKeys};
use super::stacked_experts::StackedExperts;
use crate::checkpoint::atomic::commit::temporary_files_in;
use crate::checkpoint::atomic::disk::{file_error, is_plain_name, read_text};
use crate::checkpoint::file_names::{INDEX_FILE, WEIGHTS_FILE};
use serde::Deserialize;
use serde_json::Value;
use shardgrad_tensor::{Error, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Longest index that is read, in bytes.
const INDEX_BYTES_MAX: u64 = 100_000_000;
/// Largest number of faults that an error lists.
const FAULTS_MAX: usize = 50;

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    metadata: Value,
    weight_map: UniqueKeys<BTreeMap<String, String>>,
}

impl Index {
    /// Returns the digest that the index has of a file, if there is one.
    fn digest(&self, file: &str) -> Option<&str> {
        self.metadata.get(DIGEST)?.get(file)?.as_str()
    }
}

/// All tensors of a model folder, open for reading.
#[doc(alias = "safe_open")]
#[doc(alias = "state_dict")]
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// Index of the file of each tensor.
    by_name: HashMap<String, usize>,
    /// Tensors that are read as one stacked tensor.
    stacks: StackedExperts,
}

impl Weights {
    /// Opens `model.safetensors`, or, if there is none, the files of `model.safetensors.index.json`. Does not follow
    /// a symlink out of the folder (but see [`TensorFile::open_within`]).
    ///
    /// # Errors
    /// `Kind::Checkpoint` if neither exists or the index cannot be read, if a save was interrupted while it renamed
    /// files, and, listing all faults, for files of the index: a name that is not a plain file name, a file that
    /// [`TensorFile::open_within`] refuses, a file of another save than the index (where both have digests), a tensor
    /// that is not in the file that the index names, or in another one, or not in the index. `Kind::Io` if the system
    /// refuses.
    pub fn open(dir: &Path) -> Result<Weights> {
        Weights::find(dir)?.map_or_else(|| Weights::single(dir), Ok)
    }

    /// [`Weights::open`], or `None` for a folder without weights.
    pub(crate) fn find(dir: &Path) -> Result<Option<Weights>> {
        let is_there = |name: &str| dir.join(name).symlink_metadata().is_ok();
        if is_there(WEIGHTS_FILE) {
            return Weights::single(dir).map(Some);
        }
        if !is_there(INDEX_FILE) {
            return interrupted(dir).map_or(Ok(None), Err);
        }
        let index = dir.join(INDEX_FILE);
        let text = read_text(dir, INDEX_FILE, INDEX_BYTES_MAX)?;
        let read: Index = serde_json::from_str(&text)
            .map_err(|e| file_error(&index, format_args!("cannot be parsed as an index: {e}")))?;
        Weights::of_index(dir, index, &read).map(Some)
    }

    /// Opens `model.safetensors`.
    fn single(dir: &Path) -> Result<Weights> {
        Weights::of_file(dir, WEIGHTS_FILE)
    }

    /// Opens one file of a folder.
    fn of_file(dir: &Path, name: &str) -> Result<Weights> {
        let files = vec![TensorFile::open_within(dir, name)?];
        let by_name = files[0].tensors().iter().map(|t| (t.name.clone(), 0)).collect();
        Ok(Weights {
            path: dir.join(name),
            stacks: StackedExperts::of(files[0].tensors().iter()),
            files,
            by_name,
        })
    }

    /// Opens the files that an index names, and checks that each contains what the index says.
    fn of_index(dir: &Path, index: PathBuf, read: &Index) -> Result<Weights> {
        let map = &read.weight_map.0;
        let mut faults = Vec::new();
        let mut files = Vec::new();
        for name in map.values().collect::<BTreeSet<_>>() {
            if !is_plain_name(name) {
                faults.push(("name", format!("{name:?} is not a plain file name")));
                continue;
            }
            match TensorFile::open_within(dir, name) {
                Ok(file) => {
                    let digest = read.digest(name);
                    if digest.is_some() && digest != file.metadata().get(DIGEST).map(String::as_str) {
                        faults.push(("save", format!("{name} is of another save than the index")));
                    }
                    files.push((name, file));
                }
                Err(e) => faults.push(("file", e.message().to_string())),
            }
        }
        let mut by_name = HashMap::new();
        for (i, (file_name, file)) in files.iter().enumerate() {
            for tensor in file.tensors() {
                match map.get(&tensor.name) {
                    Some(named) if named == *file_name => {
                        by_name.insert(tensor.name.clone(), i);
                    }
                    Some(named) => {
                        let fault =
                            format!("`{}` is in {file_name}, but the index says {named:?}", tensor.name);
                        faults.push(("elsewhere", fault));
                    }
                    None => {
                        faults.push((
                            "unknown",
                            format!("`{}` of {file_name} is not in the index", tensor.name),
                        ));
                    }
                }
            }
        }
        for (name, file_name) in map {
            if !by_name.contains_key(name) && files.iter().any(|(opened, _)| *opened == file_name) {
                faults.push(("missing", format!("`{name}` is not in {file_name}")));
            }
        }
        if faults.is_empty() {
            let files: Vec<TensorFile> = files.into_iter().map(|(_, file)| file).collect();
            let stacks = StackedExperts::of(files.iter().flat_map(TensorFile::tensors));
            return Ok(Weights { path: index, files, by_name, stacks });
        }
        let count = faults.len();
        let error =
            file_error(&index, format_args!("does not match the files of its folder: {count} fault(s)"));
        let listed = faults.into_iter().take(FAULTS_MAX);
        Err(listed.fold(error, |error, (label, fault)| error.detail(label, fault)))
    }

    /// Returns the path of the file, or of the index.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the identity of the save that wrote the files, as far as all of them contain it.
    pub(crate) fn save_id(&self) -> SaveId {
        let digests: Option<Vec<String>> = self.files.iter().map(|file| file.save_id().digest).collect();
        let step = self.files.first().and_then(|file| file.save_id().step);
        SaveId { digest: digests.and_then(|digests| Digest::of_files(&digests)), step }
    }

    /// Yields all tensors, file by file.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.files.iter().flat_map(TensorFile::tensors)
    }

    /// Returns the tensor of a name, if there is one. Tensors whose names differ only in the number after `.experts.`
    /// can also be read as one stacked tensor, with one more dim and `*` in place of the number, if the numbers count
    /// from 0 and all have one dtype and shape.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        let alone = self.by_name.get(name).and_then(|&i| self.files[i].get(name));
        alone.or_else(|| self.stacks.get(name))
    }

    /// Returns the name of the stacked tensor of which this tensor is a part ([`Weights::get`]).
    pub(crate) fn stack_containing(&self, name: &str) -> Option<&str> {
        self.stacks.stack_containing(name).map(|stack| stack.name.as_str())
    }

    /// Reads a box of a tensor, as [`TensorFile::read_part`].
    ///
    /// # Errors
    /// `Kind::Checkpoint` if there is no such tensor; as [`TensorFile::read_part`].
    pub fn read_part(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>> {
        let (Some(parts), [(count, chosen), ..]) =
            (self.stacks.parts(name), &shape.iter().zip(ranges).collect::<Vec<_>>()[..])
        else {
            return self.file_of(name)?.read_part(name, shape, ranges);
        };
        if **count != parts.len() {
            return Err(file_error(
                &self.path,
                format_args!("`{name}` stacks {} tensors, not {count}", parts.len()),
            ));
        }
        let read = |part: &String| self.file_of(part)?.read_part(part, &shape[1..], &ranges[1..]);
        Ok(parts[(*chosen).clone()].iter().map(read).collect::<Result<Vec<_>>>()?.concat())
    }

    /// Reads a whole tensor: its bytes, little endian, row major.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if there is no such tensor; as [`TensorFile::read`].
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        match self.stacks.parts(name) {
            Some(parts) => Ok(parts.iter().map(|part| self.read(part)).collect::<Result<Vec<_>>>()?.concat()),
            None => self.file_of(name)?.read(name),
        }
    }

    /// Returns the open files.
    #[must_use]
    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }

    /// Returns the number of tensors without a checksum, whose damage is not detected: those of files that other
    /// programs, or releases before checksums, wrote.
    #[must_use]
    pub fn num_without_checksum(&self) -> usize {
        self.files.iter().map(TensorFile::num_without_checksum).sum()
    }

    /// Compares one of `of` shares of the tensors with their checksums, except those verified already because they
    /// were read whole. If each rank takes one share, the ranks verify all tensors together.
    ///
    /// # Errors
    /// As [`TensorFile::verify`].
    pub fn verify_share(&self, share: usize, of: usize) -> Result<()> {
        self.files.iter().try_for_each(|file| file.verify_share(share, of))
    }

    fn file_of(&self, name: &str) -> Result<&TensorFile> {
        let missing = || file_error(&self.path, format_args!("there is no tensor `{name}`"));
        self.by_name.get(name).map(|&i| &self.files[i]).ok_or_else(missing)
    }
}

/// Returns the error for a folder without weights in which a save was interrupted.
fn interrupted(dir: &Path) -> Option<Error> {
    let temporaries = temporary_files_in(dir).unwrap_or_default();
    let (first, _) = temporaries.first()?;
    let error = file_error(dir, "contains a save that was interrupted, or still runs");
    let parts = format!("its files are {first} and {} others", temporaries.len() - 1);
    Some(error.detail("help", format!("save again; {parts}, complete only if all of them exist")))
}

#[cfg(test)]
mod tests {
    use super::super::safetensors_file::TensorWriter;
    use super::*;
    use crate::checkpoint::atomic::disk::scratch::Scratch;
    use shardgrad_tensor::{DType, Kind};

    fn write(path: &Path, name: &str, byte: u8) {
        let mut writer = TensorWriter::create(path, &[(name.to_string(), DType::U8, vec![2])]).unwrap();
        writer.append(name, &[byte, byte]).unwrap();
        writer.finish().unwrap();
    }

    fn index(dir: &Path, files: [&str; 2]) {
        let text = format!(
            r#"{{"metadata": {{"total_size": 4}}, "weight_map": {{"a": {:?}, "b": {:?}}}}}"#,
            files[0], files[1]
        );
        std::fs::write(dir.join(INDEX_FILE), text).unwrap();
    }

    #[test]
    fn index_finds_tensors_in_several_files() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        assert_eq!(Weights::open(dir).unwrap_err().kind(), Kind::Checkpoint);
        write(&dir.join("1.safetensors"), "a", 1);
        write(&dir.join("2.safetensors"), "b", 2);
        index(dir, ["1.safetensors", "2.safetensors"]);
        let weights = Weights::open(dir).unwrap();
        assert_eq!((weights.read("a").unwrap(), weights.read("b").unwrap()), (vec![1, 1], vec![2, 2]));
        assert_eq!(weights.tensors().count(), 2);
        assert!(weights.get("c").is_none() && weights.read("c").is_err());
        write(&dir.join(WEIGHTS_FILE), "c", 3);
        assert!(
            Weights::open(dir).unwrap().get("c").is_some(),
            "a single file takes precedence over an index"
        );
    }
}
