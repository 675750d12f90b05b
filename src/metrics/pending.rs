//! Metrics lines that could not be written, for example on a full disk: kept in memory and retried, so that training continues.

use shardgrad::Result;
use std::fs::File;
use std::io::{Error, ErrorKind, Write};

/// Bytes still to be written.
#[derive(Debug, Default)]
pub(super) struct PendingLines {
    pub(super) bytes: Vec<u8>,
    /// Whether the current failure has been reported.
    is_reported: bool,
}

impl PendingLines {
    /// Writes as many bytes as possible.
    ///
    /// # Errors
    /// The I/O error; unwritten bytes stay pending.
    pub(super) fn write_to(&mut self, file: &mut File) -> std::io::Result<()> {
        while !self.bytes.is_empty() {
            match file.write(&self.bytes) {
                Ok(0) => return Err(Error::from(ErrorKind::WriteZero)),
                Ok(written) => drop(self.bytes.drain(..written)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Reports a failed write, once until a write succeeds.
    pub(super) fn report(&mut self, done: Result<()>) {
        match done {
            Ok(()) => self.is_reported = false,
            Err(e) => {
                if !self.is_reported {
                    eprintln!(
                        "warning: {}; training continues, the metrics are written when the disk accepts them",
                        e.message()
                    );
                }
                self.is_reported = true;
            }
        }
    }
}
