//! An error as the bytes that ranks of other processes read.

use super::{Error, Kind};
use crate::bytes::{Reading, Writing, printable, printable_lines};

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

    /// Reads an error, whose control characters are escaped but for ends of lines. Its labels stay in memory for good: a process
    /// reads few, since each ends a world.
    pub(crate) fn read(from: &mut Reading<'_>) -> Option<Error> {
        let error = Error::new(*KINDS.get(from.count()?)?, printable_lines(from.text()?));
        (0..from.count()?).try_fold(error, |error, _| {
            let label: &'static str = Box::leak(printable(from.text()?).into());
            Some(error.detail(label, printable_lines(from.text()?)))
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
    fn the_text_of_another_process_steers_no_terminal() {
        let error = Error::new(Kind::Data, "a\u{1b}[2J\nb").detail("he\rlp", "c\u{7}\nd");
        let mut out = Writing::default();
        error.write(&mut out);
        let read = Error::read(&mut Reading(&out.0)).unwrap();
        assert_eq!(read.message(), "a\\u{1b}[2J\nb");
        assert_eq!(read.details(), [("he\\rlp", "c\\u{7}\nd".to_string())]);
    }
}
