//! The machine room of shardgrad: bytes and speed.
//!
//! This crate knows devices, buffers, strides and kernels. It knows no ranks, no layouts and no gradients.
//! `unsafe` is allowed here in `lock.rs`, `buffer.rs`, `buffer/`, `cpu/job.rs`, `cpu/pool.rs`, `cpu/simd/`, `cpu/gemm.rs`,
//! `cpu/gemm/`, and some files of `cuda/` and of `gpu/shim/` only.

#[cfg(panic = "abort")]
compile_error!(
    "shardgrad needs unwinding: a failing rank must release the others; remove `panic = \"abort\"`"
);

pub mod dtype;
pub mod strides;
pub mod error;
mod spin_lock;
pub mod buffer;
pub mod precision;
pub mod cpu;
pub mod gpu;
pub mod kernel;
mod cost_counter;
pub mod backend;
pub mod null;
pub mod op;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod open;

pub use backend::{
    Backend, BackendConfig, BackendProvider, Cpu, CpuProvider, Device, Graph, PackCacheGuard, SyncEvent,
    download, upload, upload_into,
};
pub use buffer::{Allocator, Buffer};
pub use dtype::{DType, Element, Float, Real};
pub use error::{KernelError, MemoryStats};
pub use kernel::{Arg, ArgMut, Bound, Cost, Gpu, HostCode, Kernel, Launch, Scalar};
pub use null::Null;
pub use open::open;
pub use precision::MatmulPrecision;
pub use strides::{Dims, Geometry, Strides};
