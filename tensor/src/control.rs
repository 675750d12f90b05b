//! The one control word of a step: a few numbers that all ranks add up.

use crate::context::Context;
use crate::piece::{Piece, launch};
use crate::state::State;
use crate::tensor::Tensor;
use crate::watch::Watch;
use shardgrad_dist::{Axis, AxisSet, Call, Error, Kind, Origin, Phase, Rank, ReduceOp, Result};
use shardgrad_kernels::host_vec::try_copied;
use shardgrad_kernels::op::reduce::SUM_SQUARES_MANY;
use shardgrad_kernels::{DType, Strides, download};
use std::panic::Location;

/// The sums of each number over all ranks of the world (of a slice: of the world it is cut from), the same bits on every rank: one all_reduce over all axes, none
/// on a mesh of one rank. Every rank calls this together with as many numbers. On the null back end, which has no
/// numbers, the call is recorded and the rank's own come back.
///
/// # Errors
/// What the collective reports.
pub fn world_sum(rank: &Rank, values: &[f64], site: &'static Location<'static>) -> Result<Vec<f64>> {
    let rank = rank.world();
    let mesh = rank.mesh();
    if mesh.num_ranks() == 1 {
        return Ok(values.to_vec());
    }
    let sums = sum_over_world(rank, Piece::upload(rank, &[values.len()], values)?, site)?;
    Ok(if sums.buffer.has_memory() { sums.front(rank, values.len())? } else { values.to_vec() })
}

/// The same of numbers that lie on the device, without waiting for them: f64, row-major from the first byte of their memory.
pub(crate) fn sum_over_world(rank: &Rank, own: Piece, site: &'static Location<'static>) -> Result<Piece> {
    let rank = rank.world();
    let mesh = rank.mesh();
    if mesh.num_ranks() == 1 {
        return Ok(own);
    }
    let axes = mesh.axes().filter(|a| mesh.size(*a) > 1).collect();
    let context = Context::of(rank);
    let path = context.path();
    let call =
        Call { axes, dtype: DType::F64, phase: Phase::Control, path: &path, origin: Origin::default(), site };
    let sums = rank.all_reduce(&call, &own.buffer, own.numel(), ReduceOp::Sum)?;
    Ok(Piece::received(sums, DType::F64, &own.view.shape))
}

/// Hands `len` bytes on along an axis, from the rank at place `from` to the one at place `to`; `bytes` is read on the first of
/// them, and comes out on the second. All other ranks have nothing to do and get nothing. Every rank calls this together.
///
/// # Errors
/// What the transport reports.
pub fn pass_bytes(
    rank: &Rank,
    axis: Axis,
    [from, to]: [usize; 2],
    bytes: &[u8],
    len: usize,
    site: &'static Location<'static>,
) -> Result<Option<Vec<u8>>> {
    let here = rank.coordinate(axis);
    if from == to {
        let copy = || try_copied(bytes, "a message to this rank itself");
        return Ok((here == to).then(copy).transpose()?);
    }
    let axes = AxisSet::one(axis);
    let call =
        Call { axes, dtype: DType::U8, phase: Phase::Control, path: "", origin: Origin::default(), site };
    if here == from {
        rank.send(&call, &Piece::upload(rank, &[bytes.len()], bytes)?.buffer, len, to)?;
    }
    if here != to {
        return Ok(None);
    }
    let received = rank.recv(&call, len, from)?;
    Ok(Some(download(&**rank.backend(), &received, len)?))
}

/// The op at which the first number that is not finite appeared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstNotFinite {
    /// Labelled lines of an error: the op, its place in the model, the line that asked for it, the rank.
    pub lines: Vec<(&'static str, String)>,
    /// Whether the op was given a NaN that no op had made: a parameter or an input holds it.
    pub is_given_nan: bool,
}

