//! The weights of a model folder, written: one file, or several of at most a certain size and the index that names them.

use super::disk::{failed, write_text};
use super::fields::WEIGHTS_FILE;
use super::files::TensorWriter;
use super::folder::INDEX_FILE;
use serde_json::json;
use shardgrad_tensor::{DType, Result};
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Name, dtype and shape of a tensor.
pub type Entry = (String, DType, Vec<usize>);

/// Writes the tensors of a list into a folder, in its order. Files appear under their names when they are whole; the index,
/// or the only file, comes last.
#[derive(Debug)]
pub struct WeightsWriter {
    dir: PathBuf,
    /// What is still to be written, file by file.
    files: VecDeque<(String, Vec<Entry>)>,
    open: Option<TensorWriter>,
    /// How many tensors are still to come in the open file.
    left: usize,
    /// The text of the index, where there is one.
    index: Option<String>,
}

impl WeightsWriter {
    /// For the tensors of a list, in files of at most `bytes_max` bytes of tensors; one that is larger has a file of its own.
    ///
    /// # Errors
    /// What [`TensorWriter::create`] reports of the first file.
    pub fn create(dir: &Path, entries: &[Entry], bytes_max: u64) -> Result<WeightsWriter> {
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
        let name = |i: usize| match count {
            1 => WEIGHTS_FILE.to_string(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let files: VecDeque<_> = groups.into_iter().enumerate().map(|(i, g)| (name(i), g)).collect();
        let index = (count > 1).then(|| {
            let of_file = |(name, group): &(String, Vec<Entry>)| -> Vec<(String, String)> {
                group.iter().map(|e| (e.0.clone(), name.clone())).collect()
            };
            let map: BTreeMap<String, String> = files.iter().flat_map(of_file).collect();
            let total: u64 = entries.iter().map(bytes).sum();
            format!("{:#}\n", json!({"metadata": {"total_size": total}, "weight_map": map}))
        });
        let mut writer = WeightsWriter { dir: dir.to_path_buf(), files, open: None, left: 0, index };
        writer.next()?;
        Ok(writer)
    }

    /// Begins the next file, if one is left.
    fn next(&mut self) -> Result<()> {
        if let Some((name, entries)) = self.files.pop_front() {
            self.open = Some(TensorWriter::create(&self.dir.join(name), &entries)?);
            self.left = entries.len();
        }
        Ok(())
    }

    /// Writes the next tensor of the list, whole.
    ///
    /// # Errors
    /// What [`TensorWriter::append`] and [`TensorWriter::create`] report.
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if self.left == 0 && !self.files.is_empty() {
            self.close()?;
            self.next()?;
        }
        self.left = self.left.saturating_sub(1);
        match &mut self.open {
            Some(open) => open.append(name, bytes),
            None => Ok(()),
        }
    }

    fn close(&mut self) -> Result<()> {
        self.open.take().map_or(Ok(()), TensorWriter::finish)
    }

    /// Makes the last file and the index whole, and takes away what would go before them.
    ///
    /// # Errors
    /// What [`TensorWriter::finish`] reports; `Kind::Io` if the system refuses.
    pub fn finish(mut self) -> Result<()> {
        self.close()?;
        let stale = match &self.index {
            Some(text) => {
                write_text(&self.dir.join(INDEX_FILE), text)?;
                self.dir.join(WEIGHTS_FILE)
            }
            None => self.dir.join(INDEX_FILE),
        };
        match fs::remove_file(&stale) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(failed(&stale, "remove", &e)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk::scratch::Scratch;
    use super::super::folder::Weights;
    use super::*;

    fn write(dir: &Path, sizes: &[usize], bytes_max: u64) -> Result<()> {
        let entry = |(i, n): (usize, &usize)| (format!("t{i}"), DType::U8, vec![*n]);
        let entries: Vec<Entry> = sizes.iter().enumerate().map(entry).collect();
        let mut writer = WeightsWriter::create(dir, &entries, bytes_max)?;
        for (i, (name, _, shape)) in entries.iter().enumerate() {
            writer.append(name, &vec![i as u8; shape[0]])?;
        }
        writer.finish()
    }

    #[test]
    fn files_are_filled_in_order_and_read_back() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        write(dir, &[3, 3, 9, 1, 0, 4], 6).unwrap();
        assert_eq!(
            scratch.names(),
            [
                "model-00001-of-00003.safetensors",
                "model-00002-of-00003.safetensors",
                "model-00003-of-00003.safetensors",
                INDEX_FILE
            ]
        );
        let weights = Weights::open(dir).unwrap();
        assert_eq!(weights.tensors().count(), 6);
        for (i, n) in [3, 3, 9, 1, 0, 4].into_iter().enumerate() {
            assert_eq!(weights.read(&format!("t{i}")).unwrap(), vec![i as u8; n]);
        }
        let index: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(dir.join(INDEX_FILE)).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], 20);
        assert_eq!(index["weight_map"]["t2"], "model-00002-of-00003.safetensors");
    }

    #[test]
    fn what_was_written_last_is_what_is_read() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        let count = |dir| Weights::open(dir).unwrap().tensors().count();
        write(dir, &[2, 2], 100).unwrap();
        assert_eq!((scratch.names(), count(dir)), (vec![WEIGHTS_FILE.to_string()], 2));
        write(dir, &[2, 2, 2], 2).unwrap();
        assert_eq!(count(dir), 3, "the single file of before is gone");
        write(dir, &[5], 100).unwrap();
        assert_eq!(count(dir), 1);
        assert!(!scratch.names().contains(&INDEX_FILE.to_string()));
        write(dir, &[], 100).unwrap();
        assert_eq!(count(dir), 0);
    }
}
