//! The weights of a model folder: one safetensors file, or an index and the files that it names.

use super::disk::{read_text, refuse};
use super::fields::WEIGHTS_FILE;
use super::files::TensorFile;
use super::header::TensorInfo;
use serde::Deserialize;
use shardgrad_tensor::Result;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

/// The name of the index in a folder whose weights are spread over several files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// No index is longer than this.
const INDEX_BYTES_MAX: u64 = 100_000_000;

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// All tensors of a model folder, open for reading.
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// In which file a tensor lies.
    by_name: HashMap<String, usize>,
}

impl Weights {
    /// Opens `model.safetensors`, or, where there is none, the files of `model.safetensors.index.json`.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if there is neither, if the index cannot be read or names a file outside of the folder, if two
    /// files hold a tensor of one name, and for all that [`TensorFile::open`] refuses.
    pub fn open(dir: &Path) -> Result<Weights> {
        let (single, index) = (dir.join(WEIGHTS_FILE), dir.join(INDEX_FILE));
        if single.symlink_metadata().is_ok() || index.symlink_metadata().is_err() {
            let files = vec![TensorFile::open(&single)?];
            return Weights::of(single, files);
        }
        let text = read_text(&index, INDEX_BYTES_MAX)?;
        let read: Index = serde_json::from_str(&text)
            .map_err(|e| refuse(&index, format_args!("cannot be read as an index: {e}")))?;
        let names: BTreeSet<&String> = read.weight_map.values().collect();
        let mut files = Vec::with_capacity(names.len());
        for name in names {
            let mut parts = Path::new(name).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                return Err(refuse(&index, format_args!("names {name:?}, which is no file of this folder")));
            }
            files.push(TensorFile::open(&dir.join(name))?);
        }
        Weights::of(index, files)
    }

    fn of(path: PathBuf, files: Vec<TensorFile>) -> Result<Weights> {
        let mut by_name = HashMap::new();
        for (i, file) in files.iter().enumerate() {
            for tensor in file.tensors() {
                if let Some(other) = by_name.insert(tensor.name.clone(), i) {
                    let other: &TensorFile = &files[other];
                    let why = format!("tensor `{}` is also in {}", tensor.name, other.path().display());
                    return Err(refuse(file.path(), why));
                }
            }
        }
        Ok(Weights { path, files, by_name })
    }

    /// The file, or the index, that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors, file by file.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.files.iter().flat_map(TensorFile::tensors)
    }

    /// The tensor of a name, if there is one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).and_then(|&i| self.files[i].get(name))
    }

    /// The bytes of the elements of a tensor whose index in each dim lies in a range, as [`TensorFile::read_part`].
    ///
    /// # Errors
    /// `Kind::Checkpoint` if there is no such tensor; as [`TensorFile::read_part`].
    pub fn read_part(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>> {
        self.file_of(name)?.read_part(name, shape, ranges)
    }

    /// The bytes of a whole tensor, little endian, row major.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if there is no such tensor; as [`TensorFile::read`].
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        self.file_of(name)?.read(name)
    }

    fn file_of(&self, name: &str) -> Result<&TensorFile> {
        let missing = || refuse(&self.path, format_args!("there is no tensor `{name}`"));
        self.by_name.get(name).map(|&i| &self.files[i]).ok_or_else(missing)
    }
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

    #[test]
    fn an_index_that_leads_astray_is_refused() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        write(&dir.join("1.safetensors"), "a", 1);
        write(&dir.join("2.safetensors"), "a", 2);
        for files in [
            ["1.safetensors", "2.safetensors"],
            ["1.safetensors", "../x"],
            ["/etc/x", "1.safetensors"],
            ["", ".."],
        ] {
            index(dir, files);
            assert_eq!(Weights::open(dir).unwrap_err().kind(), Kind::Checkpoint, "{files:?}");
        }
        std::fs::write(dir.join(INDEX_FILE), "{}").unwrap();
        assert!(Weights::open(dir).unwrap_err().to_string().contains("weight_map"));
    }
}
