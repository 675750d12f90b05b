//! Ref-counted device memory, and the caching allocator that it comes from.
//!
//! A buffer is immutable while it is shared: only the holder of its single handle can write it. Host memory is never uninitialised: the
//! system zeroes new blocks, reused blocks hold old values. Device memory is only an address here; contents are copied by
//! [`Backend::upload`](crate::Backend::upload) and [`Backend::download`](crate::Backend::download).

mod free_list;
mod raw;
mod zeroed_vec;

use crate::dtype::Element;
use crate::error::{KernelError, MemoryStats};
use crate::spin_lock::SpinLock;
pub(crate) use free_list::FreeList;
pub use raw::ALIGNMENT;
pub(crate) use raw::has_margin;
use raw::{Chunk, Class, Raw};
use std::collections::BTreeMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
pub(crate) use zeroed_vec::zeroed_vec;

/// A caching allocator of host memory. Freed small blocks are cached by size class and reused; large blocks are cut from chunks, where
/// neighbouring free blocks are merged.
#[derive(Clone, Default)]
pub struct Allocator(Arc<Owner>);

/// The handle of an allocator's users. Blocks hold [`Shared`], which contains their cache: dropping this handle empties the cache.
#[derive(Default)]
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.state.with(|state| state.is_closed = true);
        self.0.release_cache();
    }
}

#[derive(Default)]
struct Shared {
    state: SpinLock<State>,
    limit_bytes: usize,
}

/// The smallest chunk, unless the limit leaves less. Its pages are backed by memory once they are touched.
const CHUNK_MIN: usize = 64 << 20;

/// Bytes of small blocks between two checks of the system's free-memory margin.
const CHECK_BYTES: usize = 1 << 20;

/// Returns the bytes of the block that holds `bytes` bytes; `bytes` itself if no size class is that large.
fn block_bytes(bytes: usize) -> usize {
    Class::of(bytes).map_or(bytes, |class| class.bytes)
}

/// Memory to return to the system, after the lock is released.
struct MemoryToFree {
    block: Arc<Block>,
    _chunks: Vec<Chunk>,
}

/// The caches and statistics of an allocator, behind one lock.
#[derive(Default)]
struct State {
    /// Free small blocks, by the number of their size class.
    free: Vec<Vec<Arc<Block>>>,
    free_list: FreeList,
    /// Chunks by address.
    chunks: BTreeMap<u64, Chunk>,
    stats: MemoryStats,
    /// Whether the allocator has been dropped.
    is_closed: bool,
    /// Bytes of small blocks taken from the system since the last check of its margin.
    unchecked_bytes: usize,
}

impl State {
    fn count(&mut self, bytes: usize) {
        // On the null back end the sum may exceed usize.
        self.stats.in_use_bytes = self.stats.in_use_bytes.saturating_add(bytes);
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.stats.in_use_bytes);
    }

    fn count_reserved(&mut self, bytes: usize) {
        self.stats.reserved_bytes += bytes;
        self.stats.num_system_allocs += 1;
    }

    /// Takes a cached small block, counted as in use.
    fn recycled(&mut self, class: Class) -> Option<Arc<Block>> {
        let block = self.free.get_mut(class.number?)?.pop()?;
        self.count(class.bytes);
        Some(block)
    }

    /// Cuts a block from a chunk, counted as in use.
    fn cut(&mut self, class: Class) -> Option<Raw> {
        let address = self.free_list.cut(class.bytes)?;
        self.count(class.bytes);
        Some(self.chunks[&self.free_list.chunk_of(address).0].block(address, class))
    }

    /// Caches a small block, or returns a large one to its chunk. Returns memory for the system, if any; boxed, so that the usual `None`
    /// takes one register.
    #[must_use]
    fn keep(&mut self, block: Arc<Block>) -> Option<Box<MemoryToFree>> {
        let Class { bytes, number } = block.raw().class;
        self.stats.in_use_bytes -= bytes;
        let Some(number) = number else {
            self.free_list.give_back(block.raw().start.addr().get() as u64, bytes);
            let chunks = if self.is_closed { self.take_chunks() } else { Vec::new() };
            return Some(Box::new(MemoryToFree { block, _chunks: chunks }));
        };
        if self.is_closed {
            return Some(Box::new(MemoryToFree { block, _chunks: Vec::new() }));
        }
        if self.free.len() <= number {
            self.free.resize_with(number + 1, Vec::new);
        }
        self.free[number].push(block);
        None
    }

    /// Takes the chunks of which nothing is in use.
    fn take_chunks(&mut self) -> Vec<Chunk> {
        let empty = self.free_list.take_empty();
        self.stats.reserved_bytes -= empty.iter().map(|(_, bytes)| bytes).sum::<usize>();
        empty.iter().filter_map(|(address, _)| self.chunks.remove(address)).collect()
    }
}

