//! Indexing methods of every [`Value`]: index_select, gather, scatter_add, one_hot, sort, top_k.

use crate::methods::value::Value;
use crate::op::unwind;
use crate::ops::gather::{Gather, ScatterAdd};
use crate::ops::one_hot::OneHot;
use crate::ops::sort::Sort;
use crate::ops::top_k::TopK;
use shardgrad_dist::{Error, Kind};
use shardgrad_kernels::DType;
use std::panic::Location;
use std::rc::Rc;

/// Elements by index. Indices are i64 and count from 0; an index out of range is a `Kind::Data` error that names the
/// index.
pub trait Indexing: Value {
    /// Selects indices along a dim: `a [v] c, n -> a n c`. A sharded dim gives a partial sum. Equal indices give the
    /// same element, and their cotangents are summed in order.
    #[doc(alias = "take")]
    #[doc(alias = "jnp.take")]
    #[track_caller]
    #[must_use]
    fn index_select(&self, dim: usize, index: &Self) -> Self {
        Self::apply_one(unwind(Gather::along(self.layout().ndim(), dim, true)), &[self, index])
    }

    /// Gathers along a dim: y_(a, n, c) = x_(a, index_(a, n, c), c). The index has the shape of the result, and that
    /// of x except for dim `dim`. Layouts as in [`Indexing::index_select`].
    #[doc(alias = "take_along_axis")]
    #[track_caller]
    #[must_use]
    fn gather(&self, dim: usize, index: &Self) -> Self {
        Self::apply_one(unwind(Gather::along(self.layout().ndim(), dim, false)), &[self, index])
    }

    /// Adds `parts` (like x, but as long as the index along the dim) to x at the indices along a dim. Parts with
    /// equal indices are added in the order of the index, before x is added. Any float dtype. For integers use the
    /// op without x, [`ScatterAdd`].
    #[track_caller]
    #[must_use]
    fn index_add(&self, dim: usize, index: &Self, parts: &Self) -> Self {
        added(self, dim, index, parts, true)
    }

    /// Adds `parts` to x by index: x_(a, index_(a, n, c), c) grows by `parts_(a, n, c)`. Index and parts have one
    /// shape, that of x except for dim `dim`. Sums as in [`Indexing::index_add`].
    #[doc(alias = "scatter_reduce")]
    #[doc(alias = "segment_sum")]
    #[track_caller]
    #[must_use]
    fn scatter_add(&self, dim: usize, index: &Self, parts: &Self) -> Self {
        added(self, dim, index, parts, false)
    }

    /// One-hot encoding of these indices: a new last dim of `count` elements, 1 at the index and 0 elsewhere, in any
    /// dtype, without gradient.
    #[track_caller]
    #[must_use]
    fn one_hot(&self, count: usize, dtype: DType) -> Self {
        Self::apply_one(Rc::new(OneHot { count, dtype }), &[self])
    }

    /// Sorts along an unsharded dim; returns the values and their original indices (i64). Stable in both directions;
    /// NaN is larger than all numbers, 0 and -0 are equal.
    #[track_caller]
    #[must_use]
    fn sort(&self, dim: usize, descending: bool) -> (Self, Self) {
        pair(self, unwind(Sort::along(self.layout().ndim(), dim, descending)))
    }

    /// The indices (i64) of [`Indexing::sort`].
    #[track_caller]
    #[must_use]
    fn argsort(&self, dim: usize, descending: bool) -> Self {
        self.sort(dim, descending).1
    }

    /// The k largest elements along a dim in descending order (or the smallest in ascending order), and their indices
    /// (i64). Of equal elements the lowest indices are taken, lowest first, on every layout; NaN is larger than all numbers.
    /// Over a sharded dim a rank gathers k elements and indices for each row from each rank.
    #[doc(alias = "topk")]
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
        let error = Error::new(Kind::Shape, format!("{name}: dim {dim} is out of range for {}", x.layout()));
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
