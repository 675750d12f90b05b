//! The CPU back end: host memory, a pool of threads, SIMD kernels chosen at run time.

use crate::backend::{AvailableMemory, Backend, PackCacheGuard};
use crate::buffer::{Allocator, Buffer};
use crate::cost::{Cost, CostCounter};
use crate::cpu::Pool;
use crate::cpu::pack_cache::PackCache;
use crate::device::Device;
use crate::error::{KernelError, MemoryStats};
use crate::host_memory::{available_bytes, sharing_texts};
use crate::host_vec::catch_kernel_error;
use crate::kernel::{Kernel, Launch};
use crate::provider::{BackendConfig, BackendProvider};
use std::sync::Arc;

/// The provider of CPU back ends on this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuProvider;

impl BackendProvider for CpuProvider {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn backend(&self, config: BackendConfig) -> Result<Arc<dyn Backend>, KernelError> {
        let allocator = Allocator::with_limit(config.memory_bytes_max);
        let BackendConfig { num_threads, may_spin, precision, ref cores, .. } = config;
        let pool = Pool::with_affinity(num_threads, may_spin, cores)?.with_precision(precision);
        Ok(Cpu::with_pool(pool, allocator))
    }
}

/// The back end of the host: kernels run to completion before a launch returns.
#[derive(Debug)]
pub struct Cpu {
    allocator: Allocator,
    pool: Pool,
    pack_cache: Arc<PackCache>,
    cost: CostCounter,
}

impl Cpu {
    /// Creates a CPU back end whose kernels use `num_threads` threads, the caller's thread included (0 counts as 1).
    #[must_use]
    pub fn backend(num_threads: usize) -> Arc<dyn Backend> {
        Cpu::with_allocator(num_threads, Allocator::default())
    }

    /// Creates a CPU back end with its own threads on the memory of `allocator`.
    pub fn with_allocator(num_threads: usize, allocator: Allocator) -> Arc<dyn Backend> {
        Cpu::with_pool(Pool::new(num_threads), allocator)
    }

    fn with_pool(pool: Pool, allocator: Allocator) -> Arc<dyn Backend> {
        let pack_cache = Arc::new(PackCache::new(allocator.clone()));
        let pool = pool.with_pack_cache(pack_cache.clone());
        Arc::new(Cpu { allocator, pool, pack_cache, cost: CostCounter::default() })
    }

    /// Evicts the pack cache and allocates again, after an allocation failed with `error`.
    #[cold]
    fn alloc_after_eviction(&self, bytes: usize, error: KernelError) -> Result<Buffer, KernelError> {
        if self.pack_cache.evict_all() { self.allocator.alloc(bytes) } else { Err(error) }
    }
}

