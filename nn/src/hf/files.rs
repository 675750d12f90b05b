//! Safetensors files on disk: read by position, written in one pass.

use super::digest::Digest;
use super::disk::{Pending, failed, open_regular, open_within, refuse, zeros};
use super::header::{DIGEST, HEADER_BYTES_MAX, Header, STEP, TensorInfo, parse, render_with};
use shardgrad_tensor::{DType, Result};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

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
}

impl TensorFile {
    /// Opens a file and checks its header; no tensor is read.
    ///
    /// # Errors
    /// `Kind::Checkpoint` for a missing file, a folder, a header length that exceeds the file or
    /// [`HEADER_BYTES_MAX`], and all that [`parse`] refuses; `Kind::Io` if the system refuses.
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
        let by_name = header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(TensorFile { path: path.to_path_buf(), file, header, by_name, payload_start })
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

    /// The bytes of a whole tensor, little endian, row major.
    ///
    /// # Errors
    /// As [`TensorFile::find`] and [`TensorFile::read_at`]; `Kind::OutOfMemory` if the bytes cannot be had.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let range = &self.find(name)?.bytes;
        let mut bytes = zeros(&self.path, range.end - range.start)?;
        self.read_at(name, 0, &mut bytes)?;
        Ok(bytes)
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
}

/// Writes a safetensors file in one pass: header first, then each tensor's bytes in the order of the list, in
/// pieces of any size, so that no more than one piece is ever in memory. The file appears under its name when
/// it is whole.
#[derive(Debug)]
pub struct TensorWriter {
    pending: Pending,
    header: Header,
    /// The tensor whose bytes come next, and how many of them are written.
    at: usize,
    written: u64,
    /// The digest of what is written, and where in the file it is to stand, if it is.
    digest: Option<(Digest, u64)>,
}

