//! A fake GPU: CUDA libraries built by g++ from the test sources of the CUDA back end.

use crate::cli::Folder;
use shardgrad::kernels::BackendProvider;
use shardgrad::kernels::cuda::{CudaDevice, SearchPaths};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

/// An open fake GPU. Dropping it fails the test if it reported a fault.
pub(super) struct FakeGpu {
    pub(super) provider: Arc<dyn BackendProvider>,
    folder: PathBuf,
}

impl FakeGpu {
    /// Refuses a call of the driver: after `skipped` further ones the next `times` return this code.
    pub(super) fn refuse(&self, call: &str, skipped: usize, times: usize, code: i32) {
        fs::write(self.folder.join("refuse.txt"), format!("{call} {skipped} {times} {code}\n")).unwrap();
    }
}

impl Drop for FakeGpu {
    fn drop(&mut self) {
        let faults = fs::read_to_string(self.folder.join("faults.txt")).unwrap_or_default();
        assert!(faults.is_empty() || std::thread::panicking(), "the fake GPU reports: {faults}");
    }
}

/// Builds the libraries in a folder and opens the fake GPU; `None`, with a message, without g++.
pub(super) fn open(folder: &Folder) -> Option<FakeGpu> {
    static BUILT: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/src");
    let driver = folder.path("libcuda.so.1");
    let built = BUILT.get_or_init(|| {
        let flags =
            ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-o", &driver];
        let made = Command::new("g++").args(flags).arg(sources.join("cuda/fake/fake.cc")).output().ok()?;
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Some(fs::read(&driver).unwrap())
    });
    let Some(built) = built else {
        let _ = writeln!(std::io::stderr(), "skipped: no g++ for the fake GPU");
        return None;
    };
    fs::write(&driver, built).unwrap();
    for name in ["libnvrtc.so.13", "libcublasLt.so.13"] {
        symlink("libcuda.so.1", folder.path(name)).unwrap();
    }
    for name in ["shim.h", "shim.cc"] {
        fs::copy(sources.join("gpu/shim").join(name), folder.path(name)).unwrap();
    }
    // Compiled kernels are shared with the tests of the crate `kernels`.
    let cache = std::env::current_exe().unwrap().with_file_name("shim");
    fs::create_dir_all(&cache).unwrap();
    symlink(cache, folder.path("cache")).unwrap();
    folder.file("fake.txt", "");
    let named = ["SHARDGRAD_CUDA_PATH", "SHARDGRAD_NVRTC_PATH", "SHARDGRAD_CUBLASLT_PATH"];
    let named = named.map(|name| (name, Path::new(&driver).parent().unwrap().to_path_buf())).into();
    let provider = CudaDevice::open(&SearchPaths { named, ..SearchPaths::default() }, 0).unwrap();
    Some(FakeGpu { provider, folder: folder.0.clone() })
}
