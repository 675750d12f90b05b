//! Token files (`--tokens`): safetensors with `input_ids`, i64 [N, T+1]; for encoders [N, T], with `labels`.

use super::batch::Batch;
use super::content_hash::ContentHash;
use shardgrad::kernels::DType;
use shardgrad::nn::checkpoint::TensorFile;
use shardgrad::nn::{Bert, ModelConfig};
use shardgrad::{Error, Kind, Result};
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// The tensor of token ids.
const NAME: &str = "input_ids";
/// Labels of an encoder: a token id, or [`Bert::IGNORE_INDEX`].
const LABELS: &str = "labels";
/// Attention mask: 1 for tokens, 0 for padding.
const MASK: &str = "attention_mask";
/// Token types (segments).
const TYPES: &str = "token_type_ids";
/// Size of a read while checking a file.
const CHUNK_BYTES: usize = 1 << 20;

/// The valid token ids and types of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vocabulary {
    tokens: usize,
    types: usize,
    /// Whether the model predicts the next token.
    causal: bool,
}

impl Vocabulary {
    /// Returns the vocabulary of a model.
    #[must_use]
    pub(crate) fn new(config: &ModelConfig) -> Vocabulary {
        Vocabulary {
            tokens: config.vocab_size(),
            types: config.num_token_types(),
            causal: config.is_causal(),
        }
    }

    /// Returns the vocabulary of a causal model with a vocabulary size.
    #[cfg(test)]
    pub(super) fn of(tokens: usize) -> Vocabulary {
        Vocabulary { tokens, types: 1, causal: true }
    }
}

/// A tensor of the file, and its valid values.
#[derive(Clone, Debug)]
struct Column {
    name: &'static str,
    legal: Range<i64>,
}

/// Rows of token ids in a file, checked once and read row by row.
#[derive(Debug)]
pub(crate) struct TokenFile {
    file: TensorFile,
    num_rows: u64,
    seq: usize,
    /// Length of a row in the file.
    width: usize,
    vocabulary: Vocabulary,
    ids: Column,
}

impl TokenFile {
    /// Opens and checks a file.
    #[cfg(test)]
    pub(crate) fn open(path: &Path, vocabulary: &Vocabulary) -> Result<TokenFile> {
        TokenFile::open_header(path, vocabulary)?.checked()
    }

    /// Opens a file and reads its header; its values must be [checked](TokenFile::checked) before rows are read.
    ///
    /// # Errors
    /// `Kind::Data` naming the file if it is not a safetensors file, lacks `input_ids`, or has it with a shape that is not
    /// [N >= 1, T+1 >= 2] (encoders: [N >= 1, T >= 1]); `Kind::Io` if it cannot be read.
    pub(crate) fn open_header(path: &Path, vocabulary: &Vocabulary) -> Result<TokenFile> {
        let file = TensorFile::open(path).map_err(as_data_error)?;
        let info = file.find(NAME).map_err(as_data_error)?;
        let next = usize::from(vocabulary.causal);
        let (num_rows, width) = match *info.shape.as_slice() {
            [num_rows, width] if width > next => (num_rows, width),
            _ => {
                let wanted = if next == 1 { "[N, T+1]" } else { "[N, T]" };
                let why = format_args!("`{NAME}` has shape {:?}, expected {wanted} with T >= 1", info.shape);
                return Err(refuse(path, why));
            }
        };
        if num_rows == 0 {
            return Err(refuse(path, format_args!("`{NAME}` has no rows")));
        }
        let ids = Column { name: NAME, legal: 0..vocabulary.tokens as i64 };
        let vocabulary = *vocabulary;
        Ok(TokenFile { num_rows: num_rows as u64, seq: width - next, width, vocabulary, ids, file })
    }

