//! The null back end: no memory, no arithmetic. It counts what the same program would allocate and compute.

use crate::backend::{Backend, PackCacheGuard};
use crate::buffer::{Allocator, Buffer};
use crate::cost::{Cost, CostCounter};
use crate::cpu::gemm::prepacked_bytes;
use crate::cpu::pack_cache::OperandView;
use crate::device::Device;
use crate::error::{KernelError, MemoryStats};
use crate::kernel::{Kernel, Launch};
use crate::match_float;
use crate::op::leaf_matmul;
use crate::strides::Strides;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A back end that counts bytes and costs only. Its buffers have a size and no memory, as PyTorch's meta tensors.
#[doc(alias = "meta device")]
#[derive(Debug, Default)]
pub struct Null {
    cost: CostCounter,
    memory: Arc<Memory>,
}

impl Null {
    /// Creates a null back end with all counts at zero.
    #[must_use]
    pub fn backend() -> Arc<dyn Backend> {
        Null::with_limit(0)
    }

    /// Creates a null back end that counts prepacked operands ([`Backend::cache_packed`]) only while all counted bytes stay within
    /// `limit_bytes` (0: no limit), because the CPU evicts them when memory is short. Buffers are counted beyond the limit too.
    #[must_use]
    pub fn with_limit(limit_bytes: usize) -> Arc<dyn Backend> {
        Arc::new(Null {
            cost: CostCounter::default(),
            memory: Arc::new(Memory { limit_bytes, ..Memory::default() }),
        })
    }
}

/// The memory counted: buffers, and the packed forms of cached operands.
#[derive(Debug, Default)]
struct Memory {
    allocator: Allocator,
    limit_bytes: usize,
    prepacked: Mutex<Prepacked>,
}

/// Operands with a pack-cache guard, by the address of their buffer's handle.
#[derive(Debug, Default)]
struct Prepacked {
    operands: BTreeMap<usize, Operand>,
    /// Whether memory was short: no form is counted any more until all operands are gone.
    is_full: bool,
}

#[derive(Debug)]
struct Operand {
    /// Keeps the address from being used again.
    _buffer: Buffer,
    num_holders: usize,
    /// Packed forms: the offset of the first byte read, the view, and the bytes counted.
    forms: Vec<(usize, OperandView, Buffer)>,
}

/// Keeps an operand cached while this guard lives.
struct CacheGuard {
    memory: Arc<Memory>,
    address: usize,
}

impl Memory {
    fn prepacked(&self) -> MutexGuard<'_, Prepacked> {
        self.prepacked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fits(&self, bytes: usize) -> bool {
        self.limit_bytes == 0 || self.allocator.stats().in_use_bytes.saturating_add(bytes) <= self.limit_bytes
    }

    /// Counts the packed form of a product's right operand, if that operand is cached.
    fn count_form(&self, launch: &Launch<'_>) {
        let mut prepacked = self.prepacked();
        let (Some(b), Some((from, view, bytes))) = (launch.inputs.get(1), form(launch)) else { return };
        let Prepacked { operands, is_full } = &mut *prepacked;
        let Some(operand) = operands.get_mut(&b.buffer.address()) else { return };
        if *is_full || operand.forms.iter().any(|form| (form.0, &form.1) == (from, &view)) {
            return;
        }
        if self.fits(bytes) {
            operand.forms.push((from, view, self.allocator.alloc_meta(bytes)));
        } else {
            *is_full = true;
        }
    }
}

/// Returns the offset and the view with which a product of one matrix reads its right operand, and the bytes of its packed form.
fn form(launch: &Launch<'_>) -> Option<(usize, OperandView, usize)> {
    let ([a, b, ..], c) = (launch.inputs, launch.outputs.first()?) else { return None };
    // A product over leaves has two summed dims.
    let ([.., k], [.., inner, n], 3 | 4) = (&a.view.shape[..], &b.view.shape[..], a.view.ndim()) else {
        return None;
    };
    let m = a.view.shape[1];
    let is_one_matrix = a.view.numel() == m * k && b.view.numel() == k * n && a.view.ndim() == b.view.ndim();
    if inner != k || !is_one_matrix || c.view.shape[..] != [1, m, *n] || a.dtype != b.dtype {
        return None;
    }
    let last_two = |view: &Strides| [view.strides[view.ndim() - 2], view.strides[view.ndim() - 1]];
    let strides = [[a.view.strides[1], last_two(a.view)[1]], last_two(b.view), last_two(c.view)];
    let bytes = match_float!(b.dtype, T => prepacked_bytes::<T>([m, *n, *k], strides), else None)?;
    let cut = if a.view.ndim() == 4 { leaf_matmul::packed_cut(launch) } else { None };
    let view = OperandView { extents: [*k, *n], strides: strides[1], dtype: b.dtype, cut };
    Some((b.view.offset * b.dtype.size(), view, bytes))
}

impl Drop for CacheGuard {
    fn drop(&mut self) {
        let mut prepacked = self.memory.prepacked();
        let Some(operand) = prepacked.operands.get_mut(&self.address) else { return };
        operand.num_holders -= 1;
        if operand.num_holders > 0 {
            return;
        }
        let gone = prepacked.operands.remove(&self.address);
        prepacked.is_full &= !prepacked.operands.is_empty();
        drop(prepacked);
        drop(gone);
    }
}