impl Allocator {
    /// Creates an allocator that takes at most `limit_bytes` from the system (0: no limit).
    #[must_use]
    pub fn with_limit(limit_bytes: usize) -> Allocator {
        Allocator(Arc::new(Owner(Arc::new(Shared { state: SpinLock::default(), limit_bytes }))))
    }

    /// Allocates at least `bytes` bytes. Contents are arbitrary but initialised.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] if the system or the limit refuses, after the cache was emptied.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let shared = &self.0.0;
        let refuse = || KernelError::OutOfMemory { requested_bytes: bytes, stats: self.stats() };
        let class = Class::of(bytes).ok_or_else(refuse)?;
        let block = match shared.state.with(|state| state.recycled(class)) {
            Some(block) => block,
            None => Block::host(shared.fresh(class).ok_or_else(refuse)?, shared.clone()),
        };
        block.bytes.store(bytes, Ordering::Relaxed);
        Ok(Buffer(ManuallyDrop::new(block)))
    }

    /// Allocates a meta buffer: a size without memory, counted as the block that it would get (PyTorch: a meta tensor).
    #[must_use]
    pub fn alloc_meta(&self, bytes: usize) -> Buffer {
        self.0.0.state.with(|state| state.count(block_bytes(bytes)));
        Buffer::of(Memory::Meta { home: Some(self.0.0.clone()) }, bytes)
    }

    /// Returns the bytes that the limit leaves to allocate; `None` without a limit.
    #[must_use]
    pub fn bytes_below_limit(&self) -> Option<usize> {
        let limit_bytes = self.0.0.limit_bytes;
        (limit_bytes != 0).then(|| limit_bytes.saturating_sub(self.stats().in_use_bytes))
    }

    /// Returns every cached block to the system.
    pub fn release_cache(&self) {
        self.0.0.release_cache();
    }

    /// Returns the statistics.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        self.0.0.state.with(|state| state.stats)
    }
}

impl Shared {
    /// Allocates a new block, counted as in use. Calls into the system are made without the lock.
    fn fresh(&self, class: Class) -> Option<Raw> {
        let of_chunk = Class::of_chunk(class.bytes)?;
        let try_once = || if class.number.is_some() { self.small(class) } else { self.large(of_chunk) };
        let found = try_once().or_else(|| {
            self.release_cache();
            try_once()
        });
        // All free memory may be in chunks.
        found.or_else(|| self.state.with(|state| state.cut(of_chunk)))
    }

    fn fits(&self, bytes: usize) -> bool {
        let reserved = || self.state.with(|state| state.stats.reserved_bytes);
        self.limit_bytes == 0 || reserved().saturating_add(bytes) <= self.limit_bytes
    }

    /// Allocates a small block from the system.
    fn small(&self, class: Class) -> Option<Raw> {
        let raw = if self.fits(class.bytes) { Raw::new(class)? } else { return None };
        let is_due = self.state.with(|state| {
            state.unchecked_bytes += class.bytes;
            state.unchecked_bytes >= CHECK_BYTES
        });
        if is_due && !has_margin() {
            return None;
        }
        self.state.with(|state| {
            if is_due {
                state.unchecked_bytes = 0;
            }
            state.count_reserved(class.bytes);
            state.count(class.bytes);
        });
        Some(raw)
    }

    /// Cuts a block from a chunk, adding a chunk if necessary.
    fn large(&self, class: Class) -> Option<Raw> {
        loop {
            if let Some(raw) = self.state.with(|state| state.cut(class)) {
                return Some(raw);
            }
            // Chunks grow with the memory in use, so that they stay few: blocks of two chunks are never merged. Under a limit one chunk
            // takes all that is left; small blocks are cut from it, too, when nothing else is left.
            let reserved = self.state.with(|state| state.stats.reserved_bytes);
            let usual = match self.limit_bytes {
                0 => CHUNK_MIN.max(reserved / 2),
                limit => limit.saturating_sub(reserved),
            };
            let sizes = [usual.max(class.bytes), class.bytes].into_iter().filter(|bytes| self.fits(*bytes));
            // The chunk is held during the check, so that the margin excludes it.
            let chunk = sizes.filter_map(Chunk::new).find(|_chunk| has_margin())?;
            // Another thread may cut this chunk before this thread does; then loop.
            self.state.with(|state| {
                state.count_reserved(chunk.bytes());
                state.free_list.add_chunk(chunk.address(), chunk.bytes());
                state.chunks.insert(chunk.address(), chunk);
            });
        }
    }

