//! The CUDA back end (feature `cuda`): libraries loaded at run time, kernels compiled at first use by NVRTC, and safe types over
//! the driver API. `docs/gpu.md` lists which parts have run on a GPU.

pub mod library;
pub mod usage;
mod cache;
pub mod compile;
pub mod driver;
mod memory;
mod graph;
mod launch;
mod operand;
mod cublaslt;
mod matmul;
mod comm_stream;
mod staging;
pub mod backend;
pub mod report;
#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod graph_tests;
#[cfg(test)]
mod comm_stream_tests;

pub use backend::CudaDevice;
pub use compile::{CompiledProgram, Compiler, Program};
pub use driver::{DeviceProperties, Driver, reserve_hardware_queues};
pub use library::{Library, LibrarySpec, SearchPaths};
pub use report::Report;
pub use usage::Usage;
