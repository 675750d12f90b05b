//! Methods that give the elements of a tensor another shape or order, or cut them out, for plain tensors and recorded
//! variables alike. Where existing ops compose to it, nothing is added to the list of ops.

use crate::op::unwind;
use crate::ops::diagonal::{Diagonal, DiagonalOf};
use crate::ops::flip::Flip;
use crate::ops::roll::Roll;
use crate::ops::slice::Pad;
use crate::ops::split::Split;
use crate::ops::sum::Expand;
use crate::ops::triangle::Triangle;
use crate::value::Value;
use shardgrad_dist::{Error, Kind};
use shardgrad_kernels::Dims;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// The most parts that one op cuts a dim into; more are cut one by one.
const PARTS_MAX: usize = 16;

/// Shapes and orders: nothing is computed, zeros and copies aside. All are linear, and gradients go back exactly.
pub trait Shaping: Value {
    /// x with a dim of extent 1 put in before dim `dim` (at the end, if there is none).
    #[track_caller]
    #[must_use]
    fn unsqueeze(&self, dim: usize) -> Self {
        let mut shape = self.shape();
        if dim > shape.len() {
            refuse(format!("unsqueeze: no place {dim} in a tensor of {} dims", shape.len()));
        }
        shape.insert(dim, 1);
        self.reshape(&shape)
    }

    /// x without dim `dim`, which has extent 1.
    #[track_caller]
    #[must_use]
    fn squeeze(&self, dim: usize) -> Self {
        let mut shape = self.shape();
        match shape.get(dim) {
            Some(1) => shape.remove(dim),
            Some(n) => refuse(format!("squeeze: dim {dim} of {} has {n} elements, not one", self.layout())),
            None => refuse(format!("squeeze: there is no dim {dim} in {}", self.layout())),
        };
        self.reshape(&shape)
    }

    /// Some neighbouring dims (at least one) seen as one.
    #[track_caller]
    #[must_use]
    fn flatten(&self, dims: Range<usize>) -> Self {
        let shape = self.shape();
        if dims.is_empty() || dims.end > shape.len() {
            refuse(format!("flatten: {dims:?} are no dims of {}", self.layout()));
        }
        let merged = shape[dims.clone()].iter().product();
        let flat: Dims = shape[..dims.start].iter().copied().chain([merged]).collect();
        let flat: Dims = flat.into_iter().chain(shape[dims.end..].iter().copied()).collect();
        self.reshape(&flat)
    }

    /// One dim seen as several, whose extents have its extent as their product.
    #[track_caller]
    #[must_use]
    fn unflatten(&self, dim: usize, extents: &[usize]) -> Self {
        let shape = self.shape();
        if dim >= shape.len() {
            refuse(format!("unflatten: there is no dim {dim} in {}", self.layout()));
        }
        let parts: Dims = shape[..dim].iter().chain(extents).chain(&shape[dim + 1..]).copied().collect();
        self.reshape(&parts)
    }

    /// Dim `from` moved to place `to`; the others keep their order.
    #[track_caller]
    #[must_use]
    fn move_dim(&self, from: usize, to: usize) -> Self {
        let ndim = self.layout().ndim();
        if from >= ndim || to >= ndim {
            refuse(format!("move_dim: from {from} to {to} in a tensor of {ndim} dims"));
        }
        let mut order: Dims = (0..ndim).filter(|&d| d != from).collect();
        order.insert(to, from);
        self.permute(&order)
    }

    /// x seen in a longer shape: dims are matched from the right; one that is missing or has extent 1 is repeated, without
    /// a copy.
    #[track_caller]
    #[must_use]
    fn broadcast_to(&self, shape: &[usize]) -> Self {
        let from = self.shape();
        let fits = |lead: usize| from.iter().zip(&shape[lead..]).all(|(&n, &to)| n == to || n == 1);
        let lead = shape.len().checked_sub(from.len()).filter(|&lead| fits(lead));
        let Some(lead) = lead else {
            refuse(format!("broadcast_to: {} does not repeat to {shape:?}", self.layout()));
        };
        let is_new = |d: usize| d < lead || from[d - lead] != shape[d];
        let new: Dims = (0..shape.len()).filter(|&d| is_new(d)).collect();
        if new.is_empty() {
            return self.clone();
        }
        let kept: Dims = (0..shape.len()).filter(|&d| !is_new(d)).map(|d| shape[d]).collect();
        let bare = if kept == from { self.clone() } else { self.reshape(&kept) };
        Self::apply_one(unwind(Expand::to(shape, &new)), &[&bare])
    }

    /// x repeated as a whole along a dim that no axis splits: `a b` becomes `a b a b`.
    #[track_caller]
    #[must_use]
    fn repeat(&self, dim: usize, times: usize) -> Self {
        repeated(self, "repeat", dim, dim, times)
    }