    fn release_cache(&self) {
        let (blocks, chunks) = self.state.with(|state| {
            (state.free.iter_mut().flat_map(std::mem::take).collect::<Vec<_>>(), state.take_chunks())
        });
        blocks.into_iter().for_each(release);
        drop(chunks);
    }
}

/// Returns a block without handles to the cache.
fn take_back(home: &SpinLock<State>, block: Arc<Block>) {
    if let Some(to_free) = home.with(|state| state.keep(block)) {
        let MemoryToFree { block, _chunks } = *to_free;
        release(block);
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Allocator").field(&self.stats()).finish()
    }
}

/// The allocator of device memory, to which buffers return their memory.
pub trait DeviceAllocator: fmt::Debug + Send + Sync {
    /// Frees the memory at an address, after its last handle was dropped. Submitted work of the device may still use it.
    fn give_back(&self, address: u64);

    /// Prevents the memory at an address from being reused after its last handle is dropped, until [`DeviceAllocator::release`] is called
    /// as often.
    fn retain(&self, _address: u64) {}

    /// Ends one [`DeviceAllocator::retain`].
    fn release(&self, _address: u64) {}
}

/// The memory behind a buffer.
enum Memory {
    Host {
        raw: Raw,
        home: Arc<Shared>,
    },
    Device {
        address: u64,
        home: Arc<dyn DeviceAllocator>,
    },
    /// A meta buffer: a size without memory, and the allocator that counts it.
    Meta {
        home: Option<Arc<Shared>>,
    },
}

struct Block {
    memory: Memory,
    /// The requested size. It changes when the block is reused.
    bytes: AtomicUsize,
}

impl Block {
    fn of(memory: Memory) -> Block {
        Block { memory, bytes: AtomicUsize::new(0) }
    }

    fn host(raw: Raw, home: Arc<Shared>) -> Arc<Block> {
        Arc::new(Block::of(Memory::Host { raw, home }))
    }

    /// The memory of a cached block.
    fn raw(&self) -> &Raw {
        match &self.memory {
            Memory::Host { raw, .. } => raw,
            Memory::Device { .. } | Memory::Meta { .. } => unreachable!("only host memory is cached"),
        }
    }

    fn take(&mut self) -> Memory {
        std::mem::replace(&mut self.memory, Memory::Meta { home: None })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match self.take() {
            Memory::Host { raw, home } => {
                // Two threads dropped the last two handles at once, and neither saw itself as the last.
                let shared = home.clone();
                let block = Block::host(raw, home);
                take_back(&shared.state, block);
            }
            Memory::Device { address, home } => home.give_back(address),
            Memory::Meta { home: Some(home) } => {
                let bytes = block_bytes(*self.bytes.get_mut());
                // The sum may have saturated ([`State::count`]).
                let less = |in_use: usize| in_use.saturating_sub(bytes);
                home.state.with(|state| state.stats.in_use_bytes = less(state.stats.in_use_bytes));
            }
            Memory::Meta { home: None } => {}
        }
    }
}

// SAFETY: a block is written only through its single handle, borrowed mutably (one thread), and read otherwise.
unsafe impl Sync for Block {}

/// A ref-counted run of bytes on one device. Cloning copies the handle, never the bytes.
#[derive(Clone)]
pub struct Buffer(
    /// Has no weak handles.
    ManuallyDrop<Arc<Block>>,
);

/// Returns a small block to the system; a block of a chunk was returned to its chunk already.
fn release(block: Arc<Block>) {
    if let Some(Memory::Host { raw, home }) = Arc::into_inner(block).map(|mut block| block.take())
        && raw.class.number.is_some()
    {
        home.state.with(|state| state.stats.reserved_bytes -= raw.class.bytes);
    }
}

