//! A spin lock, for critical sections of a few instructions.

use std::cell::UnsafeCell;
use std::fmt;
use std::panic::RefUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};

/// Spins before a waiter yields: the operating system may have preempted the holder of the lock.
const SPINS: usize = 64;

/// A value behind a spin lock, for critical sections so short that no thread needs to sleep. Taking the lock is one atomic exchange,
/// releasing it one store. Nothing touches the lock after that store, so that the store may be its last use.
#[derive(Default)]
pub(crate) struct SpinLock<T> {
    is_held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed through `with` only, by one thread at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

// After a panic the value is as the panicking thread left it, as with a mutex whose poison is ignored.
impl<T> RefUnwindSafe for SpinLock<T> {}

/// Releases the lock when dropped, also during a panic.
struct Release<'a>(&'a AtomicBool);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> SpinLock<T> {
    /// Calls `f` with exclusive access to the value. `f` must not block, nor use the lock itself.
    #[inline]
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        if self.is_held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        let _release = Release(&self.is_held);
        // SAFETY: this thread has changed `is_held` from false to true, and only this thread changes the flag back, after `f`.
        f(unsafe { &mut *self.value.get() })
    }

    /// Waits for the lock and takes it.
    #[cold]
    fn wait(&self) {
        let mut spins = 0;
        while self.is_held.load(Ordering::Relaxed) || self.is_held.swap(true, Ordering::Acquire) {
            spins += 1;
            if spins % SPINS == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
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
    fn threads_exclude_each_other() {
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
    fn panic_releases_the_lock() {
        let lock = SpinLock::<u8>::default();
        let end = std::panic::catch_unwind(|| lock.with(|_| panic!("no")));
        assert!(end.is_err());
        assert_eq!(lock.with(|x| *x), 0);
    }
}
