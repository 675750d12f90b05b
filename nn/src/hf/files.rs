//! Safetensors files on disk: read by position, written in one pass.

use super::checksum::{self, Checksum};
use super::digest::Digest;
use super::disk::{Pending, failed, open_regular, open_within, refuse, zeros};
use super::header::{DIGEST, HEADER_BYTES_MAX, Header, STEP, TensorInfo, parse, render_with};
use shardgrad_tensor::{DType, Result};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// How many bytes of a tensor are in memory while its checksum is computed.
const CHUNK_BYTES: u64 = 1 << 20;

/// By what files of two saves are told apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Save {
    pub(crate) digest: Option<String>,
    /// The step of the run after which they were saved.
    pub(crate) step: Option<String>,
}

/// A safetensors file, open for reading single tensors or parts of them by position.
///
/// Ranks that are threads may share one: reading takes `&self` and no lock.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    header: Header,
    by_name: HashMap<String, usize>,
    payload_start: u64,
    /// Which tensors were found to have the checksum of the header.
    verified: Vec<AtomicBool>,
}

impl TensorFile {
    /// Opens a file and checks its header; no tensor is read.
    ///
    /// # Errors
    /// `Kind::Checkpoint` for a missing file, a folder, a header length that exceeds the file or
    /// [`HEADER_BYTES_MAX`], all that [`parse`] refuses, and checksums of some tensors but not of all; `Kind::Io` if the system
    /// refuses.
    pub fn open(path: &Path) -> Result<TensorFile> {
        TensorFile::of(path, open_regular(path)?)
    }

    /// [`TensorFile::open`] of an entry of a model folder: a link that leads out of the folder is not followed, unless the
    /// folder is a snapshot in a cache of Hugging Face and the link leads to the files of that cache.
    ///
    /// # Errors
    /// As [`TensorFile::open`]; `Kind::Checkpoint` for such a link.
    pub fn open_within(dir: &Path, name: &str) -> Result<TensorFile> {
        TensorFile::of(&dir.join(name), open_within(dir, name)?)
    }

    fn of(path: &Path, (file, length): (File, u64)) -> Result<TensorFile> {
        if length < 8 {
            let why = format!("has {length} bytes, too few for a safetensors file");
            return Err(refuse(path, why).detail("help", "the file is cut short; copy it again"));
        }
        let mut start = [0; 8];
        file.read_exact_at(&mut start, 0).map_err(|e| failed(path, "read", &e))?;
        let claimed = u64::from_le_bytes(start);
        if claimed > HEADER_BYTES_MAX || claimed > length - 8 {
            let why = format!("the header is said to have {claimed} bytes, in a file of {length}");
            let help = "the file is cut short, or it is no safetensors file";
            return Err(refuse(path, why).detail("help", help));
        }
        let mut text = zeros(path, claimed)?;
        file.read_exact_at(&mut text, 8).map_err(|e| failed(path, "read", &e))?;
        let payload_start = 8 + claimed;
        let header = parse(path, &text, length - payload_start)?;
        checksum::check_header(path, &header)?;
        let by_name = header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        let verified = header.tensors.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(TensorFile { path: path.to_path_buf(), file, header, by_name, payload_start, verified })
    }

