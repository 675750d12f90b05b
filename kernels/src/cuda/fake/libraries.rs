//! The libraries of a fake GPU, in a folder. Tests of other crates include this file by its path.

use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

/// The sources of the libraries.
pub(crate) const FAKE: [(&str, &str); 7] = [
    ("state.h", include_str!("state.h")),
    ("memory.h", include_str!("memory.h")),
    ("streams.h", include_str!("streams.h")),
    ("programs.h", include_str!("programs.h")),
    ("cublaslt.h", include_str!("cublaslt.h")),
    ("nccl.h", include_str!("nccl.h")),
    ("fake.cc", include_str!("fake.cc")),
];
/// What the libraries compile kernels with.
pub(crate) const SHIM: [(&str, &str); 2] =
    [("shim.h", include_str!("../../gpu/shim/shim.h")), ("shim.cc", include_str!("../../gpu/shim/shim.cc"))];

/// Compiles C++ source to a shared library.
pub(crate) fn compile(source: &Path, to: &Path) {
    let flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-o"];
    let done = Command::new("g++").args(flags).arg(to).arg(source).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Whether g++ is missing, which is then reported on stderr.
pub(crate) fn is_skipped() -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let is_missing = !env::split_paths(&path).any(|folder| folder.join("g++").is_file());
    if is_missing {
        let _ = writeln!(std::io::stderr(), "skipped: no g++ for a fake GPU");
    }
    is_missing
}

/// Puts the libraries of a fake GPU with these options (`fake.cc` lists them) into a folder, from which they read and to which
/// they write. Returns false, with a line on stderr, without g++. Compiled once in a process.
pub(crate) fn install(folder: &Path, options: &str) -> bool {
    static BUILT: OnceLock<Vec<u8>> = OnceLock::new();
    if is_skipped() {
        return false;
    }
    let driver = folder.join("libcuda.so.1");
    let built = BUILT.get_or_init(|| {
        let sources = folder.join("sources");
        fs::create_dir(&sources).unwrap();
        FAKE.iter().for_each(|(name, text)| fs::write(sources.join(name), text).unwrap());
        compile(&sources.join("fake.cc"), &driver);
        fs::remove_dir_all(sources).unwrap();
        fs::read(&driver).unwrap()
    });
    fs::write(&driver, built).unwrap();
    for name in ["libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2"] {
        symlink("libcuda.so.1", folder.join(name)).unwrap();
    }
    SHIM.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    // Compiled kernels are shared by the tests of all crates.
    let cache = env::current_exe().unwrap().with_file_name("shim");
    fs::create_dir_all(&cache).unwrap();
    symlink(cache, folder.join("cache")).unwrap();
    fs::write(folder.join("fake.txt"), options).unwrap();
    true
}
