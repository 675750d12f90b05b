//! The back end for NVIDIA cards (feature `cuda`): libraries found at run time, kernels compiled at first use, and the
//! driver behind types that keep its rules. What of it has run on a card stands in `docs/gpu.md`.

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
pub use compile::{Compiled, Compiler, Program};
pub use driver::{DeviceProperties, Driver};
pub use library::SearchPaths;
pub use report::Report;
pub use usage::Usage;