    /// The file's name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors in the order of their bytes.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.header.tensors
    }

    /// The free text entries of the header, such as `format`.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Of which save the file is, as far as it tells.
    pub(crate) fn save(&self) -> Save {
        let told = |name| self.metadata().get(name).cloned();
        Save { digest: told(DIGEST), step: told(STEP) }
    }

    /// The tensor of a name, if the file has it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.header.tensors[i])
    }

    /// The tensor of a name.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the tensor and some that the file has.
    pub fn find(&self, name: &str) -> Result<&TensorInfo> {
        self.get(name).ok_or_else(|| {
            let some: Vec<&str> = self.tensors().iter().take(3).map(|t| t.name.as_str()).collect();
            let help = match some.len() {
                0 => "the file holds no tensor".to_string(),
                _ => format!("it holds {} tensors: {}, ...", self.tensors().len(), some.join(", ")),
            };
            refuse(&self.path, format_args!("there is no tensor `{name}`")).detail("help", help)
        })
    }

    /// The bytes of a whole tensor, little endian, row major, compared with the checksum of the header, if there is one.
    ///
    /// # Errors
    /// As [`TensorFile::find`], [`TensorFile::read_at`] and [`TensorFile::verify`]; `Kind::OutOfMemory` if the bytes cannot be
    /// had.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let range = &self.find(name)?.bytes;
        let mut bytes = zeros(&self.path, range.end - range.start)?;
        self.read_at(name, 0, &mut bytes)?;
        self.verify_bytes(name, &bytes)?;
        Ok(bytes)
    }

    /// The checksum that the header has of a tensor: XXH3-64 of its bytes, as 16 hexadecimal digits.
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

    /// Reads a tensor piece by piece and compares it with the checksum of the header, unless that was done since the file was
    /// opened. Returns whether the header has a checksum of the tensor.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming file, tensor and both checksums where they differ; as [`TensorFile::read_at`].
    pub fn verify(&self, name: &str) -> Result<bool> {
        let range = self.find(name)?.bytes.clone();
        let Some(expected) = self.checksum(name) else { return Ok(false) };
        if self.by_name.get(name).is_some_and(|&i| self.verified[i].load(Ordering::Relaxed)) {
            return Ok(true);
        }
        let (length, mut checksum) = (range.end - range.start, Checksum::default());
        let mut chunk = zeros(&self.path, length.min(CHUNK_BYTES))?;
        for start in (0..length).step_by(CHUNK_BYTES as usize) {
            let bytes = &mut chunk[..(length - start).min(CHUNK_BYTES) as usize];
            self.read_at(name, start, bytes)?;
            checksum.add(bytes);
        }
        self.compare(name, expected, &checksum.hex()).map(|()| true)
    }

    /// Fills `into` with the bytes of a tensor from byte `start` of it on (so that a rank reads its rows
    /// only).
    ///
    /// # Errors
    /// As [`TensorFile::find`]; `Kind::Checkpoint` if the range leaves the tensor or the file has become
    /// shorter; `Kind::Io` if the system refuses.
    pub fn read_at(&self, name: &str, start: u64, into: &mut [u8]) -> Result<()> {
        let range = &self.find(name)?.bytes;
        let (length, wanted) = (range.end - range.start, into.len() as u64);
        if start > length || wanted > length - start {
            let why = format!("tensor `{name}` has {length} bytes, asked are {wanted} from byte {start} on");
            return Err(refuse(&self.path, why));
        }
        let at = self.payload_start + range.start + start;
        self.file.read_exact_at(into, at).map_err(|e| failed(&self.path, "read", &e))
    }

    /// How many tensors have no checksum: all, or none.
    pub(crate) fn num_without_checksum(&self) -> usize {
        self.tensors().iter().filter(|t| self.checksum(&t.name).is_none()).count()
    }

    /// [`TensorFile::verify`] of each tensor whose number in the file leaves the remainder `share` when divided by `of`.
    pub(crate) fn verify_share(&self, share: usize, of: usize) -> Result<()> {
        let own = self.tensors().iter().skip(share).step_by(of);
        own.into_iter().try_for_each(|t| self.verify(&t.name).map(drop))
    }
}

/// Writes a safetensors file in one pass: header first, then each tensor's bytes in the order of the list, in
/// pieces of any size, so that no more than one piece is ever in memory. The header is written again at the end, with the
/// checksums of the tensors. The file appears under its name when it is whole.
#[derive(Debug)]
pub struct TensorWriter {
    pending: Pending,
    header: Header,
    /// The tensor whose bytes come next, and how many of them are written.
    at: usize,
    written: u64,
    /// The checksum of the written bytes of that tensor.
    checksum: Checksum,
}

/// Stands in the place of a checksum or digest that is not known yet.
const UNKNOWN: &str = "0000000000000000";

impl TensorWriter {
    /// Begins a file of these tensors (name, dtype, global shape).
    ///
    /// # Errors
    /// `Kind::Checkpoint` for names and shapes that no file can hold ([`render`](super::header::render)); `Kind::Io` if the
    /// system refuses, and if something that is no file stands at the path: a link, a folder, a pipe, a device.
    pub fn create(path: &Path, tensors: &[(String, DType, Vec<usize>)]) -> Result<TensorWriter> {
        TensorWriter::begin(path, tensors, &[])
    }

    /// [`TensorWriter::create`] of a file that tells its digest in its header.
    pub(super) fn with_digest(path: &Path, tensors: &[(String, DType, Vec<usize>)]) -> Result<TensorWriter> {
        TensorWriter::begin(path, tensors, &[(DIGEST, UNKNOWN)])
    }

