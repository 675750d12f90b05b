//! Ref-counted memory on one device, and the caching allocator it comes from.
//!
//! A buffer is immutable while it is shared: it can be written by who holds the only handle. Host memory is never
//! uninitialised: new blocks are zeroed by the system, reused blocks hold old values. Memory of a device is an address
//! here; contents come and go by [`Backend::upload`](crate::Backend::upload) and
//! [`Backend::download`](crate::Backend::download).

use crate::dtype::Element;
use crate::error::{KernelError, MemoryStats};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Alignment of every block: one cache line, one AVX-512 register.
pub const ALIGNMENT: usize = 64;

/// A page of the larger kind on x86-64 and, with pages of 4 KiB, on AArch64. Blocks that hold one begin at one.
const HUGE_PAGE: usize = 2 << 20;

/// A caching allocator: freed blocks are kept by size class and handed out again.
#[derive(Clone, Default)]
pub struct Allocator(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    limit_bytes: usize,
}

/// What an allocator holds and counts: one lock serves both.
#[derive(Default)]
struct State {
    free: BTreeMap<usize, Vec<Raw>>,
    stats: MemoryStats,
}

impl State {
    fn count(&mut self, bytes: usize) {
        // On the null back end tensors may add up to more than memory has addresses.
        self.stats.in_use_bytes = self.stats.in_use_bytes.saturating_add(bytes);
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.stats.in_use_bytes);
    }

    /// A block that was given back, counted as in use.
    fn recycled(&mut self, class: usize) -> Option<Raw> {
        let raw = self.free.get_mut(&class)?.pop()?;
        self.count(class);
        Some(raw)
    }
}

/// One block of memory, owned.
struct Raw {
    start: NonNull<u8>,
    capacity: usize,
}

// SAFETY: `Raw` owns its memory exclusively and has no thread affinity.
unsafe impl Send for Raw {}

impl Raw {
    fn layout(capacity: usize) -> Layout {
        let alignment = if capacity < HUGE_PAGE { ALIGNMENT } else { HUGE_PAGE };
        Layout::from_size_align(capacity, alignment).expect("a size class never exceeds isize::MAX")
    }

    fn new(capacity: usize) -> Option<Raw> {
        // SAFETY: the layout has a non-zero size, since the smallest size class is ALIGNMENT.
        let start = NonNull::new(unsafe { alloc(Raw::layout(capacity)) })?;
        ask_for_huge_pages(start, capacity);
        // SAFETY: the block was just allocated with this size.
        unsafe { start.write_bytes(0, capacity) };
        Some(Raw { start, capacity })
    }
}

