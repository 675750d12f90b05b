//! One save at a time into a folder, whichever process makes it: two of them would take each other's files for what a dead one
//! left, and remove each other's weights as those of an earlier model.

use shardgrad_tensor::{Error, Kind, Result};
use std::fs::{File, TryLockError};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// So long a save waits for another.
const PATIENCE: Duration = Duration::from_secs(600);
/// How often it looks.
const NAP: Duration = Duration::from_millis(20);

/// What keeps other saves out of a folder as long as it lives: a lock on the folder itself, so that no file is left behind. It
/// holds on one machine, for all of its containers; a file system without such locks, as NFS, keeps nobody out.
#[derive(Debug)]
pub(super) struct Turn {
    _locked: Option<File>,
}

impl Turn {
    /// Waits until no other save writes into a folder. One that is not there has nobody to wait for.
    ///
    /// # Errors
    /// `Kind::Io` if the other save takes too long.
    pub(super) fn wait(dir: &Path) -> Result<Turn> {
        let place = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        let Ok(folder) = File::open(place) else { return Ok(Turn { _locked: None }) };
        let start = Instant::now();
        while let Err(TryLockError::WouldBlock) = folder.try_lock() {
            if start.elapsed() > PATIENCE {
                let text = format!("cannot write {}: another save into it goes on", dir.display());
                return Err(
                    Error::new(Kind::Io, text).detail("help", "wait for its end, or give another folder")
                );
            }
            thread::sleep(NAP);
        }
        Ok(Turn { _locked: Some(folder) })
    }
}
