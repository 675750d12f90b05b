//! Backward of elementwise functions of one argument that have a backward kernel.

use crate::local_tensor::LocalTensor;
use crate::op::{ForwardContext, LocalTensors, Op, PlanKey};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::{Kernel, Scalar};
use std::rc::Rc;

const SIGNATURE: &str = "..m, ..m -> ..m";

/// Backward of an elementwise function: dx = f(saved) g.
///
/// `..m, ..m -> ..m` on the saved argument (or result) and the cotangent g; linear in g.
#[derive(Debug)]
pub(super) struct UnaryBackward {
    kernel: &'static Kernel,
    scalars: Vec<Scalar>,
}

impl UnaryBackward {
    /// The cotangent of the argument.
    pub(super) fn of(kernel: &'static Kernel, saved: &Tensor, g: &Tensor) -> Tensor {
        UnaryBackward::with(kernel, saved, g, &[])
    }

    /// The cotangent of the argument, by a kernel that takes scalars.
    pub(super) fn with(kernel: &'static Kernel, saved: &Tensor, g: &Tensor, scalars: &[f64]) -> Tensor {
        let scalars = scalars.iter().map(|&c| Scalar::Real(c)).collect();
        Tensor::result(Rc::new(UnaryBackward { kernel, scalars }), &[saved, g])
    }
}

impl Op for UnaryBackward {
    fn name(&self) -> &'static str {
        self.kernel.name
    }

    fn signature(&self) -> &str {
        SIGNATURE
    }

    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<UnaryBackward>(SIGNATURE))
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(self.kernel, &[x[0], x[1]], &self.scalars)
    }
}
