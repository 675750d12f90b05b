//! Back-end providers: a device creates a back end for each rank.

use crate::backend::Backend;
use crate::device::Device;
use crate::error::KernelError;
use crate::precision::MatmulPrecision;
use std::fmt;
use std::sync::Arc;

/// The configuration of a rank's back end.
#[derive(Clone, Debug)]
pub struct BackendConfig {
    /// Host threads for kernels, the rank's own thread included (0 counts as 1).
    pub num_threads: usize,
    /// Whether idle and waiting threads may spin for a while: every thread of every rank has a core.
    pub may_spin: bool,
    /// The most bytes that the back end may take from the system; 0 for no limit.
    pub memory_bytes_max: usize,
    /// The precision of f32 matrix products.
    pub precision: MatmulPrecision,
    /// The cores that the threads are pinned to, the rank's own thread first. Empty: the operating system schedules them.
    pub cores: Vec<usize>,
}

impl Default for BackendConfig {
    /// One unpinned thread that may spin, no memory limit, the highest precision.
    fn default() -> Self {
        let precision = MatmulPrecision::Highest;
        BackendConfig { num_threads: 1, may_spin: true, cores: Vec::new(), memory_bytes_max: 0, precision }
    }
}

/// Creates a back end for each rank of a world, all on one device. [`open`](crate::open) returns the provider of a device.
pub trait BackendProvider: fmt::Debug + Send + Sync {
    /// Returns the device of the back ends.
    fn device(&self) -> Device;

    /// Returns the UUID of the device, by which processes notice that they have the same one; `None` for the CPU.
    fn uuid(&self) -> Option<&str> {
        None
    }

    /// Creates a back end.
    ///
    /// # Errors
    /// An error of the device.
    fn backend(&self, config: BackendConfig) -> Result<Arc<dyn Backend>, KernelError>;
}