/// Returns whether a handle is the only one; accesses through dropped handles happen before.
fn is_last(block: &Arc<Block>) -> bool {
    let last = Arc::strong_count(block) == 1;
    fence(Ordering::Acquire);
    last
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the handle is being dropped; nothing uses it afterwards.
        let block = unsafe { ManuallyDrop::take(&mut self.0) };
        if let Memory::Host { home, .. } = &block.memory
            && is_last(&block)
        {
            let home = Arc::as_ptr(home);
            // SAFETY: the block keeps `home` alive until `home` has the block, under its lock; after the lock is released, `home` is not
            // used here, unless the block comes back, which still holds it.
            take_back(unsafe { &(*home).state }, block);
        }
    }
}

impl Buffer {
    fn of(memory: Memory, bytes: usize) -> Buffer {
        let block = Block { memory, bytes: AtomicUsize::new(bytes) };
        Buffer(ManuallyDrop::new(Arc::new(block)))
    }

    /// Creates a meta buffer that no allocator counts: a size without memory.
    #[must_use]
    pub fn without_memory(bytes: usize) -> Buffer {
        Buffer::of(Memory::Meta { home: None }, bytes)
    }

    /// Wraps device memory, which is returned to `home`.
    #[must_use]
    pub fn on_device(address: u64, bytes: usize, home: Arc<dyn DeviceAllocator>) -> Buffer {
        Buffer::of(Memory::Device { address, home }, bytes)
    }

    /// Returns the device address; `None` for every other buffer.
    #[must_use]
    pub fn device_address(&self) -> Option<u64> {
        match self.0.memory {
            Memory::Device { address, .. } => Some(address),
            Memory::Host { .. } | Memory::Meta { .. } => None,
        }
    }

    /// Returns the device address and the allocator of the memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_allocation(&self) -> Option<(u64, &Arc<dyn DeviceAllocator>)> {
        match &self.0.memory {
            Memory::Device { address, home } => Some((*address, home)),
            Memory::Host { .. } | Memory::Meta { .. } => None,
        }
    }

    /// Returns the requested size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Returns whether there is memory behind this buffer (not on the null back end).
    #[must_use]
    pub fn has_memory(&self) -> bool {
        !matches!(self.0.memory, Memory::Meta { .. })
    }

    /// Returns whether this is the only handle.
    #[must_use]
    pub fn is_unique(&mut self) -> bool {
        is_last(&self.0)
    }

    /// Returns whether two handles share the same memory.
    #[must_use]
    pub fn same_as(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns a number that differs between any two live buffers.
    #[must_use]
    pub fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Returns the contents as elements; empty without memory. A tail shorter than an element is omitted.
    ///
    /// # Panics
    /// On device memory: CPU kernels never get any.
    #[must_use]
    pub(crate) fn as_slice<T: Element>(&self) -> &[T] {
        match &self.0.memory {
            // SAFETY: the block is initialised, 64-byte aligned and at least `bytes` long; every bit pattern
            // is a valid `T` (Element is sealed); no `&mut` exists while this shared borrow of a handle does.
            Memory::Host { raw, .. } => unsafe {
                std::slice::from_raw_parts(raw.start.as_ptr().cast::<T>(), self.bytes() / size_of::<T>())
            },
            Memory::Device { .. } => panic!("bug: device memory is read as host memory"),
            Memory::Meta { .. } => &[],
        }
    }

    /// Returns the contents for writing; `None` if another handle exists, empty without memory.
    ///
    /// # Panics
    /// On device memory.
    pub(crate) fn as_mut<T: Element>(&mut self) -> Option<&mut [T]> {
        if !self.is_unique() {
            return None;
        }
        Some(match &self.0.memory {
            // SAFETY: as in `as_slice`; this is the only handle, and it is borrowed mutably.
            Memory::Host { raw, .. } => unsafe {
                std::slice::from_raw_parts_mut(raw.start.as_ptr().cast::<T>(), self.bytes() / size_of::<T>())
            },
            Memory::Device { .. } => panic!("bug: device memory is written as host memory"),
            Memory::Meta { .. } => &mut [],
        })
    }
}

/// Returns the bytes of a slice of elements.
pub(crate) fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: elements have no padding (Element is sealed), and any memory may be read as bytes.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// Returns the bytes of a slice of elements, for writing.
pub(crate) fn bytes_of_mut<T: Element>(data: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`; every bit pattern is a valid element.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(data)) }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes())
    }
}

#[cfg(test)]
mod tests;