impl Backend for Cpu {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        match self.allocator.alloc(bytes) {
            Err(error) => self.alloc_after_eviction(bytes, error),
            buffer => buffer,
        }
    }

    fn cache_packed(&self, buffer: &Buffer) -> PackCacheGuard {
        if buffer.has_memory() {
            PackCacheGuard::new(self.pack_cache.hold(buffer))
        } else {
            PackCacheGuard::default()
        }
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        debug_assert!(
            launch.inputs.iter().all(|a| a.buffer.bytes() >= a.view.reach() * a.dtype.size())
                && launch.outputs.iter().all(|a| a.buffer.bytes() >= a.view.reach() * a.dtype.size()),
            "{}: a view reaches outside of its buffer",
            kernel.name
        );
        self.cost.add(kernel.cost(launch));
        catch_kernel_error(|| kernel.cpu.unwrap_or(kernel.reference)(&self.pool, launch))
    }

    fn memory(&self) -> MemoryStats {
        self.allocator.stats()
    }

    fn available_memory(&self) -> Option<AvailableMemory> {
        if let Some(bytes) = self.allocator.bytes_below_limit() {
            return Some(AvailableMemory { bytes: bytes as u64, shared_by: None });
        }
        let bytes = available_bytes()?;
        Some(AvailableMemory { bytes, shared_by: Some(sharing_texts().concat()) })
    }

    fn cost(&self) -> Cost {
        self.cost.sum()
    }

    fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{download, upload};
    use crate::buffer::bytes_of;
    use crate::dtype::DType;
    use crate::kernel::{Arg, ArgMut};
    use crate::op::batched_matmul::BATCHED_MATMUL;
    use crate::strides::Strides;

    /// Returns x times weight, for an x of 64 rows and a weight of 100 rows and 300 columns.
    fn matmul(cpu: &dyn Backend, x: &Buffer, weight: &Buffer) -> Vec<f32> {
        let mut y = cpu.alloc(64 * 300 * 4).unwrap();
        let [a, b, c] =
            [[64, 100], [100, 300], [64, 300]].map(|[rows, cols]| Strides::contiguous(&[1, rows, cols]));
        let arg = |buffer, view| Arg { buffer, dtype: DType::F32, view };
        let inputs = [arg(x, &a), arg(weight, &b)];
        let outputs = &mut [ArgMut { buffer: &mut y, dtype: DType::F32, view: &c }];
        cpu.launch(&BATCHED_MATMUL, &mut Launch { inputs: &inputs, outputs, scalars: &[] }).unwrap();
        download(cpu, &y, 64 * 300).unwrap()
    }

    fn test_values(seed: usize, len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed) % 1000) as f32 - 500.0).collect()
    }

    #[test]
    fn cached_weight_is_packed_once_and_repacked_after_an_update() {
        let cpu = Cpu::backend(2);
        let x = upload(&*cpu, &test_values(1, 64 * 100)).unwrap();
        let mut weight = upload(&*cpu, &test_values(2, 100 * 300)).unwrap();
        let in_use = || cpu.memory().in_use_bytes;
        let (expected, before) = (matmul(&*cpu, &x, &weight), in_use());
        for seed in [3, 4] {
            let guard = cpu.cache_packed(&weight);
            assert_eq!(in_use(), before, "the first product packs, not `cache_packed`");
            assert!(!weight.is_unique(), "the cache holds a handle");
            let first = matmul(&*cpu, &x, &weight);
            let with_packed = in_use();
            assert!(with_packed >= before + 100 * 304 * 4);
            assert!(matmul(&*cpu, &x, &weight) == first && in_use() == with_packed);
            drop(guard);
            assert_eq!(in_use(), before);
            cpu.upload(bytes_of(&test_values(seed, 100 * 300)), &mut weight).unwrap();
            assert!(matmul(&*cpu, &x, &weight) != first, "the packed form of the old weight is gone");
        }
        cpu.upload(bytes_of(&test_values(2, 100 * 300)), &mut weight).unwrap();
        let _guard = cpu.cache_packed(&weight);
        assert!(matmul(&*cpu, &x, &weight) == expected);
    }

    #[test]
    fn allocation_evicts_the_pack_cache() {
        let (limit, packed) = (1 << 20, 100 * 304 * 4);
        let cpu = Cpu::with_allocator(1, Allocator::with_limit(limit));
        let x = upload(&*cpu, &test_values(1, 64 * 100)).unwrap();
        let weight = upload(&*cpu, &test_values(2, 100 * 300)).unwrap();
        let in_use = || cpu.memory().in_use_bytes;
        let (expected, before) = (matmul(&*cpu, &x, &weight), in_use());
        let guard = cpu.cache_packed(&weight);
        assert!(matmul(&*cpu, &x, &weight) == expected && in_use() >= before + packed);
        let needed = cpu.alloc(limit - in_use() + packed / 4).expect("evicting the packed form frees enough");
        let after = in_use();
        assert!(after < before + needed.bytes() + packed, "the packed form was evicted");
        assert!(matmul(&*cpu, &x, &weight) == expected && in_use() == after);
        drop(guard);
        let _guard = cpu.cache_packed(&weight);
        assert!(
            matmul(&*cpu, &x, &weight) == expected && in_use() == after,
            "without memory for the cache, each product packs for itself"
        );
        drop(needed);
        assert!(
            matmul(&*cpu, &x, &weight) == expected && in_use() == before,
            "the cache stays off while an operand is held"
        );
    }

    #[test]
    fn upload_and_download_round_trip() {
        let cpu = Cpu::backend(1);
        let buffer = upload(&*cpu, &[1.5f32, -2.0, 7.0]).unwrap();
        assert_eq!(download::<f32>(&*cpu, &buffer, 2).unwrap(), [1.5, -2.0]);
        assert_eq!(download::<f32>(&*cpu, &Buffer::without_memory(8), 2).unwrap(), []);
        assert!(cpu.record_event().unwrap().is_complete());
    }
}
