//! Safetensors files: read by position, written in one pass.

use super::checksum::{self, Checksum};
use super::digest::Digest;
use super::safetensors_header::{
    DIGEST, HEADER_BYTES_MAX, Header, STEP, TensorInfo, TensorSpec, parse, render,
};
use crate::checkpoint::atomic::atomic_file::AtomicFile;
use crate::checkpoint::atomic::disk::{file_error, io_error, open_regular, open_within, zeroed};
use shardgrad_tensor::Result;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of bytes of a tensor in memory while its checksum is computed.
const CHUNK_BYTES: u64 = 1 << 20;

/// Identity of a save, to tell files of different saves apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SaveId {
    pub(crate) digest: Option<String>,
    /// Step of the run after which the file was saved.
    pub(crate) step: Option<String>,
}

/// A safetensors file, open for reading tensors, or parts of them, by position.
///
/// Ranks that are threads may share one: reading takes `&self` and no lock.
#[doc(alias = "safetensors")]
#[doc(alias = "safe_open")]
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    header: Header,
    by_name: HashMap<String, usize>,
    payload_start: u64,
    /// Which tensors have been found to match their checksum.
    verified: Vec<AtomicBool>,
}

impl TensorFile {
    /// Opens a file and checks its header; reads no tensor.
    ///
    /// # Errors
    /// `Kind::Checkpoint` for a missing file, a folder, a header length that exceeds the file or
    /// [`HEADER_BYTES_MAX`], all that [`parse`] refuses, and checksums of some tensors but not of all; `Kind::Io` if
    /// the system refuses.
    pub fn open(path: &Path) -> Result<TensorFile> {
        TensorFile::of(path, open_regular(path)?)
    }

    /// [`TensorFile::open`] for an entry of a model folder. Follows a symlink out of the folder only if the folder is
    /// a snapshot in the Hugging Face cache and the link leads to the blobs of that cache.
    ///
    /// # Errors
    /// As [`TensorFile::open`]; `Kind::Checkpoint` for other symlinks out of the folder.
    pub fn open_within(dir: &Path, name: &str) -> Result<TensorFile> {
        TensorFile::of(&dir.join(name), open_within(dir, name)?)
    }

    fn of(path: &Path, (file, length): (File, u64)) -> Result<TensorFile> {
        if length < 8 {
            let why = format!("has {length} bytes, too few for a safetensors file");
            return Err(file_error(path, why).detail("help", "the file is truncated: copy it again"));
        }
        let mut start = [0; 8];
        file.read_exact_at(&mut start, 0).map_err(|e| io_error(path, "read", &e))?;
        let header_bytes = u64::from_le_bytes(start);
        if header_bytes > HEADER_BYTES_MAX || header_bytes > length - 8 {
            let why = format!("the header length is {header_bytes} bytes, but the file has {length} bytes");
            let help = "the file is truncated, or is not a safetensors file";
            return Err(file_error(path, why).detail("help", help));
        }
        let mut text = zeroed(path, header_bytes)?;
        file.read_exact_at(&mut text, 8).map_err(|e| io_error(path, "read", &e))?;
        let payload_start = 8 + header_bytes;
        let header = parse(path, &text, length - payload_start)?;
        checksum::check_header(path, &header)?;
        let by_name = header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        let verified = header.tensors.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(TensorFile { path: path.to_path_buf(), file, header, by_name, payload_start, verified })
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tensors in the order of their bytes.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.header.tensors
    }

    /// Returns the entries of `__metadata__`, such as `format`.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Returns the identity of the save that wrote the file, as far as the header contains it.
    pub(crate) fn save_id(&self) -> SaveId {
        let entry = |name| self.metadata().get(name).cloned();
        SaveId { digest: entry(DIGEST), step: entry(STEP) }
    }