/// What stands in the place of a digest that is not known yet, and in the bytes that it is made of.
const NO_DIGEST: &str = "0000000000000000";

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
        TensorWriter::begin(path, tensors, &[(DIGEST, NO_DIGEST)])
    }

    /// [`TensorWriter::create`] of a file that tells its digest, and the step of the run after which it is saved.
    pub(crate) fn of_step(
        path: &Path,
        tensors: &[(String, DType, Vec<usize>)],
        step: u64,
    ) -> Result<TensorWriter> {
        TensorWriter::begin(path, tensors, &[(DIGEST, NO_DIGEST), (STEP, &step.to_string())])
    }

    fn begin(
        path: &Path,
        tensors: &[(String, DType, Vec<usize>)],
        more: &[(&str, &str)],
    ) -> Result<TensorWriter> {
        let (text, header) = render_with(path, tensors, more)?;
        let tells = more.iter().any(|(name, _)| *name == DIGEST);
        let place = text.find(NO_DIGEST).filter(|_| tells).map(|at| 8 + at as u64);
        let digest = place.map(|at| (Digest::default(), at));
        let pending = Pending::create(path)?;
        let mut writer = TensorWriter { pending, header, at: 0, written: 0, digest };
        writer.write(&(text.len() as u64).to_le_bytes())?;
        writer.write(text.as_bytes())?;
        writer.pass_empty();
        Ok(writer)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if let Some((digest, _)) = &mut self.digest {
            digest.add(bytes);
        }
        self.pending.write(bytes)
    }

    fn pass_empty(&mut self) {
        while self.expected().is_some_and(|t| t.bytes.is_empty()) {
            self.at += 1;
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
        self.write(bytes)?;
        self.written += given;
        if given == left {
            self.at += 1;
            self.written = 0;
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
        let digest = self.digest.take().map(|(digest, at)| (digest.hex(), at));
        if let Some((digest, at)) = &digest {
            self.pending.rewrite(*at, digest.as_bytes())?;
        }
        self.pending.seal()?;
        Ok((self.pending, digest.map(|(digest, _)| digest)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::disk::scratch::Scratch;
    use safetensors::tensor::{Dtype, TensorView};
    use shardgrad_tensor::Kind;
    use std::fs;

    fn refused(path: &Path) -> String {
        let error = TensorFile::open(path).unwrap_err();
        assert_eq!(error.kind(), Kind::Checkpoint);
        error.message().replace(&format!("{}: ", path.display()), "")
    }

    fn two() -> Vec<(String, DType, Vec<usize>)> {
        vec![
            ("none".to_string(), DType::F32, vec![0, 3]),
            ("w".to_string(), DType::F32, vec![2, 2]),
            ("void".to_string(), DType::F32, vec![0]),
            ("ids".to_string(), DType::I64, vec![1]),
        ]
    }

    fn write_two(path: &Path) {
        let mut writer = TensorWriter::create(path, &two()).unwrap();
        for x in [1.0f32, 2.0, 3.0, 4.0] {
            assert_eq!(writer.expected().unwrap().name, "w");
            writer.append("w", &x.to_le_bytes()).unwrap();
        }
        writer.append("ids", &7i64.to_le_bytes()).unwrap();
        assert_eq!(writer.expected(), None);
        writer.finish().unwrap();
    }

    #[test]
    fn what_is_written_is_read_back_here_and_by_the_reference_library() {
        let dir = Scratch::new();
        let path = dir.path("model.safetensors");
        write_two(&path);
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.tensors().len(), 4);
        assert_eq!(file.metadata()["format"], "pt");
        assert_eq!(file.read("ids").unwrap(), 7i64.to_le_bytes());
        assert_eq!(file.read("none").unwrap(), [0u8; 0]);
        let mut row = [0; 8];
        file.read_at("w", 8, &mut row).unwrap();
        assert_eq!(row, [0, 0, 64, 64, 0, 0, 128, 64]);
        let bytes = fs::read(&path).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(theirs.tensor("w").unwrap().shape(), [2, 2]);
        assert_eq!(theirs.tensor("w").unwrap().data(), file.read("w").unwrap());
        assert_eq!(dir.names(), ["model.safetensors"]);
    }

    #[test]
    fn what_the_reference_library_writes_is_read() {
        let dir = Scratch::new();
        let path = dir.path("theirs.safetensors");
        let data: Vec<u8> = (0..24).collect();
        let view = |dtype, shape: &[usize], n| TensorView::new(dtype, shape.to_vec(), &data[..n]).unwrap();
        let tensors = [
            ("a", view(Dtype::F32, &[2, 3], 24)),
            ("b", view(Dtype::BF16, &[5], 10)),
            ("c", view(Dtype::BOOL, &[3], 3)),
            ("d", view(Dtype::F64, &[], 8)),
            ("e", view(Dtype::F16, &[2, 0], 0)),
        ];
        safetensors::serialize_to_file(tensors, None, &path).unwrap();
        let file = TensorFile::open(&path).unwrap();
        let dtypes = [DType::F32, DType::BF16, DType::Bool, DType::F64, DType::F16];
        for ((name, n), dtype) in [("a", 24), ("b", 10), ("c", 3), ("d", 8), ("e", 0)].into_iter().zip(dtypes)
        {
            assert_eq!(file.find(name).unwrap().dtype, dtype);
            assert_eq!(file.read(name).unwrap(), data[..n]);
        }
    }

    #[test]
    fn bad_files_are_refused_with_a_reason() {
        let dir = Scratch::new();
        assert_eq!(refused(&dir.path("absent")), "there is no such file");
        assert_eq!(refused(&dir.path("")), "is a folder, not a file");
        assert_eq!(refused(Path::new("/dev/zero")), "is a pipe or a device, not a file");
        assert_eq!(refused(&dir.file("empty", b"")), "has 0 bytes, too few for a safetensors file");
        let long = dir.file("long", &[&u64::MAX.to_le_bytes()[..], b"{}"].concat());
        assert_eq!(refused(&long), format!("the header is said to have {} bytes, in a file of 10", u64::MAX));
        let long = dir.file("long", &[&3u64.to_le_bytes()[..], b"{}"].concat());
        assert_eq!(refused(&long), "the header is said to have 3 bytes, in a file of 10");
        let huge = dir.path("huge");
        let sparse = File::create(&huge).unwrap();
        sparse.set_len(1 << 40).unwrap();
        sparse.write_all_at(&(HEADER_BYTES_MAX + 1).to_le_bytes(), 0).unwrap();
        assert!(refused(&huge).starts_with("the header is said to have 100000001 bytes"));
        let text = dir.file("text", b"{\"model_type\": \"gpt2\"}");
        assert!(refused(&text).ends_with("bytes, in a file of 22"));
    }

    #[test]
    fn a_file_cut_anywhere_is_refused() {
        let dir = Scratch::new();
        let path = dir.path("model.safetensors");
        write_two(&path);
        let bytes = fs::read(&path).unwrap();
        for n in 0..bytes.len() {
            refused(&dir.file("cut", &bytes[..n]));
        }
        refused(&dir.file("more", &[&bytes[..], &[0]].concat()));
    }

    #[test]
    fn a_file_that_shrinks_while_open_is_an_error() {
        let dir = Scratch::new();
        let path = dir.path("model.safetensors");
        write_two(&path);
        let file = TensorFile::open(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
        let error = file.read("ids").unwrap_err();
        assert!(error.message().ends_with("the file became shorter while it was read"), "{error}");
    }

    #[test]
    fn reading_outside_of_a_tensor_is_refused() {
        let dir = Scratch::new();
        let path = dir.path("m");
        write_two(&path);
        let file = TensorFile::open(&path).unwrap();
        let error = file.read_at("w", 12, &mut [0; 8]).unwrap_err();
        assert!(error.message().ends_with("tensor `w` has 16 bytes, asked are 8 from byte 12 on"), "{error}");
        assert!(file.read_at("w", u64::MAX, &mut [0; 8]).is_err());
        let error = file.read("v").unwrap_err();
        assert!(error.message().ends_with("there is no tensor `v`"));
        assert_eq!(error.details()[0].1, "it holds 4 tensors: none, w, void, ...");
    }

    #[test]
    fn bytes_out_of_order_too_many_or_missing_are_refused_and_leave_the_old_file() {
        let dir = Scratch::new();
        let path = dir.file("m", b"old");
        let told = |error: shardgrad_tensor::Error| error.message().rsplit_once(": ").unwrap().1.to_string();
        let mut writer = TensorWriter::create(&path, &two()).unwrap();
        assert_eq!(
            told(writer.append("ids", &[0; 8]).unwrap_err()),
            "got 8 bytes of `ids`, expected 16 bytes of `w`"
        );
        assert_eq!(
            told(writer.append("w", &[0; 17]).unwrap_err()),
            "got 17 bytes of `w`, expected 16 bytes of `w`"
        );
        writer.append("w", &[0; 10]).unwrap();
        assert_eq!(told(writer.finish().unwrap_err()), "6 bytes of `w` are missing");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        let mut writer = TensorWriter::create(&path, &[]).unwrap();
        assert_eq!(told(writer.append("w", &[0]).unwrap_err()), "got 1 bytes of `w`, expected no more");
        writer.finish().unwrap();
        assert!(TensorFile::open(&path).unwrap().tensors().is_empty());
        drop(TensorWriter::create(&path, &two()).unwrap());
        assert_eq!(dir.names(), ["m"]);
        let error = TensorWriter::create(&dir.path("no/where"), &two()).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(error.message().ends_with("its folder does not exist"), "{error}");
    }
}
