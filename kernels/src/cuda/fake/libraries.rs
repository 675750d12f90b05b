//! The libraries of a fake GPU, in a folder. Tests of other crates include this file by its path.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{self, Command};
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

const FLAGS: [&str; 7] = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-o"];

/// Compiles C++ source to a shared library.
pub(crate) fn compile(source: &Path, to: &Path) {
    let done = Command::new("g++").args(FLAGS).arg(to).arg(source).output().unwrap();
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

/// Returns the libraries, one file. Compiled once: test programs share the file in the folder of compiled kernels, named by a hash of the
/// sources.
fn compiled(cache: &Path) -> Vec<u8> {
    let mut hasher = DefaultHasher::new();
    (FAKE, FLAGS).hash(&mut hasher);
    let library = cache.join(format!("libraries-{:016x}.so", hasher.finish()));
    if !library.exists() {
        // Another program may compile at the same time: each renames a whole file of its own.
        let draft = cache.join(format!("libraries-{}", process::id()));
        fs::create_dir_all(&draft).unwrap();
        FAKE.iter().for_each(|(name, text)| fs::write(draft.join(name), text).unwrap());
        compile(&draft.join("fake.cc"), &draft.join("fake.so"));
        fs::rename(draft.join("fake.so"), &library).unwrap();
        fs::remove_dir_all(draft).unwrap();
    }
    fs::read(library).unwrap()
}

/// Puts the libraries of a fake GPU with these options (`fake.cc` lists them) into a folder, from which they read and to which
/// they write. Returns false, with a line on stderr, without g++.
pub(crate) fn install(folder: &Path, options: &str) -> bool {
    static COMPILED: OnceLock<Vec<u8>> = OnceLock::new();
    if is_skipped() {
        return false;
    }
    // Compiled kernels are shared by the tests of all crates.
    let cache = env::current_exe().unwrap().with_file_name("shim");
    fs::create_dir_all(&cache).unwrap();
    fs::write(folder.join("libcuda.so.1"), COMPILED.get_or_init(|| compiled(&cache))).unwrap();
    for name in ["libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2"] {
        symlink("libcuda.so.1", folder.join(name)).unwrap();
    }
    SHIM.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    symlink(cache, folder.join("cache")).unwrap();
    fs::write(folder.join("fake.txt"), options).unwrap();
    true
}
