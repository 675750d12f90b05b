//! A direct-mapped cache: each key has one slot, and a new value replaces the old one.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

/// The number of slots: more than the distinct keys of one step of a usual model.
const NUM_SLOTS: usize = 512;

/// Reference-counted values by slot. The caller compares a value with what it looks for, so any number may select the
/// slot: addresses, which are free to compute and need not be equal for equal keys.
pub(crate) struct DirectMappedCache<T>(RefCell<Box<[Option<Rc<T>>; NUM_SLOTS]>>);

impl<T> DirectMappedCache<T> {
    /// Returns what `accept` makes of the value in a slot, if there is a value.
    pub(crate) fn get<R>(&self, slot: u64, accept: impl FnOnce(&Rc<T>) -> Option<R>) -> Option<R> {
        self.0.borrow()[slot as usize % NUM_SLOTS].as_ref().and_then(accept)
    }

    /// Returns the values of all slots.
    #[cfg(test)]
    pub(crate) fn values(&self) -> Vec<Rc<T>> {
        self.0.borrow().iter().flatten().cloned().collect()
    }

    /// Stores a value, replacing the old value of the slot.
    pub(crate) fn insert(&self, slot: u64, value: &Rc<T>) {
        self.0.borrow_mut()[slot as usize % NUM_SLOTS] = Some(value.clone());
    }
}

impl<T> Default for DirectMappedCache<T> {
    fn default() -> Self {
        DirectMappedCache(RefCell::new(Box::new([const { None }; NUM_SLOTS])))
    }
}

impl<T> fmt::Debug for DirectMappedCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DirectMappedCache({} things)", self.0.borrow().iter().flatten().count())
    }
}
