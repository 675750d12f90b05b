//! A long row of tokens, in memory or in files, of which any part is read by its position.

use super::digest::ContentHash;
use shardgrad::{Error, Kind, Result};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Which part of a corpus. The last tenth of its tokens (rounded down) is held out from training.
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

    /// The word for it on the command line.
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

/// How a token number is stored: little endian, without sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// One byte.
    U8,
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
}

impl Width {
    /// Bytes of a token.
    #[must_use]
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Width::U8 => 1,
            Width::U16 => 2,
            Width::U32 => 4,
        }
    }

    /// The least width for the tokens of a vocabulary, of two bytes or four.
    #[must_use]
    pub(super) const fn of(vocab: usize) -> Width {
        if vocab > 1 << 16 { Width::U32 } else { Width::U16 }
    }

    /// Numbers as they are stored. They must fit.
    pub(super) fn to_bytes(self, numbers: &[u32]) -> Vec<u8> {
        match self {
            Width::U8 => numbers.iter().map(|n| *n as u8).collect(),
            Width::U16 => numbers.iter().flat_map(|n| (*n as u16).to_le_bytes()).collect(),
            Width::U32 => numbers.iter().flat_map(|n| n.to_le_bytes()).collect(),
        }
    }

    /// Hands over the numbers that bytes stand for.
    fn numbers(self, bytes: &[u8], each: impl FnMut(u32)) {
        match self {
            Width::U8 => bytes.iter().map(|b| u32::from(*b)).for_each(each),
            Width::U16 => {
                bytes.as_chunks().0.iter().map(|b| u32::from(u16::from_le_bytes(*b))).for_each(each)
            }
            Width::U32 => bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).for_each(each),
        }
    }
}

/// Where tokens are.
#[derive(Debug)]
pub(super) enum Source {
    /// In memory.
    Memory(Vec<u8>),
    /// In a file, kept open if there are few.
    File(PathBuf, Option<File>),
    /// In a file of ours that has no name, from a byte on. Its numbers were checked when they were written.
    Nameless(Arc<File>, u64),
}

/// Tokens that follow each other in one place.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) source: Source,
    pub(super) width: Width,
    pub(super) len: u64,
}

impl Part {
    /// Tokens in memory.
    pub(super) fn of(tokens: &[u32]) -> Part {
        Part {
            source: Source::Memory(Width::U32.to_bytes(tokens)),
            width: Width::U32,
            len: tokens.len() as u64,
        }
    }

    /// Bytes of text in memory.
    pub(super) fn of_bytes(bytes: Vec<u8>) -> Part {
        Part { len: bytes.len() as u64, source: Source::Memory(bytes), width: Width::U8 }
    }

    /// Adds the numbers as they are stored.
    fn add_to(&self, hash: &mut ContentHash) -> Result<()> {
        hash.add(&[self.width.bytes() as u8]);
        let len = self.len * self.width.bytes() as u64;
        hash.add_contents(len, |at, part| match &self.source {
            Source::Memory(bytes) => {
                part.copy_from_slice(&bytes[at as usize..][..part.len()]);
                Ok(())
            }
            Source::File(path, Some(file)) => file.read_exact_at(part, at).map_err(|e| short(path, &e)),
            Source::File(path, None) => {
                File::open(path).and_then(|file| file.read_exact_at(part, at)).map_err(|e| short(path, &e))
            }
            Source::Nameless(file, start) => file.read_exact_at(part, start + at).map_err(|e| not_read(&e)),
        })
    }

    /// Appends `n` numbers from number `first` on.
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
                done.map_err(|e| short(path, &e))?;
                self.width.numbers(&bytes, |id| into.push(i64::from(id)));
            }
            Source::Nameless(file, start) => {
                let mut bytes = vec![0; size];
                file.read_exact_at(&mut bytes, start + at).map_err(|e| not_read(&e))?;
                self.width.numbers(&bytes, |id| into.push(i64::from(id)));
            }
        }
        let outside = into[from..].iter().position(|id| *id as usize >= vocab);
        let (Some(i), Source::File(path, _)) = (outside, &self.source) else { return Ok(()) };
        let (place, id) = (first + i as u64, into[from + i]);
        let why = format!("{}: token {place} is {id}, outside of the vocabulary 0..{vocab}", path.display());
        let help = "the file was made with another tokenizer than the model, or its numbers have another width (--width)";
        Err(Error::new(Kind::Data, why).detail("help", help))
    }
}

/// An error of the operating system about tokens of ours.
fn not_read(e: &std::io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot read tokens from disk: {e}"))
}

/// Documents, one behind the other. Its `Display` says in one line what it is made of.
#[derive(Debug)]
pub(crate) struct Corpus {
    origin: String,
    /// What its tokens are called.
    unit: &'static str,
    vocab: usize,
    parts: Vec<Part>,
    /// Where each part begins, and where the last ends.
    starts: Vec<u64>,
}

impl Corpus {
    /// The number of tokens there are where a token is a byte.
    pub(crate) const VOCAB: usize = crate::tokenizer::BYTES;