    /// Every element repeated along a dim: `a b` becomes `a a b b`.
    #[track_caller]
    #[must_use]
    fn repeat_interleave(&self, dim: usize, times: usize) -> Self {
        repeated(self, "repeat_interleave", dim, dim + 1, times)
    }

    /// [`Shaping::repeat`] along every dim.
    #[track_caller]
    #[must_use]
    fn tile(&self, times: &[usize]) -> Self {
        let mut tiled = self.clone();
        if times.len() != self.layout().ndim() {
            refuse(format!("tile: {times:?} for a tensor of {} dims", self.layout().ndim()));
        }
        for (dim, &times) in times.iter().enumerate().filter(|(_, times)| **times != 1) {
            tiled = tiled.repeat(dim, times);
        }
        tiled
    }

    /// Parts of these sizes, which add up to the extent, of a dim that no axis splits.
    #[track_caller]
    #[must_use]
    fn split(&self, dim: usize, sizes: &[usize]) -> Vec<Self> {
        let extent = self.shape().get(dim).copied().unwrap_or(0);
        if sizes.len() <= PARTS_MAX {
            let op = unwind(Split::along(self.layout().ndim(), extent, dim, sizes));
            return Self::apply(op, &[self]).into_iter().collect();
        }
        if sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) != Some(extent) {
            refuse(format!("split: {sizes:?} do not add up to the {extent} elements of dim {dim}"));
        }
        let mut parts = Vec::new();
        let mut start = 0;
        for &size in sizes {
            parts.push(self.slice(dim, start..start + size));
            start += size;
        }
        parts
    }

    /// `count` parts of a dim that no axis splits, part i from floor(i n / count) on: as even as can be, and cut where an axis
    /// of so many ranks would split the dim. 5 elements in 2 parts are 2 and 3, where `torch.chunk` and `tensor_split` give 3
    /// and 2; [`Shaping::split`] takes the sizes.
    #[track_caller]
    #[must_use]
    fn chunk(&self, dim: usize, count: usize) -> Vec<Self> {
        let extent = self.shape().get(dim).copied().unwrap_or(0);
        if count == 0 {
            refuse("chunk: into no parts".to_string());
        }
        let cut = |i: usize| (i as u128 * extent as u128 / count as u128) as usize;
        let sizes: Vec<usize> = (0..count).map(|i| cut(i + 1) - cut(i)).collect();
        self.split(dim, &sizes)
    }

    /// `len` elements from `start` on, of a dim that no axis splits.
    #[track_caller]
    #[must_use]
    fn narrow(&self, dim: usize, start: usize, len: usize) -> Self {
        self.slice(dim, start..start.saturating_add(len))
    }

    /// A value before and behind the elements of a dim that no axis splits. A tensor of integers or truth values must hold
    /// the value (`Kind::DType`); to floats it is rounded.
    #[track_caller]
    #[must_use]
    fn pad_with(&self, dim: usize, before: usize, after: usize, value: f64) -> Self {
        Self::apply_one(unwind(Pad::along(self.layout().ndim(), dim, before, after, value)), &[self])
    }

    /// y_((i + shift) mod n) = x_i along a dim that no axis splits.
    #[track_caller]
    #[must_use]
    fn roll(&self, dim: usize, shift: i64) -> Self {
        Self::apply_one(unwind(Roll::along(self.layout().ndim(), dim, shift)), &[self])
    }

    /// A dim that no axis splits in the opposite order.
    #[track_caller]
    #[must_use]
    fn flip(&self, dim: usize) -> Self {
        Self::apply_one(unwind(Flip::along(self.layout().ndim(), dim)), &[self])
    }

    /// The last two dims as matrices: what lies on the diagonal or above it; zeros below. Diagonal 0 is the main one, 1 the
    /// one above it.
    #[track_caller]
    #[must_use]
    fn triu(&self, diagonal: i64) -> Self {
        Self::apply_one(Rc::new(Triangle { is_upper: true, diagonal }), &[self])
    }

    /// The last two dims as matrices: what lies on the diagonal or below it; zeros above. Diagonals as in
    /// [`Shaping::triu`].
    #[track_caller]
    #[must_use]
    fn tril(&self, diagonal: i64) -> Self {
        Self::apply_one(Rc::new(Triangle { is_upper: false, diagonal }), &[self])
    }

    /// y_(.., i) = x_(.., i, i + offset) (from row -offset on, if negative): a diagonal of the last two dims, which no axis
    /// splits.
    #[track_caller]
    #[must_use]
    fn diagonal(&self, offset: isize) -> Self {
        Self::apply_one(unwind(Diagonal::of(&self.shape(), offset)), &[self])
    }

    /// Square matrices with the last dim, which no axis splits, on a diagonal, and zeros elsewhere.
    #[track_caller]
    #[must_use]
    fn diagonal_of(&self, offset: isize) -> Self {
        Self::apply_one(unwind(DiagonalOf::square(&self.shape(), offset)), &[self])
    }
}

