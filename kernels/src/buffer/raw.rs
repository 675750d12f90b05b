//! Memory from the system: small blocks of a few size classes, and chunks that large blocks are cut from.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Alignment of every block: one cache line, one AVX-512 register.
pub const ALIGNMENT: usize = 64;

/// The size of a huge page on x86-64 and, with pages of 4 KiB, on AArch64. Chunks of at least this size are aligned to it.
const HUGE_PAGE: usize = 2 << 20;

/// Larger blocks are cut from chunks; smaller ones are allocated from the system individually.
const SMALL_MAX: usize = 1 << 18;
/// The granularity of blocks of chunks: a page.
const GRAIN: usize = 1 << 12;

/// The size class of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class {
    pub(super) bytes: usize,
    /// The number of a small size class. Small sizes grow in steps of an eighth, so that at most 12.5% of a block is unused; blocks of one
    /// class replace each other.
    pub(super) number: Option<usize>,
}

impl Class {
    /// Returns the smallest class that holds `bytes` bytes.
    pub(super) fn of(bytes: usize) -> Option<Class> {
        let bytes = bytes.max(ALIGNMENT);
        if bytes > SMALL_MAX {
            return Class::of_chunk(bytes);
        }
        let step = (bytes.next_power_of_two() / 16).max(ALIGNMENT).ilog2();
        let steps = ((bytes - 1) >> step) + 1;
        // The smallest step has sizes of 1 to 16 steps, each other step sizes of 9 to 16.
        let number = 8 * (step - ALIGNMENT.ilog2()) as usize + steps;
        Some(Class { bytes: steps << step, number: Some(number) })
    }

    /// Returns the class of a block of a chunk, however small.
    pub(super) fn of_chunk(bytes: usize) -> Option<Class> {
        let bytes = bytes.checked_next_multiple_of(GRAIN)?;
        (bytes <= isize::MAX as usize - 2 * HUGE_PAGE).then_some(Class { bytes, number: None })
    }
}

/// One owned block of memory: from the system, or cut from a chunk, which takes it back by its address.
pub(super) struct Raw {
    pub(super) start: NonNull<u8>,
    pub(super) class: Class,
}

// SAFETY: `Raw` owns its memory exclusively and has no thread affinity.
unsafe impl Send for Raw {}

impl Raw {
    fn layout(class: Class) -> Layout {
        Layout::from_size_align(class.bytes, ALIGNMENT).expect("a size class never exceeds isize::MAX")
    }

    /// Allocates a small block of zeros; `None` if the system refuses.
    pub(super) fn new(class: Class) -> Option<Raw> {
        debug_assert!(class.number.is_some(), "large blocks are cut from chunks");
        // SAFETY: the layout has a non-zero size, since the smallest size class is ALIGNMENT.
        let start = NonNull::new(unsafe { alloc_zeroed(Raw::layout(class)) })?;
        Some(Raw { start, class })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if self.class.number.is_some() {
            // SAFETY: `start` came from `alloc_zeroed` with this very layout and is freed once, here.
            unsafe { dealloc(self.start.as_ptr(), Raw::layout(self.class)) }
        }
    }
}

/// Memory from the system that blocks are cut from.
pub(super) struct Chunk {
    start: NonNull<u8>,
    /// Of the whole allocation, including the part before the first huge page.
    layout: Layout,
    /// Bytes from `start` to the first block.
    skipped: usize,
    bytes: usize,
}

// SAFETY: a chunk owns its memory and has no thread affinity.
unsafe impl Send for Chunk {}

impl Chunk {
    /// Allocates a chunk of zeros, whose pages the system provides on first touch; `None` if it refuses.
    pub(super) fn new(bytes: usize) -> Option<Chunk> {
        let slack = if bytes < HUGE_PAGE { GRAIN } else { HUGE_PAGE };
        // With the alignment of a word, calloc returns fresh zero pages without writing them again.
        let layout = Layout::from_size_align(bytes.checked_add(slack)?, align_of::<u64>()).ok()?;
        // SAFETY: the layout has a non-zero size.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let chunk = Chunk { start, layout, skipped: start.align_offset(slack), bytes };
        ask_for_huge_pages(chunk.at(0), bytes);
        Some(chunk)
    }

