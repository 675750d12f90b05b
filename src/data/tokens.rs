//! Token numbers made elsewhere: a safetensors file with `input_ids`, i64 [N, T+1].

use shardgrad::kernels::DType;
use shardgrad::nn::hf::TensorFile;
use shardgrad::{Error, Kind, Result};
use std::fmt;
use std::path::Path;

/// The tensor that holds the rows.
const NAME: &str = "input_ids";
/// So many bytes are checked at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// Rows of token numbers in a file, checked once and read row by row.
#[derive(Debug)]
pub(crate) struct TokenFile {
    file: TensorFile,
    num_rows: u64,
    seq: usize,
    vocab: usize,
}

impl TokenFile {
    /// Opens a file and checks that each number is a token of a vocabulary of `vocab`.
    ///
    /// # Errors
    /// `Kind::Data` naming the file for one that is no safetensors file, lacks `input_ids`, holds it in
    /// another dtype than i64 or in a shape that is not [N >= 1, T+1 >= 2], or holds a number outside of
    /// 0..vocab (with its place); `Kind::Io` if the system refuses.
    pub(crate) fn open(path: &Path, vocab: usize) -> Result<TokenFile> {
        let file = TensorFile::open(path).map_err(as_data)?;
        let info = file.find(NAME).map_err(as_data)?;
        let (num_rows, width) = match *info.shape.as_slice() {
            [num_rows, width] if width > 1 => (num_rows, width),
            _ => {
                let why = format_args!("`{NAME}` has the shape {:?}, not [N, T+1] with T >= 1", info.shape);
                return Err(refuse(path, why));
            }
        };
        if num_rows == 0 {
            return Err(refuse(path, format_args!("`{NAME}` has no row")));
        }
        if info.dtype != DType::I64 {
            return Err(refuse(path, format_args!("`{NAME}` is {}, not i64", info.dtype)));
        }
        let num_bytes = info.bytes.end - info.bytes.start;
        let tokens = TokenFile { num_rows: num_rows as u64, seq: width - 1, vocab, file };
        let mut chunk = vec![0; CHUNK_BYTES.min(usize::try_from(num_bytes).unwrap_or(CHUNK_BYTES))];
        let mut at = 0;
        while at < num_bytes {
            let n = (num_bytes - at).min(chunk.len() as u64);
            tokens.numbers(at, &mut chunk[..n as usize], |_| ())?;
            at += n;
        }
        Ok(tokens)
    }

    /// The number of rows.
    #[must_use]
    pub(crate) fn num_rows(&self) -> u64 {
        self.num_rows
    }

    /// The tokens of a row that have a next one: T.
    #[must_use]
    pub(crate) fn seq(&self) -> usize {
        self.seq
    }

    /// Checks that rows have as many tokens as were asked for.
    ///
    /// # Errors
    /// `Kind::Data` naming both numbers.
    pub(crate) fn require_seq(&self, seq: usize) -> Result<()> {
        if seq == self.seq {
            return Ok(());
        }
        let why = format_args!("rows have {} tokens and a next one, but --seq is {seq}", self.seq);
        Err(refuse(self.file.path(), why)
            .detail("help", format!("leave out --seq, or give --seq {}", self.seq)))
    }

    /// Appends the T+1 tokens of a row, counted from 0 and wrapping at the end of the file.
    ///
    /// # Errors
    /// `Kind::Data` if the file has changed since it was checked; `Kind::Io` if the system refuses.
    pub(crate) fn row(&self, row: u64, into: &mut Vec<i64>) -> Result<()> {
        let mut bytes = vec![0; (self.seq + 1) * 8];
        let start = (row % self.num_rows) * bytes.len() as u64;
        self.numbers(start, &mut bytes, |id| into.push(id))
    }

    /// Reads the bytes from `start` on and hands each number over, checked.
    fn numbers(&self, start: u64, bytes: &mut [u8], mut each: impl FnMut(i64)) -> Result<()> {
        self.file.read_at(NAME, start, bytes).map_err(as_data)?;
        for (i, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let id = i64::from_le_bytes(*word);
            if id < 0 || id as u64 >= self.vocab as u64 {
                let at = start / 8 + i as u64;
                let width = self.seq as u64 + 1;
                let (row, column) = (at / width, at % width);
                let why = format_args!(
                    "`{NAME}`[{row}, {column}] is {id}, outside of the vocabulary 0..{}",
                    self.vocab
                );
                let help = "the file was made with another tokenizer than the model";
                return Err(refuse(self.file.path(), why).detail("help", help));
            }
            each(id);
        }
        Ok(())
    }
}

impl fmt::Display for TokenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} rows of {} tokens", self.file.path().display(), self.num_rows, self.seq)
    }
}

fn refuse(path: &Path, why: impl fmt::Display) -> Error {
    Error::new(Kind::Data, format!("{}: {why}", path.display()))
}

