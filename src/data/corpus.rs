//! A corpus: a long sequence of tokens in memory or in files, read by position.

use super::content_hash::ContentHash;
use shardgrad::{Error, Kind, Result};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A split of a corpus. The last tenth of its tokens (rounded down) is held out for validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Split {
    /// All but the last tenth.
    Train,
    /// The last tenth.
    Val,
    /// Everything.
    All,
}

impl Split {
    /// Every split.
    pub(crate) const EVERY: [Split; 3] = [Split::Train, Split::Val, Split::All];

    /// Returns the name on the command line.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Split::Train => "train",
            Split::Val => "val",
            Split::All => "all",
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Integer type of stored token ids: unsigned, little endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenWidth {
    /// One byte.
    U8,
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
}

impl TokenWidth {
    /// Returns the bytes per token.
    #[must_use]
    pub(crate) const fn bytes(self) -> usize {
        match self {
            TokenWidth::U8 => 1,
            TokenWidth::U16 => 2,
            TokenWidth::U32 => 4,
        }
    }

    /// Returns u16 or u32 for a vocabulary size.
    #[must_use]
    pub(super) const fn of(vocab: usize) -> TokenWidth {
        if vocab > 1 << 16 { TokenWidth::U32 } else { TokenWidth::U16 }
    }

    /// Encodes token ids, which must fit.
    pub(super) fn to_bytes(self, numbers: &[u32]) -> Vec<u8> {
        match self {
            TokenWidth::U8 => numbers.iter().map(|n| *n as u8).collect(),
            TokenWidth::U16 => numbers.iter().flat_map(|n| (*n as u16).to_le_bytes()).collect(),
            TokenWidth::U32 => numbers.iter().flat_map(|n| n.to_le_bytes()).collect(),
        }
    }

    /// Decodes token ids and calls `each` with them.
    fn numbers(self, bytes: &[u8], each: impl FnMut(u32)) {
        match self {
            TokenWidth::U8 => bytes.iter().map(|b| u32::from(*b)).for_each(each),
            TokenWidth::U16 => {
                bytes.as_chunks().0.iter().map(|b| u32::from(u16::from_le_bytes(*b))).for_each(each)
            }
            TokenWidth::U32 => bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).for_each(each),
        }
    }
}

/// Where tokens are stored.
#[derive(Debug)]
pub(super) enum Source {
    /// In memory.
    Memory(Vec<u8>),
    /// In a file, kept open if there are few files.
    File(PathBuf, Option<File>),
    /// In a temporary (unlinked) file, from a byte offset on. Its token ids were checked when they were written.
    Unlinked(Arc<File>, u64),
}

/// A contiguous segment of tokens in one source.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) source: Source,
    pub(super) width: TokenWidth,
    pub(super) len: u64,
}

impl Segment {
    /// Creates a segment in memory.
    pub(super) fn of(tokens: &[u32]) -> Segment {
        Segment {
            source: Source::Memory(TokenWidth::U32.to_bytes(tokens)),
            width: TokenWidth::U32,
            len: tokens.len() as u64,
        }
    }

    /// Creates a segment of byte tokens in memory.
    pub(super) fn of_bytes(bytes: Vec<u8>) -> Segment {
        Segment { len: bytes.len() as u64, source: Source::Memory(bytes), width: TokenWidth::U8 }
    }

    /// Adds the stored token ids to a hash.
    fn add_to(&self, hash: &mut ContentHash) -> Result<()> {
        hash.add(&[self.width.bytes() as u8]);
        let len = self.len * self.width.bytes() as u64;
        hash.add_contents(len, |at, part| match &self.source {
            Source::Memory(bytes) => {
                part.copy_from_slice(&bytes[at as usize..][..part.len()]);
                Ok(())
            }
            Source::File(path, Some(file)) => file.read_exact_at(part, at).map_err(|e| read_failed(path, &e)),
            Source::File(path, None) => File::open(path)
                .and_then(|file| file.read_exact_at(part, at))
                .map_err(|e| read_failed(path, &e)),
            Source::Unlinked(file, start) => {
                file.read_exact_at(part, start + at).map_err(|e| cannot_read_tokens(&e))
            }
        })
    }

