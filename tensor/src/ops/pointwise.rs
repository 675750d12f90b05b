//! The backward of the pointwise functions that have a kernel of their own for it.

use crate::op::{Fixed, Local, Op, Pieces};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::{Kernel, Scalar};
use std::rc::Rc;

const SIGNATURE: &str = "..m, ..m -> ..m";

/// dx = f(kept) g: `..m, ..m -> ..m` on the kept argument (or result) and the cotangent, linear in the cotangent.
#[derive(Debug)]
pub(super) struct PointwiseBackward {
    kernel: &'static Kernel,
    scalars: Vec<Scalar>,
}

impl PointwiseBackward {
    /// The cotangent of the argument.
    pub(super) fn of(kernel: &'static Kernel, kept: &Tensor, g: &Tensor) -> Tensor {
        PointwiseBackward::with(kernel, kept, g, &[])
    }

    /// The same for a kernel that takes numbers.
    pub(super) fn with(kernel: &'static Kernel, kept: &Tensor, g: &Tensor, scalars: &[f64]) -> Tensor {
        let scalars = scalars.iter().map(|&c| Scalar::Real(c)).collect();
        Tensor::result(Rc::new(PointwiseBackward { kernel, scalars }), &[kept, g])
    }
}

impl Op for PointwiseBackward {
    fn name(&self) -> &'static str {
        self.kernel.name
    }

    fn signature(&self) -> &str {
        SIGNATURE
    }

    fn fixed(&self) -> Option<Fixed> {
        Some(Fixed::of::<PointwiseBackward>(SIGNATURE))
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(self.kernel, &[x[0], x[1]], &self.scalars)
    }
}
