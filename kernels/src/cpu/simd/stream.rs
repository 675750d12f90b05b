//! Streaming (non-temporal) stores, for outputs larger than the caches: such memory need not be read in order to be written.

use crate::dtype::Element;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Outputs of at least this size exceed the cache per core: a later reader reads their beginning from memory anyway.
const LARGE_BYTES: usize = 32 << 20;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Permission of one thread to use streaming stores. Dropping it makes these stores visible to other threads like ordinary ones.
#[derive(Debug)]
pub(crate) struct StreamingStores(PhantomData<*const ()>);

impl StreamingStores {
    /// Returns streaming stores for an output of `numel` elements; `None` if the output fits the caches.
    pub(crate) fn of<T>(numel: usize) -> Option<StreamingStores> {
        (numel * size_of::<T>() >= LARGE_BYTES).then_some(StreamingStores(PhantomData))
    }

    /// Copies `from` to `to`; cache lines that `to` covers only in part are stored as usual.
    #[inline(always)]
    pub(crate) fn copy<T: Element>(&self, to: &mut [T], from: &[T]) {
        let head = to.as_ptr().align_offset(LINE).min(to.len());
        let whole = (to.len() - head) * size_of::<T>() / LINE * (LINE / size_of::<T>());
        let from = &from[..to.len()];
        let ((first, to), (from_first, from)) = (to.split_at_mut(head), from.split_at(head));
        let ((lines, last), (from_lines, from_last)) = (to.split_at_mut(whole), from.split_at(whole));
        first.copy_from_slice(from_first);
        store_lines(lines, from_lines);
        last.copy_from_slice(from_last);
    }
}

impl Drop for StreamingStores {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every CPU of this architecture has the instruction.
        unsafe {
            _mm_sfence();
        }
    }
}

/// Whole cache lines of `to`, whose first byte is that of one.
#[inline(always)]
fn store_lines<T: Element>(to: &mut [T], from: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for (to, from) in to.chunks_exact_mut(LINE / size_of::<T>()).zip(from.chunks_exact(LINE / size_of::<T>()))
    {
        let (to, from): (*mut __m128i, *const __m128i) = (to.as_mut_ptr().cast(), from.as_ptr().cast());
        for part in 0..LINE / size_of::<__m128i>() {
            // SAFETY: both hold a line, each bit pattern of which is one of elements; that of `to` is aligned, being a whole line. A
            // `StreamingStores` is there, which orders these stores before later ones when it goes.
            unsafe { _mm_stream_si128(to.add(part), _mm_loadu_si128(from.add(part))) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_start_and_length_is_copied_and_nothing_else() {
        let from: Vec<u8> = (0..400).map(|i| (i % 251) as u8 + 1).collect();
        for start in 0..70 {
            for len in [0, 1, 63, 64, 65, 130, 300] {
                let mut to = vec![0u8; 400];
                StreamingStores(PhantomData).copy(&mut to[start..start + len], &from[start..]);
                assert_eq!(to[start..start + len], from[start..start + len], "{len} from {start} on");
                assert!(
                    to[..start].iter().chain(&to[start + len..]).all(|&x| x == 0),
                    "{len} from {start} on"
                );
            }
        }
        let (wide, mut to) = ([1.5f64; 40], [0f64; 40]);
        StreamingStores(PhantomData).copy(&mut to[1..39], &wide);
        assert_eq!((to[0], &to[1..39], to[39]), (0.0, &wide[1..39], 0.0));
    }

    #[test]
    fn only_large_outputs_use_nontemporal_stores() {
        assert!(
            StreamingStores::of::<f32>(LARGE_BYTES / 4).is_some()
                && StreamingStores::of::<f32>(LARGE_BYTES / 4 - 1).is_none()
        );
    }
}
