//! Ref-counted memory on one device, and the caching allocator it comes from.
//!
//! A buffer is immutable while it is shared: it can be written by who holds the only handle. Host memory is never
//! uninitialised: new blocks are zeroed by the system, reused blocks hold old values. Memory of a device is an address
//! here; contents come and go by [`Backend::upload`](crate::Backend::upload) and
//! [`Backend::download`](crate::Backend::download).

mod free_list;
mod raw;

use crate::dtype::Element;
use crate::error::{KernelError, MemoryStats};
use crate::spin_lock::SpinLock;
pub(crate) use free_list::FreeList;
pub use raw::ALIGNMENT;
use raw::{Chunk, Class, Raw};
use std::collections::BTreeMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

/// A caching allocator. Small blocks that are freed are kept by size and handed out again; large ones are cut from chunks, where
/// they are joined again.
#[derive(Clone, Default)]
pub struct Allocator(Arc<Owner>);

/// The handle of those who allocate. Blocks hold what is shared, and their cache lies there: it goes with this handle.
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

/// No chunk is smaller, unless there is not so much. A page of it is memory once it was touched.
const CHUNK_MIN: usize = 64 << 20;

/// What goes back to the system, after the release of the lock.
struct Useless {
    block: Arc<Block>,
    _chunks: Vec<Chunk>,
}

/// What an allocator holds and counts: one lock serves both.
#[derive(Default)]
struct State {
    /// By the number of the size class, small blocks whose last handle is here.
    free: Vec<Vec<Arc<Block>>>,
    free_list: FreeList,
    /// By address.
    chunks: BTreeMap<u64, Chunk>,
    stats: MemoryStats,
    /// Nobody allocates any more.
    is_closed: bool,
}

impl State {
    fn count(&mut self, bytes: usize) {
        // On the null back end tensors may add up to more than memory has addresses.
        self.stats.in_use_bytes = self.stats.in_use_bytes.saturating_add(bytes);
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.stats.in_use_bytes);
    }

    fn count_reserved(&mut self, bytes: usize) {
        self.stats.reserved_bytes += bytes;
        self.stats.num_system_allocs += 1;
    }

    /// A small block that was given back, counted as in use.
    fn recycled(&mut self, class: Class) -> Option<Arc<Block>> {
        let block = self.free.get_mut(class.number?)?.pop()?;
        self.count(class.bytes);
        Some(block)
    }

    /// A block of a chunk, counted as in use.
    fn cut(&mut self, class: Class) -> Option<Raw> {
        let address = self.free_list.cut(class.bytes)?;
        self.count(class.bytes);
        Some(self.chunks[&self.free_list.chunk_of(address).0].block(address, class))
    }

    /// Keeps a block, or what it was cut from; gives back what is of no more use: of small blocks nearly always nothing, which
    /// takes one register to say.
    #[must_use]
    fn keep(&mut self, block: Arc<Block>) -> Option<Box<Useless>> {
        let Class { bytes, number } = block.raw().class;
        self.stats.in_use_bytes -= bytes;
        let Some(number) = number else {
            self.free_list.give_back(block.raw().start.addr().get() as u64, bytes);
            let chunks = if self.is_closed { self.take_chunks() } else { Vec::new() };
            return Some(Box::new(Useless { block, _chunks: chunks }));
        };
        if self.is_closed {
            return Some(Box::new(Useless { block, _chunks: Vec::new() }));
        }
        if self.free.len() <= number {
            self.free.resize_with(number + 1, Vec::new);
        }
        self.free[number].push(block);
        None
    }

    /// Takes the chunks of which nobody uses anything.
    fn take_chunks(&mut self) -> Vec<Chunk> {
        let empty = self.free_list.take_empty();
        self.stats.reserved_bytes -= empty.iter().map(|(_, bytes)| bytes).sum::<usize>();
        empty.iter().filter_map(|(address, _)| self.chunks.remove(address)).collect()
    }
}

impl Allocator {
    /// An allocator that refuses to hold more than `limit_bytes` from the system (0: no limit).
    #[must_use]
    pub fn with_limit(limit_bytes: usize) -> Allocator {
        Allocator(Arc::new(Owner(Arc::new(Shared { state: SpinLock::default(), limit_bytes }))))
    }

    /// A block of at least `bytes` bytes. Contents are arbitrary but initialised.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] when the system or the limit refuses, after the cache was emptied.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let shared = &self.0.0;
        let refuse = || KernelError::OutOfMemory { asked_bytes: bytes, stats: self.stats() };
        let class = Class::of(bytes).ok_or_else(refuse)?;
        let block = match shared.state.with(|state| state.recycled(class)) {
            Some(block) => block,
            None => Block::host(shared.fresh(class).ok_or_else(refuse)?, shared.clone()),
        };
        block.bytes.store(bytes, Ordering::Relaxed);
        Ok(Buffer(ManuallyDrop::new(block)))
    }

    /// A buffer that only has a size, which is counted as if it were memory.
    #[must_use]
    pub fn outline(&self, bytes: usize) -> Buffer {
        self.0.0.state.with(|state| state.count(bytes));
        Buffer::of(Memory::Outline { home: Some(self.0.0.clone()) }, bytes)
    }

    /// Gives every cached block back to the system.
    pub fn release_cache(&self) {
        self.0.0.release_cache();
    }

    /// What is in use now.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        self.0.0.state.with(|state| state.stats)
    }
}

