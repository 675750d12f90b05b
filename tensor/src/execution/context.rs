//! Per-rank state between ops: caches, the current phase and the current module path.

use crate::execution::direct_mapped_cache::DirectMappedCache;
use crate::execution::flag_guard::FlagGuard;
use crate::execution::inference_cache::InferenceCache;
use crate::execution::plan_cache::PlanCache;
use crate::layout::Layout;
use crate::layout::fast_hasher::FastBuildHasher;
use crate::layout::route::RouteCache;
use crate::layout::signature::Signature;
use shardgrad_dist::{Phase, Rank, Result};
use shardgrad_kernels::SumTree;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::Location;
use std::rc::Rc;

/// The number of recent tensors that errors list. Every collective carries their text, so they are few.
const RECENT_TENSORS_MAX: usize = 4;

/// The state that tensor ops keep on a [`Rank`]. It caches, names and counts; only [`Context::set_sum_tree`] changes values, by the order
/// of sums.
#[derive(Debug, Default)]
pub struct Context {
    /// The cache of cheapest routes between layouts.
    pub routes: RouteCache,
    /// The cache of layout inferences.
    pub(crate) inferences: InferenceCache,
    /// The cache of op plans.
    pub(crate) plans: PlanCache,
    /// The cache of op plans where sums are canonical, and fewer ops take partial sums.
    pub(crate) canonical_plans: PlanCache,
    signatures: RefCell<HashMap<Box<str>, Rc<Signature>, FastBuildHasher>>,
    recent_signatures: DirectMappedCache<Signature>,
    backward: Cell<bool>,
    in_vjp: Cell<bool>,
    detect_anomalies: Cell<bool>,
    sum_tree: Cell<Option<SumTree>>,
    path: RefCell<Rc<str>>,
    recent_tensors: RefCell<Rc<str>>,
}

impl Context {
    /// Returns the context of a rank.
    #[must_use]
    pub fn of(rank: &Rank) -> &Context {
        rank.extension::<Context>()
    }

    /// Returns the parsed form of a signature text, from the cache.
    ///
    /// # Panics
    /// If the text is not a signature: ops are validated before they run.
    #[must_use]
    pub fn signature(&self, text: &str) -> Rc<Signature> {
        self.checked_signature(text).unwrap_or_else(|e| panic!("bug in shardgrad: {e}"))
    }

    /// [`Context::signature`] for a text that may be invalid.
    ///
    /// # Errors
    /// As [`Signature::parse`].
    pub(crate) fn checked_signature(&self, text: &str) -> Result<Rc<Signature>> {
        let slot = (text.as_ptr().addr() ^ text.len() << 4) as u64;
        let same = |s: &Rc<Signature>| (s.text() == text).then(|| s.clone());
        if let Some(found) = self.recent_signatures.get(slot, same) {
            return Ok(found);
        }
        let found = self.read(text)?;
        self.recent_signatures.insert(slot, &found);
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

    /// Returns the phase of the collectives that are issued now: forward or backward.
    #[must_use]
    pub fn phase(&self) -> Phase {
        if self.backward.get() { Phase::Backward } else { Phase::Forward }
    }

    /// Sets whether a backward pass is running, until the guard is dropped.
    pub fn set_backward(&self, backward: bool) -> FlagGuard<'_> {
        FlagGuard::set(&self.backward, backward)
    }

    /// Whether a vjp is running, in which ops must not take implicit steps: cotangents already have the layouts that
    /// the ops need.
    #[must_use]
    pub fn is_in_vjp(&self) -> bool {
        self.in_vjp.get()
    }

