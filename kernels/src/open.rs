//! Devices by name.

use crate::backend::{BackendProvider, CpuProvider, Device};
use crate::error::KernelError;
use std::sync::Arc;

/// What ranks on a device get their back ends from.
///
/// # Errors
/// [`KernelError::Library`] where the device is missing, this build has no back end for it, or it runs no ranks; what the
/// device reports.
pub fn open(device: Device) -> Result<Arc<dyn BackendProvider>, KernelError> {
    match device {
        Device::Cpu => Ok(Arc::new(CpuProvider)),
        #[cfg(feature = "cuda")]
        Device::Cuda(card) => Ok(crate::cuda::CudaDevice::open(&crate::cuda::SearchPaths::from_env(), card)?),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => Err(KernelError::Library {
            library: "CUDA",
            why: "this build has no back end for NVIDIA cards".into(),
            help: "build it with `--features cuda`; that needs no CUDA toolkit".into(),
        }),
        Device::Null => Err(KernelError::Library {
            library: "the null device",
            why: "nothing is computed there, so no rank can run".into(),
            help: "use World::dry_run".into(),
        }),
    }
}
