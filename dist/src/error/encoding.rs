//! Encoding of an [`Error`] for other processes.

use super::{Error, Kind};
use crate::encoding::{Decoder, Encoder, printable};

/// The most characters kept of the message, or of one line of a detail, of another process.
const LINE_CHARS_MAX: usize = 4000;
/// The most lines kept of one detail.
const LINES_MAX: usize = 100;
/// The most characters kept of a label.
const LABEL_CHARS_MAX: usize = 32;
/// The most details kept of one error; a timeout has one per absent rank.
const DETAILS_MAX: usize = 100;

const KINDS: [Kind; 18] = [
    Kind::Shape,
    Kind::DType,
    Kind::Layout,
    Kind::Mesh,
    Kind::Device,
    Kind::Collective,
    Kind::PeerLost,
    Kind::Timeout,
    Kind::OutOfMemory,
    Kind::Unsupported,
    Kind::Checkpoint,
    Kind::Config,
    Kind::Data,
    Kind::Diverged,
    Kind::NotFinite,
    Kind::Interrupted,
    Kind::Io,
    Kind::Panic,
];

impl Error {
    /// Appends the error to `out`. The line of user code becomes a detail, which prints the same.
    pub(crate) fn encode(&self, out: &mut Encoder) {
        let site = self.site().map(|site| ("line", format!("{}:{}", site.file(), site.line())));
        let details: Vec<_> = self.details().iter().cloned().chain(site).collect();
        out.count(self.kind() as usize).text(self.message()).count(details.len());
        for (label, text) in &details {
            out.text(label).text(text);
        }
    }

    /// Decodes an error of another process. Its texts are escaped and truncated, because they are printed. Labels are leaked: a process
    /// decodes few errors, since each ends the world.
    pub(crate) fn decode(from: &mut Decoder<'_>) -> Option<Error> {
        let kind = *KINDS.get(from.count()?)?;
        let error = Error::new(kind, printable(from.text()?, LINE_CHARS_MAX));
        (0..from.count()?).try_fold(error, |error, at| {
            let (label, text) = (from.text()?, from.text()?);
            if at >= DETAILS_MAX {
                return Some(error);
            }
            let lines = text.split('\n').take(LINES_MAX).map(|line| printable(line, LINE_CHARS_MAX));
            let label: &'static str = Box::leak(printable(label, LABEL_CHARS_MAX).into());
            Some(error.detail(label, lines.collect::<Vec<String>>().join("\n")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoded_error_equals_the_encoded_one() {
        for (at, kind) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, at);
            let error = Error::new(kind, "no disk").detail("help", "buy one\nor two").detail("arg 0", "x");
            let error = error.at(std::panic::Location::caller());
            let mut out = Encoder::default();
            error.encode(&mut out);
            let read = Error::decode(&mut Decoder(&out.0)).unwrap();
            assert_eq!((read.kind(), read.to_string()), (kind, error.to_string()));
            assert!((0..out.0.len()).all(|len| Error::decode(&mut Decoder(&out.0[..len])).is_none()));
        }
    }
    #[test]
    fn decoded_error_is_printable_and_truncated() {
        let odd = |len: usize| format!("\x1b]0;x\x07\r{}", "y".repeat(len));
        let mut error = Error::new(Kind::Io, format!("{}\nerror: all is well", odd(10)));
        error =
            error.detail(Box::leak(odd(100_000).into()), odd(100_000)).detail("lines", "z\n".repeat(9999));
        for _ in 0..1000 {
            error = error.detail("absent", "rank 1");
        }
        let mut out = Encoder::default();
        error.encode(&mut out);
        let read = Error::decode(&mut Decoder(&out.0)).unwrap();
        let text = read.to_string();
        assert!(text.starts_with(r"\u{1b}]0;x\u{7}\ryyyyyyyyyy\nerror: all is well"), "{text}");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text}");
        assert!(text.len() < 20_000 && text.lines().skip(1).all(|line| line.starts_with("  ")), "{text}");
    }
}
