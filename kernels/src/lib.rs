//! Kernels, buffers and back ends of shardgrad: memory and arithmetic on one device.
//!
//! This crate knows devices, buffers, strides and kernels, but no ranks, layouts or gradients. Each kernel has a plain reference
//! implementation, and fast paths for CPUs (SIMD, threads) and NVIDIA GPUs (CUDA C++ compiled at run time) that tests compare with the
//! reference.
//!
//! Of all crates only this one and `nccl` contain `unsafe`: in the files listed in `docs/adr/0012-unsafe-budget.md`.

#[cfg(panic = "abort")]
compile_error!(
    "shardgrad needs unwinding: a failing rank must release the others; remove `panic = \"abort\"`"
);

pub mod dtype;
pub mod strides;
pub mod error;
mod spin_lock;
mod sum_tree;
pub mod buffer;
pub mod host_vec;
pub mod host_memory;
pub mod precision;
pub mod cpu;
pub mod gpu;
pub mod cost;
pub mod kernel;
pub mod device;
pub mod backend;
pub mod provider;
pub mod op;
pub mod null;
pub mod cpu_backend;
#[cfg(feature = "cuda")]
pub mod cuda;

pub use backend::{
    AsyncStream, AvailableMemory, Backend, Graph, PackCacheGuard, ResultCheck, SyncEvent, download, upload,
    upload_into,
};
pub use buffer::{Allocator, Buffer};
pub use cost::Cost;
pub use cpu_backend::{Cpu, CpuProvider};
pub use device::Device;
pub use dtype::{DType, Element, Float, Real};
pub use error::{KernelError, MemoryStats};
pub use kernel::{Arg, ArgMut, Bound, CpuKernelFn, GpuCode, Kernel, Launch, Scalar};
pub use null::Null;
pub use precision::MatmulPrecision;
pub use provider::{BackendConfig, BackendProvider};
pub use strides::{Dims, Geometry, Strides};
pub use sum_tree::{SumTree, TreeNode, TreeSums};

use std::sync::Arc;

/// Whether this crate is compiled with optimization; its kernels are many times slower without.
pub const IS_OPTIMIZED: bool = cfg!(not(unoptimized));

/// Returns the back end provider of a device.
///
/// # Errors
/// [`KernelError::Library`] if the device is missing, this build has no back end for it, or the device cannot run ranks; an error of
/// the device.
pub fn open(device: Device) -> Result<Arc<dyn BackendProvider>, KernelError> {
    match device {
        Device::Cpu => Ok(Arc::new(CpuProvider)),
        #[cfg(feature = "cuda")]
        Device::Cuda(ordinal) => Ok(cuda::CudaDevice::open(&cuda::SearchPaths::from_env(), ordinal)?),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => Err(KernelError::Library {
            library: "CUDA",
            why: "this build has no back end for NVIDIA GPUs".into(),
            help: "build it with `--features cuda`; that needs no CUDA toolkit".into(),
        }),
        Device::Null => Err(KernelError::Library {
            library: "the null device",
            why: "it computes nothing, so no rank can run on it".into(),
            help: "use World::dry_run".into(),
        }),
    }
}
