//! The weights of a model folder: one safetensors file, or an index and the files that it names.

use super::commit::unfinished_in;
use super::digest::Digest;
use super::disk::{is_plain, read_text, refuse};
use super::distinct::Distinct;
pub use super::fields::INDEX_FILE;
use super::fields::WEIGHTS_FILE;
use super::files::{Save, TensorFile};
use super::header::{DIGEST, TensorInfo};
use super::stacks::Stacks;
use serde::Deserialize;
use serde_json::Value;
use shardgrad_tensor::{Error, Result};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// No index is longer than this.
const INDEX_BYTES_MAX: u64 = 100_000_000;
/// No more faults than these are told of one folder.
const FAULTS_MAX: usize = 50;

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    metadata: Value,
    weight_map: Distinct,
}

impl Index {
    /// The digest of a file as it was when the index was written, if the index tells.
    fn digest(&self, file: &str) -> Option<&str> {
        self.metadata.get(DIGEST)?.get(file)?.as_str()
    }
}

/// All tensors of a model folder, open for reading.
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// In which file a tensor lies.
    by_name: HashMap<String, usize>,
    /// Tensors that are read as one.
    stacks: Stacks,
}

impl Weights {
    /// Opens `model.safetensors`, or, where there is none, the files of `model.safetensors.index.json`. A link that leads out
    /// of the folder is not followed (but see [`TensorFile::open_within`]).
    ///
    /// # Errors
    /// `Kind::Checkpoint` if there is neither, if the index cannot be read, and with all that is wrong with the files that it
    /// names: a name that is no file of the folder, a file that [`TensorFile::open_within`] refuses, a file of another save
    /// than the index (where both tell), a tensor that is not in the file that the index names, or in another one, or nowhere
    /// in the index. And if a save was interrupted while files got their names. `Kind::Io` if the system refuses.
    pub fn open(dir: &Path) -> Result<Weights> {
        Weights::find(dir)?.map_or_else(|| Weights::single(dir), Ok)
    }

    /// [`Weights::open`], if there is anything of weights.
    pub(super) fn find(dir: &Path) -> Result<Option<Weights>> {
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
            .map_err(|e| refuse(&index, format_args!("cannot be read as an index: {e}")))?;
        Weights::of_index(dir, index, &read).map(Some)
    }

    /// The only file.
    fn single(dir: &Path) -> Result<Weights> {
        Weights::of_file(dir, WEIGHTS_FILE)
    }

    /// The tensors of one file of a folder.
    fn of_file(dir: &Path, name: &str) -> Result<Weights> {
        let files = vec![TensorFile::open_within(dir, name)?];
        let by_name = files[0].tensors().iter().map(|t| (t.name.clone(), 0)).collect();
        Ok(Weights { path: dir.join(name), stacks: Stacks::of(files[0].tensors().iter()), files, by_name })
    }

