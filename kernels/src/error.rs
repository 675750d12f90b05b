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
    /// A library that is needed is missing, or cannot be used.
    Library {
        /// What it is called.
        library: &'static str,
        /// What is wrong with it.
        why: String,
        /// What to do about it.
        help: String,
    },
    /// A kernel has no code for a device.
    Unsupported {
        /// The kernel.
        kernel: &'static str,
        /// The device.
        device: &'static str,
    },
    /// The compiler refused the source of a kernel.
    Compile {
        /// The kernel.
        kernel: String,
        /// What the compiler said.
        log: String,
    },
    /// Work that is being captured cannot be done as a whole later.
    Captured {
        /// What it does.
        what: &'static str,
    },
    /// A capture failed, and contents that it was to make are still held.
    CaptureOutputHeld {
        /// How many bytes have no contents.
        bytes: usize,
    },
    /// A device refused or failed.
    Device {
        /// The function of its library that said so.
        call: &'static str,
        /// What it said.
        why: String,
        /// Whether every later call fails too, until the process ends.
        lasting: bool,
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
            KernelError::Library { library, why, .. } => write!(f, "{library}: {why}"),
            KernelError::Unsupported { kernel, device } => write!(f, "{kernel}: no kernel for {device}"),
            KernelError::Compile { kernel, log } => write!(f, "{kernel}: the compiler refused it: {log}"),
            KernelError::Captured { what } => write!(f, "work that is being captured {what}"),
            KernelError::CaptureOutputHeld { bytes } => {
                write!(f, "work could not be captured, and {bytes} bytes that it was to fill are still held")
            }
            KernelError::Device { call, why, lasting: false } => write!(f, "{call}: {why}"),
            KernelError::Device { call, why, lasting: true } => {
                write!(f, "{call}: {why}; the device answers nothing more to this process")
            }
        }
    }
}

impl std::error::Error for KernelError {}
