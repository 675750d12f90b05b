//! What can go wrong on a device, as facts; the public error wraps them.

use crate::dtype::DType;
use std::fmt;

/// What an allocator has given out and taken from the system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes in live buffers.
    pub in_use_bytes: usize,
    /// The most that `in_use_bytes` has been.
    pub peak_bytes: usize,
    /// Bytes taken from the system and not given back.
    pub reserved_bytes: usize,
    /// How often memory was taken from the system.
    pub num_system_allocs: usize,
}

/// A fact about a failed allocation or launch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelError {
    /// Memory could not be had.
    OutOfMemory {
        /// What was asked for.
        asked_bytes: usize,
        /// What the allocator held then.
        stats: MemoryStats,
    },
    /// A kernel has no code for a dtype.
    DType {
        /// The kernel.
        kernel: &'static str,
        /// The dtype it was given.
        dtype: DType,
    },
    /// An index points outside of a table.
    Index {
        /// The kernel.
        kernel: &'static str,
        /// The index found.
        index: i64,
        /// Where it stands among the indices, counted row-major on this rank.
        position: usize,
        /// The number of rows of the table.
        rows: usize,
    },
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KernelError::OutOfMemory { asked_bytes, stats } => write!(
                f,
                "out of memory: {asked_bytes} bytes asked for; in use {}, peak {}, reserved {} bytes",
                stats.in_use_bytes, stats.peak_bytes, stats.reserved_bytes
            ),
            KernelError::DType { kernel, dtype } => write!(f, "{kernel}: no kernel for dtype {dtype}"),
            KernelError::Index { kernel, index, position, rows } => {
                write!(f, "{kernel}: index {index} at position {position} is outside of 0..{rows}")
            }
        }
    }
}

impl std::error::Error for KernelError {}
