//! Memory from the system, in blocks of a few sizes.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

/// Alignment of every block: one cache line, one AVX-512 register.
pub const ALIGNMENT: usize = 64;

/// A page of the larger kind on x86-64 and, with pages of 4 KiB, on AArch64. Blocks that hold one begin at one.
const HUGE_PAGE: usize = 2 << 20;

/// Blocks of one size. Sizes grow in steps of an eighth, so that at most 12.5% of a block is unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class {
    pub(super) bytes: usize,
    /// Its place among all classes, by size.
    pub(super) number: usize,
}

impl Class {
    /// The smallest that holds so many bytes.
    pub(super) fn of(bytes: usize) -> Option<Class> {
        let bytes = bytes.max(ALIGNMENT);
        let step = (bytes.checked_next_power_of_two()? / 16).max(ALIGNMENT).ilog2();
        let steps = ((bytes - 1) >> step) + 1;
        // Of the smallest step there are 1 to 16, of each other one 9 to 16.
        let class = Class { bytes: steps << step, number: 8 * (step - ALIGNMENT.ilog2()) as usize + steps };
        (class.bytes <= isize::MAX as usize - HUGE_PAGE).then_some(class)
    }
}

/// One block of memory from the system, owned.
pub(super) struct Raw {
    pub(super) start: NonNull<u8>,
    pub(super) class: Class,
}

// SAFETY: `Raw` owns its memory exclusively and has no thread affinity.
unsafe impl Send for Raw {}

impl Raw {
    fn layout(capacity: usize) -> Layout {
        let alignment = if capacity < HUGE_PAGE { ALIGNMENT } else { HUGE_PAGE };
        Layout::from_size_align(capacity, alignment).expect("a size class never exceeds isize::MAX")
    }

    /// Zeros; `None` where the system refuses.
    pub(super) fn new(class: Class) -> Option<Raw> {
        let capacity = class.bytes;
        // SAFETY: the layout has a non-zero size, since the smallest size class is ALIGNMENT.
        let start = NonNull::new(unsafe { alloc(Raw::layout(capacity)) })?;
        ask_for_huge_pages(start, capacity);
        // SAFETY: the block was just allocated with this size.
        unsafe { start.write_bytes(0, capacity) };
        Some(Raw { start, class })
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
        unsafe { dealloc(self.start.as_ptr(), Raw::layout(self.class.bytes)) }
    }
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
    fn size_classes_are_numbered_by_size() {
        let (mut last, mut bytes) = (Class { bytes: 0, number: 0 }, 0);
        while let Some(class) = Class::of(bytes) {
            assert_eq!((class.number, Class::of(class.bytes)), (last.number + 1, Some(class)), "{last:?}");
            (last, bytes) = (class, class.bytes + 1);
        }
        assert!(last.number < 512);
    }
}