    /// Bytes of a text that is in memory already; `origin` names it in messages.
    #[cfg(test)]
    pub(crate) fn new(origin: String, bytes: Vec<u8>) -> Corpus {
        Corpus::of(origin, Corpus::VOCAB, vec![Part::of_bytes(bytes)])
    }

    /// Parts in their order.
    pub(super) fn of(origin: String, vocab: usize, parts: Vec<Part>) -> Corpus {
        let mut end = 0;
        let mut starts = vec![0];
        for part in &parts {
            end += part.len;
            starts.push(end);
        }
        let unit = if parts.iter().all(|part| part.width == Width::U8) { "bytes" } else { "tokens" };
        Corpus { origin, unit, vocab, parts, starts }
    }

    /// What a token is: `byte` or `token`.
    #[must_use]
    pub(crate) fn unit(&self) -> &'static str {
        &self.unit[..self.unit.len() - 1]
    }

    /// The first token of a split, and the number of its tokens.
    fn range(&self, split: Split) -> (u64, u64) {
        let all = *self.starts.last().expect("starts have an end");
        let held_out = all / 10;
        match split {
            Split::Train => (0, all - held_out),
            Split::Val => (all - held_out, held_out),
            Split::All => (0, all),
        }
    }

    /// The number of tokens of a split.
    #[must_use]
    pub(crate) fn len(&self, split: Split) -> u64 {
        self.range(split).1
    }

    /// Appends `n` tokens of a split from token `start` of it on.
    ///
    /// # Errors
    /// `Kind::Data` if a file has become shorter or holds a number that is no token; `Kind::Io` if the system refuses.
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
    /// `Kind::Data` naming the corpus, what it has and what is needed; `Kind::Config` for a `seq` of 0.
    pub(crate) fn require(&self, split: Split, seq: usize) -> Result<()> {
        if seq == 0 {
            return Err(Error::new(Kind::Config, "a sequence has at least one token; --seq is 0"));
        }
        let have = self.len(split);
        if have > seq as u64 {
            return Ok(());
        }
        let part = match split {
            Split::Train => "the part for training has",
            Split::Val => "the held-out last tenth has",
            Split::All => "the text has",
        };
        let (origin, unit, need) = (&self.origin, self.unit, seq.saturating_add(1));
        let why = format!("{origin}: {part} {have} {unit}, but --seq {seq} needs {need}");
        let help = match have {
            0 | 1 => "use a longer text".to_string(),
            _ => format!("use a longer text, or --seq {} or less", have - 1),
        };
        Err(Error::new(Kind::Data, why).detail("help", help))
    }

    /// The bytes of a split.
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

/// An error of the operating system about a file that is read.
pub(super) fn failed(path: &Path, e: &std::io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot read {}: {e}", path.display()))
}

/// An error about a file whose length was known.
pub(super) fn short(path: &Path, e: &std::io::Error) -> Error {
    match e.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            let why = format!("{}: the file became shorter while it was read", path.display());
            Error::new(Kind::Data, why)
        }
        _ => failed(path, e),
    }
}

/// An error about a file of text: the refusal of a byte and its place.
pub(super) fn bad_byte(path: &Path, at: u64, byte: u8) -> Error {
    let why = format!("{}: not UTF-8 text: byte {at} is {byte:#04x}", path.display());
    let help = "convert it to UTF-8 (iconv -t UTF-8), or use --tokens for token numbers";
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
    fn any_piece_is_read_over_the_borders_of_parts() {
        let parts = vec![
            Part::of_bytes(vec![0, 1, 2]),
            Part::of(&[3]),
            Part::of_bytes(Vec::new()),
            Part::of(&[4, 5]),
            Part::of_bytes(vec![6]),
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
    fn every_length_around_the_shortest_is_accepted_or_explained() {
        for n in 0..70 {
            let corpus = Corpus::new("t".into(), vec![b'x'; n]);
            for (split, seq) in
                [(Split::Train, 4), (Split::Val, 4), (Split::All, 4), (Split::Val, usize::MAX)]
            {
                let enough = corpus.tokens(split).len() >= seq.saturating_add(1) && seq < usize::MAX;
                assert_eq!(corpus.require(split, seq).is_ok(), enough);
            }
        }
        let error = Corpus::new("t.txt".into(), vec![b'x'; 30]).require(Split::Val, 64).unwrap_err();
        assert_eq!(error.message(), "t.txt: the held-out last tenth has 3 bytes, but --seq 64 needs 65");
        assert_eq!(error.details()[0].1, "use a longer text, or --seq 2 or less");
        let error = Corpus::new("t.txt".into(), vec![b'x']).require(Split::Train, 1).unwrap_err();
        assert_eq!(error.message(), "t.txt: the part for training has 1 bytes, but --seq 1 needs 2");
        assert_eq!(error.details()[0].1, "use a longer text");
        assert_eq!(Corpus::new("t".into(), vec![1]).require(Split::All, 0).unwrap_err().kind(), Kind::Config);
    }
}
