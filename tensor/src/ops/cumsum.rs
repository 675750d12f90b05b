//! Cumulative sum along a dim: y_i = x_0 + x_1 + .. + x_i.

use super::labels::{check_dim, dim_label, dim_labels_with};
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::scan::CUMSUM;
use shardgrad_kernels::{Dims, Scalar};
use std::rc::Rc;

/// Cumulative sum along a dim: y_i = x_0 + x_1 + .. + x_i; `a b! c -> a b! c`.
///
/// Any float dtype, summed in order in the accumulator dtype. The dim must not be sharded. Linear. Gradient: dx_i =
/// g_i + g_(i+1) + .. to the end.
#[doc(alias = "prefix sum")]
#[derive(Debug)]
pub struct Cumsum {
    signature: String,
    ndim: usize,
    dim: usize,
    /// Whether the sum runs from the end to the beginning.
    is_reversed: bool,
}

impl Cumsum {
    /// The cumulative sum along dim `dim` of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range.
    pub fn along(ndim: usize, dim: usize) -> Result<Rc<dyn Op>> {
        check_dim("cumsum", ndim, dim)?;
        Ok(Cumsum::of(ndim, dim, false))
    }

    fn of(ndim: usize, dim: usize, is_reversed: bool) -> Rc<dyn Op> {
        let labels = dim_labels_with(ndim, dim, &format!("{}!", dim_label(dim)));
        Rc::new(Cumsum { signature: format!("{labels} -> {labels}"), ndim, dim, is_reversed })
    }
}

impl Op for Cumsum {
    fn name(&self) -> &'static str {
        "cumsum"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        // A transposition of two dims is its own inverse.
        let mut order: Dims = (0..self.ndim).collect();
        order.swap(self.dim, self.ndim - 1);
        let dim_last = x[0].with_view(x[0].view.permute(&order)).contiguous(local.rank)?;
        let mut y = LocalTensor::alloc(local.rank, dim_last.dtype, &dim_last.view.shape)?;
        let scalars = [Scalar::Int(i64::from(self.is_reversed))];
        launch(local.rank, &CUMSUM, &[&dim_last], &mut [&mut y], &scalars)?;
        Ok([y.with_view(y.view.permute(&order))].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| {
            Tensor::apply_one(Cumsum::of(self.ndim, self.dim, !self.is_reversed), &[&cx.grad(0)])
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], dim| {
        let op = Cumsum::along(shape.len(), dim).expect("a dim of the case");
        Case::new(op, vec![Input::real(shape)]).exact()
    };
    vec![case(&[5, 7], 1), case(&[5, 3], 0), case(&[2, 5, 3], 1)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::reduction::Reduction;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
            assert_eq!(x.cumsum(1).to_host::<f32>()?, [1.0, 3.0, 6.0, 4.0, 9.0, 15.0]);
            assert_eq!(x.cumsum(0).to_host::<f32>()?, [1.0, 2.0, 3.0, 5.0, 7.0, 9.0]);
            Ok(())
        })
        .unwrap();
        assert!(Cumsum::along(2, 2).is_err());
    }
}