    /// Checks that all token ids are in the vocabulary; for encoders also `labels`, of which at least one must not be ignored, and the optional
    /// `attention_mask` and `token_type_ids`. Causal models have no `labels` and no padding.
    ///
    /// # Errors
    /// `Kind::Data` naming the file if a tensor is missing, has another dtype than i64 or another shape than the rows, or has a value out of
    /// range (with its position); `Kind::Io` if the file cannot be read.
    pub(crate) fn checked(self) -> Result<TokenFile> {
        let shape = [self.num_rows as usize, self.width];
        self.check(&self.ids, &shape, |_| ())?;
        if self.vocabulary.causal {
            self.check_causal(&shape)?;
        } else {
            let mut has_targets = false;
            self.check(&self.labels(), &shape, |label| has_targets |= label != Bert::IGNORE_INDEX)?;
            if !has_targets {
                let why = format_args!("`{LABELS}` has no targets: all are {}", Bert::IGNORE_INDEX);
                return Err(refuse(self.file.path(), why));
            }
            self.extra().iter().try_for_each(|column| self.check(column, &shape, |_| ()))?;
        }
        Ok(self)
    }

    /// Rejects tensors that causal models would ignore: labels and padding.
    fn check_causal(&self, shape: &[usize]) -> Result<()> {
        let path = self.file.path();
        if self.file.get(LABELS).is_some() {
            let why = format_args!("`{LABELS}` is for encoders; a causal model predicts every next token");
            let help = "remove the tensor; masked loss is not supported for causal models";
            return Err(refuse(path, why).detail("help", help));
        }
        let mut has_padding = false;
        if self.file.get(MASK).is_some() {
            let mask = Column { name: MASK, legal: 0..2 };
            self.check(&mask, shape, |value| has_padding |= value == 0)?;
        }
        if has_padding {
            let why = format_args!("`{MASK}` has zeros; padding is supported for encoders only");
            let help = "pack texts into rows of one length, separated by the end-of-text token";
            return Err(refuse(path, why).detail("help", help));
        }
        Ok(())
    }

    /// Checks dtype, shape and every value of a tensor, and calls `each` with the values.
    fn check(&self, column: &Column, shape: &[usize], mut each: impl FnMut(i64)) -> Result<()> {
        let (path, name) = (self.file.path(), column.name);
        let info = self.file.find(name).map_err(as_data_error)?;
        if info.shape != shape {
            return Err(refuse(
                path,
                format_args!("`{name}` has shape {:?}, expected {shape:?}", info.shape),
            ));
        }
        if info.dtype != DType::I64 {
            return Err(refuse(path, format_args!("`{name}` is {}, expected i64", info.dtype)));
        }
        let num_bytes = info.bytes.end - info.bytes.start;
        let mut chunk = vec![0; CHUNK_BYTES.min(usize::try_from(num_bytes).unwrap_or(CHUNK_BYTES))];
        let mut at = 0;
        while at < num_bytes {
            let n = (num_bytes - at).min(chunk.len() as u64);
            self.numbers(column, at, &mut chunk[..n as usize], &mut each)?;
            at += n;
        }
        self.file.verify(name).map(drop).map_err(as_data_error)
    }

    fn labels(&self) -> Column {
        Column { name: LABELS, legal: 0..self.vocabulary.tokens as i64 }
    }

    /// Returns the optional tensors of an encoder that the file has.
    fn extra(&self) -> Vec<Column> {
        let columns = [
            Column { name: MASK, legal: 0..2 },
            Column { name: TYPES, legal: 0..self.vocabulary.types as i64 },
        ];
        columns.into_iter().filter(|column| self.file.get(column.name).is_some()).collect()
    }

    /// Returns the number of extra columns of a batch: mask and types if the file has either, else none.
    #[must_use]
    pub(crate) fn num_extra(&self) -> usize {
        if self.is_labelled() && !self.extra().is_empty() { 2 } else { 0 }
    }

    /// Returns whether rows have labels.
    #[must_use]
    pub(crate) fn is_labelled(&self) -> bool {
        !self.vocabulary.causal
    }

    /// Returns the number of rows.
    #[must_use]
    pub(crate) fn num_rows(&self) -> u64 {
        self.num_rows
    }

    /// Returns the sequence length T.
    #[must_use]
    pub(crate) fn seq(&self) -> usize {
        self.seq
    }

    /// Adds all used tensors to a hash.
    ///
    /// # Errors
    /// As [`TokenFile::row`].
    pub(super) fn add_to(&self, hash: &mut ContentHash) -> Result<()> {
        let labels = self.is_labelled().then(|| self.labels());
        for column in [self.ids.clone()].into_iter().chain(labels).chain(self.extra()) {
            let info = self.file.find(column.name).map_err(as_data_error)?;
            hash.add(column.name.as_bytes());
            let read = |at, part: &mut [u8]| self.file.read_at(column.name, at, part).map_err(as_data_error);
            hash.add_contents(info.bytes.end - info.bytes.start, read)?;
        }
        Ok(())
    }

