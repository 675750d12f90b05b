//! NCCL for shardgrad: the library, loaded at run time, and communicators whose operations run on streams of the CUDA back end.
//!
//! The crate knows buffers, streams and the ranks of a communicator as numbers; it knows no mesh and no calls to compare. Every failing
//! call is an error with the text of `ncclGetLastError`. No call blocks: communicators are non-blocking, and the caller that waits for one
//! decides how long. NCCL's types are declared here; a test lets a C++ compiler compare them with `nccl.h`.
//!
//! The feature `cuda` is the whole crate.

#[cfg(feature = "cuda")]
mod functions;
#[cfg(feature = "cuda")]
mod library;
#[cfg(feature = "cuda")]
mod communicator;
#[cfg(all(test, feature = "cuda"))]
mod header_tests;
#[cfg(all(test, feature = "cuda"))]
mod library_tests;

#[cfg(feature = "cuda")]
pub use communicator::{ABORTED, Communicator, Part, ReduceOp, SplitGroup};
#[cfg(feature = "cuda")]
pub use library::{Nccl, UniqueId, algorithm, pin_algorithm};
