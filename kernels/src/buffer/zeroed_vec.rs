//! A vector of zeros whose allocation may fail.

use crate::dtype::Element;
use std::alloc::{Layout, alloc_zeroed};

/// Returns `len` zeros, of pages that the system provides on first touch if there are many; `None` if it refuses.
pub(crate) fn zeroed_vec<T: Element>(len: usize) -> Option<Vec<T>> {
    let layout = Layout::array::<T>(len).ok()?;
    if layout.size() == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the layout has a non-zero size.
    let start = unsafe { alloc_zeroed(layout) }.cast::<T>();
    // SAFETY: `start` came from the global allocator with the layout of `len` elements, and zero bytes are a value of each element type:
    // `Element` is sealed, its types are numbers.
    (!start.is_null()).then(|| unsafe { Vec::from_raw_parts(start, len, len) })
}