/// Runs a piece of the program, such as a step again that went wrong, with every op watched. Returns the op that made the
/// first number that is not finite: the same on every rank, and `None` if no op made one. Two all_reduces over all axes after
/// `replay`; every rank calls this together and applies the same ops in it.
///
/// # Errors
/// What `replay` and the collectives report.
#[track_caller]
pub fn first_not_finite(rank: &Rank, replay: impl FnOnce() -> Result<()>) -> Result<Option<FirstNotFinite>> {
    let site = Location::caller();
    Watch::begin(rank);
    let done = replay();
    let found = Watch::end(rank);
    done?;
    let text = found.as_ref().map(|f| f.lines.join("\n")).unwrap_or_default();
    // Of each rank of the whole world: which op it was, counted from 1, where what is not a number came from, the length of the
    // text, and whether the op was given a NaN.
    let world = rank.world();
    let (num_ranks, me) = (world.mesh().num_ranks(), world.index());
    let mut word = vec![0.0; 4 * num_ranks];
    if let Some(found) = &found {
        let source = f64::from(found.source as u8);
        let is_given_nan = f64::from(u8::from(found.is_given_nan));
        let own = [(found.number + 1) as f64, source, text.len() as f64, is_given_nan];
        word[4 * me..4 * me + 4].copy_from_slice(&own);
    }
    let word = world_sum(world, &word, site)?;
    // An op that made one comes before all that were given one: those may stand behind it in a pipeline.
    let key = |r: &usize| (word[4 * r + 1] as u64, word[4 * r] as u64, *r);
    let Some(first) = (0..num_ranks).filter(|r| word[4 * r] > 0.0).min_by_key(key) else { return Ok(None) };
    let byte = |i: usize| if me == first { f64::from(text.as_bytes()[i]) } else { 0.0 };
    let bytes: Vec<f64> = (0..word[4 * first + 2] as usize).map(byte).collect();
    let bytes = world_sum(world, &bytes, site)?.into_iter().map(|b| b as u8).collect();
    let text = String::from_utf8(bytes).map_err(|e| Error::new(Kind::Collective, e.to_string()))?;
    let lines = ["first", "at", "asked for", "rank"].into_iter().zip(text.lines().map(String::from));
    let lines = lines.filter(|(_, text)| !text.is_empty()).collect();
    Ok(Some(FirstNotFinite { lines, is_given_nan: word[4 * first + 3] > 0.0 }))
}

/// Tells the watch of [`first_not_finite`] what another stage has sent, so that who was given it is not blamed for it.
///
/// # Errors
/// What the device reports.
pub fn note_sent(tensor: &Tensor) -> Result<()> {
    let rank = tensor.rank();
    if Context::of(rank).is_watched() { Watch::look_at_sent(rank, tensor.piece()) } else { Ok(()) }
}

impl Tensor {
    /// This rank's part of a scalar, such that the parts of all ranks of its mesh add up to it. No communication; 0 on the
    /// null back end.
    ///
    /// # Errors
    /// `Kind::Shape` if this is no scalar.
    pub fn local_part_once(&self) -> Result<f64> {
        let counts = self.counts_once()?;
        let value = self.to_local_f64()?.first().copied().unwrap_or(0.0);
        Ok(if counts { value } else { 0.0 })
    }

    /// Whether this rank's part of a scalar counts in [`Tensor::local_part_once`].
    pub(crate) fn counts_once(&self) -> Result<bool> {
        let (layout, rank) = (self.layout(), self.rank());
        if layout.ndim() != 0 {
            return Err(Error::new(Kind::Shape, format!("{layout} is no scalar")));
        }
        let counts = |a| layout.state(a) == State::Partial || rank.coordinate(a) == 0;
        Ok(layout.mesh().axes().all(counts))
    }
}

/// This rank's share of the sum of the squares of all elements of some tensors, in f64: added up over the world, every global
/// element counts once. Copies count where this rank stands at 0 on every axis that does not split the tensor. The sums of
/// neighbours of one dtype are one launch, and all of them are one copy to the host; they are added up in the order of the tensors.
/// No communication; 0 on the null back end.
///
/// # Errors
/// `Kind::Layout` for a pending sum, whose squares are not known before it is completed.
pub fn local_sum_squares_once<'a>(rank: &Rank, tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<f64> {
    let counted = counted_once(rank, tensors)?;
    let mut sums = Piece::alloc(rank, DType::F64, &[counted.len()])?;
    sum_squares(rank, &counted, &mut sums)?;
    let sums: Vec<f64> = if counted.is_empty() { Vec::new() } else { sums.front(rank, counted.len())? };
    Ok(sums.iter().fold(0.0, |all, sum| all + sum))
}