    /// Sets that a vjp is running, until the guard is dropped.
    pub fn enter_vjp(&self) -> FlagGuard<'_> {
        FlagGuard::set(&self.in_vjp, true)
    }

    /// Whether anomaly detection is on: every op checks its results for NaN and infinity (see
    /// [`find_first_non_finite`](crate::training_step::anomaly_report::find_first_non_finite)).
    #[must_use]
    pub fn detects_anomalies(&self) -> bool {
        self.detect_anomalies.get()
    }

    pub(crate) fn set_anomaly_detection(&self, detect_anomalies: bool) {
        self.detect_anomalies.set(detect_anomalies);
    }

    /// Returns the tree over the leaves of sums, if their bits must not depend on the mesh.
    #[must_use]
    pub fn sum_tree(&self) -> Option<SumTree> {
        self.sum_tree.get()
    }

    /// Sets the tree over the leaves into which each op cuts a label that it sums over and that a mesh may shard
    /// ([`CanonicalForm`](crate::op::CanonicalForm)), until the guard is dropped. All ranks set the same tree.
    pub fn set_sum_tree(&self, tree: Option<SumTree>) -> FlagGuard<'_, Option<SumTree>> {
        FlagGuard::set(&self.sum_tree, tree)
    }

    /// Returns the zero that changes no sum: -0 where sums are canonical, since -0 + 0 is 0.
    pub(crate) fn zero(&self) -> f64 {
        if self.sum_tree.get().is_some() { -0.0 } else { 0.0 }
    }

    /// Returns the dotted path of the parameter or module that the program used last.
    #[must_use]
    pub fn path(&self) -> Rc<str> {
        self.path.borrow().clone()
    }

    /// Sets the current path in the model.
    pub fn set_path(&self, path: &Rc<str>) {
        *self.path.borrow_mut() = path.clone();
    }

    /// Returns the tensors that the program created last from host data or random numbers, newest first, each with
    /// its source line: usually the parts of a batch. Errors about ranks with different shapes list them. Empty
    /// before the first tensor.
    #[must_use]
    pub fn recent_tensors(&self) -> Rc<str> {
        self.recent_tensors.borrow().clone()
    }

    /// Records a created tensor. Scalars are skipped, since ranks cannot differ in their shape.
    pub(crate) fn note_tensor(&self, layout: &Layout, site: &'static Location<'static>) {
        if layout.ndim() == 0 {
            return;
        }
        let newest = format!("{layout} at {}:{}", site.file(), site.line());
        let mut recent_tensors = self.recent_tensors.borrow_mut();
        let before = recent_tensors.lines().filter(|line| *line != newest).take(RECENT_TENSORS_MAX - 1);
        let all: Vec<&str> = std::iter::once(newest.as_str()).chain(before).collect();
        *recent_tensors = all.join("\n").into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_tensors_are_listed_once_and_newest_first() {
        let context = Context::default();
        let mesh = shardgrad_dist::Mesh::single();
        let give = |text: &str| {
            context.note_tensor(&Layout::parse(text, &mesh).unwrap(), Location::caller());
            let recent_tensors = context.recent_tensors();
            recent_tensors
                .lines()
                .map(|line| line.split(" at ").next().unwrap().to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(&*context.recent_tensors(), "");
        assert_eq!(give("f32[4]"), ["f32[4]"]);
        assert_eq!(give("f32[]"), ["f32[4]"], "a scalar has no shape to differ in");
        assert_eq!(give("f32[5]"), ["f32[5]", "f32[4]"]);
        assert_eq!(give("f32[4]"), ["f32[4]", "f32[5]"]);
        for n in 6..9 {
            give(&format!("f32[{n}]"));
        }
        assert_eq!(give("f32[9]"), ["f32[9]", "f32[8]", "f32[7]", "f32[6]"]);
    }

    #[test]
    fn signatures_are_cached_by_text_not_by_address() {
        let context = Context::default();
        let cached = context.signature("..m, ..m -> ..m");
        let mut text = String::from("..m, ..m -> ..m");
        assert!(Rc::ptr_eq(&cached, &context.signature(&text)));
        // Another text of the same length in the same memory.
        text.replace_range(.., "..d, ..d -> ..d");
        assert_eq!(context.signature(&text).text(), text);
        assert!(Rc::ptr_eq(&cached, &context.signature("..m, ..m -> ..m")));
    }
}
