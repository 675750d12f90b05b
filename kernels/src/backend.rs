//! Where kernels run: the object-safe trait, the CPU and the null back end.

use crate::buffer::{Allocator, Buffer};
use crate::cpu::Pool;
use crate::dtype::Element;
use crate::error::{KernelError, MemoryStats};
use crate::kernel::{Cost, Kernel, Launch};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// What a tensor lives on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// Host memory, host threads.
    Cpu,
    /// No memory and no arithmetic: shapes, bytes and costs only.
    Null,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Device::Cpu => "cpu",
            Device::Null => "null",
        })
    }
}

/// One device as one rank sees it: its memory and its way to run kernels.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Which device this is.
    fn device(&self) -> Device;

    /// Memory of at least `bytes` bytes with arbitrary contents.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError>;

    /// Runs a kernel. Every output buffer has one handle.
    ///
    /// # Errors
    /// What the kernel reports.
    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError>;

    /// What is in use now.
    fn memory(&self) -> MemoryStats;

    /// What the launches so far cost.
    fn cost(&self) -> Cost;

    /// How many threads a kernel may use.
    fn num_threads(&self) -> usize;
}

/// Copies elements from the host into new memory (without contents on the null back end).
///
/// # Errors
/// [`KernelError::OutOfMemory`].
pub fn upload<T: Element>(backend: &dyn Backend, data: &[T]) -> Result<Buffer, KernelError> {
    let mut buffer = backend.alloc(size_of_val(data))?;
    if let Some(memory) = buffer.as_mut::<T>()
        && !memory.is_empty()
    {
        memory.copy_from_slice(data);
    }
    Ok(buffer)
}

/// The embedded default: host memory, a pool of threads, run-time SIMD detection.
#[derive(Debug)]
pub struct Cpu {
    allocator: Allocator,
    pool: Pool,
    cost: Mutex<Cost>,
}

impl Cpu {
    /// A CPU back end whose kernels use `num_threads` threads, the caller's among them (at least 1).
    #[must_use]
    pub fn backend(num_threads: usize) -> Arc<dyn Backend> {
        Cpu::with_allocator(num_threads, Allocator::default())
    }

    /// The same on memory of a given allocator.
    #[must_use]
    pub fn with_allocator(num_threads: usize, allocator: Allocator) -> Arc<dyn Backend> {
        Arc::new(Cpu { allocator, pool: Pool::new(num_threads), cost: Mutex::default() })
    }
}

impl Backend for Cpu {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        self.allocator.alloc(bytes)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        debug_assert!(
            launch.inputs.iter().all(|a| a.buffer.bytes() >= a.view.reach() * a.dtype.size())
                && launch.outputs.iter().all(|a| a.buffer.bytes() >= a.view.reach() * a.dtype.size()),
            "{}: a view reaches outside of its buffer",
            kernel.name
        );
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner) += kernel.cost(launch);
        kernel.cpu.unwrap_or(kernel.reference)(&self.pool, launch)
    }

    fn memory(&self) -> MemoryStats {
        self.allocator.stats()
    }

    fn cost(&self) -> Cost {
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }
}