impl Backend for Null {
    fn device(&self) -> Device {
        Device::Null
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        if !self.memory.fits(bytes) {
            let mut prepacked = self.memory.prepacked();
            if !prepacked.operands.is_empty() {
                prepacked.is_full = true;
                prepacked.operands.values_mut().for_each(|operand| operand.forms.clear());
            }
        }
        Ok(self.memory.allocator.alloc_meta(bytes))
    }

    fn cache_packed(&self, buffer: &Buffer) -> PackCacheGuard {
        let address = buffer.address();
        let new = || Operand { _buffer: buffer.clone(), num_holders: 0, forms: Vec::new() };
        self.memory.prepacked().operands.entry(address).or_insert_with(new).num_holders += 1;
        PackCacheGuard::new(CacheGuard { memory: self.memory.clone(), address })
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        self.cost.add(kernel.cost(launch));
        self.memory.count_form(launch);
        Ok(())
    }

    fn memory(&self) -> MemoryStats {
        self.memory.allocator.stats()
    }

    fn cost(&self) -> Cost {
        self.cost.sum()
    }

    fn num_threads(&self) -> usize {
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_backend::Cpu;
    use crate::dtype::DType;
    use crate::kernel::{Arg, ArgMut, Scalar};
    use crate::op::batched_matmul::BATCHED_MATMUL;
    use crate::op::leaf_matmul::LEAF_MATMUL;
    use crate::sum_tree::SumTree;

    /// Returns the memory in use after two products of 64 rows by a cached weight, and after the guard is dropped.
    fn in_use(backend: &dyn Backend) -> [usize; 2] {
        let [x, weight] = [64 * 100 * 4, 100 * 300 * 4].map(|bytes| backend.alloc(bytes).unwrap());
        let mut y = backend.alloc(64 * 300 * 4).unwrap();
        let [a, b, c] =
            [[64, 100], [100, 300], [64, 300]].map(|[rows, cols]| Strides::contiguous(&[1, rows, cols]));
        let arg = |buffer, view| Arg { buffer, dtype: DType::F32, view };
        let guard = backend.cache_packed(&weight);
        for _ in 0..2 {
            let outputs = &mut [ArgMut { buffer: &mut y, dtype: DType::F32, view: &c }];
            let inputs = &[arg(&x, &a), arg(&weight, &b)];
            backend.launch(&BATCHED_MATMUL, &mut Launch { inputs, outputs, scalars: &[] }).unwrap();
        }
        let with_form = backend.memory().in_use_bytes;
        drop(guard);
        [with_form, backend.memory().in_use_bytes]
    }

    #[test]
    fn prepacked_operands_are_counted_as_the_cpu_allocates_them() {
        let counted = in_use(&*Null::backend());
        assert_eq!(counted, in_use(&*Cpu::backend(1)));
        assert!(counted[0] > counted[1] + 100 * 300 * 4);
        let limited = in_use(&*Null::with_limit(counted[1]));
        assert_eq!(limited, [counted[1]; 2], "evicted: the limit leaves no room");
    }

    /// Returns the memory in use after products of 64 rows by a cached weight over these numbers of leaves of 300 steps.
    fn in_use_by_leaves(backend: &dyn Backend, numbers: &[usize]) -> usize {
        let [x, weight] = [64 * 300 * 4, 300 * 100 * 4].map(|bytes| backend.alloc(bytes).unwrap());
        let mut y = backend.alloc(64 * 100 * 4).unwrap();
        let [a, b, c] = [&[1, 64, 1, 300][..], &[1, 1, 300, 100], &[1, 64, 100]].map(Strides::contiguous);
        let arg = |buffer, view| Arg { buffer, dtype: DType::F32, view };
        let _guard = backend.cache_packed(&weight);
        for &num_leaves in numbers {
            let borders = (0..=num_leaves).map(|leaf| SumTree::new(num_leaves).leaf_range(300, leaf).start);
            let scalars: Vec<Scalar> =
                [num_leaves, 0].into_iter().chain(borders).map(|n| Scalar::Int(n as i64)).collect();
            let outputs = &mut [ArgMut { buffer: &mut y, dtype: DType::F32, view: &c }];
            let inputs = &[arg(&x, &a), arg(&weight, &b)];
            backend.launch(&LEAF_MATMUL, &mut Launch { inputs, outputs, scalars: &scalars }).unwrap();
        }
        backend.memory().in_use_bytes
    }

    #[test]
    fn packed_forms_of_other_leaves_are_counted_as_the_cpu_allocates_them() {
        let counted = |numbers: &[usize]| in_use_by_leaves(&*Null::backend(), numbers);
        for numbers in [&[8][..], &[8, 8], &[8, 3]] {
            assert_eq!(counted(numbers), in_use_by_leaves(&*Cpu::backend(1), numbers), "{numbers:?} leaves");
        }
        assert!(counted(&[8, 3]) >= counted(&[8, 8]) + 300 * 100 * 4, "leaves that cut blocks otherwise");
    }
}
