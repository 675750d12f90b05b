//! Memory from the system, in blocks of a few sizes.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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

    /// The largest that fits into so many bytes, which a class of at least [`CUT_MIN`] was cut from.
    fn within(bytes: usize) -> Class {
        let step = bytes.next_power_of_two() / 16;
        Class::of(bytes / step * step).expect("it is smaller than a class")
    }
}

/// Larger blocks are not cut for less, and what is left of one is not kept apart if it is less.
pub(super) const CUT_MIN: usize = 1 << 18;

/// One block of memory, owned: from the system, or cut from such a one.
pub(super) struct Raw {
    pub(super) start: NonNull<u8>,
    pub(super) class: Class,
    part: Option<Part>,
}

/// What a block was cut from, and how much of it is this one's: at least its class.
struct Part {
    whole: Arc<Whole>,
    bytes: usize,
}

/// A block that is cut up.
pub(super) struct Whole {
    raw: Raw,
    /// Parts that somebody uses; changed under the latch of the allocator.
    used: AtomicUsize,
}

// SAFETY: handles that are shared reach `used` only; the block itself is the last handle's.
unsafe impl Sync for Whole {}

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
        Some(Raw { start, class, part: None })
    }

    /// A block of a smaller class, in use, and what is left, if it is worth keeping. Neighbours are not joined before all parts are
    /// free (see [`Raw::whole`]).
    pub(super) fn cut(mut self, class: Class) -> (Raw, Option<Raw>) {
        let (start, own) = (self.start, self.class.bytes);
        let Part { whole, bytes } = match self.part.take() {
            Some(part) => {
                // Without its part it would pass for a block of the system.
                std::mem::forget(self);
                part
            }
            None => Part { whole: Arc::new(Whole { raw: self, used: AtomicUsize::new(0) }), bytes: own },
        };
        assert!(class.bytes <= bytes, "a part is no larger than what it is cut from");
        whole.used.fetch_add(1, Ordering::Relaxed);
        let left = bytes - class.bytes;
        let rest = (left >= CUT_MIN).then(|| Raw {
            // SAFETY: it lies inside of the block, of which `bytes` from `start` on are this part's.
            start: unsafe { start.add(class.bytes) },
            class: Class::within(left),
            part: Some(Part { whole: whole.clone(), bytes: left }),
        });
        let bytes = if rest.is_some() { class.bytes } else { bytes };
        (Raw { start, class, part: Some(Part { whole, bytes }) }, rest)
    }

    /// What this was cut from.
    pub(super) fn whole(&self) -> Option<&Arc<Whole>> {
        self.part.as_ref().map(|part| &part.whole)
    }

    /// Notes that somebody uses it again.
    pub(super) fn take_up(&self) {
        if let Some(whole) = self.whole() {
            whole.used.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes that nobody uses it any more; what it was cut from, if nobody uses any part of that.
    pub(super) fn let_go(&self) -> Option<Arc<Whole>> {
        let whole = self.whole()?;
        (whole.used.fetch_sub(1, Ordering::Relaxed) == 1).then(|| whole.clone())
    }
}

impl Whole {
    /// The block again, from the last handle of it: when all its parts are gone.
    pub(super) fn into_raw(self: Arc<Whole>) -> Option<Raw> {
        Arc::into_inner(self).map(|whole| whole.raw)
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
        if self.part.is_some() {
            return;
        }
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
    fn what_is_left_holds_its_class() {
        for bytes in (CUT_MIN..5_000_000).step_by(977) {
            let class = Class::within(bytes);
            let next = Class::of(class.bytes + 1).unwrap();
            assert!(class.bytes <= bytes && bytes < next.bytes, "{bytes} {class:?}");
            assert_eq!(Class::of(class.bytes), Some(class));
        }
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
