//! The gradient norm: this rank's share of a sum of squares, in which every global element counts once.

use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::placement::Placement;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::reduce::SUM_SQUARES_MANY;
use shardgrad_kernels::{DType, Strides};

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
        let (layout, own) = (tensor.layout(), tensor.rank());
        if !layout.partial().is_empty() {
            return Err(Error::new(
                Kind::Layout,
                format!("the norm of a partial sum is unknown before it is reduced: {layout}"),
            )
            .detail("help", "redistribute the tensor to an invariant or sharded layout first"));
        }
        let split = layout.sharded_axes();
        if layout.mesh().axes().all(|a| split.contains(a) || own.coordinate(a) == 0) {
            counted.push(tensor.local().contiguous(rank)?);
        }
    }
    Ok(counted)
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
    use crate::layout::Layout;
    use crate::training_step::control::world_sum;
    use shardgrad_dist::{Mesh, World};
    use std::panic::Location;

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
