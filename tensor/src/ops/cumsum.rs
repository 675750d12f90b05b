//! y_i = x_0 + x_1 + .. + x_i along a dim.

use super::labels::{check_dim, letter, letters_with};
use super::{Case, Input};
use crate::op::{Cotangents, Local, Op, Pieces, Vjp};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::scan::CUMSUM;
use shardgrad_kernels::{Dims, Scalar};
use std::rc::Rc;

/// `a b! c -> a b! c`: the dim must be whole. Any float, added up one after another in the accumulator. Linear. dx_i = g_i +
/// g_i+1 + .. to the end.
#[derive(Debug)]
pub struct Cumsum {
    signature: String,
    ndim: usize,
    dim: usize,
    backward: bool,
}

impl Cumsum {
    /// Along a dim of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if there is no such dim.
    pub fn along(ndim: usize, dim: usize) -> Result<Rc<dyn Op>> {
        check_dim("cumsum", ndim, dim)?;
        Ok(Cumsum::of(ndim, dim, false))
    }

    fn of(ndim: usize, dim: usize, backward: bool) -> Rc<dyn Op> {
        let labels = letters_with(ndim, dim, &format!("{}!", letter(dim)));
        Rc::new(Cumsum { signature: format!("{labels} -> {labels}"), ndim, dim, backward })
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

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        // Two dims exchanged are exchanged back by the same order.
        let mut order: Dims = (0..self.ndim).collect();
        order.swap(self.dim, self.ndim - 1);
        let turned = x[0].viewed(x[0].view.permute(&order)).contiguous(local.rank)?;
        let mut y = Piece::alloc(local.rank, turned.dtype, &turned.view.shape)?;
        let scalars = [Scalar::Int(i64::from(self.backward))];
        launch(local.rank, &CUMSUM, &[&turned], &mut [&mut y], &scalars)?;
        Ok([y.viewed(y.view.permute(&order))].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| Tensor::result(Cumsum::of(self.ndim, self.dim, !self.backward), &[&cx.grad(0)]))
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
    use crate::reduction::Reduction;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
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
