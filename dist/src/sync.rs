//! The locks, counters and pauses with which ranks meet: those of `std`, or in a build with `--cfg loom` those of the model
//! checker loom, whose tests run every order in which a few threads can meet.

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

/// What sequentially consistent changes and looks promise anyhow: of two threads that each change one thing and then look at
/// the other's, at least one sees the change. loom takes them for acquire and release, so it has to be told.
pub(crate) fn in_one_order() {
    #[cfg(all(loom, test))]
    loom::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}
