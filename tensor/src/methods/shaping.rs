//! Shape methods of every [`Value`]: squeeze, flatten, broadcast, repeat, split, pad, roll, flip, triangles, diagonals.
//! They compose existing ops where possible.

use crate::methods::value::Value;
use crate::op::unwind;
use crate::ops::ARGUMENTS_MAX;
use crate::ops::diagonal::{DiagEmbed, Diagonal};
use crate::ops::flip::Flip;
use crate::ops::roll::Roll;
use crate::ops::slice::Pad;
use crate::ops::split::Split;
use crate::ops::sum::Expand;
use crate::ops::triangle::Triangle;
use shardgrad_dist::{Error, Kind};
use shardgrad_kernels::Dims;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// Shape and order of elements. All methods are linear, and gradients are exact.
pub trait Shaping: Value {
    /// Inserts a dim of extent 1 at position `dim`.
    #[doc(alias = "expand_dims")]
    #[track_caller]
    #[must_use]
    fn unsqueeze(&self, dim: usize) -> Self {
        let mut shape = self.shape();
        if dim > shape.len() {
            refuse(format!("unsqueeze: position {dim} is out of range for {} dims", shape.len()));
        }
        shape.insert(dim, 1);
        self.reshape(&shape)
    }

    /// Removes dim `dim`, which has extent 1.
    #[track_caller]
    #[must_use]
    fn squeeze(&self, dim: usize) -> Self {
        let mut shape = self.shape();
        match shape.get(dim) {
            Some(1) => shape.remove(dim),
            Some(n) => refuse(format!("squeeze: dim {dim} of {} has extent {n}, not 1", self.layout())),
            None => refuse(format!("squeeze: dim {dim} is out of range for {}", self.layout())),
        };
        self.reshape(&shape)
    }

    /// Merges neighbouring dims (at least one) into one.
    #[track_caller]
    #[must_use]
    fn flatten(&self, dims: Range<usize>) -> Self {
        let shape = self.shape();
        if dims.is_empty() || dims.end > shape.len() {
            refuse(format!("flatten: {dims:?} is not a range of dims of {}", self.layout()));
        }
        let merged = shape[dims.clone()].iter().product();
        let flat: Dims = shape[..dims.start].iter().copied().chain([merged]).collect();
        let flat: Dims = flat.into_iter().chain(shape[dims.end..].iter().copied()).collect();
        self.reshape(&flat)
    }

    /// Splits one dim into several whose extents multiply to its extent.
    #[track_caller]
    #[must_use]
    fn unflatten(&self, dim: usize, extents: &[usize]) -> Self {
        let shape = self.shape();
        if dim >= shape.len() {
            refuse(format!("unflatten: dim {dim} is out of range for {}", self.layout()));
        }
        let parts: Dims = shape[..dim].iter().chain(extents).chain(&shape[dim + 1..]).copied().collect();
        self.reshape(&parts)
    }

    /// Moves dim `from` to position `to`; the other dims keep their order.
    #[doc(alias = "movedim")]
    #[doc(alias = "moveaxis")]
    #[track_caller]
    #[must_use]
    fn move_dim(&self, from: usize, to: usize) -> Self {
        let ndim = self.layout().ndim();
        if from >= ndim || to >= ndim {
            refuse(format!("move_dim: {from} to {to} is out of range for {ndim} dims"));
        }
        let mut order: Dims = (0..ndim).filter(|&d| d != from).collect();
        order.insert(to, from);
        self.permute(&order)
    }

    /// Broadcasts x to a shape, aligned at the last dim, without a copy.
    #[doc(alias = "expand")]
    #[doc(alias = "expand_as")]
    #[track_caller]
    #[must_use]
    fn broadcast_to(&self, shape: &[usize]) -> Self {
        let from = self.shape();
        let fits = |lead: usize| from.iter().zip(&shape[lead..]).all(|(&n, &to)| n == to || n == 1);
        let lead = shape.len().checked_sub(from.len()).filter(|&lead| fits(lead));
        let Some(lead) = lead else {
            refuse(format!("broadcast_to: {} does not broadcast to {shape:?}", self.layout()));
        };
        let is_new = |d: usize| d < lead || from[d - lead] != shape[d];
        let new: Dims = (0..shape.len()).filter(|&d| is_new(d)).collect();
        if new.is_empty() {
            return self.clone();
        }
        let unbroadcast: Dims = (0..shape.len()).filter(|&d| !is_new(d)).map(|d| shape[d]).collect();
        let reshaped = if unbroadcast == from { self.clone() } else { self.reshape(&unbroadcast) };
        Self::apply_one(unwind(Expand::to(shape, &new)), &[&reshaped])
    }

    /// Repeats x as a whole along an unsharded dim: `a b` becomes `a b a b`.
    #[track_caller]
    #[must_use]
    fn repeat(&self, dim: usize, times: usize) -> Self {
        repeated(self, "repeat", dim, dim, times)
    }

    /// Repeats every element along a dim: `a b` becomes `a a b b`.
    #[track_caller]
    #[must_use]
    fn repeat_interleave(&self, dim: usize, times: usize) -> Self {
        repeated(self, "repeat_interleave", dim, dim + 1, times)
    }

    /// Repeats x along every dim ([`Shaping::repeat`]).
    #[track_caller]
    #[must_use]
    fn tile(&self, times: &[usize]) -> Self {
        let mut tiled = self.clone();
        if times.len() != self.layout().ndim() {
            refuse(format!("tile: {times:?} needs one number for each of {} dims", self.layout().ndim()));
        }
        for (dim, &times) in times.iter().enumerate().filter(|(_, times)| **times != 1) {
            tiled = tiled.repeat(dim, times);
        }
        tiled
    }