/// Asks the system to back whole huge pages of a block by such: with pages of 4 KiB, the first touch of large tensors
/// and the address translation of products that stride through them take noticeable time. No is an answer.
fn ask_for_huge_pages(start: NonNull<u8>, capacity: usize) {
    #[cfg(target_os = "linux")]
    if capacity >= HUGE_PAGE {
        use std::ffi::{c_int, c_void};
        unsafe extern "C" {
            fn madvise(start: *mut c_void, length: usize, advice: c_int) -> c_int;
        }
        const MADV_HUGEPAGE: c_int = 14;
        // SAFETY: the range lies inside of a block that this program owns; the advice changes no contents.
        let _ = unsafe { madvise(start.as_ptr().cast(), capacity / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, capacity);
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: `start` came from `alloc` with this very layout and is freed once, here.
        unsafe { dealloc(self.start.as_ptr(), Raw::layout(self.capacity)) }
    }
}

/// Size classes grow in steps of an eighth, so that at most 12.5% of a block is unused.
fn size_class(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(ALIGNMENT);
    let step = (bytes.checked_next_power_of_two()? / 16).max(ALIGNMENT);
    bytes.checked_next_multiple_of(step).filter(|&b| b <= isize::MAX as usize - HUGE_PAGE)
}

impl Allocator {
    /// An allocator that refuses to hold more than `limit_bytes` from the system (0: no limit).
    #[must_use]
    pub fn with_limit(limit_bytes: usize) -> Allocator {
        Allocator(Arc::new(Shared { state: Mutex::default(), limit_bytes }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of at least `bytes` bytes. Contents are arbitrary but initialised.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] when the system or the limit refuses, after the cache was emptied.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let refuse = || KernelError::OutOfMemory { asked_bytes: bytes, stats: self.stats() };
        let class = size_class(bytes).ok_or_else(refuse)?;
        let recycled = self.state().recycled(class);
        let raw = match recycled {
            Some(raw) => raw,
            None => self.fresh(class).ok_or_else(refuse)?,
        };
        Ok(Buffer(Arc::new(Block { memory: Memory::Host { raw, home: self.clone() }, bytes })))
    }

    /// A buffer that only has a size, which is counted as if it were memory.
    #[must_use]
    pub fn outline(&self, bytes: usize) -> Buffer {
        self.state().count(bytes);
        Buffer(Arc::new(Block { memory: Memory::Outline { home: Some(self.clone()) }, bytes }))
    }

    /// A block from the system, counted as in use. Nobody waits for it on the lock.
    fn fresh(&self, class: usize) -> Option<Raw> {
        let limit = self.0.limit_bytes;
        let fits = || limit == 0 || self.state().stats.reserved_bytes.saturating_add(class) <= limit;
        let mut raw = if fits() { Raw::new(class) } else { None };
        if raw.is_none() {
            self.release_cache();
            raw = if fits() { Raw::new(class) } else { None };
        }
        raw.inspect(|_| {
            let mut state = self.state();
            state.stats.reserved_bytes += class;
            state.stats.num_system_allocs += 1;
            state.count(class);
        })
    }

    /// Gives every cached block back to the system.
    pub fn release_cache(&self) {
        let mut state = self.state();
        let blocks = std::mem::take(&mut state.free);
        state.stats.reserved_bytes -= blocks.iter().map(|(class, raws)| class * raws.len()).sum::<usize>();
        drop(state);
        // The blocks go back to the system after the lock.
    }

    /// What is in use now.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        self.state().stats
    }

    fn give_back(&self, raw: Raw) {
        let mut state = self.state();
        state.stats.in_use_bytes -= raw.capacity;
        state.free.entry(raw.capacity).or_default().push(raw);
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
        home: Allocator,
    },
    Device {
        address: u64,
        home: Arc<dyn Keeper>,
    },
    /// Nothing but a size.
    Outline {
        home: Option<Allocator>,
    },
}

struct Block {
    memory: Memory,
    bytes: usize,
}

impl Drop for Block {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.memory, Memory::Outline { home: None }) {
            Memory::Host { raw, home } => home.give_back(raw),
            Memory::Device { address, home } => home.give_back(address),
            Memory::Outline { home: Some(home) } => {
                home.state().stats.in_use_bytes -= self.bytes;
            }
            Memory::Outline { home: None } => {}
        }
    }
}

// SAFETY: a block is written only through `Arc::get_mut` (one handle, one thread) and read otherwise.
unsafe impl Sync for Block {}

/// A ref-counted run of bytes on one device. Cloning copies the handle, never the bytes.
#[derive(Clone)]
pub struct Buffer(Arc<Block>);

impl Buffer {
    /// A buffer that only has a size, and is counted nowhere.
    #[must_use]
    pub fn without_memory(bytes: usize) -> Buffer {
        Buffer(Arc::new(Block { memory: Memory::Outline { home: None }, bytes }))
    }

    /// A buffer of memory that only a device reaches, which `home` gets back.
    #[must_use]
    pub fn on_device(address: u64, bytes: usize, home: Arc<dyn Keeper>) -> Buffer {
        Buffer(Arc::new(Block { memory: Memory::Device { address, home }, bytes }))
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
        self.0.bytes
    }

    /// Whether there is memory behind this buffer (not on the null back end).
    #[must_use]
    pub fn has_memory(&self) -> bool {
        !matches!(self.0.memory, Memory::Outline { .. })
    }

    /// Whether this is the only handle.
    #[must_use]
    pub fn is_unique(&mut self) -> bool {
        Arc::get_mut(&mut self.0).is_some()
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
                std::slice::from_raw_parts(raw.start.as_ptr().cast::<T>(), self.0.bytes / size_of::<T>())
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
        let block = Arc::get_mut(&mut self.0)?;
        Some(match &block.memory {
            // SAFETY: as in `as_slice`; `get_mut` has shown that this is the only handle, and it is borrowed mutably.
            Memory::Host { raw, .. } => unsafe {
                std::slice::from_raw_parts_mut(raw.start.as_ptr().cast::<T>(), block.bytes / size_of::<T>())
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
        write!(f, "Buffer({} bytes)", self.0.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn size_classes_waste_at_most_an_eighth() {
        for bytes in (64..5_000_000).step_by(977) {
            let class = size_class(bytes).unwrap();
            assert!(class >= bytes && (class - bytes) * 8 <= class.max(8 * ALIGNMENT), "{bytes} {class}");
        }
        assert!(size_class(usize::MAX).is_none());
    }
}
