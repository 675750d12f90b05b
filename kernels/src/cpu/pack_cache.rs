//! The pack cache: prepacked forms of matrix product operands that several products read.
//!
//! A step of several microbatches reads the same weights in each of them, forward and backward. Without the cache each product packs
//! them anew; operands held here are packed once for each view. A buffer is immutable while it is shared, and the cache holds a handle,
//! so a packed form stays valid as long as its operand is held.

use crate::buffer::{Allocator, Buffer};
use crate::dtype::DType;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How a product reads a matrix: k rows of n elements, from some byte of the buffer on. The key of a packed form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OperandView {
    /// Rows and columns.
    pub(crate) extents: [usize; 2],
    /// Row and column stride, in elements.
    pub(crate) strides: [usize; 2],
    /// The dtype of the elements.
    pub(crate) dtype: DType,
    /// The first step of each block that is packed; `None` for blocks of equal size.
    pub(crate) cut: Option<Arc<[usize]>>,
}

/// The cached operands of a back end.
pub(crate) struct PackCache {
    allocator: Allocator,
    /// Whether there is any operand.
    is_in_use: AtomicBool,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// By the address of the first byte. Memories of two buffers do not overlap.
    operands: BTreeMap<usize, Operand>,
    /// Whether memory ran out: nothing more is packed until all operands are gone.
    is_disabled: bool,
}

struct Operand {
    buffer: Buffer,
    /// The number of guards.
    holders: usize,
    forms: Vec<PackedForm>,
}

/// A packed form of an operand.
struct PackedForm {
    /// Bytes of the operand before the first element.
    from: usize,
    view: OperandView,
    packed: Buffer,
}

/// Holds an operand in the cache until dropped.
pub(crate) struct CacheGuard {
    cache: Arc<PackCache>,
    address: usize,
}

impl PackCache {
    /// Creates an empty cache whose packed forms are allocated from `allocator`.
    pub(crate) fn new(allocator: Allocator) -> PackCache {
        PackCache { allocator, is_in_use: AtomicBool::new(false), table: Mutex::default() }
    }

    /// Returns whether any operand is held.
    pub(crate) fn is_in_use(&self) -> bool {
        self.is_in_use.load(Ordering::Relaxed)
    }

    /// Adds a buffer as an operand. Its memory is neither written nor allocated again until the guard is dropped.
    pub(crate) fn hold(self: &Arc<Self>, buffer: &Buffer) -> CacheGuard {
        let address = buffer.as_slice::<u8>().as_ptr().addr();
        let new = || Operand { buffer: buffer.clone(), holders: 0, forms: Vec::new() };
        let mut table = self.table();
        table.operands.entry(address).or_insert_with(new).holders += 1;
        self.is_in_use.store(true, Ordering::Relaxed);
        CacheGuard { cache: self.clone(), address }
    }

    /// Returns the packed form of the operand that contains `memory`, packing it on a miss: `make` fills a new buffer of `bytes` bytes.
    /// `None` if no operand contains `memory`, or there is no memory for the form.
    pub(crate) fn get_or_pack(
        &self,
        memory: &[u8],
        view: &OperandView,
        bytes: usize,
        make: impl FnOnce(&mut Buffer),
    ) -> Option<Buffer> {
        let at = memory.as_ptr().addr();
        let cached = self.table().find(at, |operand, from| {
            operand.forms.iter().find(|form| form.matches(from, view)).map(|form| form.packed.clone())
        });
        if let Some(packed) = cached? {
            return Some(packed);
        }
        if self.table().is_disabled {
            return None;
        }
        let Ok(mut packed) = self.allocator.alloc(bytes) else {
            self.table().is_disabled = true;
            return None;
        };
        make(&mut packed);
        self.table().find(at, |operand, from| {
            operand.forms.push(PackedForm { from, view: view.clone(), packed: packed.clone() });
        })?;
        Some(packed)
    }

    /// Frees all packed forms, because another allocation needs the memory; returns whether there were any. Nothing more is packed until
    /// all operands are gone.
    pub(crate) fn evict_all(&self) -> bool {
        if !self.is_in_use() {
            return false;
        }
        let mut table = self.table();
        table.is_disabled = true;
        let forms: Vec<PackedForm> =
            table.operands.values_mut().flat_map(|operand| operand.forms.drain(..)).collect();
        drop(table);
        !forms.is_empty()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of operands and of packed forms.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> [usize; 2] {
        let table = self.table();
        [table.operands.len(), table.operands.values().map(|operand| operand.forms.len()).sum()]
    }
}

impl Table {
    /// Calls `f` with the operand that contains the byte at an address, and the offset of the byte.
    fn find<T>(&mut self, at: usize, f: impl FnOnce(&mut Operand, usize) -> T) -> Option<T> {
        let (start, operand) = self.operands.range_mut(..=at).next_back()?;
        let from = at - start;
        (from < operand.buffer.bytes()).then(|| f(operand, from))
    }
}

impl PackedForm {
    fn matches(&self, from: usize, view: &OperandView) -> bool {
        self.from == from && self.view == *view
    }
}

impl Drop for CacheGuard {
    fn drop(&mut self) {
        let mut table = self.cache.table();
        let operand =
            table.operands.get_mut(&self.address).expect("bug: an operand is there while it is held");
        operand.holders -= 1;
        if operand.holders > 0 {
            return;
        }
        let gone = table.operands.remove(&self.address);
        if table.operands.is_empty() {
            table.is_disabled = false;
            self.cache.is_in_use.store(false, Ordering::Relaxed);
        }
        drop(table);
        drop(gone);
    }
}

impl fmt::Debug for PackCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackCache({} operands)", self.table().operands.len())
    }
}
