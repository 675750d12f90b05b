//! The null back end: no memory, no arithmetic. It counts what the same program would allocate and compute.

use crate::backend::Backend;
use crate::buffer::{Allocator, Buffer};
use crate::cost::{Cost, CostCounter};
use crate::device::Device;
use crate::error::{KernelError, MemoryStats};
use crate::kernel::{Kernel, Launch};
use std::sync::Arc;

/// A back end that counts bytes and costs only. Its buffers have a size and no memory, as PyTorch's meta tensors.
#[derive(Debug, Default)]
pub struct Null {
    cost: CostCounter,
    allocator: Allocator,
}

impl Null {
    /// Creates a null back end with all counts at zero.
    #[must_use]
    pub fn backend() -> Arc<dyn Backend> {
        Arc::new(Null::default())
    }
}

impl Backend for Null {
    fn device(&self) -> Device {
        Device::Null
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        Ok(self.allocator.alloc_meta(bytes))
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        self.cost.add(kernel.cost(launch));
        Ok(())
    }

    fn memory(&self) -> MemoryStats {
        self.allocator.stats()
    }

    fn cost(&self) -> Cost {
        self.cost.sum()
    }

    fn num_threads(&self) -> usize {
        1
    }
}
