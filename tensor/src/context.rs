//! What one rank remembers between ops: caches that change no result, and where the program stands.

use crate::layout::Layout;
use crate::memo::{Memo, Quick};
use crate::plans::Plans;
use crate::recent::Recent;
use crate::route::RouteCache;
use crate::signature::Signature;
use shardgrad_dist::{Phase, Rank, Result};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::Location;
use std::rc::Rc;

/// So many of the tensors that a program makes are noted. Every collective takes their text along, so they are few.
const GIVEN_MAX: usize = 4;

/// Hangs on the [`Rank`]. Nothing in it changes a value; it only names, counts and remembers.
#[derive(Debug, Default)]
pub struct Context {
    /// Cheapest routes between layouts, by pair.
    pub routes: RouteCache,
    /// What was inferred, by question.
    pub(crate) inferences: Memo,
    /// What was planned, by op.
    pub(crate) plans: Plans,
    signatures: RefCell<HashMap<Box<str>, Rc<Signature>, Quick>>,
    recent_signatures: Recent<Signature>,
    backward: Cell<bool>,
    closed: Cell<bool>,
    watched: Cell<bool>,
    path: RefCell<Rc<str>>,
    given: RefCell<Rc<str>>,
}

impl Context {
    /// The context of a rank.
    #[must_use]
    pub fn of(rank: &Rank) -> &Context {
        rank.extension::<Context>()
    }

    /// The parsed form of a signature text.
    ///
    /// # Panics
    /// If the text is no signature: an op is asked before it is run.
    #[must_use]
    pub fn signature(&self, text: &str) -> Rc<Signature> {
        self.checked_signature(text).unwrap_or_else(|e| panic!("bug in shardgrad: {e}"))
    }

    /// The same of a text that may be no signature.
    ///
    /// # Errors
    /// As [`Signature::parse`].
    pub(crate) fn checked_signature(&self, text: &str) -> Result<Rc<Signature>> {
        let place = (text.as_ptr().addr() ^ text.len() << 4) as u64;
        let same = |s: &Rc<Signature>| (s.text() == text).then(|| s.clone());
        if let Some(found) = self.recent_signatures.find(place, same) {
            return Ok(found);
        }
        let found = self.read(text)?;
        self.recent_signatures.keep(place, &found);
        Ok(found)
    }

    fn read(&self, text: &str) -> Result<Rc<Signature>> {
        if let Some(found) = self.signatures.borrow().get(text) {
            return Ok(found.clone());
        }
        let parsed = Rc::new(Signature::parse(text)?);
        self.signatures.borrow_mut().insert(text.into(), parsed.clone());
        Ok(parsed)
    }

    /// Forward or backward: what a collective issued now belongs to.
    #[must_use]
    pub fn phase(&self) -> Phase {
        if self.backward.get() { Phase::Backward } else { Phase::Forward }
    }

    /// Says whether a backward pass runs from now on; returns what was said before.
    pub fn set_backward(&self, backward: bool) -> bool {
        self.backward.replace(backward)
    }

    /// Whether ops may imply steps. Inside a vjp they may not: by the gradient law none is needed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Opens or closes the door for implied steps; returns what was said before.
    pub fn set_closed(&self, closed: bool) -> bool {
        self.closed.replace(closed)
    }

    /// Whether every op looks for results that are not finite
    /// (see [`first_not_finite`](crate::control::first_not_finite)).
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.watched.get()
    }

    pub(crate) fn set_watched(&self, watched: bool) {
        self.watched.set(watched);
    }

    /// The dotted name of the parameter or point that the program touched last.
    #[must_use]
    pub fn path(&self) -> Rc<str> {
        self.path.borrow().clone()
    }

    /// Notes where in the model the program stands.
    pub fn set_path(&self, path: &Rc<str>) {
        *self.path.borrow_mut() = path.clone();
    }

    /// The tensors that the program made last of numbers of its own or at random, each with its line, the newest first: most often
    /// what makes up a batch. Empty before the first one.
    #[must_use]
    pub fn given(&self) -> Rc<str> {
        self.given.borrow().clone()
    }

    /// Notes what the program makes. Numbers alone are passed over, as no ranks differ in their shape.
    pub(crate) fn set_given(&self, layout: &Layout, site: &'static Location<'static>) {
        if layout.ndim() == 0 {
            return;
        }
        let newest = format!("{layout} at {}:{}", site.file(), site.line());
        let mut given = self.given.borrow_mut();
        let before = given.lines().filter(|line| *line != newest).take(GIVEN_MAX - 1);
        let all: Vec<&str> = std::iter::once(newest.as_str()).chain(before).collect();
        *given = all.join("\n").into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_last_is_told_once_and_first() {
        let context = Context::default();
        let mesh = shardgrad_dist::Mesh::single();
        let give = |text: &str| {
            context.set_given(&Layout::parse(text, &mesh).unwrap(), Location::caller());
            let given = context.given();
            given.lines().map(|line| line.split(" at ").next().unwrap().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(&*context.given(), "");
        assert_eq!(give("f32[4]"), ["f32[4]"]);
        assert_eq!(give("f32[]"), ["f32[4]"], "a number has no shape to differ in");
        assert_eq!(give("f32[5]"), ["f32[5]", "f32[4]"]);
        assert_eq!(give("f32[4]"), ["f32[4]", "f32[5]"]);
        for n in 6..9 {
            give(&format!("f32[{n}]"));
        }
        assert_eq!(give("f32[9]"), ["f32[9]", "f32[8]", "f32[7]", "f32[6]"]);
    }

    #[test]
    fn signatures_are_found_by_their_text_wherever_it_lies() {
        let context = Context::default();
        let kept = context.signature("..m, ..m -> ..m");
        let mut text = String::from("..m, ..m -> ..m");
        assert!(Rc::ptr_eq(&kept, &context.signature(&text)));
        // Another text of this length in the same memory.
        text.replace_range(.., "..d, ..d -> ..d");
        assert_eq!(context.signature(&text).text(), text);
        assert!(Rc::ptr_eq(&kept, &context.signature("..m, ..m -> ..m")));
    }
}
