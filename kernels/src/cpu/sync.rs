//! What the threads of a pool meet by: that of `std`, or in a build with `--cfg loom` that of the model checker loom, whose tests
//! run every order in which a few threads can meet.

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
