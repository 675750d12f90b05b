//! Errors of allocations, launches and devices; the public error type wraps them.

use crate::dtype::DType;
use std::fmt;

/// Memory statistics of an allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes in live buffers.
    pub in_use_bytes: usize,
    /// The peak of `in_use_bytes`.
    pub peak_bytes: usize,
    /// Bytes taken from the system and not returned.
    pub reserved_bytes: usize,
    /// The number of allocations from the system.
    pub num_system_allocs: usize,
}

/// An error of an allocation, a launch or a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelError {
    /// An allocation failed.
    OutOfMemory {
        /// The size of the request.
        requested_bytes: usize,
        /// The allocator's statistics at that moment.
        stats: MemoryStats,
    },
    /// The system has no host memory for an allocation other than a buffer.
    HostMemory {
        /// The size of the request.
        requested_bytes: usize,
        /// What the memory is for.
        what: &'static str,
    },
    /// A kernel has no code for a dtype.
    DType {
        /// The kernel.
        kernel: &'static str,
        /// The unsupported dtype.
        dtype: DType,
    },
    /// An index is outside of a table.
    Index {
        /// The kernel.
        kernel: &'static str,
        /// The index.
        index: i64,
        /// Its position among the indices, counted row-major on this rank.
        position: usize,
        /// The number of rows of the table.
        rows: usize,
    },
    /// A required library is missing or unusable.
    Library {
        /// The name of the library.
        library: &'static str,
        /// The reason.
        why: String,
        /// How to fix it.
        help: String,
    },
    /// A kernel does not support a device.
    Unsupported {
        /// The kernel.
        kernel: &'static str,
        /// The device.
        device: &'static str,
    },
    /// The run-time compiler rejected the source of a kernel.
    Compile {
        /// The kernel.
        kernel: String,
        /// The compiler's log.
        log: String,
    },
    /// A captured function did something that a graph cannot replay.
    NotCapturable {
        /// What the function did, as a predicate: "replays other work".
        what: &'static str,
    },
    /// A capture failed while buffers allocated by the captured function were still held.
    CaptureOutputHeld {
        /// Bytes without contents.
        bytes: usize,
    },
    /// A device call failed.
    Device {
        /// The library function that failed.
        call: &'static str,
        /// The reason it gave.
        why: String,
        /// The number of the GPU whose context is lost, if one is: every later call of this process to it fails too.
        lost_gpu: Option<usize>,
    },
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KernelError::OutOfMemory { requested_bytes, stats } => write!(
                f,
                "out of memory: {requested_bytes} bytes requested; in use {}, peak {}, reserved {} bytes",
                stats.in_use_bytes, stats.peak_bytes, stats.reserved_bytes
            ),
            KernelError::HostMemory { requested_bytes, what } => {
                write!(f, "out of memory: the system refused {requested_bytes} bytes for {what}")
            }
            KernelError::DType { kernel, dtype } => write!(f, "{kernel}: no kernel for dtype {dtype}"),
            KernelError::Index { kernel, index, position, rows } => {
                write!(f, "{kernel}: index {index} at position {position} is outside of 0..{rows}")
            }
            KernelError::Library { library, why, .. } => write!(f, "{library}: {why}"),
            KernelError::Unsupported { kernel, device } => write!(f, "{kernel}: no kernel for {device}"),
            KernelError::Compile { kernel, log } => write!(f, "{kernel}: NVRTC rejected the source: {log}"),
            KernelError::NotCapturable { what } => {
                write!(f, "graph capture: a graph cannot contain work that {what}")
            }
            KernelError::CaptureOutputHeld { bytes } => {
                write!(
                    f,
                    "graph capture failed, and {bytes} bytes that it allocated are still held: drop them"
                )
            }
            KernelError::Device { call, why, lost_gpu: None } => write!(f, "{call}: {why}"),
            KernelError::Device { call, why, lost_gpu: Some(_) } => {
                write!(f, "{call}: {why}; the device context is lost: restart the process")
            }
        }
    }
}

impl std::error::Error for KernelError {}