    /// Checks the sequence length against `--seq`.
    ///
    /// # Errors
    /// `Kind::Data` with both numbers.
    pub(crate) fn check_seq(&self, seq: usize) -> Result<()> {
        if seq == self.seq {
            return Ok(());
        }
        let next = if self.is_labelled() { "" } else { " (and a next one)" };
        let why = format_args!("rows have {} tokens{next}, but --seq is {seq}", self.seq);
        Err(refuse(self.file.path(), why).detail("help", format!("omit --seq, or use --seq {}", self.seq)))
    }

    /// Appends the token ids of a row, counted from 0 and wrapping at the end of the file.
    ///
    /// # Errors
    /// `Kind::Data` if the file has changed since it was checked; `Kind::Io` if it cannot be read.
    pub(crate) fn row(&self, row: u64, into: &mut Vec<i64>) -> Result<()> {
        self.column(&self.ids, row, into)
    }

    /// Appends a row with its labels, and mask and types if the file has either.
    ///
    /// # Errors
    /// As [`TokenFile::row`].
    pub(crate) fn labelled_row(&self, row: u64, batch: &mut Batch) -> Result<()> {
        self.row(row, &mut batch.inputs)?;
        self.column(&self.labels(), row, &mut batch.targets)?;
        let columns = self.extra();
        if columns.is_empty() {
            return Ok(());
        }
        batch.extra.resize_with(self.num_extra(), Vec::new);
        for (into, (name, default)) in batch.extra.iter_mut().zip([(MASK, 1), (TYPES, 0)]) {
            match columns.iter().find(|column| column.name == name) {
                Some(column) => self.column(column, row, into)?,
                None => into.extend(std::iter::repeat_n(default, self.width)),
            }
        }
        Ok(())
    }

    /// Returns the number of labels of a row that are not ignored.
    ///
    /// # Errors
    /// As [`TokenFile::row`].
    pub(crate) fn num_targets(&self, row: u64) -> Result<u64> {
        let mut labels = Vec::with_capacity(self.width);
        self.column(&self.labels(), row, &mut labels)?;
        Ok(labels.iter().filter(|label| **label != Bert::IGNORE_INDEX).count() as u64)
    }

    fn column(&self, column: &Column, row: u64, into: &mut Vec<i64>) -> Result<()> {
        let mut bytes = vec![0; self.width * 8];
        let start = (row % self.num_rows) * bytes.len() as u64;
        self.numbers(column, start, &mut bytes, |id| into.push(id))
    }

