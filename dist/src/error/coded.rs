//! An error as the bytes that ranks of other processes read.

use super::{Error, Kind};
use crate::bytes::{Reading, Writing, printable};

/// Characters of a message, or of a line of a detail, of another process.
const LINE_CHARS_MAX: usize = 4000;
/// Lines of one detail.
const LINES_MAX: usize = 100;
/// Characters of a label.
const LABEL_CHARS_MAX: usize = 32;
/// Details of one error; a wait for many ranks has one for each.
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
    /// Appends the error; the line of user code goes as a detail, which prints alike.
    pub(crate) fn write(&self, out: &mut Writing) {
        let site = self.site().map(|site| ("line", format!("{}:{}", site.file(), site.line())));
        let details: Vec<_> = self.details().iter().cloned().chain(site).collect();
        out.count(self.kind() as usize).text(self.message()).count(details.len());
        for (label, text) in &details {
            out.text(label).text(text);
        }
    }

    /// Reads an error of another process, whose texts are printed: they are escaped and cut to a length. Labels stay in memory for
    /// good; a process reads few, since each error ends a world.
    pub(crate) fn read(from: &mut Reading<'_>) -> Option<Error> {
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
    fn an_error_reads_the_same_in_another_process() {
        for (at, kind) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, at);
            let error = Error::new(kind, "no disk").detail("help", "buy one\nor two").detail("arg 0", "x");
            let error = error.at(std::panic::Location::caller());
            let mut out = Writing::default();
            error.write(&mut out);
            let read = Error::read(&mut Reading(&out.0)).unwrap();
            assert_eq!((read.kind(), read.to_string()), (kind, error.to_string()));
            assert!((0..out.0.len()).all(|len| Error::read(&mut Reading(&out.0[..len])).is_none()));
        }
    }
    #[test]
    fn an_error_of_another_process_is_printable_and_short() {
        let odd = |len: usize| format!("\x1b]0;x\x07\r{}", "y".repeat(len));
        let mut error = Error::new(Kind::Io, format!("{}\nerror: all is well", odd(10)));
        error =
            error.detail(Box::leak(odd(100_000).into()), odd(100_000)).detail("lines", "z\n".repeat(9999));
        for _ in 0..1000 {
            error = error.detail("absent", "rank 1");
        }
        let mut out = Writing::default();
        error.write(&mut out);
        let read = Error::read(&mut Reading(&out.0)).unwrap();
        let text = read.to_string();
        assert!(text.starts_with(r"\u{1b}]0;x\u{7}\ryyyyyyyyyy\nerror: all is well"), "{text}");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text}");
        assert!(text.len() < 20_000 && text.lines().skip(1).all(|line| line.starts_with("  ")), "{text}");
    }
}
