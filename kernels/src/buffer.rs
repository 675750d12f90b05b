//! Ref-counted memory on one device, and the caching allocator it comes from.
//!
//! A buffer is immutable while it is shared: it can be written by who holds the only handle. Host memory is never
//! uninitialised: new blocks are zeroed by the system, reused blocks hold old values. Memory of a device is an address
//! here; contents come and go by [`Backend::upload`](crate::Backend::upload) and
//! [`Backend::download`](crate::Backend::download).

mod raw;

use crate::dtype::Element;
use crate::error::{KernelError, MemoryStats};
use crate::latch::Latch;
pub use raw::ALIGNMENT;
use raw::{Class, Raw};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

/// A caching allocator: freed blocks are kept by size class and handed out again.
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
    state: Latch<State>,
    limit_bytes: usize,
}

/// What an allocator holds and counts: one latch serves both.
#[derive(Default)]
struct State {
    /// By the number of the size class, blocks whose last handle is here.
    free: Vec<Vec<Arc<Block>>>,
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

    /// A block that was given back, counted as in use.
    fn recycled(&mut self, class: Class) -> Option<Arc<Block>> {
        let block = self.free.get_mut(class.number)?.pop()?;
        self.count(class.bytes);
        Some(block)
    }

    /// Keeps a block, unless there is nobody who could ask for it.
    fn keep(&mut self, class: Class, block: Arc<Block>) -> Option<Arc<Block>> {
        self.stats.in_use_bytes -= class.bytes;
        if self.is_closed {
            return Some(block);
        }
        if self.free.len() <= class.number {
            self.free.resize_with(class.number + 1, Vec::new);
        }
        self.free[class.number].push(block);
        None
    }
}

impl Allocator {
    /// An allocator that refuses to hold more than `limit_bytes` from the system (0: no limit).
    #[must_use]
    pub fn with_limit(limit_bytes: usize) -> Allocator {
        Allocator(Arc::new(Owner(Arc::new(Shared { state: Latch::default(), limit_bytes }))))
    }

