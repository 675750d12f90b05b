//! Tensors in files: safetensors files, their headers, checksums and partial reads; weights in one file or in several
//! with an index. Bytes, names and shapes, without tensors on a mesh.
//!
//! Files are read by position and never memory-mapped, so that a file truncated during a run causes an error, not a
//! signal.

pub(crate) mod digest;
pub mod safetensors_header;
mod checksum;
pub(crate) mod safetensors_file;
mod partial_read;
mod stacked_experts;
pub(crate) mod weights;
pub(crate) mod weights_writer;