    /// Reads values from byte `start` on, checks them and calls `each` with them.
    fn numbers(
        &self,
        column: &Column,
        start: u64,
        bytes: &mut [u8],
        mut each: impl FnMut(i64),
    ) -> Result<()> {
        let name = column.name;
        self.file.read_at(name, start, bytes).map_err(as_data_error)?;
        for (i, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let id = i64::from_le_bytes(*word);
            let asks_nothing = name == LABELS && id == Bert::IGNORE_INDEX;
            if !column.legal.contains(&id) && !asks_nothing {
                let at = start / 8 + i as u64;
                let (row, place) = (at / self.width as u64, at % self.width as u64);
                let (what, from) = match name {
                    NAME | LABELS => ("the vocabulary", 0),
                    _ => ("the range", column.legal.start),
                };
                let end = column.legal.end;
                let why = format_args!("`{name}`[{row}, {place}] is {id}, outside {what} {from}..{end}");
                let help = "the file was made for another model or tokenizer";
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

/// Converts checkpoint errors to data errors, with help on `--tokens`.
fn as_data_error(error: Error) -> Error {
    let kind = if error.kind() == Kind::Checkpoint { Kind::Data } else { error.kind() };
    let help = format!(
        "--tokens expects a safetensors file with `{NAME}`, i64 [N, T+1]; for encoders [N, T], with `{LABELS}`"
    );
    let plain = Error::new(kind, error.message());
    error.details().iter().fold(plain, |e, (label, text)| e.detail(label, text)).detail("help", help)
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::*;
    use shardgrad::nn::checkpoint::TensorWriter;
    use std::path::PathBuf;

    fn write(dir: &Scratch, name: &str, dtype: DType, shape: &[usize], ids: &[i64]) -> PathBuf {
        let path = dir.path(name);
        let mut writer = TensorWriter::create(&path, &[(NAME.to_string(), dtype, shape.to_vec())]).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        writer.append(NAME, &bytes).unwrap();
        writer.finish().unwrap();
        path
    }

    #[test]
    fn causal_rows_have_no_labels_and_no_padding() {
        let dir = Scratch::new();
        let with = |file: &str, name: &str, numbers: [i64; 3]| {
            let path = dir.path(file);
            let tensor = |name: &str| (name.to_string(), DType::I64, vec![1, 3]);
            let mut writer = TensorWriter::create(&path, &[tensor(NAME), tensor(name)]).unwrap();
            for (name, numbers) in [(NAME, [1, 2, 3]), (name, numbers)] {
                writer
                    .append(name, &numbers.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>())
                    .unwrap();
            }
            writer.finish().unwrap();
            path
        };
        assert!(error_text(&with("a", LABELS, [-100; 3])).starts_with("`labels` is for encoders"));
        assert!(error_text(&with("b", MASK, [1, 1, 0])).starts_with("`attention_mask` has zeros"));
        TokenFile::open(&with("c", MASK, [1; 3]), &Vocabulary::of(10)).unwrap();
    }

    fn error_text(path: &Path) -> String {
        let error = TokenFile::open(path, &Vocabulary::of(10)).unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        error.message().strip_prefix(&format!("{}: ", path.display())).unwrap().to_string()
    }

    #[test]
    fn rows_are_read_in_order_and_wrap() {
        let dir = Scratch::new();
        let file =
            TokenFile::open(&write(&dir, "t", DType::I64, &[2, 3], &[0, 1, 2, 3, 4, 9]), &Vocabulary::of(10))
                .unwrap();
        assert_eq!((file.num_rows(), file.seq()), (2, 2));
        let mut row = Vec::new();
        for r in [1, 0, 3, u64::MAX] {
            file.row(r, &mut row).unwrap();
        }
        assert_eq!(row, [3, 4, 9, 0, 1, 2, 3, 4, 9, 3, 4, 9]);
        file.check_seq(2).unwrap();
        let error = file.check_seq(3).unwrap_err();
        assert!(error.message().ends_with("rows have 2 tokens (and a next one), but --seq is 3"), "{error}");
        assert!(file.to_string().ends_with("t, 2 rows of 2 tokens"));
    }

    #[test]
    fn invalid_token_files_are_reported_with_the_position() {
        let dir = Scratch::new();
        let ids: Vec<i64> = (0..6).collect();
        assert_eq!(error_text(&dir.path("absent")), "no such file");
        assert_eq!(
            error_text(&write(&dir, "a", DType::F64, &[2, 3], &ids)),
            "`input_ids` is f64, expected i64"
        );
        assert_eq!(
            error_text(&write(&dir, "b", DType::I64, &[6], &ids)),
            "`input_ids` has shape [6], expected [N, T+1] with T >= 1"
        );
        assert_eq!(
            error_text(&write(&dir, "c", DType::I64, &[6, 1], &ids)),
            "`input_ids` has shape [6, 1], expected [N, T+1] with T >= 1"
        );
        assert_eq!(error_text(&write(&dir, "d", DType::I64, &[0, 3], &[])), "`input_ids` has no rows");
        assert_eq!(
            error_text(&write(&dir, "e", DType::I64, &[2, 3], &[0, 1, 2, 3, 10, 5])),
            "`input_ids`[1, 1] is 10, outside the vocabulary 0..10"
        );
        assert_eq!(
            error_text(&write(&dir, "f", DType::I64, &[2, 3], &[0, 1, -1, 3, 4, 5])),
            "`input_ids`[0, 2] is -1, outside the vocabulary 0..10"
        );
        let other = dir.path("g");
        TensorWriter::create(&other, &[]).unwrap().finish().unwrap();
        assert_eq!(error_text(&other), "there is no tensor `input_ids`");
        let error = TokenFile::open(&dir.file("text", "hello, world"), &Vocabulary::of(10)).unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert_eq!(
            error.details().last().unwrap().1,
            "--tokens expects a safetensors file with `input_ids`, i64 [N, T+1]; for encoders [N, T], with `labels`"
        );
    }

    #[test]
    fn invalid_token_after_the_first_chunk_is_reported() {
        let dir = Scratch::new();
        let mut ids = vec![1; 3 * 70_000];
        ids[3 * 60_000 + 2] = 99;
        let path = write(&dir, "t", DType::I64, &[70_000, 3], &ids);
        assert_eq!(error_text(&path), "`input_ids`[60000, 2] is 99, outside the vocabulary 0..10");
    }

    #[test]
    fn token_file_changed_after_check_is_an_error() {
        let dir = Scratch::new();
        let path = write(&dir, "t", DType::I64, &[2, 3], &[0, 1, 2, 3, 4, 5]);
        let file = TokenFile::open(&path, &Vocabulary::of(10)).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() = 0x80;
        std::fs::write(&path, &bytes).unwrap();
        assert!(file.row(0, &mut Vec::new()).is_ok());
        assert!(file.row(1, &mut Vec::new()).unwrap_err().message().contains("`input_ids`[1, 2] is -"));
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(file.row(1, &mut Vec::new()).unwrap_err().message().contains("the file shrank"));
    }

    fn labelled(dir: &Scratch, tensors: &[(&str, &[i64])]) -> Result<TokenFile> {
        let path = dir.path("labelled");
        let entry = |(name, ids): &(&str, &[i64])| (name.to_string(), DType::I64, vec![ids.len() / 3, 3]);
        let entries: Vec<_> = tensors.iter().map(entry).collect();
        let mut writer = TensorWriter::create(&path, &entries).unwrap();
        for (name, ids) in tensors {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            writer.append(name, &bytes).unwrap();
        }
        writer.finish().unwrap();
        TokenFile::open(&path, &Vocabulary { tokens: 10, types: 2, causal: false })
    }

    #[test]
    fn encoder_rows_have_labels_and_optional_masks_and_types() {
        let dir = Scratch::new();
        let (ids, labels): (&[i64], &[i64]) = (&[1, 2, 3, 4, 5, 6], &[-100, 7, -100, 0, -100, 9]);
        let file = labelled(&dir, &[("input_ids", ids), ("labels", labels)]).unwrap();
        assert!(file.is_labelled() && file.seq() == 3 && file.num_rows() == 2);
        let mut batch = Batch::default();
        file.labelled_row(1, &mut batch).unwrap();
        assert_eq!(batch, Batch { inputs: ids[3..].to_vec(), targets: labels[3..].to_vec(), extra: vec![] });
        let typed = [("input_ids", ids), ("labels", labels), ("token_type_ids", &[0, 0, 1, 1, 1, 0])];
        let mut batch = Batch::default();
        labelled(&dir, &typed).unwrap().labelled_row(0, &mut batch).unwrap();
        assert_eq!(batch.extra, [[1, 1, 1], [0, 0, 1]]);
        let error_text = |tensors: &[(&str, &[i64])]| {
            let error = labelled(&dir, tensors).unwrap_err();
            assert_eq!(error.kind(), Kind::Data);
            error.message().rsplit_once("labelled: ").unwrap().1.to_string()
        };
        assert_eq!(error_text(&[("input_ids", ids)]), "there is no tensor `labels`");
        let none: &[i64] = &[-100; 6];
        let all = [("input_ids", ids), ("labels", none)];
        assert_eq!(error_text(&all), "`labels` has no targets: all are -100");
        assert_eq!(
            error_text(&[("input_ids", ids), ("labels", &[0, 0, 10, 0, 0, 0])]),
            "`labels`[0, 2] is 10, outside the vocabulary 0..10"
        );
        assert_eq!(
            error_text(&[("input_ids", ids), ("labels", &[0, 0, 0])]),
            "`labels` has shape [1, 3], expected [2, 3]"
        );
        assert_eq!(
            error_text(&[("input_ids", ids), ("labels", labels), ("attention_mask", &[1, 1, 1, 1, 1, 2])]),
            "`attention_mask`[1, 2] is 2, outside the range 0..2"
        );
    }
}
