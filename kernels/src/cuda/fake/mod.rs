//! A fake GPU for tests: `fake.cc`, compiled by g++, which the back end loads in place of NVIDIA's libraries.

pub(crate) mod device;

use super::library::SearchPaths;
use crate::gpu::shim::compiler_is_found;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::UNIX_EPOCH;

const FAKE: &str = include_str!("fake.cc");
const SHIM: [(&str, &str); 2] =
    [("shim.h", include_str!("../../gpu/shim/shim.h")), ("shim.cc", include_str!("../../gpu/shim/shim.cc"))];

/// Compiles C++ source to a shared library.
pub(super) fn library(text: &str, to: &Path) {
    let source = to.with_extension("cc");
    fs::write(&source, text).unwrap();
    let flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-o"];
    let done = Command::new("g++").args(flags).arg(to).arg(&source).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// A temporary folder of libraries, deleted on drop.
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
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns whether g++ is missing, and reports that on stderr.
pub(super) fn is_skipped() -> bool {
    let is_missing = !compiler_is_found();
    if is_missing {
        let _ = writeln!(std::io::stderr(), "skipped: no g++ for a fake GPU");
    }
    is_missing
}

/// Creates a folder with the libraries of a fake GPU with these options (`fake.cc` lists them); `None`, with a line on stderr, without
/// g++.
pub(super) fn gpu(options: &str) -> Option<Folder> {
    static BUILT: OnceLock<Vec<u8>> = OnceLock::new();
    if is_skipped() {
        return None;
    }
    let built = BUILT.get_or_init(|| {
        let scratch = Folder::new();
        let file = scratch.0.join("fake.so");
        library(FAKE, &file);
        fs::read(file).unwrap()
    });
    let folder = Folder::new();
    fs::write(folder.0.join("libcuda.so.1"), built).unwrap();
    for name in ["libnvrtc.so.13", "libcublasLt.so.13"] {
        std::os::unix::fs::symlink("libcuda.so.1", folder.0.join(name)).unwrap();
    }
    for (name, text) in SHIM {
        fs::write(folder.0.join(name), text).unwrap();
    }
    fs::write(folder.0.join("fake.txt"), options).unwrap();
    Some(folder)
}
