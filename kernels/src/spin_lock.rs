//! A lock for a few instructions at a time.

use std::cell::UnsafeCell;
use std::fmt;
use std::panic::RefUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};

/// So often a waiter looks before it lets others run: who holds the lock may have been stopped by the system.
const LOOKS: usize = 64;

/// A value that threads use in turn, each for so short that nobody needs to sleep: to take the lock is one atomic
/// exchange, to release it a store. Nothing is touched after that store, so that it may be the last use of the value.
#[derive(Default)]
pub(crate) struct SpinLock<T> {
    is_held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through `with` only, by one thread at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

// Whoever catches a panic finds what the last user left, as with a lock whose poison is ignored.
impl<T> RefUnwindSafe for SpinLock<T> {}

/// Releases a lock, after a panic too.
struct Release<'a>(&'a AtomicBool);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> SpinLock<T> {
    /// Uses the value alone. `f` calls nothing that waits, and does not use the lock itself.
    #[inline]
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        if self.is_held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        let _release = Release(&self.is_held);
        // SAFETY: this thread has changed `is_held` from false to true, and only it changes it back, after `f`.
        f(unsafe { &mut *self.value.get() })
    }

    /// Waits for the lock and takes it.
    #[cold]
    fn wait(&self) {
        let mut looks = 0;
        while self.is_held.load(Ordering::Relaxed) || self.is_held.swap(true, Ordering::Acquire) {
            looks += 1;
            if looks % LOOKS == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl<T: Copy + fmt::Debug> fmt::Debug for SpinLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with(|value| *value).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_take_turns() {
        let count = SpinLock::<[u64; 2]>::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        count.with(|[a, b]| {
                            *a += 1;
                            *b = *a * 3;
                        });
                    }
                });
            }
        });
        assert_eq!(count.with(|both| *both), [80_000, 240_000]);
    }

    #[test]
    fn a_panic_releases_it() {
        let lock = SpinLock::<u8>::default();
        let end = std::panic::catch_unwind(|| lock.with(|_| panic!("no")));
        assert!(end.is_err());
        assert_eq!(lock.with(|x| *x), 0);
    }
}