/// What counts on this rank where every global element counts once: pieces without gaps.
pub(crate) fn counted_once<'a>(
    rank: &Rank,
    tensors: impl IntoIterator<Item = &'a Tensor>,
) -> Result<Vec<Piece>> {
    let mut counted = Vec::new();
    for tensor in tensors {
        let (layout, own) = (tensor.layout(), tensor.rank());
        if !layout.partial().is_empty() {
            return Err(Error::new(Kind::Layout, format!("the squares of a pending sum, {layout}"))
                .detail("help", "complete it first, or bring a gradient to its stored layout"));
        }
        let split = layout.sharded_axes();
        if layout.mesh().axes().all(|a| split.contains(a) || own.coordinate(a) == 0) {
            counted.push(tensor.piece().contiguous(rank)?);
        }
    }
    Ok(counted)
}

/// The sum of the squares of each piece, to the front of f64 memory; neighbours of one dtype are one launch.
pub(crate) fn sum_squares(rank: &Rank, pieces: &[Piece], sums: &mut Piece) -> Result<()> {
    let (whole, mut filled) = (sums.view.clone(), 0);
    for alike in pieces.chunk_by(|a, b| a.dtype == b.dtype) {
        let inputs: Vec<&Piece> = alike.iter().collect();
        sums.view = Strides::contiguous(&[alike.len()]).at(filled).into();
        launch(rank, &SUM_SQUARES_MANY, &inputs, &mut [&mut *sums], &[])?;
        filled += alike.len();
    }
    sums.view = whole;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn every_element_counts_once_on_every_layout() {
        let data: Vec<f32> = (0..15).map(|i| i as f32).collect();
        let wide: Vec<f64> = data.iter().map(|x| f64::from(*x)).collect();
        let expected: f64 = data.iter().map(|x| f64::from(*x).powi(2)).sum();
        for mesh in ["", "a=1", "a=3", "a=2,b=2"] {
            for text in
                ["f32[5, 3]", "f32[5@a, 3]", "f32[5, 3@a]", "f32[5, 3] ~a", "f32[5@a, 3@b]", "f32[5@b@a, 3]"]
            {
                let mesh = Mesh::parse(mesh).unwrap();
                let Ok(layout) = Layout::parse(text, &mesh) else { continue };
                World::run(mesh, |rank| {
                    let x = Tensor::from_global(rank, &layout, &data)?;
                    let wide = Tensor::from_global(rank, &layout.with_dtype(DType::F64), &wide)?;
                    // Of one tensor, and of several of two dtypes.
                    for (tensors, times) in [(vec![&x], 1.0), (vec![&x, &wide, &x, &x], 4.0)] {
                        let word = [local_sum_squares_once(rank, tensors)?, 1.0];
                        let sums = world_sum(rank, &word, Location::caller())?;
                        assert_eq!(sums, [times * expected, rank.mesh().num_ranks() as f64], "{layout}");
                    }
                    assert_eq!(local_sum_squares_once(rank, [])?, 0.0);
                    Ok(())
                })
                .unwrap();
            }
        }
    }

    #[test]
    fn squares_are_added_up_in_the_order_of_the_tensors() {
        World::run(Mesh::single(), |rank| {
            let numbers = [(DType::F64, 1e8), (DType::F32, 1e8), (DType::F64, 1.5), (DType::F32, 1.5)];
            let full = |(dtype, x)| Tensor::full(rank, &Layout::invariant(rank.mesh(), dtype, &[]), x);
            let tensors = numbers.into_iter().map(full).collect::<Result<Vec<Tensor>>>()?;
            let sum = |order: [usize; 4]| order.iter().fold(0.0, |sum, &i| sum + numbers[i].1 * numbers[i].1);
            assert_eq!(local_sum_squares_once(rank, &tensors)?, sum([0, 1, 2, 3]));
            for other in [[0, 2, 1, 3], [1, 3, 0, 2]] {
                assert_ne!(sum(other), sum([0, 1, 2, 3]), "the numbers tell orders apart");
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_pending_sum_has_no_squares_yet() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse("f32[4] +a", rank.mesh())?)?;
            assert_eq!(local_sum_squares_once(rank, [&x]).unwrap_err().kind(), Kind::Layout);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_world_of_one_does_not_call() {
        World::run(Mesh::parse("a=1").unwrap(), |rank| {
            rank.trace().enable();
            assert_eq!(world_sum(rank, &[2.5], Location::caller())?, [2.5]);
            assert!(rank.trace().take().is_empty());
            Ok(())
        })
        .unwrap();
        World::new(Mesh::parse("a=2").unwrap())
            .dry_run(1, |rank| {
                assert_eq!(world_sum(rank, &[2.5], Location::caller())?, [2.5]);
                assert_eq!(rank.trace().take().len(), 1);
                Ok(())
            })
            .unwrap();
    }
}
