//! Methods that pick, place and order elements by index, for plain tensors and recorded variables alike.

use crate::op::unwind;
use crate::ops::gather::{Gather, ScatterAdd};
use crate::ops::one_hot::OneHot;
use crate::ops::sort::Sort;
use crate::ops::top_k::TopK;
use crate::value::Value;
use shardgrad_dist::{Error, Kind};
use shardgrad_kernels::DType;
use std::panic::Location;
use std::rc::Rc;

/// Elements by index. Indices are i64 and count from 0; one outside of its dim is an error of kind `Kind::Data` that
/// names it.
pub trait Indexing: Value {
    /// `a [v] c, n -> a n c`: what stands at the places of a list along a dim. A dim that an axis splits leaves a pending
    /// sum. Equal indices give the same element; the cotangent is summed over them in order.
    #[track_caller]
    #[must_use]
    fn index_select(&self, dim: usize, index: &Self) -> Self {
        Self::apply_one(unwind(Gather::along(self.layout().ndim(), dim, true)), &[self, index])
    }

    /// y_(a, n, c) = x_(a, index_(a, n, c), c): the index has the shape of the result, and that of x but for dim `dim`.
    /// Splits as in [`Indexing::index_select`].
    #[track_caller]
    #[must_use]
    fn gather(&self, dim: usize, index: &Self) -> Self {
        Self::apply_one(unwind(Gather::along(self.layout().ndim(), dim, false)), &[self, index])
    }

    /// x with `parts` (like x, but as long as the list along the dim) added at the places of a list. Equal indices add up,
    /// in the order of the list, before x is added. Any float. Integers have the op without x,
    /// [`ScatterAdd`].
    #[track_caller]
    #[must_use]
    fn index_add(&self, dim: usize, index: &Self, parts: &Self) -> Self {
        added(self, dim, index, parts, true)
    }

    /// x with `parts` added: x_(a, index_(a, n, c), c) grows by `parts_(a, n, c)`. Index and parts have one shape, that of x
    /// but for dim `dim`. Sums as in [`Indexing::index_add`].
    #[track_caller]
    #[must_use]
    fn scatter_add(&self, dim: usize, index: &Self, parts: &Self) -> Self {
        added(self, dim, index, parts, false)
    }

    /// These indices as rows of a unit matrix: a new last dim of `count` elements, 1 at the index and 0 elsewhere, in any
    /// dtype. It has no gradient.
    #[track_caller]
    #[must_use]
    fn one_hot(&self, count: usize, dtype: DType) -> Self {
        Self::apply_one(Rc::new(OneHot { count, dtype }), &[self])
    }

    /// The elements of a dim that no axis splits in order, and the places where they stood (i64). The order is stable in
    /// both directions; not-a-number is larger than all numbers, 0 and -0 are equal.
    #[track_caller]
    #[must_use]
    fn sort(&self, dim: usize, descending: bool) -> (Self, Self) {
        pair(self, unwind(Sort::along(self.layout().ndim(), dim, descending)))
    }

    /// The places (i64) that [`Indexing::sort`] gives.
    #[track_caller]
    #[must_use]
    fn argsort(&self, dim: usize, descending: bool) -> Self {
        self.sort(dim, descending).1
    }

    /// The k largest elements of a dim that no axis splits in descending order (or the smallest in ascending order), and
    /// their places (i64). Of equal elements those with the lowest places are taken, lowest first.
    #[track_caller]
    #[must_use]
    fn top_k(&self, dim: usize, k: usize, largest: bool) -> (Self, Self) {
        let extent = self.shape().get(dim).copied().unwrap_or(0);
        pair(self, unwind(TopK::along(self.layout().ndim(), extent, dim, k, largest)))
    }
}

impl<V: Value> Indexing for V {}

#[track_caller]
fn added<V: Value>(x: &V, dim: usize, index: &V, parts: &V, is_shared: bool) -> V {
    let Some(&target) = x.layout().dims().get(dim) else {
        let name = if is_shared { "index_add" } else { "scatter_add" };
        let error = Error::new(Kind::Shape, format!("{name}: there is no dim {dim} in {}", x.layout()));
        error.at(Location::caller()).raise()
    };
    let op = unwind(ScatterAdd::along(x.layout().ndim(), dim, target, is_shared));
    x.add(&V::apply_one(op, &[parts, index]))
}

#[track_caller]
fn pair<V: Value>(x: &V, op: Rc<dyn crate::op::Op>) -> (V, V) {
    let mut outputs = V::apply(op, &[x]);
    let places = outputs.pop().expect("the op has two outputs");
    (outputs.pop().expect("the op has two outputs"), places)
}
