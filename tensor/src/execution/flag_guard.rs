//! Flags and settings that hold for a scope.

use std::cell::Cell;

/// A flag, or another setting, that has another value until the guard is dropped, also by an error that unwinds.
#[derive(Debug)]
#[must_use = "the flag has its old value again when the guard is dropped"]
pub struct FlagGuard<'a, T: Copy = bool> {
    flag: &'a Cell<T>,
    before: T,
}

impl<'a, T: Copy> FlagGuard<'a, T> {
    /// Sets a flag.
    pub fn set(flag: &'a Cell<T>, value: T) -> FlagGuard<'a, T> {
        FlagGuard { flag, before: flag.replace(value) }
    }
}

impl<T: Copy> Drop for FlagGuard<'_, T> {
    fn drop(&mut self) {
        self.flag.set(self.before);
    }
}