impl Shared {
    /// A block that no handle was given of, counted as in use. Nobody waits for the system on the lock.
    fn fresh(&self, class: Class) -> Option<Raw> {
        let of_chunk = Class::of_chunk(class.bytes)?;
        let try_once = || if class.number.is_some() { self.small(class) } else { self.large(of_chunk) };
        let found = try_once().or_else(|| {
            self.release_cache();
            try_once()
        });
        // What there is may all be in chunks.
        found.or_else(|| self.state.with(|state| state.cut(of_chunk)))
    }

    fn fits(&self, bytes: usize) -> bool {
        let reserved = || self.state.with(|state| state.stats.reserved_bytes);
        self.limit_bytes == 0 || reserved().saturating_add(bytes) <= self.limit_bytes
    }

    /// A small block from the system.
    fn small(&self, class: Class) -> Option<Raw> {
        let raw = if self.fits(class.bytes) { Raw::new(class) } else { None };
        raw.inspect(|_| {
            self.state.with(|state| {
                state.count_reserved(class.bytes);
                state.count(class.bytes);
            });
        })
    }

    /// A block of a chunk; of a new one, if need be.
    fn large(&self, class: Class) -> Option<Raw> {
        loop {
            if let Some(raw) = self.state.with(|state| state.cut(class)) {
                return Some(raw);
            }
            // Chunks grow with what there is, so that they stay few: blocks of two are never joined. Under a limit one is all that
            // it leaves; small blocks are cut from it, too, when nothing else is left.
            let reserved = self.state.with(|state| state.stats.reserved_bytes);
            let usual = match self.limit_bytes {
                0 => CHUNK_MIN.max(reserved / 2),
                limit => limit.saturating_sub(reserved),
            };
            let sizes = [usual.max(class.bytes), class.bytes].into_iter().filter(|bytes| self.fits(*bytes));
            let chunk = sizes.filter_map(Chunk::new).next()?;
            // Another thread may take it before this one comes to cut it.
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

/// Takes a block that nobody uses.
fn take_back(home: &SpinLock<State>, block: Arc<Block>) {
    if let Some(useless) = home.with(|state| state.keep(block)) {
        let Useless { block, _chunks } = *useless;
        release(block);
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Allocator").field(&self.stats()).finish()
    }
}

/// What takes memory of a device back.
pub trait DeviceAllocator: fmt::Debug + Send + Sync {
    /// The last handle of the memory at an address is gone. Work that the device has yet to do may still use it.
    fn give_back(&self, address: u64);

    /// Keeps the memory at an address from being used again, once its last handle is gone, until it is let go as often.
    fn keep(&self, _address: u64) {}

    /// The end of one [`DeviceAllocator::keep`].
    fn release(&self, _address: u64) {}
}

/// What is behind a buffer.
enum Memory {
    Host {
        raw: Raw,
        home: Arc<Shared>,
    },
    Device {
        address: u64,
        home: Arc<dyn DeviceAllocator>,
    },
    /// Nothing but a size, and who counts it.
    Outline {
        home: Option<Arc<Shared>>,
    },
}

struct Block {
    memory: Memory,
    /// What was asked for. It changes when the block is handed out again.
    bytes: AtomicUsize,
}

impl Block {
    fn of(memory: Memory) -> Block {
        Block { memory, bytes: AtomicUsize::new(0) }
    }

    fn host(raw: Raw, home: Arc<Shared>) -> Arc<Block> {
        Arc::new(Block::of(Memory::Host { raw, home }))
    }

    /// Of a block in the cache.
    fn raw(&self) -> &Raw {
        match &self.memory {
            Memory::Host { raw, .. } => raw,
            Memory::Device { .. } | Memory::Outline { .. } => unreachable!("only memory of the host is kept"),
        }
    }

    fn take(&mut self) -> Memory {
        std::mem::replace(&mut self.memory, Memory::Outline { home: None })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match self.take() {
            Memory::Host { raw, home } => {
                // Two handles were the last ones at once, and left it to this.
                let shared = home.clone();
                let block = Block::host(raw, home);
                take_back(&shared.state, block);
            }
            Memory::Device { address, home } => home.give_back(address),
            Memory::Outline { home: Some(home) } => {
                let bytes = *self.bytes.get_mut();
                // The sum may have come to its end before ([`State::count`]).
                home.state.with(|state| {
                    state.stats.in_use_bytes = state.stats.in_use_bytes.saturating_sub(bytes);
                });
            }
            Memory::Outline { home: None } => {}
        }
    }
}

// SAFETY: a block is written only by who holds its only handle, mutably (one thread), and read otherwise.
unsafe impl Sync for Block {}

/// A ref-counted run of bytes on one device. Cloning copies the handle, never the bytes.
#[derive(Clone)]
pub struct Buffer(
    /// There are no weak handles of it.
    ManuallyDrop<Arc<Block>>,
);

/// Gives a small block that nobody uses back to the system; a block of a chunk was given back already.
fn release(block: Arc<Block>) {
    if let Some(Memory::Host { raw, home }) = Arc::into_inner(block).map(|mut block| block.take())
        && raw.class.number.is_some()
    {
        home.state.with(|state| state.stats.reserved_bytes -= raw.class.bytes);
    }
}

/// Whether a handle is the only one, and all that others did with theirs is done.
fn is_last(block: &Arc<Block>) -> bool {
    let last = Arc::strong_count(block) == 1;
    fence(Ordering::Acquire);
    last
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: this is the end of the handle, which nothing uses afterwards.
        let block = unsafe { ManuallyDrop::take(&mut self.0) };
        if let Memory::Host { home, .. } = &block.memory
            && is_last(&block)
        {
            let home = Arc::as_ptr(home);
            // SAFETY: the block keeps its home alive until that has it, under its lock; after the release of the lock nothing
            // of the home is used here, unless the block comes back, which still holds it.
            take_back(unsafe { &(*home).state }, block);
        }
    }
}

impl Buffer {
    fn of(memory: Memory, bytes: usize) -> Buffer {
        let block = Block { memory, bytes: AtomicUsize::new(bytes) };
        Buffer(ManuallyDrop::new(Arc::new(block)))
    }

    /// A buffer that only has a size, and is counted nowhere.
    #[must_use]
    pub fn without_memory(bytes: usize) -> Buffer {
        Buffer::of(Memory::Outline { home: None }, bytes)
    }

    /// A buffer of memory that only a device reaches, which `home` gets back.
    #[must_use]
    pub fn on_device(address: u64, bytes: usize, home: Arc<dyn DeviceAllocator>) -> Buffer {
        Buffer::of(Memory::Device { address, home }, bytes)
    }

    /// Where the memory of a device begins; `None` for every other buffer.
    #[must_use]
    pub fn device_address(&self) -> Option<u64> {
        match self.0.memory {
            Memory::Device { address, .. } => Some(address),
            Memory::Host { .. } | Memory::Outline { .. } => None,
        }
    }

    /// Where the memory of a device begins, and who gets it back.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_its_device(&self) -> Option<(u64, &Arc<dyn DeviceAllocator>)> {
        match &self.0.memory {
            Memory::Device { address, home } => Some((*address, home)),
            Memory::Host { .. } | Memory::Outline { .. } => None,
        }
    }

    /// The size that was asked for.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Whether there is memory behind this buffer (not on the null back end).
    #[must_use]
    pub fn has_memory(&self) -> bool {
        !matches!(self.0.memory, Memory::Outline { .. })
    }

    /// Whether this is the only handle.
    #[must_use]
    pub fn is_unique(&mut self) -> bool {
        is_last(&self.0)
    }

    /// Whether two handles name the same memory.
    #[must_use]
    pub fn same_as(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A number that differs between any two live buffers.
    #[must_use]
    pub fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// The contents as elements; empty without memory. A tail shorter than an element is left out.
    ///
    /// # Panics
    /// On memory of a device: kernels for the host are never given any.
    #[must_use]
    pub(crate) fn as_slice<T: Element>(&self) -> &[T] {
        match &self.0.memory {
            // SAFETY: the block is initialised, 64-byte aligned and at least `bytes` long; every bit pattern
            // is a valid `T` (Element is sealed); no `&mut` exists while this shared borrow of a handle does.
            Memory::Host { raw, .. } => unsafe {
                std::slice::from_raw_parts(raw.start.as_ptr().cast::<T>(), self.bytes() / size_of::<T>())
            },
            Memory::Device { .. } => panic!("bug: memory of a device is read as if it were the host's"),
            Memory::Outline { .. } => &[],
        }
    }

    /// The contents for writing; `None` if another handle exists, empty without memory.
    ///
    /// # Panics
    /// On memory of a device.
    pub(crate) fn as_mut<T: Element>(&mut self) -> Option<&mut [T]> {
        if !self.is_unique() {
            return None;
        }
        Some(match &self.0.memory {
            // SAFETY: as in `as_slice`; this is the only handle, and it is borrowed mutably.
            Memory::Host { raw, .. } => unsafe {
                std::slice::from_raw_parts_mut(raw.start.as_ptr().cast::<T>(), self.bytes() / size_of::<T>())
            },
            Memory::Device { .. } => panic!("bug: memory of a device is written as if it were the host's"),
            Memory::Outline { .. } => &mut [],
        })
    }
}

/// The bytes of some elements.
pub(crate) fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: elements have no padding (Element is sealed), and any memory may be read as bytes.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// The bytes of some elements, for writing.
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
