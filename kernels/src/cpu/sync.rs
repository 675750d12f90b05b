//! Synchronization primitives of the thread pool: those of `std`, or with `--cfg loom` those of the model checker loom, whose tests
//! explore every interleaving of a few threads.

#[cfg(all(loom, test))]
pub(super) use loom::{
    sync::atomic::{AtomicPtr, AtomicUsize},
    thread::{JoinHandle, Thread, park, yield_now},
};
#[cfg(not(all(loom, test)))]
pub(super) use std::{
    sync::atomic::{AtomicPtr, AtomicUsize},
    thread::{JoinHandle, Thread, park, yield_now},
};
