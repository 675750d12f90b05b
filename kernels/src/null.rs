//! A back end that computes nothing: it counts what the same program would allocate, move and compute.

use crate::backend::{Backend, Device};
use crate::buffer::{Allocator, Buffer};
use crate::cost_counter::CostCounter;
use crate::error::{KernelError, MemoryStats};
use crate::kernel::{Cost, Kernel, Launch};
use std::sync::Arc;

/// Shapes, bytes and costs only. Buffers have a size and no memory.
#[derive(Debug, Default)]
pub struct Null {
    cost: CostCounter,
    allocator: Allocator,
}

impl Null {
    /// A null back end that has counted nothing yet.
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
        Ok(self.allocator.outline(bytes))
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
