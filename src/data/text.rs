//! Text at byte level: a token is a byte, the vocabulary has 256 of them.

use shardgrad::{Error, Kind, Result};
use std::fmt;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Which part of a text. The last tenth of its bytes (rounded down) is held out from training.
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

/// A text in memory. Its `Display` says in one line what it is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Corpus {
    origin: String,
    bytes: Vec<u8>,
}

impl Corpus {
    /// The number of tokens there are: one per byte value.
    pub(crate) const VOCAB: usize = 256;

    /// A text that is in memory already; `origin` names it in messages.
    pub(super) fn new(origin: String, bytes: Vec<u8>) -> Corpus {
        Corpus { origin, bytes }
    }

    /// Reads a file of UTF-8 text, whatever its line ends.
    ///
    /// # Errors
    /// `Kind::Data` naming the file if it is missing, a folder, a pipe or a device, empty, or not UTF-8 (with
    /// the offset of the first bad byte); `Kind::OutOfMemory` if it does not fit; `Kind::Io` if the system
    /// refuses.
    pub(crate) fn from_file(path: &Path) -> Result<Corpus> {
        let refuse = |why: String, help: &str| {
            Err(Error::new(Kind::Data, format!("{}: {why}", path.display())).detail("help", help))
        };
        const HELP: &str = "give the name of a UTF-8 text file with --data";
        let kind = match fs::metadata(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return refuse("there is no such file".into(), HELP),
            Err(e) => return Err(failed(path, &e)),
            Ok(found) => found,
        };
        if kind.is_dir() {
            return refuse("is a folder, not a file".into(), HELP);
        }
        if !kind.is_file() {
            return refuse("is a pipe or a device, not a file".into(), "write the text to a file first");
        }
        let bytes = read_whole(path)?;
        if bytes.is_empty() {
            return refuse("the file is empty".into(), HELP);
        }
        if let Err(e) = std::str::from_utf8(&bytes) {
            let why = format!("not UTF-8 text: byte {} is {:#04x}", e.valid_up_to(), bytes[e.valid_up_to()]);
            return refuse(why, "convert it to UTF-8 (iconv -t UTF-8), or use --tokens for token numbers");
        }
        Ok(Corpus::new(path.display().to_string(), bytes))
    }

    /// The tokens of a split, one byte each.
    #[must_use]
    pub(crate) fn tokens(&self, split: Split) -> &[u8] {
        let cut = self.bytes.len() - self.bytes.len() / 10;
        match split {
            Split::Train => &self.bytes[..cut],
            Split::Val => &self.bytes[cut..],
            Split::All => &self.bytes,
        }
    }

    /// Checks that a split holds at least one window of `seq` tokens and the token after it.
    ///
    /// # Errors
    /// `Kind::Data` naming the text, what it has and what is needed; `Kind::Config` for a `seq` of 0.
    pub(crate) fn require(&self, split: Split, seq: usize) -> Result<()> {
        if seq == 0 {
            return Err(Error::new(Kind::Config, "a sequence has at least one token; --seq is 0"));
        }
        let have = self.tokens(split).len();
        if have > seq {
            return Ok(());
        }
        let part = match split {
            Split::Train => "the part for training has",
            Split::Val => "the held-out last tenth has",
            Split::All => "the text has",
        };
        let why =
            format!("{}: {part} {have} bytes, but --seq {seq} needs {}", self.origin, seq.saturating_add(1));
        let help = match have {
            0 | 1 => "use a longer text".to_string(),
            _ => format!("use a longer text, or --seq {} or less", have - 1),
        };
        Err(Error::new(Kind::Data, why).detail("help", help))
    }
}

impl fmt::Display for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} bytes", self.origin, self.bytes.len())
    }
}

/// An error of the operating system about a file that is read.
pub(super) fn failed(path: &Path, e: &std::io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot read {}: {e}", path.display()))
}

/// All bytes of a regular file. Its length is taken once: a file that grows meanwhile is cut there, one that
/// shrinks is an error.
pub(super) fn read_whole(path: &Path) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(|e| failed(path, &e))?;
    let length = file.metadata().map_err(|e| failed(path, &e))?.len();
    let mut bytes = Vec::new();
    let room = usize::try_from(length).ok().filter(|n| bytes.try_reserve_exact(*n).is_ok());
    if room.is_none() {
        let why = format!("{}: no memory for its {length} bytes", path.display());
        return Err(Error::new(Kind::OutOfMemory, why).detail("help", "use a part of the file"));
    }
    file.take(length).read_to_end(&mut bytes).map_err(|e| failed(path, &e))?;
    if (bytes.len() as u64) < length {
        return Err(Error::new(
            Kind::Data,
            format!("{}: the file became shorter while it was read", path.display()),
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::*;

    fn told(path: &Path) -> (Kind, String, String) {
        let error = Corpus::from_file(path).unwrap_err();
        let message =
            error.message().strip_prefix(&format!("{}: ", path.display())).unwrap_or(error.message());
        (error.kind(), message.to_string(), error.details().first().map_or(String::new(), |d| d.1.clone()))
    }

    #[test]
    fn text_is_read_byte_for_byte() {
        let dir = Scratch::new();
        let text = "\u{feff}a\r\nb\0é";
        let corpus = Corpus::from_file(&dir.file("t.txt", text)).unwrap();
        assert_eq!(corpus.tokens(Split::All), text.as_bytes());
        assert_eq!(corpus.to_string(), format!("{}, 10 bytes", dir.path("t.txt").display()));
    }

    #[test]
    fn bad_files_are_named_with_a_repair() {
        let dir = Scratch::new();
        let (kind, message, help) = told(&dir.path("absent"));
        assert_eq!((kind, message.as_str()), (Kind::Data, "there is no such file"));
        assert_eq!(help, "give the name of a UTF-8 text file with --data");
        assert_eq!(told(&dir.path("")).1, "is a folder, not a file");
        assert_eq!(told(Path::new("/dev/zero")).1, "is a pipe or a device, not a file");
        assert_eq!(told(&dir.file("empty", "")).1, "the file is empty");
        let (kind, message, help) = told(&dir.file("latin1", b"caf\xe9 noir"));
        assert_eq!((kind, message.as_str()), (Kind::Data, "not UTF-8 text: byte 3 is 0xe9"));
        assert!(help.starts_with("convert it to UTF-8"));
        assert_eq!(told(&dir.file("cut", b"caf\xc3")).1, "not UTF-8 text: byte 3 is 0xc3");
        let (kind, message, _) = told(&dir.file("file", "x").join("under"));
        assert_eq!(kind, Kind::Io);
        assert!(message.starts_with("cannot read "), "{message}");
    }

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
