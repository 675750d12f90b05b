//! The gradient norm: this rank's share of a sum of squares, in which every global element counts once.

use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::placement::Placement;
use crate::tensor::Tensor;
use crate::training_step::control::world_sum;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::reduce::SUM_SQUARES_MANY;
use shardgrad_kernels::{DType, Strides, SumTree};
use std::ops::Range;
use std::panic::Location;

impl Tensor {
    /// Returns this rank's share of a scalar: the shares of all ranks of its mesh add up to the value. No
    /// communication; 0 on the null back end.
    ///
    /// # Errors
    /// `Kind::Shape` if the tensor is not a scalar.
    pub fn local_contribution(&self) -> Result<f64> {
        let counts = self.contributes()?;
        let value = self.to_local_f64()?.first().copied().unwrap_or(0.0);
        Ok(if counts { value } else { 0.0 })
    }

    /// Whether this rank's share of a scalar is its local value ([`Tensor::local_contribution`]) rather than 0.
    pub(crate) fn contributes(&self) -> Result<bool> {
        let layout = self.layout();
        match layout.ndim() {
            0 => Ok(self.is_counted_here()),
            _ => Err(Error::new(Kind::Shape, format!("{layout} is not a scalar"))),
        }
    }

    /// Whether this rank's local tensor is a term of the value of a tensor that no axis shards: a partial sum, or the first of the
    /// copies.
    pub(crate) fn is_counted_here(&self) -> bool {
        let (layout, rank) = (self.layout(), self.rank());
        let counts = |a| layout.placement(a) == Placement::Partial || rank.coordinate(a) == 0;
        layout.mesh().axes().all(counts)
    }
}

/// Returns this rank's share of the sum of the squares of all elements of some tensors, in f64: summed over the world,
/// every global element counts once. Of replicas only the rank at coordinate 0 of every axis that does not shard the
/// tensor counts. Neighbours of one dtype take one launch, and all sums one copy to the host; they are added in the
/// order of the tensors. No communication; 0 on the null back end.
///
/// # Errors
/// `Kind::Layout` for a partial sum, whose squares are unknown before it is reduced.
#[doc(alias = "get_total_norm")]
#[doc(alias = "grad_norm")]
#[doc(alias = "clip_grad_norm_")]
#[doc(alias = "global_norm")]
pub fn local_sum_squares<'a>(rank: &Rank, tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<f64> {
    let counted = contributing_locals(rank, tensors)?;
    let mut sums = LocalTensor::alloc(rank, DType::F64, &[counted.len()])?;
    sum_squares(rank, &counted, &mut sums)?;
    let sums: Vec<f64> = if counted.is_empty() { Vec::new() } else { sums.download(rank, counted.len())? };
    Ok(sums.iter().fold(0.0, |all, sum| all + sum))
}

/// Returns the local tensors, without gaps, that count on this rank so that every global element counts once.
pub(crate) fn contributing_locals<'a>(
    rank: &Rank,
    tensors: impl IntoIterator<Item = &'a Tensor>,
) -> Result<Vec<LocalTensor>> {
    let mut counted = Vec::new();
    for tensor in tensors {
        if squares_count_here(tensor)? {
            counted.push(tensor.local().contiguous(rank)?);
        }
    }
    Ok(counted)
}

/// Whether this rank counts the elements that it holds: all axes that do not shard the tensor have copies, of which the first counts.
fn squares_count_here(tensor: &Tensor) -> Result<bool> {
    let (layout, own) = (tensor.layout(), tensor.rank());
    if !layout.partial().is_empty() {
        let text = format!("the norm of a partial sum is unknown before it is reduced: {layout}");
        return Err(Error::new(Kind::Layout, text)
            .detail("help", "redistribute the tensor to an invariant or sharded layout first"));
    }
    let split = layout.sharded_axes();
    Ok(layout.mesh().axes().all(|a| split.contains(a) || own.coordinate(a) == 0))
}

/// Returns the sum of the squares of all elements of some gradients in f64, with the same bits on every mesh: each dim of a gradient is
/// cut at the leaves of a tree ([`SumTree::leaf_range`]), and the sums of the blocks, each by one rank and over its elements in
/// row-major order, are added in the order of the gradients and of their blocks. A gradient is given by its global shape; the tensor is
/// `None` where other ranks count it. One all-reduce of a number for each block, of which one rank has a term that is not 0, and so
/// exact. A collective call: every rank of the world passes as many gradients, in the same order. 0 on the null back end.
///
/// # Errors
/// `Kind::Layout` for a partial sum; `Kind::Config` for a shard that holds a part of a block; errors of the collective.
pub fn canonical_sum_squares<'a>(
    rank: &Rank,
    tree: SumTree,
    gradients: impl IntoIterator<Item = (&'a [usize], Option<&'a Tensor>)>,
    site: &'static Location<'static>,
) -> Result<f64> {
    let mut sums: Vec<f64> = Vec::new();
    for (shape, tensor) in gradients {
        let leaves = |&extent: &usize| {
            let ranges = (0..tree.num_leaves()).map(|leaf| tree.leaf_range(extent, leaf));
            ranges.filter(|range| !range.is_empty()).collect::<Vec<Range<usize>>>()
        };
        let leaves: Vec<Vec<Range<usize>>> = shape.iter().map(leaves).collect();
        let first = sums.len();
        sums.resize(first + leaves.iter().map(Vec::len).product::<usize>(), 0.0);
        if let Some(tensor) = tensor
            && squares_count_here(tensor)?
        {
            for (block, sum) in block_squares(tensor, tree.num_leaves(), &leaves)? {
                sums[first + block] = sum;
            }
        }
    }
    Ok(world_sum(rank, &sums, site)?.iter().fold(0.0, |all, sum| all + sum))
}

