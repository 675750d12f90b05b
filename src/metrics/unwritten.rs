//! Lines that the disk refused: kept in memory and written when the disk takes them, since a full disk must not end a training.

use shardgrad::Result;
use std::fs::File;
use std::io::{Error, ErrorKind, Write};

/// The bytes that are still to be written, in their order.
#[derive(Debug, Default)]
pub(super) struct Unwritten {
    pub(super) bytes: Vec<u8>,
    /// Whether the user knows that the disk refuses bytes.
    is_reported: bool,
}

impl Unwritten {
    /// Writes as many of the bytes as the file takes.
    ///
    /// # Errors
    /// What the system refuses; the bytes that are not written stay.
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

    /// Reports a failed write, once until one succeeds again.
    pub(super) fn report(&mut self, done: Result<()>) {
        match done {
            Ok(()) => self.is_reported = false,
            Err(e) => {
                if !self.is_reported {
                    eprintln!(
                        "warning: {}; training goes on, the lines are written once the disk takes them",
                        e.message()
                    );
                }
                self.is_reported = true;
            }
        }
    }
}
