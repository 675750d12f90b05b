//! A back end that computes nothing: it counts what the same program would allocate, move and compute.

use crate::backend::{Backend, Device, Reuse};
use crate::buffer::{Allocator, Buffer};
use crate::cpu::gemm::prepacked_bytes;
use crate::cpu::recurring::Reading;
use crate::error::{KernelError, MemoryStats};
use crate::kernel::{Cost, Kernel, Launch};
use crate::match_float;
use crate::tally::Tally;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Shapes, bytes and costs only. Buffers have a size and no memory.
#[derive(Debug, Default)]
pub struct Null {
    cost: Tally,
    memory: Arc<Memory>,
}

impl Null {
    /// A null back end that has counted nothing yet.
    #[must_use]
    pub fn backend() -> Arc<dyn Backend> {
        Null::with_limit(0)
    }

    /// The same, which counts prepacked operands ([`Backend::reuse`]) only as far as all that is counted stays within a limit (0: no
    /// limit): on the CPU they give way where memory is short. Buffers are given beyond the limit all the same.
    #[must_use]
    pub fn with_limit(limit_bytes: usize) -> Arc<dyn Backend> {
        Arc::new(Null {
            cost: Tally::default(),
            memory: Arc::new(Memory { limit_bytes, ..Memory::default() }),
        })
    }
}

/// What is counted as memory: buffers, and the packed forms of those that recur.
#[derive(Debug, Default)]
struct Memory {
    allocator: Allocator,
    limit_bytes: usize,
    prepacked: Mutex<Prepacked>,
}

/// Operands that recur, by the address of their buffer's handle.
#[derive(Debug, Default)]
struct Prepacked {
    operands: BTreeMap<usize, Operand>,
    /// Whether memory was short: nothing more is kept until all operands are gone.
    is_full: bool,
}

#[derive(Debug)]
struct Operand {
    /// Keeps the address from being used again.
    _buffer: Buffer,
    num_holders: usize,
    /// By the first byte that is read, how it is read.
    forms: Vec<(usize, Reading, Buffer)>,
}

/// An operand recurs while this lives.
struct Hold {
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

    /// Counts the packed form that a product keeps of its right operand, if that recurs.
    fn count_form(&self, launch: &Launch<'_>) {
        let mut prepacked = self.prepacked();
        let (Some(b), Some((from, reading, bytes))) = (launch.inputs.get(1), form(launch)) else { return };
        let Prepacked { operands, is_full } = &mut *prepacked;
        let Some(operand) = operands.get_mut(&b.buffer.address()) else { return };
        if *is_full || operand.forms.iter().any(|form| (form.0, form.1) == (from, reading)) {
            return;
        }
        if self.fits(bytes) {
            operand.forms.push((from, reading, self.allocator.outline(bytes)));
        } else {
            *is_full = true;
        }
    }
}

/// How a product of one matrix reads its right operand, and the bytes of the packed form that it keeps of it.
fn form(launch: &Launch<'_>) -> Option<(usize, Reading, usize)> {
    let ([a, b, ..], c) = (launch.inputs, launch.outputs.first()?) else { return None };
    let ([1, m, k], [1, inner, n]) = (&a.view.shape[..], &b.view.shape[..]) else { return None };
    if inner != k || c.view.shape[..] != [1, *m, *n] || a.dtype != b.dtype {
        return None;
    }
    let strides = [a.view, b.view, c.view].map(|view| [view.strides[1], view.strides[2]]);
    let bytes = match_float!(b.dtype, T => prepacked_bytes::<T>([*m, *n, *k], strides), else None)?;
    let reading = Reading { extents: [*k, *n], strides: strides[1], dtype: b.dtype };
    Some((b.view.offset * b.dtype.size(), reading, bytes))
}

impl Drop for Hold {
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
        Ok(self.memory.allocator.outline(bytes))
    }

    fn reuse(&self, buffer: &Buffer) -> Reuse {
        let address = buffer.address();
        let new = || Operand { _buffer: buffer.clone(), num_holders: 0, forms: Vec::new() };
        self.memory.prepacked().operands.entry(address).or_insert_with(new).num_holders += 1;
        Reuse::new(Hold { memory: self.memory.clone(), address })
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
    use crate::backend::Cpu;
    use crate::dtype::DType;
    use crate::kernel::{Arg, ArgMut};
    use crate::op::contract::CONTRACT;
    use crate::strides::Strides;

    /// The memory in use after a product of 64 rows by a weight that recurs, and while nothing recurs any more.
    fn in_use(backend: &dyn Backend) -> [usize; 2] {
        let [x, weight] = [64 * 100 * 4, 100 * 300 * 4].map(|bytes| backend.alloc(bytes).unwrap());
        let mut y = backend.alloc(64 * 300 * 4).unwrap();
        let [a, b, c] =
            [[64, 100], [100, 300], [64, 300]].map(|[rows, cols]| Strides::contiguous(&[1, rows, cols]));
        let arg = |buffer, view| Arg { buffer, dtype: DType::F32, view };
        let reuse = backend.reuse(&weight);
        for _ in 0..2 {
            let outputs = &mut [ArgMut { buffer: &mut y, dtype: DType::F32, view: &c }];
            let inputs = &[arg(&x, &a), arg(&weight, &b)];
            backend.launch(&CONTRACT, &mut Launch { inputs, outputs, scalars: &[] }).unwrap();
        }
        let with_form = backend.memory().in_use_bytes;
        drop(reuse);
        [with_form, backend.memory().in_use_bytes]
    }

    #[test]
    fn prepacked_operands_are_counted_as_the_cpu_allocates_them() {
        let counted = in_use(&*Null::backend());
        assert_eq!(counted, in_use(&*Cpu::backend(1)));
        assert!(counted[0] > counted[1] + 100 * 300 * 4);
        let limited = in_use(&*Null::with_limit(counted[1]));
        assert_eq!(limited, [counted[1]; 2], "they give way");
    }
}
