//! Flags that hold for a scope.

use std::cell::Cell;

/// A flag that has another value until the guard is dropped, also by an error that unwinds.
#[derive(Debug)]
#[must_use = "the flag has its old value again when the guard is dropped"]
pub struct FlagGuard<'a> {
    flag: &'a Cell<bool>,
    before: bool,
}

impl<'a> FlagGuard<'a> {
    /// Sets a flag.
    pub fn set(flag: &'a Cell<bool>, value: bool) -> FlagGuard<'a> {
        FlagGuard { flag, before: flag.replace(value) }
    }
}

impl Drop for FlagGuard<'_> {
    fn drop(&mut self) {
        self.flag.set(self.before);
    }
}
