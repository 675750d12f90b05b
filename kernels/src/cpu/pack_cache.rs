//! Operands that products meet again, and the forms in which they keep them for the next time.
//!
//! A step of several microbatches reads the same weights in each of them, forward and backward. Each product would pack them anew;
//! those that are held here are packed once for each way in which they are read. A buffer is immutable while it is shared, and the
//! table holds a handle: what was packed is what lies there, as long as it is held.

use crate::buffer::{Allocator, Buffer};
use crate::dtype::DType;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How a product reads a matrix: k rows of n elements, from some byte of the buffer on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OperandView {
    /// Rows and columns.
    pub(crate) extents: [usize; 2],
    /// Distances of both, in elements.
    pub(crate) strides: [usize; 2],
    /// What the elements are.
    pub(crate) dtype: DType,
}

/// The operands that recur on a back end.
pub(crate) struct PackCache {
    allocator: Allocator,
    /// Whether there is one.
    is_in_use: AtomicBool,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// By the address of the first byte. Memories of two buffers do not overlap.
    operands: BTreeMap<usize, Operand>,
    /// Whether memory was short: nothing more is packed until all operands are gone.
    is_full: bool,
}

struct Operand {
    buffer: Buffer,
    /// How many hold it.
    holders: usize,
    forms: Vec<PackedForm>,
}

/// What a product keeps of an operand.
struct PackedForm {
    /// Bytes of the operand before the first element.
    from: usize,
    view: OperandView,
    packed: Buffer,
}

/// An operand recurs while this lives.
pub(crate) struct CacheGuard {
    home: Arc<PackCache>,
    address: usize,
}

impl PackCache {
    /// Nothing recurs yet; what products keep is memory of an allocator.
    pub(crate) fn new(allocator: Allocator) -> PackCache {
        PackCache { allocator, is_in_use: AtomicBool::new(false), table: Mutex::default() }
    }

    /// Whether any operand recurs.
    pub(crate) fn is_in_use(&self) -> bool {
        self.is_in_use.load(Ordering::Relaxed)
    }

    /// Holds a buffer, whose memory nobody writes or takes until the hold is dropped.
    pub(crate) fn hold(self: &Arc<Self>, buffer: &Buffer) -> CacheGuard {
        let address = buffer.as_slice::<u8>().as_ptr().addr();
        let new = || Operand { buffer: buffer.clone(), holders: 0, forms: Vec::new() };
        let mut table = self.table();
        table.operands.entry(address).or_insert_with(new).holders += 1;
        self.is_in_use.store(true, Ordering::Relaxed);
        CacheGuard { home: self.clone(), address }
    }

    /// What was packed of the operand that holds this memory, or is packed from now on: so many bytes, which `make` fills. `None` if no
    /// operand holds it, or there is no memory.
    pub(crate) fn get_or_pack(
        &self,
        memory: &[u8],
        view: OperandView,
        bytes: usize,
        make: impl FnOnce(&mut Buffer),
    ) -> Option<Buffer> {
        let at = memory.as_ptr().addr();
        let known = self.table().find(at, |operand, from| {
            operand
                .forms
                .iter()
                .find(|get_or_pack| get_or_pack.fits(from, view))
                .map(|get_or_pack| get_or_pack.packed.clone())
        });
        if let Some(packed) = known? {
            return Some(packed);
        }
        if self.table().is_full {
            return None;
        }
        let Ok(mut packed) = self.allocator.alloc(bytes) else {
            self.table().is_full = true;
            return None;
        };
        make(&mut packed);
        self.table().find(at, |operand, from| {
            operand.forms.push(PackedForm { from, view, packed: packed.clone() });
        })?;
        Some(packed)
    }

    /// Gives the memory of all that is packed back, for somebody who needs it more; whether there was any. Nothing more is packed until
    /// all operands are gone.
    pub(crate) fn evict_all(&self) -> bool {
        if !self.is_in_use() {
            return false;
        }
        let mut table = self.table();
        table.is_full = true;
        let forms: Vec<PackedForm> =
            table.operands.values_mut().flat_map(|operand| operand.forms.drain(..)).collect();
        drop(table);
        !forms.is_empty()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operands that recur, and the forms that are packed of them.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> [usize; 2] {
        let table = self.table();
        [table.operands.len(), table.operands.values().map(|operand| operand.forms.len()).sum()]
    }
}

impl Table {
    /// The operand that holds the byte at an address, and where in it that is.
    fn find<T>(&mut self, at: usize, f: impl FnOnce(&mut Operand, usize) -> T) -> Option<T> {
        let (start, operand) = self.operands.range_mut(..=at).next_back()?;
        let from = at - start;
        (from < operand.buffer.bytes()).then(|| f(operand, from))
    }
}

impl PackedForm {
    fn fits(&self, from: usize, view: OperandView) -> bool {
        (self.from, self.view) == (from, view)
    }
}

impl Drop for CacheGuard {
    fn drop(&mut self) {
        let mut table = self.home.table();
        let operand =
            table.operands.get_mut(&self.address).expect("bug: an operand is there while it is held");
        operand.holders -= 1;
        if operand.holders > 0 {
            return;
        }
        let gone = table.operands.remove(&self.address);
        if table.operands.is_empty() {
            table.is_full = false;
            self.home.is_in_use.store(false, Ordering::Relaxed);
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
