//! Plain tensors as values: nothing is recorded, so an op needs no handle.

use crate::op::Op;
use crate::tensor::Tensor;
use crate::value::Value;
use smallvec::SmallVec;
use std::rc::Rc;

impl Value for Tensor {
    fn tensor(&self) -> &Tensor {
        self
    }

    #[track_caller]
    fn apply(op: Rc<dyn Op>, args: &[&Self]) -> SmallVec<[Self; 2]> {
        Tensor::results(op, args)
    }

    #[track_caller]
    fn apply_one(op: Rc<dyn Op>, args: &[&Self]) -> Self {
        Tensor::result_of(&*op, args)
    }

    #[track_caller]
    fn apply_new<O: Op + 'static>(op: O, args: &[&Self]) -> Self {
        Tensor::result_of(&op, args)
    }
}