    /// Appends `n` token ids from token `first` on.
    fn read(&self, first: u64, n: usize, vocab: usize, into: &mut Vec<i64>) -> Result<()> {
        let (at, size) = (first * self.width.bytes() as u64, n * self.width.bytes());
        let from = into.len();
        match &self.source {
            Source::Memory(bytes) => {
                self.width.numbers(&bytes[at as usize..][..size], |id| into.push(i64::from(id)));
            }
            Source::File(path, open) => {
                let mut bytes = vec![0; size];
                let done = match open {
                    Some(file) => file.read_exact_at(&mut bytes, at),
                    None => File::open(path).and_then(|file| file.read_exact_at(&mut bytes, at)),
                };
                done.map_err(|e| read_failed(path, &e))?;
                self.width.numbers(&bytes, |id| into.push(i64::from(id)));
            }
            Source::Unlinked(file, start) => {
                let mut bytes = vec![0; size];
                file.read_exact_at(&mut bytes, start + at).map_err(|e| cannot_read_tokens(&e))?;
                self.width.numbers(&bytes, |id| into.push(i64::from(id)));
            }
        }
        let outside = into[from..].iter().position(|id| *id as usize >= vocab);
        let (Some(i), Source::File(path, _)) = (outside, &self.source) else { return Ok(()) };
        let (place, id) = (first + i as u64, into[from + i]);
        let why = format!("{}: token {place} is {id}, outside the vocabulary 0..{vocab}", path.display());
        let help = "the file was made with another tokenizer, or --width is wrong";
        Err(Error::new(Kind::Data, why).detail("help", help))
    }
}

/// Converts an I/O error of the temporary token file.
fn cannot_read_tokens(e: &std::io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot read tokens from disk: {e}"))
}

/// Concatenated documents. `Display` describes their origin in one line.
#[derive(Debug)]
pub(crate) struct Corpus {
    origin: String,
    /// `bytes` or `tokens`.
    unit: &'static str,
    vocab: usize,
    parts: Vec<Segment>,
    /// The start of each segment, and the end of the last.
    starts: Vec<u64>,
}

impl Corpus {
    /// The vocabulary size with byte tokens.
    pub(crate) const VOCAB: usize = crate::tokenizer::BYTES;

    /// Creates a corpus from bytes in memory; `origin` names it in messages.
    #[cfg(test)]
    pub(crate) fn new(origin: String, bytes: Vec<u8>) -> Corpus {
        Corpus::of(origin, Corpus::VOCAB, vec![Segment::of_bytes(bytes)])
    }

    /// Concatenates segments.
    pub(super) fn of(origin: String, vocab: usize, parts: Vec<Segment>) -> Corpus {
        let mut end = 0;
        let mut starts = vec![0];
        for part in &parts {
            end += part.len;
            starts.push(end);
        }
        let unit = if parts.iter().all(|part| part.width == TokenWidth::U8) { "bytes" } else { "tokens" };
        Corpus { origin, unit, vocab, parts, starts }
    }

    /// Returns the unit of a loss: `byte` or `token`.
    #[must_use]
    pub(crate) fn unit(&self) -> &'static str {
        &self.unit[..self.unit.len() - 1]
    }

    /// Returns the first token of a split, and its length.
    fn range(&self, split: Split) -> (u64, u64) {
        let all = *self.starts.last().expect("starts have an end");
        let held_out = all / 10;
        match split {
            Split::Train => (0, all - held_out),
            Split::Val => (all - held_out, held_out),
            Split::All => (0, all),
        }
    }

    /// Returns the number of tokens of a split.
    #[must_use]
    pub(crate) fn len(&self, split: Split) -> u64 {
        self.range(split).1
    }

    /// Appends `n` tokens of a split from its token `start` on.
    ///
    /// # Errors
    /// `Kind::Data` if a file became shorter or holds an id outside the vocabulary; `Kind::Io` if it cannot be read.
    pub(crate) fn read(&self, split: Split, start: u64, n: usize, into: &mut Vec<i64>) -> Result<()> {
        let (mut at, mut left) = (self.range(split).0 + start, n);
        let mut part = self.starts.partition_point(|first| *first <= at) - 1;
        while left > 0 {
            let (first, end) = (self.starts[part], self.starts[part + 1]);
            let here = usize::try_from(end - at).map_or(left, |here| here.min(left));
            self.parts[part].read(at - first, here, self.vocab, into)?;
            (at, left, part) = (at + here as u64, left - here, part + 1);
        }
        Ok(())
    }

    /// Adds all tokens to a hash.
    ///
    /// # Errors
    /// As [`Corpus::read`].
    pub(super) fn add_to(&self, hash: &mut ContentHash) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.add_to(hash))
    }

    /// Checks that a split holds at least one window of `seq` tokens and the token after it.
    ///
    /// # Errors
    /// `Kind::Data` with the available and the needed number of tokens; `Kind::Config` for a `seq` of 0.
    pub(crate) fn check_length(&self, split: Split, seq: usize) -> Result<()> {
        if seq == 0 {
            return Err(Error::new(Kind::Config, "--seq must be at least 1"));
        }
        let have = self.len(split);
        if have > seq as u64 {
            return Ok(());
        }
        let part = match split {
            Split::Train => "the training split has",
            Split::Val => "the validation split (last 10%) has",
            Split::All => "the text has",
        };
        let (origin, unit, need) = (&self.origin, self.unit, seq.saturating_add(1));
        let why = format!("{origin}: {part} {have} {unit}, but --seq {seq} needs at least {need}");
        let help = match have {
            0 | 1 => "use a longer text".to_string(),
            _ => format!("use a longer text, or --seq {} or less", have - 1),
        };
        Err(Error::new(Kind::Data, why).detail("help", help))
    }

    /// Returns the byte tokens of a split.
    #[cfg(test)]
    pub(super) fn tokens(&self, split: Split) -> Vec<u8> {
        let mut ids = Vec::new();
        self.read(split, 0, self.len(split) as usize, &mut ids).unwrap();
        ids.into_iter().map(|id| u8::try_from(id).unwrap()).collect()
    }
}