/// Here a file that cannot be read as safetensors is bad data, not a bad checkpoint.
fn as_data(error: Error) -> Error {
    let kind = if error.kind() == Kind::Checkpoint { Kind::Data } else { error.kind() };
    let help = format!("--tokens wants a safetensors file with `{NAME}`, i64 [N, T+1]");
    let plain = Error::new(kind, error.message());
    error.details().iter().fold(plain, |e, (label, text)| e.detail(label, text)).detail("help", help)
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::*;
    use shardgrad::nn::hf::TensorWriter;
    use std::path::PathBuf;

    fn write(dir: &Scratch, name: &str, dtype: DType, shape: &[usize], ids: &[i64]) -> PathBuf {
        let path = dir.path(name);
        let mut writer = TensorWriter::create(&path, &[(NAME.to_string(), dtype, shape.to_vec())]).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        writer.append(NAME, &bytes).unwrap();
        writer.finish().unwrap();
        path
    }

    fn told(path: &Path) -> String {
        let error = TokenFile::open(path, 10).unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        error.message().strip_prefix(&format!("{}: ", path.display())).unwrap().to_string()
    }

    #[test]
    fn rows_are_read_in_order_and_wrap() {
        let dir = Scratch::new();
        let file = TokenFile::open(&write(&dir, "t", DType::I64, &[2, 3], &[0, 1, 2, 3, 4, 9]), 10).unwrap();
        assert_eq!((file.num_rows(), file.seq()), (2, 2));
        let mut row = Vec::new();
        for r in [1, 0, 3, u64::MAX] {
            file.row(r, &mut row).unwrap();
        }
        assert_eq!(row, [3, 4, 9, 0, 1, 2, 3, 4, 9, 3, 4, 9]);
        file.require_seq(2).unwrap();
        let error = file.require_seq(3).unwrap_err();
        assert!(error.message().ends_with("rows have 2 tokens and a next one, but --seq is 3"), "{error}");
        assert!(file.to_string().ends_with("t, 2 rows of 2 tokens"));
    }

    #[test]
    fn bad_files_are_named_with_the_place() {
        let dir = Scratch::new();
        let ids: Vec<i64> = (0..6).collect();
        assert_eq!(told(&dir.path("absent")), "there is no such file");
        assert_eq!(told(&write(&dir, "a", DType::F64, &[2, 3], &ids)), "`input_ids` is f64, not i64");
        assert_eq!(
            told(&write(&dir, "b", DType::I64, &[6], &ids)),
            "`input_ids` has the shape [6], not [N, T+1] with T >= 1"
        );
        assert_eq!(
            told(&write(&dir, "c", DType::I64, &[6, 1], &ids)),
            "`input_ids` has the shape [6, 1], not [N, T+1] with T >= 1"
        );
        assert_eq!(told(&write(&dir, "d", DType::I64, &[0, 3], &[])), "`input_ids` has no row");
        assert_eq!(
            told(&write(&dir, "e", DType::I64, &[2, 3], &[0, 1, 2, 3, 10, 5])),
            "`input_ids`[1, 1] is 10, outside of the vocabulary 0..10"
        );
        assert_eq!(
            told(&write(&dir, "f", DType::I64, &[2, 3], &[0, 1, -1, 3, 4, 5])),
            "`input_ids`[0, 2] is -1, outside of the vocabulary 0..10"
        );
        let other = dir.path("g");
        TensorWriter::create(&other, &[]).unwrap().finish().unwrap();
        assert_eq!(told(&other), "there is no tensor `input_ids`");
        let error = TokenFile::open(&dir.file("text", "hello, world"), 10).unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert_eq!(
            error.details().last().unwrap().1,
            "--tokens wants a safetensors file with `input_ids`, i64 [N, T+1]"
        );
    }

    #[test]
    fn a_bad_number_behind_the_first_chunk_is_found_at_its_place() {
        let dir = Scratch::new();
        let mut ids = vec![1; 3 * 70_000];
        ids[3 * 60_000 + 2] = 99;
        let path = write(&dir, "t", DType::I64, &[70_000, 3], &ids);
        assert_eq!(told(&path), "`input_ids`[60000, 2] is 99, outside of the vocabulary 0..10");
    }

    #[test]
    fn a_file_that_changes_after_its_check_is_an_error() {
        let dir = Scratch::new();
        let path = write(&dir, "t", DType::I64, &[2, 3], &[0, 1, 2, 3, 4, 5]);
        let file = TokenFile::open(&path, 10).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() = 0x80;
        std::fs::write(&path, &bytes).unwrap();
        assert!(file.row(0, &mut Vec::new()).is_ok());
        assert!(file.row(1, &mut Vec::new()).unwrap_err().message().contains("`input_ids`[1, 2] is -"));
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(file.row(1, &mut Vec::new()).unwrap_err().message().contains("became shorter"));
    }
}