    /// Splits an unsharded dim into parts of these sizes, which must add up to its extent.
    #[doc(alias = "array_split")]
    #[doc(alias = "tensor_split")]
    #[track_caller]
    #[must_use]
    fn split(&self, dim: usize, sizes: &[usize]) -> Vec<Self> {
        let extent = self.shape().get(dim).copied().unwrap_or(0);
        if sizes.len() <= ARGUMENTS_MAX {
            let op = unwind(Split::along(self.layout().ndim(), extent, dim, sizes));
            return Self::apply(op, &[self]).into_iter().collect();
        }
        if sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) != Some(extent) {
            refuse(format!("split: {sizes:?} do not add up to the {extent} elements of dim {dim}"));
        }
        let groups: Vec<&[usize]> = sizes.chunks(sizes.len().div_ceil(ARGUMENTS_MAX)).collect();
        let group_sizes: Dims = groups.iter().map(|group| group.iter().sum::<usize>()).collect();
        let mut parts = Vec::new();
        for (part, group) in self.split(dim, &group_sizes).iter().zip(groups) {
            parts.extend(part.split(dim, group));
        }
        parts
    }

    /// Splits an unsharded dim into `count` parts as even as possible, part i from floor(i n / count): the same
    /// boundaries as a dim sharded over `count` ranks. 5 elements in 2 parts are 2 and 3, where `torch.chunk` and
    /// `tensor_split` give 3 and 2; [`Shaping::split`] takes explicit sizes.
    #[track_caller]
    #[must_use]
    fn chunk(&self, dim: usize, count: usize) -> Vec<Self> {
        let extent = self.shape().get(dim).copied().unwrap_or(0);
        if count == 0 {
            refuse("chunk: the number of parts is 0; pass at least 1".to_string());
        }
        let cut = |i: usize| (i as u128 * extent as u128 / count as u128) as usize;
        let sizes: Vec<usize> = (0..count).map(|i| cut(i + 1) - cut(i)).collect();
        self.split(dim, &sizes)
    }

    /// Returns `len` elements from `start` of an unsharded dim.
    #[track_caller]
    #[must_use]
    fn narrow(&self, dim: usize, start: usize, len: usize) -> Self {
        self.slice(dim, start..start.saturating_add(len))
    }

    /// Pads an unsharded dim with a value before and after its elements. Integer and bool tensors must be able to
    /// represent the value (`Kind::DType`); floats round it.
    #[doc(alias = "constant_pad")]
    #[track_caller]
    #[must_use]
    fn pad_with(&self, dim: usize, before: usize, after: usize, value: f64) -> Self {
        Self::apply_one(unwind(Pad::along(self.layout().ndim(), dim, before, after, value)), &[self])
    }

    /// Rolls an unsharded dim: y_((i + shift) mod n) = x_i.
    #[track_caller]
    #[must_use]
    fn roll(&self, dim: usize, shift: i64) -> Self {
        Self::apply_one(unwind(Roll::along(self.layout().ndim(), dim, shift)), &[self])
    }

    /// Reverses an unsharded dim.
    #[doc(alias = "reverse")]
    #[doc(alias = "rev")]
    #[track_caller]
    #[must_use]
    fn flip(&self, dim: usize) -> Self {
        Self::apply_one(unwind(Flip::along(self.layout().ndim(), dim)), &[self])
    }

    /// Upper triangle of the last two dims, zeros below. Diagonal 0 is the main diagonal, 1 the one above.
    #[track_caller]
    #[must_use]
    fn triu(&self, diagonal: i64) -> Self {
        Self::apply_one(Rc::new(Triangle { is_upper: true, diagonal }), &[self])
    }

    /// Lower triangle of the last two dims, zeros above. Diagonals as in [`Shaping::triu`].
    #[doc(alias = "causal_mask")]
    #[track_caller]
    #[must_use]
    fn tril(&self, diagonal: i64) -> Self {
        Self::apply_one(Rc::new(Triangle { is_upper: false, diagonal }), &[self])
    }

    /// A diagonal of the last two dims, which must be unsharded: y_(.., i) = x_(.., i, i + offset) (from row
    /// -offset, if negative).
    #[track_caller]
    #[must_use]
    fn diagonal(&self, offset: isize) -> Self {
        Self::apply_one(unwind(Diagonal::of(&self.shape(), offset)), &[self])
    }

    /// Square matrices with the last dim, which must be unsharded, on a diagonal, and zeros elsewhere.
    #[track_caller]
    #[must_use]
    fn diag_embed(&self, offset: isize) -> Self {
        Self::apply_one(unwind(DiagEmbed::square(&self.shape(), offset)), &[self])
    }
}

impl<V: Value> Shaping for V {}

/// Repeats x along a new dim at `at`, which is then merged with its neighbour.
#[track_caller]
fn repeated<V: Value>(x: &V, name: &str, dim: usize, at: usize, times: usize) -> V {
    let mut shape = x.shape();
    let Some(extent) = shape.get_mut(dim) else {
        refuse(format!("{name}: dim {dim} is out of range for {}", x.layout()));
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
    fn shapes_match_hand_computed_values() {
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
    fn repetitions_match_hand_computed_values() {
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
    fn parts_match_hand_computed_values() {
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
    fn repeat_interleave_keeps_the_sharding() {
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
    fn misuse_is_refused_with_the_source_line() {
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
    fn chunk_boundaries_match_shard_boundaries() {
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
