//! A fake GPU for tests: the sources of this folder, compiled by g++, which the back end loads in place of NVIDIA's libraries.

pub(crate) mod device;
mod libraries;

use super::library::SearchPaths;
use libraries::{FAKE, SHIM, compile};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

pub(super) use libraries::is_skipped;

/// Compiles C++ source to a shared library.
pub(super) fn library(text: &str, to: &Path) {
    let source = to.with_extension("cc");
    fs::write(&source, text).unwrap();
    compile(&source, to);
}

/// A temporary folder of libraries, deleted on drop. Dropping it fails the test if the fake GPU reported a fault that the test did not
/// take.
#[derive(Debug)]
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn new() -> Folder {
        // Names are never reused: the loader keeps returning the library that it opened first under a name.
        let name = |n: u32| {
            let nanos = UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
            std::env::temp_dir().join(format!("shardgrad-fake-{}-{nanos}-{n}", std::process::id()))
        };
        let folder = (0..).map(name).find(|f| fs::create_dir(f).is_ok()).expect("a folder can be made");
        Folder(folder)
    }

    /// Returns search paths with every library in this folder, without a cache.
    pub(super) fn search_paths(&self) -> SearchPaths {
        let named = ["SHARDGRAD_CUDA_PATH", "SHARDGRAD_NVRTC_PATH", "SHARDGRAD_CUBLASLT_PATH"];
        SearchPaths { named: named.map(|name| (name, self.0.clone())).into(), ..SearchPaths::default() }
    }

    /// Returns the faults that the fake GPU reported since the last call, one a line.
    pub(super) fn take_faults(&self) -> String {
        let file = self.0.join("faults.txt");
        let faults = fs::read_to_string(&file).unwrap_or_default();
        let _ = fs::remove_file(file);
        faults
    }

    /// Returns the priority of each stream, in the order of creation.
    pub(super) fn stream_priorities(&self) -> Vec<i32> {
        let text = fs::read_to_string(self.0.join("streams.txt")).unwrap_or_default();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    /// Refuses a call of the driver: after `skipped` further ones the next `times` return this code.
    pub(super) fn refuse(&self, call: &str, skipped: usize, times: usize, code: i32) {
        fs::write(self.0.join("refuse.txt"), format!("{call} {skipped} {times} {code}\n")).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let faults = self.take_faults();
        let _ = fs::remove_dir_all(&self.0);
        assert!(faults.is_empty() || std::thread::panicking(), "the fake GPU reports: {faults}");
    }
}

/// Creates a folder with the libraries of a fake GPU with these options (`fake.cc` lists them); `None`, with a line on stderr, without
/// g++.
pub(super) fn gpu(options: &str) -> Option<Folder> {
    let folder = Folder::new();
    libraries::install(&folder.0, options).then_some(folder)
}

/// Compiles the program of planted faults; `None`, with a line on stderr, without g++.
pub(super) fn planted_faults() -> Option<Folder> {
    if is_skipped() {
        return None;
    }
    let folder = Folder::new();
    let sources = FAKE.iter().chain(&SHIM).chain(&[("planted.cc", include_str!("planted.cc"))]);
    sources.for_each(|(name, text)| fs::write(folder.0.join(name), text).unwrap());
    fs::write(folder.0.join("fake.txt"), "quiet").unwrap();
    let flags = ["-std=c++17", "-O1", "-pthread", "-rdynamic", "-o", "planted", "planted.cc"];
    let done = Command::new("g++").args(flags).current_dir(&folder.0).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(folder)
}