    /// A block of at least `bytes` bytes. Contents are arbitrary but initialised.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] when the system or the limit refuses, after the cache was emptied.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let shared = &self.0.0;
        let refuse = || KernelError::OutOfMemory { asked_bytes: bytes, stats: self.stats() };
        let class = Class::of(bytes).ok_or_else(refuse)?;
        let recycled = shared.state.with(|state| state.recycled(class));
        let block = match recycled {
            Some(block) => block,
            None => {
                let raw = shared.fresh(class).ok_or_else(refuse)?;
                Arc::new(Block::of(Memory::Host { raw, home: shared.clone() }))
            }
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
    /// A block from the system, counted as in use. Nobody waits for it on the latch.
    fn fresh(&self, class: Class) -> Option<Raw> {
        let limit = self.limit_bytes;
        let reserved = || self.state.with(|state| state.stats.reserved_bytes);
        let fits = || limit == 0 || reserved().saturating_add(class.bytes) <= limit;
        let mut raw = if fits() { Raw::new(class) } else { None };
        if raw.is_none() {
            self.release_cache();
            raw = if fits() { Raw::new(class) } else { None };
        }
        raw.inspect(|_| {
            self.state.with(|state| {
                state.stats.reserved_bytes += class.bytes;
                state.stats.num_system_allocs += 1;
                state.count(class.bytes);
            });
        })
    }

    fn release_cache(&self) {
        let blocks = self.state.with(|state| std::mem::take(&mut state.free));
        blocks.into_iter().flatten().for_each(release);
    }

    /// Takes a block that nobody uses; gives it back if nobody will ask for it.
    #[must_use]
    fn take_back(&self, class: Class, block: Arc<Block>) -> Option<Arc<Block>> {
        self.state.with(|state| state.keep(class, block))
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Allocator").field(&self.stats()).finish()
    }
}

/// What takes memory of a device back.
pub trait Keeper: fmt::Debug + Send + Sync {
    /// The last handle of the memory at an address is gone. Work that the device has yet to do may still use it.
    fn give_back(&self, address: u64);
}

/// What is behind a buffer.
enum Memory {
    Host {
        raw: Raw,
        home: Arc<Shared>,
    },
    Device {
        address: u64,
        home: Arc<dyn Keeper>,
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

    fn take(&mut self) -> Memory {
        std::mem::replace(&mut self.memory, Memory::Outline { home: None })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match self.take() {
            Memory::Host { raw, home } => {
                // Two handles were the last ones at once, and left it to this.
                let (class, shared) = (raw.class, home.clone());
                let block = Arc::new(Block::of(Memory::Host { raw, home }));
                shared.take_back(class, block).into_iter().for_each(release);
            }
            Memory::Device { address, home } => home.give_back(address),
            Memory::Outline { home: Some(home) } => {
                let bytes = *self.bytes.get_mut();
                home.state.with(|state| state.stats.in_use_bytes -= bytes);
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

/// Gives a block that nobody uses back to the system.
fn release(block: Arc<Block>) {
    if let Some(Memory::Host { raw, home }) = Arc::into_inner(block).map(|mut block| block.take()) {
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
        if let Memory::Host { raw, home } = &block.memory
            && is_last(&block)
        {
            let (class, home) = (raw.class, Arc::as_ptr(home));
            // SAFETY: the block keeps its home alive until that has it, under its latch; after the release of the latch nothing
            // of the home is used here, unless the block comes back, which still holds it.
            let refused = unsafe { &*home }.take_back(class, block);
            refused.into_iter().for_each(release);
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
    pub fn on_device(address: u64, bytes: usize, home: Arc<dyn Keeper>) -> Buffer {
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
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn a_freed_block_is_used_again() {
        let a = Allocator::default();
        drop(a.alloc(1000).unwrap());
        let b = a.alloc(990).unwrap();
        assert_eq!(a.stats().num_system_allocs, 1);
        assert_eq!(b.bytes(), 990);
        drop(b);
        a.release_cache();
        assert_eq!(a.stats().reserved_bytes, 0);
    }

    #[test]
    fn a_shared_buffer_cannot_be_written() {
        let mut b = Allocator::default().alloc(16).unwrap();
        b.as_mut::<f32>().unwrap()[1] = 2.0;
        let c = b.clone();
        assert!(b.as_mut::<f32>().is_none());
        drop(c);
        assert_eq!(b.as_slice::<f32>()[1], 2.0);
        assert!(b.is_unique());
    }

    #[test]
    fn a_limit_is_an_error_with_figures() {
        let a = Allocator::with_limit(1 << 20);
        let held = a.alloc(1 << 19).unwrap();
        let error = a.alloc(1 << 20).unwrap_err();
        assert!(error.to_string().contains("1048576 bytes"), "{error}");
        drop(held);
        a.alloc(1 << 20).unwrap();
    }

    #[derive(Debug, Default)]
    struct Returned(Mutex<Vec<u64>>);

    impl Keeper for Returned {
        fn give_back(&self, address: u64) {
            self.0.lock().unwrap().push(address);
        }
    }

    #[test]
    fn memory_of_a_device_is_an_address_and_goes_home() {
        let home = Arc::new(Returned::default());
        let buffer = Buffer::on_device(4096, 12, home.clone());
        assert_eq!((buffer.device_address(), buffer.bytes(), buffer.has_memory()), (Some(4096), 12, true));
        let read = std::panic::AssertUnwindSafe(|| buffer.as_slice::<f32>().len());
        let read = std::panic::catch_unwind(read);
        assert!(read.is_err());
        let other = buffer.clone();
        drop(buffer);
        assert!(home.0.lock().unwrap().is_empty());
        drop(other);
        assert_eq!(*home.0.lock().unwrap(), [4096]);
    }

    #[test]
    fn the_cache_goes_with_the_allocator() {
        let a = Allocator::default();
        let (held, shared) = (a.alloc(100).unwrap(), Arc::downgrade(&a.0.0));
        drop((a.alloc(100).unwrap(), a.alloc(5000).unwrap()));
        assert_eq!(shared.upgrade().unwrap().state.with(|s| s.stats).reserved_bytes, 2 * 128 + 5120);
        drop(a.clone());
        assert_eq!(a.stats().reserved_bytes, 2 * 128 + 5120, "there is another handle");
        drop(a);
        assert_eq!(
            shared.upgrade().unwrap().state.with(|s| s.stats).reserved_bytes,
            128,
            "what is held stays"
        );
        drop(held.clone());
        drop(held);
        assert!(shared.upgrade().is_none());
    }

    #[test]
    fn last_handles_may_go_at_once_on_two_threads() {
        let a = Allocator::default();
        let (sender, receiver) = std::sync::mpsc::channel::<Buffer>();
        std::thread::scope(|scope| {
            scope.spawn(|| receiver.into_iter().for_each(drop));
            for i in 0..20_000i64 {
                let mut buffer = a.alloc(64 << (i % 3)).unwrap();
                buffer.as_mut::<i64>().unwrap().fill(i);
                sender.send(buffer.clone()).unwrap();
                assert!(buffer.as_slice::<i64>().iter().all(|x| *x == i), "shared memory is not handed out");
            }
            drop(sender);
        });
        assert_eq!(a.stats().in_use_bytes, 0);
        a.release_cache();
        assert_eq!(a.stats().reserved_bytes, 0, "every block came back");
    }
}