impl<V: Value> Shaping for V {}

/// x with a new dim at `at`, along which it is repeated, and which is then merged with the dim next to it.
#[track_caller]
fn repeated<V: Value>(x: &V, name: &str, dim: usize, at: usize, times: usize) -> V {
    let mut shape = x.shape();
    let Some(extent) = shape.get_mut(dim) else {
        refuse(format!("{name}: there is no dim {dim} in {}", x.layout()));
    };
    *extent = extent.saturating_mul(times);
    x.expand(at, times).reshape(&shape)
}

/// Unwinds to the rank boundary.
#[track_caller]
fn refuse(why: String) -> ! {
    Error::new(Kind::Shape, why).at(Location::caller()).raise()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, Rank, Result, World};

    fn two_by_three(rank: &Rank) -> Result<Tensor> {
        Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])
    }

    #[test]
    fn shapes_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = two_by_three(rank)?;
            assert_eq!(x.unsqueeze(1).shape().as_slice(), [2, 1, 3]);
            assert_eq!(x.unsqueeze(2).squeeze(2).shape().as_slice(), [2, 3]);
            assert_eq!(x.unsqueeze(0).flatten(0..2).shape().as_slice(), [2, 3]);
            assert_eq!(x.flatten(0..2).unflatten(0, &[3, 2]).shape().as_slice(), [3, 2]);
            assert_eq!(x.unsqueeze(0).move_dim(2, 0).shape().as_slice(), [3, 1, 2]);
            assert_eq!(x.move_dim(1, 0).to_host::<i64>()?, [1, 4, 2, 5, 3, 6]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn repetitions_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 1], &[1.0f32, 2.0])?;
            assert_eq!(
                x.broadcast_to(&[2, 2, 2]).to_host::<f32>()?,
                [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]
            );
            assert_eq!(x.repeat(0, 2).to_host::<f32>()?, [1.0, 2.0, 1.0, 2.0]);
            assert_eq!(x.repeat_interleave(0, 2).to_host::<f32>()?, [1.0, 1.0, 2.0, 2.0]);
            assert_eq!(x.repeat(0, 0).shape().as_slice(), [0, 1]);
            assert_eq!(x.tile(&[2, 2]).to_host::<f32>()?, [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn parts_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = two_by_three(rank)?;
            let halves = x.chunk(1, 2);
            assert_eq!(halves[0].to_host::<i64>()?, [1, 4]);
            assert_eq!(halves[1].to_host::<i64>()?, [2, 3, 5, 6]);
            assert_eq!(x.narrow(1, 1, 2).to_host::<i64>()?, [2, 3, 5, 6]);
            let many = x.flatten(0..2).repeat(0, 3).split(0, &[1; 18]);
            assert_eq!((many.len(), many[17].to_host::<i64>()?), (18, vec![6]));
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn elements_repeated_in_place_keep_the_split() {
        let mesh = Mesh::parse("a=2").unwrap();
        World::run(mesh.clone(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse("f32[3@a, 1]", &mesh)?)?;
            assert_eq!(x.repeat_interleave(0, 2).layout().to_string(), "f32[6:2@a, 1]");
            assert_eq!(x.broadcast_to(&[2, 3, 4]).layout().to_string(), "f32[2, 3@a, 4]");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn what_has_no_meaning_is_refused_with_the_line() {
        let cases: [fn(&Tensor) -> Tensor; 8] = [
            |x| x.squeeze(0),
            |x| x.squeeze(2),
            |x| x.unsqueeze(3),
            |x| x.flatten(1..3),
            |x| x.broadcast_to(&[4, 3]),
            |x| x.move_dim(0, 2),
            |x| x.repeat(2, 2),
            |x| x.chunk(1, 0).remove(0),
        ];
        for case in cases {
            let error =
                World::run(Mesh::single(), |rank| two_by_three(rank).map(|x| case(&x).layout().to_string()))
                    .unwrap_err();
            assert_eq!(error.kind(), Kind::Shape, "{error}");
            assert!(error.site().is_some_and(|s| s.file().ends_with("shaping.rs")), "{error}");
        }
    }

    #[test]
    fn parts_are_cut_where_shards_are() {
        let mesh = Mesh::parse("a=3").unwrap();
        World::run(mesh.clone(), |rank| {
            for extent in 0..9 {
                let x = Tensor::arange(rank, &Layout::parse(&format!("i64[{extent}]"), &mesh)?, 0.0, 1.0)?;
                let split = Layout::parse(&format!("i64[{extent}@a]"), &mesh)?;
                let shard: Vec<i64> = split.range(0, rank.coordinates()).map(|i| i as i64).collect();
                assert_eq!(x.chunk(0, 3)[rank.index()].to_host::<i64>()?, shard, "{extent} elements");
            }
            Ok(())
        })
        .unwrap();
    }
}