    /// The files that an index names, if each holds what the index says that it holds.
    fn of_index(dir: &Path, index: PathBuf, read: &Index) -> Result<Weights> {
        let map = &read.weight_map.0;
        let mut faults = Vec::new();
        let mut files = Vec::new();
        for name in map.values().collect::<BTreeSet<_>>() {
            if !is_plain(name) {
                faults.push(("name", format!("{name:?} is no file of this folder")));
                continue;
            }
            match TensorFile::open_within(dir, name) {
                Ok(file) => {
                    let told = read.digest(name);
                    if told.is_some() && told != file.metadata().get(DIGEST).map(String::as_str) {
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
                    Some(said) if said == *file_name => {
                        by_name.insert(tensor.name.clone(), i);
                    }
                    Some(said) => {
                        let fault = format!("`{}` is in {file_name}, by the index in {said:?}", tensor.name);
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
            let stacks = Stacks::of(files.iter().flat_map(TensorFile::tensors));
            return Ok(Weights { path: index, files, by_name, stacks });
        }
        let count = faults.len();
        let error = refuse(&index, format_args!("does not fit the files of its folder: {count} fault(s)"));
        let told = faults.into_iter().take(FAULTS_MAX);
        Err(told.fold(error, |error, (label, fault)| error.detail(label, fault)))
    }

    /// The file, or the index, that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Of which save the files are, as far as all of them tell.
    pub(crate) fn save(&self) -> Save {
        let digests: Option<Vec<String>> = self.files.iter().map(|file| file.save().digest).collect();
        let step = self.files.first().and_then(|file| file.save().step);
        Save { digest: digests.and_then(|digests| Digest::of_files(&digests)), step }
    }

    /// All tensors, file by file.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.files.iter().flat_map(TensorFile::tensors)
    }

    /// The tensor of a name, if there is one. Tensors whose names differ in the number behind `.experts.` alone are one tensor too,
    /// of one dim more and with a `*` in the place of the number, if the numbers count from 0 and all are of one dtype and shape.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        let alone = self.by_name.get(name).and_then(|&i| self.files[i].get(name));
        alone.or_else(|| self.stacks.get(name))
    }

    /// The name of the tensor of which the one of this name is a part, as [`Weights::get`] tells.
    pub(crate) fn stack_around(&self, name: &str) -> Option<&str> {
        self.stacks.around(name).map(|stack| stack.name.as_str())
    }

    /// The bytes of the elements of a tensor whose index in each dim lies in a range, as [`TensorFile::read_part`].
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
            return Err(refuse(
                &self.path,
                format_args!("there are {} of `{name}`, not {count}", parts.len()),
            ));
        }
        let read = |part: &String| self.file_of(part)?.read_part(part, &shape[1..], &ranges[1..]);
        Ok(parts[(*chosen).clone()].iter().map(read).collect::<Result<Vec<_>>>()?.concat())
    }

    /// The bytes of a whole tensor, little endian, row major.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if there is no such tensor; as [`TensorFile::read`].
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        match self.stacks.parts(name) {
            Some(parts) => Ok(parts.iter().map(|part| self.read(part)).collect::<Result<Vec<_>>>()?.concat()),
            None => self.file_of(name)?.read(name),
        }
    }

    /// The open files.
    #[must_use]
    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }

    /// How many tensors have no checksum, so that damage of them is not found: of files that other programs wrote, and releases
    /// before there were checksums.
    #[must_use]
    pub fn num_without_checksum(&self) -> usize {
        self.files.iter().map(TensorFile::num_without_checksum).sum()
    }

    /// Compares one of `of` shares of the tensors with their checksums: those that are not verified yet, since only parts of
    /// them were read. Ranks that take a share each verify all tensors together.
    ///
    /// # Errors
    /// As [`TensorFile::verify`].
    pub fn verify_share(&self, share: usize, of: usize) -> Result<()> {
        self.files.iter().try_for_each(|file| file.verify_share(share, of))
    }

    fn file_of(&self, name: &str) -> Result<&TensorFile> {
        let missing = || refuse(&self.path, format_args!("there is no tensor `{name}`"));
        self.by_name.get(name).map(|&i| &self.files[i]).ok_or_else(missing)
    }
}

/// Why a folder without weights has none, if a save tells.
fn interrupted(dir: &Path) -> Option<Error> {
    let left = unfinished_in(dir).unwrap_or_default();
    let (first, _) = left.first()?;
    let error = refuse(dir, "holds a save that was interrupted, or is not done yet");
    let lie = format!("what it wrote lies in {first} and {} others", left.len() - 1);
    Some(error.detail("help", format!("save again; {lie}, whole only if all of them are there")))
}

#[cfg(test)]
mod tests {
    use super::super::disk::scratch::Scratch;
    use super::super::files::TensorWriter;
    use super::*;
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
    fn tensors_are_found_in_several_files() {
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
        assert!(Weights::open(dir).unwrap().get("c").is_some(), "one file goes before an index");
    }
}
