//! The methods that users see, written once for plain tensors and for recorded variables.

use crate::layout::Layout;
use crate::op::Op;
use crate::ops::einsum;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Rank, Result};
use shardgrad_kernels::{DType, Dims};
use smallvec::SmallVec;
use std::panic::Location;
use std::rc::Rc;

/// A tensor in the eyes of model code. Misuse unwinds with the [`Error`] that names op, layouts and line.
pub trait Value: Clone {
    /// The plain tensor behind the value.
    fn tensor(&self) -> &Tensor;

    /// Applies an op; gives its visible outputs.
    #[track_caller]
    fn apply(op: Rc<dyn Op>, args: &[&Self]) -> SmallVec<[Self; 2]>;

    /// How the value lies on the mesh.
    fn layout(&self) -> &Layout {
        self.tensor().layout()
    }

    /// The rank that holds this piece of the value.
    fn rank(&self) -> &Rank {
        self.tensor().rank()
    }

    /// The global shape.
    fn shape(&self) -> Dims {
        self.tensor().shape()
    }

    /// The dtype.
    fn dtype(&self) -> DType {
        self.tensor().dtype()
    }

    /// Applies an op with one visible output.
    #[track_caller]
    fn apply_one(op: Rc<dyn Op>, args: &[&Self]) -> Self {
        Self::apply(op, args).into_iter().next().expect("the op has an output")
    }

    /// x w: `[..m, k] x [k, n] -> [..m, n]`.
    #[track_caller]
    #[must_use]
    fn matmul(&self, w: &Self) -> Self {
        Self::apply_one(einsum::matmul(), &[self, w])
    }

    /// x w^T: `[..m, n] x [k, n] -> [..m, k]`.
    #[track_caller]
    #[must_use]
    fn matmul_nt(&self, w: &Self) -> Self {
        Self::apply_one(einsum::matmul_nt(), &[self, w])
    }

    /// The product of two tensors by an index signature, such as `b t d, d h c -> b t h c`.
    #[track_caller]
    #[must_use]
    fn einsum(&self, signature: &str, other: &Self) -> Self {
        let op = einsum::Einsum::new(signature).unwrap_or_else(|e| e.at(Location::caller()).raise());
        Self::apply_one(Rc::new(op), &[self, other])
    }
}

impl Value for Tensor {
    fn tensor(&self) -> &Tensor {
        self
    }

    #[track_caller]
    fn apply(op: Rc<dyn Op>, args: &[&Self]) -> SmallVec<[Self; 2]> {
        let mut outputs = unwind(crate::op::apply(&op, args, &[], Location::caller()));
        outputs.truncate(outputs.len() - op.num_saved());
        outputs
    }
}

impl Tensor {
    /// Applies an op with one visible output whose layout is known beforehand: it decides the split of labels that
    /// no argument has. This is what a vjp calls; the layout is the dual of the argument's.
    #[track_caller]
    #[must_use]
    pub fn apply_with(op: Rc<dyn Op>, args: &[&Tensor], want: Layout) -> Tensor {
        let outputs = unwind(crate::op::apply(&op, args, &[Some(want)], Location::caller()));
        outputs.into_iter().next().expect("the op has an output")
    }
}

/// The value, or an unwinding to the rank boundary with the error.
#[track_caller]
pub fn unwind<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|e| e.at(Location::caller()).raise())
}
