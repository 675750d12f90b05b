//! What of the back end is there on a machine, for people.

use super::compile::Compiler;
use super::cublaslt::CublasLt;
use super::driver::{DeviceProperties, Driver};
use super::library::{BLAS, DRIVER, NVRTC, SearchPaths};
use crate::error::KernelError;

/// What was found.
#[derive(Clone, Debug)]
pub struct Report {
    /// For each library what it is called, and its file and version, or what is wrong and what to do.
    pub libraries: Vec<(&'static str, Result<String, KernelError>)>,
    /// The cards, by number.
    pub cards: Vec<Result<DeviceProperties, KernelError>>,
}

impl Report {
    /// Opens the libraries and asks the driver for its cards.
    #[must_use]
    pub fn new(places: &SearchPaths) -> Report {
        let driver = Driver::open(places);
        let compiler = Compiler::open(places).map(|c| {
            let (major, minor) = c.version();
            format!("{} ({major}.{minor})", c.file().display())
        });
        let cards =
            driver.as_ref().map_or(Vec::new(), |d| (0..d.num_devices()).map(|i| d.describe(i)).collect());
        let driver = driver.map(|d| {
            let version = d.version();
            format!("{} (CUDA {}.{})", d.file().display(), version / 1000, version % 1000 / 10)
        });
        let libraries =
            vec![(DRIVER.name, driver), (NVRTC.name, compiler), (BLAS.name, CublasLt::look(places))];
        Report { libraries, cards }
    }
}
