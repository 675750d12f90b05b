//! What was asked for last, at hand: one look at one place instead of a search.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

/// So many places there are: more than a step of a usual model has different questions.
const PLACES: usize = 512;

/// Handles of things. Who looks at a place compares what is there with what is wanted, so any number
/// may say where to look: addresses, which cost nothing and need not be the same for equal things.
pub(crate) struct Recent<T>(RefCell<Box<[Option<Rc<T>>; PLACES]>>);

impl<T> Recent<T> {
    /// What `serves` makes of the thing at a place.
    pub(crate) fn find<R>(&self, place: u64, serves: impl FnOnce(&Rc<T>) -> Option<R>) -> Option<R> {
        self.0.borrow()[place as usize % PLACES].as_ref().and_then(serves)
    }

    /// Puts a thing there, in the place of what was there.
    pub(crate) fn keep(&self, place: u64, thing: &Rc<T>) {
        self.0.borrow_mut()[place as usize % PLACES] = Some(thing.clone());
    }
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Recent(RefCell::new(Box::new([const { None }; PLACES])))
    }
}

impl<T> fmt::Debug for Recent<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recent({} things)", self.0.borrow().iter().flatten().count())
    }
}