    /// Returns the tensor of a name, if the file has it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.header.tensors[i])
    }

    /// Returns the tensor of a name.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the tensor, and some tensors of the file.
    pub fn find(&self, name: &str) -> Result<&TensorInfo> {
        self.get(name).ok_or_else(|| {
            let some: Vec<&str> = self.tensors().iter().take(3).map(|t| t.name.as_str()).collect();
            let help = match some.len() {
                0 => "the file contains no tensor".to_string(),
                _ => format!("the file contains {} tensors: {}, ...", self.tensors().len(), some.join(", ")),
            };
            file_error(&self.path, format_args!("there is no tensor `{name}`")).detail("help", help)
        })
    }

    /// Reads a whole tensor: its bytes, little endian, row major. Compares them with the checksum of the header, if
    /// there is one.
    ///
    /// # Errors
    /// As [`TensorFile::find`], [`TensorFile::read_at`] and [`TensorFile::verify`]; `Kind::OutOfMemory`.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let range = &self.find(name)?.bytes;
        let mut bytes = zeroed(&self.path, range.end - range.start)?;
        self.read_at(name, 0, &mut bytes)?;
        self.verify_bytes(name, &bytes)?;
        Ok(bytes)
    }

    /// Returns the checksum of a tensor in the header: XXH3-64 of its bytes, as 16 hexadecimal digits.
    #[must_use]
    pub fn checksum(&self, name: &str) -> Option<&str> {
        self.metadata().get(&checksum::key(name)).map(String::as_str)
    }

    /// Compares the bytes of a whole tensor with the checksum of the header.
    pub(super) fn verify_bytes(&self, name: &str, bytes: &[u8]) -> Result<()> {
        match self.checksum(name) {
            Some(expected) => self.compare(name, expected, &Checksum::of(bytes)),
            None => Ok(()),
        }
    }

    fn compare(&self, name: &str, expected: &str, found: &str) -> Result<()> {
        checksum::compare(&self.path, name, expected, found)?;
        if let Some(&i) = self.by_name.get(name) {
            self.verified[i].store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Reads a tensor in chunks and compares it with the checksum of the header, unless that has been done since the
    /// file was opened. Returns whether the header has a checksum of the tensor.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the file, the tensor and both checksums if they differ; as [`TensorFile::read_at`].
    pub fn verify(&self, name: &str) -> Result<bool> {
        let range = self.find(name)?.bytes.clone();
        let Some(expected) = self.checksum(name) else { return Ok(false) };
        if self.by_name.get(name).is_some_and(|&i| self.verified[i].load(Ordering::Relaxed)) {
            return Ok(true);
        }
        let (length, mut checksum) = (range.end - range.start, Checksum::default());
        let mut chunk = zeroed(&self.path, length.min(CHUNK_BYTES))?;
        for start in (0..length).step_by(CHUNK_BYTES as usize) {
            let bytes = &mut chunk[..(length - start).min(CHUNK_BYTES) as usize];
            self.read_at(name, start, bytes)?;
            checksum.add(bytes);
        }
        self.compare(name, expected, &checksum.hex()).map(|()| true)
    }

    /// Fills `into` with the bytes of a tensor from its byte `start` on (so that a rank reads its rows only).
    ///
    /// # Errors
    /// As [`TensorFile::find`]; `Kind::Checkpoint` if the range exceeds the tensor, or the file has shrunk;
    /// `Kind::Io` if the system refuses.
    pub fn read_at(&self, name: &str, start: u64, into: &mut [u8]) -> Result<()> {
        let range = &self.find(name)?.bytes;
        let (length, wanted) = (range.end - range.start, into.len() as u64);
        if start > length || wanted > length - start {
            let why = format!(
                "tensor `{name}` has {length} bytes: cannot read {wanted} bytes from byte {start} on"
            );
            return Err(file_error(&self.path, why));
        }
        let at = self.payload_start + range.start + start;
        self.file.read_exact_at(into, at).map_err(|e| io_error(&self.path, "read", &e))
    }

    /// Number of tensors without a checksum: all or none.
    pub(crate) fn num_without_checksum(&self) -> usize {
        self.tensors().iter().filter(|t| self.checksum(&t.name).is_none()).count()
    }

    /// [`TensorFile::verify`] for one of `of` shares of the tensors: those whose index modulo `of` is `share`.
    pub(crate) fn verify_share(&self, share: usize, of: usize) -> Result<()> {
        let own = self.tensors().iter().skip(share).step_by(of);
        own.into_iter().try_for_each(|t| self.verify(&t.name).map(drop))
    }
}

/// Writes a safetensors file in one pass: first the header, then the bytes of each tensor in the order of the list,
/// in pieces of any size, so that at most one piece is in memory. At the end the header is rewritten with the
/// checksums of the tensors. The file is renamed from its temporary name when it is complete.
#[doc(alias = "safetensors")]
#[doc(alias = "save_file")]
#[derive(Debug)]
pub struct TensorWriter {
    output: AtomicFile,
    header: Header,
    /// Index of the tensor whose bytes come next, and the number of its bytes written so far.
    at: usize,
    written: u64,
    /// Checksum of the bytes of that tensor so far.
    checksum: Checksum,
}

/// Placeholder for a checksum or digest that is not yet known.
const UNKNOWN: &str = "0000000000000000";

impl TensorWriter {
    /// Begins a file of these tensors (name, dtype, global shape).
    ///
    /// # Errors
    /// `Kind::Checkpoint` for names and shapes that no file can contain: what [`parse`] would refuse; `Kind::Io` if the
    /// system refuses, and if the path is not a regular file (a symlink, a folder, a pipe, a device).
    pub fn create(path: &Path, tensors: &[TensorSpec]) -> Result<TensorWriter> {
        TensorWriter::begin(path, tensors, [])
    }

    /// [`TensorWriter::create`] of a file with its digest in its header, and the step of the run if there is one.
    pub(crate) fn with_digest(
        path: &Path,
        tensors: &[TensorSpec],
        step: Option<u64>,
    ) -> Result<TensorWriter> {
        let step = step.map(|step| (STEP.to_string(), step.to_string()));
        TensorWriter::begin(
            path,
            tensors,
            [(DIGEST.to_string(), UNKNOWN.to_string())].into_iter().chain(step),
        )
    }

    fn begin(
        path: &Path,
        tensors: &[TensorSpec],
        more: impl IntoIterator<Item = (String, String)>,
    ) -> Result<TensorWriter> {
        let checksums = tensors.iter().map(|(name, ..)| (checksum::key(name), UNKNOWN.to_string()));
        let (text, header) = render(path, tensors, &more.into_iter().chain(checksums).collect())?;
        let mut output = AtomicFile::create(path)?;
        output.write(&(text.len() as u64).to_le_bytes())?;
        output.write(text.as_bytes())?;
        let mut writer = TensorWriter { output, header, at: 0, written: 0, checksum: Checksum::default() };
        writer.skip_empty();
        Ok(writer)
    }

    /// Records the checksum of the current tensor, and advances to the next.
    fn end_tensor(&mut self) {
        let checksum = std::mem::take(&mut self.checksum).hex();
        self.header.metadata.insert(checksum::key(&self.header.tensors[self.at].name), checksum);
        (self.at, self.written) = (self.at + 1, 0);
    }

    fn skip_empty(&mut self) {
        while self.expected().is_some_and(|t| t.bytes.is_empty()) {
            self.end_tensor();
        }
    }

    /// Returns the tensor whose bytes come next; `None` when the file is complete. Skips empty tensors.
    #[must_use]
    pub fn expected(&self) -> Option<&TensorInfo> {
        self.header.tensors.get(self.at)
    }

    /// Appends bytes (little endian, row major) of the expected tensor, which must be `name`.
    ///
    /// # Errors
    /// `Kind::Checkpoint` for another tensor, or more bytes than the tensor has left; `Kind::Io` if the system
    /// refuses.
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let num_bytes = bytes.len() as u64;
        if num_bytes == 0 {
            return Ok(());
        }
        let left = self.expected().map_or(0, |t| t.bytes.end - t.bytes.start - self.written);
        if self.expected().is_none_or(|t| t.name != name || num_bytes > left) {
            let expected_text =
                self.expected().map_or("no more".to_string(), |t| format!("{left} bytes of `{}`", t.name));
            return Err(file_error(
                &self.output.path,
                format_args!("got {num_bytes} bytes of `{name}`, expected {expected_text}"),
            ));
        }
        self.output.write(bytes)?;
        self.checksum.add(bytes);
        self.written += num_bytes;
        if num_bytes == left {
            self.end_tensor();
            self.skip_empty();
        }
        Ok(())
    }

    /// Finishes the file: syncs it to the disk and renames it into place, replacing the old file.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if bytes are missing; `Kind::Io` if the system refuses. The old file stays then.
    pub fn finish(self) -> Result<()> {
        self.finish_with_digest().map(drop)
    }

    /// [`TensorWriter::finish`]; returns the digest of the file, if it has one.
    pub(crate) fn finish_with_digest(self) -> Result<Option<String>> {
        let (output, digest) = self.finish_unnamed()?;
        output.commit()?;
        Ok(digest)
    }

    /// Finishes the file and syncs it to the disk under its temporary name. Returns its digest, if it has one.
    pub(super) fn finish_unnamed(mut self) -> Result<(AtomicFile, Option<String>)> {
        if let Some(t) = self.expected() {
            let left = t.bytes.end - t.bytes.start - self.written;
            return Err(file_error(
                &self.output.path,
                format_args!("{left} bytes of `{}` are missing", t.name),
            ));
        }
        let digest = self.write_header()?;
        self.output.flush_and_sync()?;
        Ok((self.output, digest))
    }

    /// Rewrites the header, with unchanged length, with the checksums of all tensors and the digest of the file, if
    /// it has one. The digest is that of the header, and so, through the checksums, of the tensors.
    fn write_header(&mut self) -> Result<Option<String>> {
        let Header { tensors, metadata } = &self.header;
        let entries: Vec<_> = tensors.iter().map(|t| (t.name.clone(), t.dtype, t.shape.clone())).collect();
        let render = |metadata| render(&self.output.path, &entries, metadata).map(|(text, _)| text);
        let mut text = render(metadata)?;
        let digest = metadata.contains_key(DIGEST).then(|| {
            let mut digest = Digest::default();
            digest.add(text.as_bytes());
            digest.hex()
        });
        if let Some(digest) = &digest {
            let mut metadata = metadata.clone();
            metadata.insert(DIGEST.to_string(), digest.clone());
            text = render(&metadata)?;
        }
        self.output.rewrite(8, text.as_bytes())?;
        Ok(digest)
    }
}

#[cfg(test)]
mod tests;
