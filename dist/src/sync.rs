//! Locks, condition variables and atomics: those of `std`, or with `--cfg loom` those of the model checker loom, whose tests run
//! every interleaving of a few threads.

#[cfg(all(loom, test))]
pub(crate) use loom::{
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize},
    sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard},
    thread::yield_now,
};
#[cfg(not(all(loom, test)))]
pub(crate) use std::{
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize},
    sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard},
    thread::yield_now,
};

/// Sequentially consistent fence under loom; nothing otherwise.
///
/// Of two threads that each store to one variable and then load the other's, at least one sees the store. `SeqCst` accesses
/// guarantee that by themselves; loom treats them as acquire and release, and needs the fence.
pub(crate) fn seq_cst_fence() {
    #[cfg(all(loom, test))]
    loom::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}
