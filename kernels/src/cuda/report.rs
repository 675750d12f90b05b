//! A report of the libraries and GPUs that the back end finds on a machine (`shardgrad doctor`).

use super::compile::Compiler;
use super::cublaslt::CublasLt;
use super::driver::{DeviceProperties, Driver};
use super::library::{CUBLASLT, DRIVER, NVRTC, SearchPaths};
use crate::error::KernelError;

/// The libraries and GPUs of a machine.
#[derive(Clone, Debug)]
pub struct Report {
    /// For each library its name, and its file and version, or an error that says how to fix it.
    pub libraries: Vec<(&'static str, Result<String, KernelError>)>,
    /// The GPUs, by number.
    pub devices: Vec<Result<DeviceProperties, KernelError>>,
}

impl Report {
    /// Opens the libraries and asks the driver for its GPUs.
    #[must_use]
    pub fn new(paths: &SearchPaths) -> Report {
        let driver = Driver::open(paths);
        let compiler = Compiler::open(paths).map(|c| {
            let (major, minor) = c.version();
            format!("{} ({major}.{minor})", c.file().display())
        });
        let devices =
            driver.as_ref().map_or(Vec::new(), |d| (0..d.num_devices()).map(|i| d.describe(i)).collect());
        let driver = driver.map(|d| {
            let version = d.version();
            format!("{} (CUDA {}.{})", d.file().display(), version / 1000, version % 1000 / 10)
        });
        let libraries =
            vec![(DRIVER.name, driver), (NVRTC.name, compiler), (CUBLASLT.name, CublasLt::describe(paths))];
        Report { libraries, devices }
    }
}