    /// Returns the address of the first block.
    pub(super) fn address(&self) -> u64 {
        self.at(0).addr().get() as u64
    }

    /// Returns the bytes that blocks are cut from.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.bytes, "a block must be within its chunk");
        // SAFETY: there are `skipped` and `bytes` bytes from `start` on: at most `slack` were skipped.
        unsafe { self.start.add(self.skipped + offset) }
    }

    /// Returns the block that was cut at an address.
    pub(super) fn block(&self, address: u64, class: Class) -> Raw {
        Raw { start: self.at((address - self.address()) as usize), class }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: `start` came from `alloc_zeroed` with this very layout and is freed once, here; no block of the chunk is in use.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Asks the system to back a chunk by huge pages: with pages of 4 KiB, the first touch of large tensors and the TLB misses of products
/// with large strides take noticeable time. A refusal is ignored.
fn ask_for_huge_pages(start: NonNull<u8>, capacity: usize) {
    #[cfg(target_os = "linux")]
    if capacity >= HUGE_PAGE {
        use std::ffi::{c_int, c_void};
        unsafe extern "C" {
            fn madvise(start: *mut c_void, length: usize, advice: c_int) -> c_int;
        }
        const MADV_HUGEPAGE: c_int = 14;
        // SAFETY: the range is within memory that this program owns; the advice changes no contents.
        let _ = unsafe { madvise(start.as_ptr().cast(), capacity / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, capacity);
}

/// The memory that large allocations must leave for the rest of the program: thread stacks, messages, small vectors. A failure of those
/// aborts the process.
const MARGIN: usize = 16 << 20;

/// Returns whether the system can still provide [`MARGIN`] bytes. It refuses beyond a limit of the address space (`ulimit -v`), and, if
/// overcommit is off, beyond its memory.
pub(crate) fn has_margin() -> bool {
    #[cfg(target_os = "linux")]
    {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the system chooses; it is unmapped as a whole before anything uses it.
        unsafe {
            let start = mmap_anonymous(std::ptr::null_mut(), MARGIN, access, MapFlags::PRIVATE);
            start.is_ok_and(|start| munmap(start, MARGIN).is_ok())
        }
    }
    #[cfg(not(target_os = "linux"))]
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_waste_at_most_an_eighth() {
        for bytes in (64..5_000_000).step_by(977) {
            let class = Class::of(bytes).unwrap().bytes;
            assert!(class >= bytes && (class - bytes) * 8 <= class.max(8 * ALIGNMENT), "{bytes} {class}");
        }
        assert!(Class::of(usize::MAX).is_none() && Class::of(isize::MAX as usize).is_none());
    }

    #[test]
    fn small_sizes_are_numbered() {
        let (mut last, mut bytes) = (0, 0);
        while let Some(Class { bytes: whole, number: Some(number) }) = Class::of(bytes) {
            assert_eq!((number, Class::of(whole).unwrap().number), (last + 1, Some(number)), "{bytes}");
            (last, bytes) = (number, whole + 1);
        }
        assert!(bytes == SMALL_MAX + 1 && last < 128);
    }

    #[test]
    fn chunks_are_zeroed_aligned_and_contain_their_blocks() {
        for bytes in [GRAIN, 3 * GRAIN, HUGE_PAGE, 5 * HUGE_PAGE + GRAIN] {
            let chunk = Chunk::new(bytes).unwrap();
            let alignment = if bytes < HUGE_PAGE { GRAIN } else { HUGE_PAGE };
            assert!(chunk.address().is_multiple_of(alignment as u64) && chunk.bytes() == bytes);
            let class = Class::of_chunk(GRAIN).unwrap();
            let last = chunk.block(chunk.address() + (bytes - GRAIN) as u64, class);
            // SAFETY: the chunk holds the block.
            let last = unsafe { std::slice::from_raw_parts_mut(last.start.as_ptr(), GRAIN) };
            assert!(last.iter().all(|x| *x == 0));
            last.fill(1);
        }
        assert!(Chunk::new(usize::MAX).is_none() && Chunk::new(1 << 62).is_none());
    }
}