impl fmt::Display for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} {}", self.origin, self.len(Split::All), self.unit)
    }
}

/// Converts an I/O error of an input file.
pub(super) fn cannot_read(path: &Path, e: &std::io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot read {}: {e}", path.display()))
}

/// Converts the error of a read within the known length of a file.
pub(super) fn read_failed(path: &Path, e: &std::io::Error) -> Error {
    match e.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            let why = format!("{}: the file shrank while it was read", path.display());
            Error::new(Kind::Data, why)
        }
        _ => cannot_read(path, e),
    }
}

/// Returns the error for a byte that is not UTF-8.
pub(super) fn not_utf8(path: &Path, at: u64, byte: u8) -> Error {
    let why = format!("{}: not UTF-8 text: byte {at} is {byte:#04x}", path.display());
    let help = "convert it to UTF-8 (iconv -t UTF-8), or rename it to NAME.bin if it contains token ids";
    Error::new(Kind::Data, why).detail("help", help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tenth_is_held_out() {
        for n in [1, 9, 10, 11, 19, 20, 105] {
            let corpus = Corpus::new("t".into(), (0..n as u8).collect());
            let (train, val) = (corpus.tokens(Split::Train), corpus.tokens(Split::Val));
            assert_eq!(val.len(), n / 10);
            assert_eq!([train, val].concat(), corpus.tokens(Split::All));
        }
    }

    #[test]
    fn reads_cross_segment_boundaries() {
        let parts = vec![
            Segment::of_bytes(vec![0, 1, 2]),
            Segment::of(&[3]),
            Segment::of_bytes(Vec::new()),
            Segment::of(&[4, 5]),
            Segment::of_bytes(vec![6]),
        ];
        let corpus = Corpus::of("t".into(), 7, parts);
        assert_eq!(corpus.to_string(), "t, 7 tokens");
        for first in 0..=7 {
            for n in 0..=7 - first {
                let mut ids = Vec::new();
                corpus.read(Split::All, first as u64, n, &mut ids).unwrap();
                assert_eq!(ids, (first as i64..(first + n) as i64).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn minimum_text_length_is_checked() {
        for n in 0..70 {
            let corpus = Corpus::new("t".into(), vec![b'x'; n]);
            for (split, seq) in
                [(Split::Train, 4), (Split::Val, 4), (Split::All, 4), (Split::Val, usize::MAX)]
            {
                let enough = corpus.tokens(split).len() >= seq.saturating_add(1) && seq < usize::MAX;
                assert_eq!(corpus.check_length(split, seq).is_ok(), enough);
            }
        }
        let error = Corpus::new("t.txt".into(), vec![b'x'; 30]).check_length(Split::Val, 64).unwrap_err();
        assert_eq!(
            error.message(),
            "t.txt: the validation split (last 10%) has 3 bytes, but --seq 64 needs at least 65"
        );
        assert_eq!(error.details()[0].1, "use a longer text, or --seq 2 or less");
        let error = Corpus::new("t.txt".into(), vec![b'x']).check_length(Split::Train, 1).unwrap_err();
        assert_eq!(error.message(), "t.txt: the training split has 1 bytes, but --seq 1 needs at least 2");
        assert_eq!(error.details()[0].1, "use a longer text");
        assert_eq!(
            Corpus::new("t".into(), vec![1]).check_length(Split::All, 0).unwrap_err().kind(),
            Kind::Config
        );
    }
}