/// Checks that the shards of a layout hold whole blocks of [`canonical_sum_squares`] over a number of leaves.
///
/// # Errors
/// `Kind::Config` for a dim that is sharded over a number of ranks that does not divide the leaves.
pub fn check_norm_leaves(layout: &Layout, num_leaves: usize) -> Result<()> {
    let shards = layout.dims().iter().map(|dim| dim.axes.num_shards(layout.mesh()));
    let Some(shards) = shards.filter(|shards| !num_leaves.is_multiple_of(*shards)).max() else {
        return Ok(());
    };
    let text = format!(
        "{shards} shards of {layout} do not hold whole leaves of a gradient norm of {num_leaves} leaves"
    );
    let fitting = SumTree::new(num_leaves).num_leaves_for(shards);
    let help = format!(
        "use {fitting} leaves (--sum-leaves), or shard over a number of ranks that divides {num_leaves}; a run on other meshes has the \
         same bits only with the same number"
    );
    Err(Error::new(Kind::Config, text).detail("help", help))
}

/// Returns the sums of squares of the blocks that this rank holds, with their numbers in row-major order. `leaves` are the ranges of
/// the blocks in each dim.
fn block_squares(
    tensor: &Tensor,
    num_leaves: usize,
    leaves: &[Vec<Range<usize>>],
) -> Result<Vec<(usize, f64)>> {
    let (rank, layout, local) = (tensor.rank(), tensor.layout(), tensor.local());
    check_norm_leaves(layout, num_leaves)?;
    let mut blocks = vec![(0, local.view.as_ref().clone())];
    for (dim, leaves) in leaves.iter().enumerate() {
        let own = layout.range(dim, rank.coordinates());
        let is_cut = |leaf: &Range<usize>| {
            let common = leaf.start.max(own.start)..leaf.end.min(own.end);
            !common.is_empty() && common != *leaf
        };
        if leaves.iter().any(is_cut) {
            let text =
                format!("the shards of dim {dim} of {layout} hold parts of its {} leaves", leaves.len());
            let help = "shard over a number of ranks that divides the leaves of the gradient norm";
            return Err(Error::new(Kind::Config, text).detail("help", help));
        }
        let held =
            leaves.iter().enumerate().filter(|(_, leaf)| own.start <= leaf.start && leaf.end <= own.end);
        let held: Vec<(usize, Range<usize>)> =
            held.map(|(at, leaf)| (at, leaf.start - own.start..leaf.end - own.start)).collect();
        let narrowed = |(number, view): &(usize, Strides)| {
            let (number, view) = (number * leaves.len(), view.clone());
            let narrow = move |(at, leaf): &(usize, Range<usize>)| {
                (number + at, view.narrow(dim, leaf.start, leaf.end))
            };
            held.iter().map(narrow).collect::<Vec<_>>()
        };
        blocks = blocks.iter().flat_map(narrowed).collect();
    }
    if blocks.is_empty() || rank.is_dry_run() {
        return Ok(Vec::new());
    }
    let contiguous = blocks.iter().map(|(_, view)| local.with_view(view.clone()).contiguous(rank));
    let contiguous = contiguous.collect::<Result<Vec<LocalTensor>>>()?;
    let mut sums = LocalTensor::alloc(rank, DType::F64, &[blocks.len()])?;
    sum_squares(rank, &contiguous, &mut sums)?;
    let sums: Vec<f64> = sums.download(rank, blocks.len())?;
    Ok(blocks.into_iter().map(|(number, _)| number).zip(sums).collect())
}