    /// [`TensorWriter::create`] of a file that tells its digest, and the step of the run after which it is saved.
    pub(crate) fn of_step(
        path: &Path,
        tensors: &[(String, DType, Vec<usize>)],
        step: u64,
    ) -> Result<TensorWriter> {
        TensorWriter::begin(path, tensors, &[(DIGEST, UNKNOWN), (STEP, &step.to_string())])
    }

    fn begin(
        path: &Path,
        tensors: &[(String, DType, Vec<usize>)],
        more: &[(&str, &str)],
    ) -> Result<TensorWriter> {
        let more = more.iter().map(|(name, text)| (name.to_string(), text.to_string()));
        let checksums = tensors.iter().map(|(name, ..)| (checksum::key(name), UNKNOWN.to_string()));
        let (text, header) = render_with(path, tensors, &more.chain(checksums).collect())?;
        let mut pending = Pending::create(path)?;
        pending.write(&(text.len() as u64).to_le_bytes())?;
        pending.write(text.as_bytes())?;
        let mut writer = TensorWriter { pending, header, at: 0, written: 0, checksum: Checksum::default() };
        writer.pass_empty();
        Ok(writer)
    }

    /// Notes the checksum of the expected tensor, and expects the next one.
    fn end_tensor(&mut self) {
        let checksum = std::mem::take(&mut self.checksum).hex();
        self.header.metadata.insert(checksum::key(&self.header.tensors[self.at].name), checksum);
        (self.at, self.written) = (self.at + 1, 0);
    }

    fn pass_empty(&mut self) {
        while self.expected().is_some_and(|t| t.bytes.is_empty()) {
            self.end_tensor();
        }
    }

    /// The tensor whose bytes are expected next; `None` when all are there. Empty tensors are passed over.
    #[must_use]
    pub fn expected(&self) -> Option<&TensorInfo> {
        self.header.tensors.get(self.at)
    }

    /// Appends bytes (little endian, row major) of the expected tensor, which must be `name`.
    ///
    /// # Errors
    /// `Kind::Checkpoint` for another tensor or more bytes than it has left; `Kind::Io` if the system
    /// refuses.
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let given = bytes.len() as u64;
        if given == 0 {
            return Ok(());
        }
        let left = self.expected().map_or(0, |t| t.bytes.end - t.bytes.start - self.written);
        if self.expected().is_none_or(|t| t.name != name || given > left) {
            let wanted =
                self.expected().map_or("no more".to_string(), |t| format!("{left} bytes of `{}`", t.name));
            return Err(refuse(
                &self.pending.path,
                format_args!("got {given} bytes of `{name}`, expected {wanted}"),
            ));
        }
        self.pending.write(bytes)?;
        self.checksum.add(bytes);
        self.written += given;
        if given == left {
            self.end_tensor();
            self.pass_empty();
        }
        Ok(())
    }

    /// Ends the file: syncs it to the disk and gives it its name, replacing what stood there.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if bytes are missing; `Kind::Io` if the system refuses. Either way the old file
    /// stays.
    pub fn finish(self) -> Result<()> {
        self.finish_telling().map(drop)
    }

    /// [`TensorWriter::finish`]; gives the digest of the file too, if it tells it.
    pub(crate) fn finish_telling(self) -> Result<Option<String>> {
        let (pending, digest) = self.seal()?;
        pending.commit()?;
        Ok(digest)
    }

    /// Ends the file and syncs it to the disk; its name is still another. Gives its digest too, if it has one.
    pub(super) fn seal(mut self) -> Result<(Pending, Option<String>)> {
        if let Some(t) = self.expected() {
            let left = t.bytes.end - t.bytes.start - self.written;
            return Err(refuse(&self.pending.path, format_args!("{left} bytes of `{}` are missing", t.name)));
        }
        let digest = self.write_header()?;
        self.pending.seal()?;
        Ok((self.pending, digest))
    }

    /// Writes the header again, as long as before, with the checksums of all tensors and the digest of the file, if it is to
    /// have one: a digest of the header, and so, through the checksums, of the tensors.
    fn write_header(&mut self) -> Result<Option<String>> {
        let Header { tensors, metadata } = &self.header;
        let entries: Vec<_> = tensors.iter().map(|t| (t.name.clone(), t.dtype, t.shape.clone())).collect();
        let render = |metadata| render_with(&self.pending.path, &entries, metadata).map(|(text, _)| text);
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
        self.pending.rewrite(8, text.as_bytes())?;
        Ok(digest)
    }
}

#[cfg(test)]
mod tests;
