//! A fake GPU: CUDA libraries built by g++ from the test sources of the CUDA back end.

#[path = "../kernels/src/cuda/fake/libraries.rs"]
mod libraries;

use crate::cli::Folder;
use shardgrad::kernels::BackendProvider;
use shardgrad::kernels::cuda::{CudaDevice, SearchPaths};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

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

/// Installs the libraries in a folder and opens the fake GPU; `None`, with a message, without g++.
pub(super) fn open(folder: &Folder) -> Option<FakeGpu> {
    if !libraries::install(&folder.0, "") {
        return None;
    }
    let named = ["SHARDGRAD_CUDA_PATH", "SHARDGRAD_NVRTC_PATH", "SHARDGRAD_CUBLASLT_PATH"];
    let named = named.map(|name| (name, folder.0.clone())).into();
    let provider = CudaDevice::open(&SearchPaths { named, ..SearchPaths::default() }, 0).unwrap();
    Some(FakeGpu { provider, folder: folder.0.clone() })
}