/// Writes the sum of squares of each local tensor to the front of f64 memory; neighbours of one dtype take one launch.
pub(crate) fn sum_squares(rank: &Rank, locals: &[LocalTensor], sums: &mut LocalTensor) -> Result<()> {
    let (whole, mut filled) = (sums.view.clone(), 0);
    for alike in locals.chunk_by(|a, b| a.dtype == b.dtype) {
        let inputs: Vec<&LocalTensor> = alike.iter().collect();
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
    use crate::training_step::control::world_sum;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn sum_squares_counts_every_global_element_once() {
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
                    // Of one tensor, and of several tensors with two dtypes.
                    for (tensors, times) in [(vec![&x], 1.0), (vec![&x, &wide, &x, &x], 4.0)] {
                        let word = [local_sum_squares(rank, tensors)?, 1.0];
                        let sums = world_sum(rank, &word, Location::caller())?;
                        assert_eq!(sums, [times * expected, rank.mesh().num_ranks() as f64], "{layout}");
                    }
                    assert_eq!(local_sum_squares(rank, [])?, 0.0);
                    Ok(())
                })
                .unwrap();
            }
        }
    }

    /// The sum of the squares of a tensor of 11 x 7 x 3 numbers and of a vector of 5 on a mesh.
    fn canonical_on(mesh: &str, layouts: [&str; 2], dtype: DType) -> Vec<u64> {
        let mesh = Mesh::parse(mesh).unwrap();
        let numbers = |i: usize| ((i * 7919 % 1013) as f64 - 500.0) * 1.37_f64.powi((i % 23) as i32 - 11);
        let shapes = [&[11, 7, 3][..], &[5]];
        let layouts = layouts.map(|text| Layout::parse(text, &mesh).unwrap().with_dtype(dtype));
        let sums = World::run(mesh, |rank| {
            let tensor = |layout: &Layout| {
                let all: Vec<f32> = (0..layout.numel()).map(|i| numbers(i) as f32).collect();
                let wide = layout.with_dtype(DType::F32);
                let local = Tensor::from_global(rank, &wide, &all)?.local().to_dtype(rank, dtype)?;
                Ok::<_, Error>(Tensor::assemble(rank, layout.clone(), local))
            };
            let tensors = [tensor(&layouts[0])?, tensor(&layouts[1])?];
            let terms = shapes.into_iter().zip(tensors.iter().map(Some));
            canonical_sum_squares(rank, SumTree::new(6), terms, Location::caller()).map(f64::to_bits)
        });
        sums.unwrap()
    }

    #[test]
    fn canonical_sum_squares_has_the_bits_of_one_rank_for_every_layout() {
        for dtype in [DType::F32, DType::BF16] {
            let alone = canonical_on("", ["f32[11, 7, 3]", "f32[5]"], dtype)[0];
            for (mesh, layouts) in [
                ("a=2", ["f32[11, 7, 3]", "f32[5]"]),
                ("a=2", ["f32[11@a, 7, 3]", "f32[5@a]"]),
                ("a=3", ["f32[11, 7@a, 3]", "f32[5@a]"]),
                ("a=6", ["f32[11, 7, 3@a]", "f32[5] ~a"]),
                ("a=2,b=3", ["f32[11@a, 7@b, 3]", "f32[5@b]"]),
                ("a=2,b=3,c=2", ["f32[11@b, 7@c, 3@a]", "f32[5@a] ~b"]),
            ] {
                assert!(
                    canonical_on(mesh, layouts, dtype).iter().all(|bits| *bits == alone),
                    "{mesh} {layouts:?}"
                );
            }
        }
    }

    #[test]
    fn shards_that_cut_the_leaves_of_the_norm_are_refused() {
        World::run(Mesh::parse("a=3").unwrap(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse("f32[12@a]", rank.mesh())?)?;
            let error =
                canonical_sum_squares(rank, SumTree::new(8), [(&[12][..], Some(&x))], Location::caller());
            let error = error.unwrap_err();
            assert_eq!(error.kind(), Kind::Config);
            let help = "use 12 leaves (--sum-leaves), or shard over a number of ranks that divides 8";
            assert!(error.to_string().contains(help), "{error}");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn sum_squares_adds_in_the_order_of_the_tensors() {
        World::run(Mesh::single(), |rank| {
            let numbers = [(DType::F64, 1e8), (DType::F32, 1e8), (DType::F64, 1.5), (DType::F32, 1.5)];
            let full = |(dtype, x)| Tensor::full(rank, &Layout::invariant(rank.mesh(), dtype, &[]), x);
            let tensors = numbers.into_iter().map(full).collect::<Result<Vec<Tensor>>>()?;
            let sum = |order: [usize; 4]| order.iter().fold(0.0, |sum, &i| sum + numbers[i].1 * numbers[i].1);
            assert_eq!(local_sum_squares(rank, &tensors)?, sum([0, 1, 2, 3]));
            for other in [[0, 2, 1, 3], [1, 3, 0, 2]] {
                assert_ne!(sum(other), sum([0, 1, 2, 3]), "the numbers tell orders apart");
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn sum_squares_of_a_partial_sum_is_refused() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse("f32[4] +a", rank.mesh())?)?;
            assert_eq!(local_sum_squares(rank, [&x]).unwrap_err().kind(), Kind::Layout);
            Ok(())
        })
        .unwrap();
    }
}
