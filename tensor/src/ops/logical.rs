//! Elementwise logical and, or, xor and not of bool tensors. Shapes broadcast as in NumPy.

use super::broadcast::Broadcast;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{DTypes, ForwardContext, LocalTensors, Op};
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::op::compare_select::{AND, NOT, OR, XOR};
use shardgrad_kernels::{DType, Kernel};
use smallvec::SmallVec;
use std::rc::Rc;

/// The logical connective of a [`Logical`] op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connective {
    /// True where both are true.
    And,
    /// True where at least one is true.
    Or,
    /// True where exactly one is true.
    Xor,
}

/// Elementwise logical and, or or xor of two bool tensors; the result is bool.
///
/// Shapes broadcast as for [`Add`](super::add::Add). Not differentiable.
#[doc(alias = "logical_and")]
#[doc(alias = "logical_or")]
#[doc(alias = "logical_xor")]
#[derive(Debug)]
pub struct Logical {
    connective: Connective,
    shape: Broadcast,
}

/// Elementwise logical not of a bool tensor; the result is bool.
///
/// `..m -> ..m`. Not differentiable.
#[doc(alias = "logical_not")]
#[derive(Debug)]
pub struct Not;

impl Logical {
    /// The connective of two tensors of these shapes.
    #[must_use]
    pub fn between(connective: Connective, first: &[usize], second: &[usize]) -> Rc<dyn Op> {
        Rc::new(Logical { connective, shape: Broadcast::between(first, second) })
    }

    fn kernel(&self) -> &'static Kernel {
        match self.connective {
            Connective::And => &AND,
            Connective::Or => &OR,
            Connective::Xor => &XOR,
        }
    }
}

/// Refuses any dtype but bool.
pub(super) fn check_bool(dtype: DType) -> Result<()> {
    if dtype == DType::Bool {
        return Ok(());
    }
    Err(Error::new(Kind::DType, format!("needs a bool tensor, got {dtype}"))
        .detail("help", "compare first: x.ne_scalar(0.0) is true where x is not zero"))
}

fn bool_dtypes(inputs: &[DType]) -> Result<DTypes> {
    inputs.iter().try_for_each(|d| check_bool(*d))?;
    Ok(SmallVec::from_slice(&[DType::Bool]))
}

impl Op for Logical {
    fn name(&self) -> &'static str {
        self.kernel().name
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false, false]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        bool_dtypes(inputs)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Broadcast::launch(local, self.kernel(), x, &[])
    }
}

impl Op for Not {
    fn name(&self) -> &'static str {
        "logical_not"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        bool_dtypes(inputs)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&NOT, &[x[0]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |connective, x: &[usize], y: &[usize]| {
        Case::fixed_shape(Logical::between(connective, x, y), vec![Input::boolean(x), Input::boolean(y)])
            .exact()
    };
    vec![
        case(Connective::And, &[5, 3], &[5, 3]),
        case(Connective::Or, &[5, 1], &[3]),
        case(Connective::Xor, &[3], &[5, 3]),
        Case::new(Rc::new(Not), vec![Input::boolean(&[5, 3])]).exact(),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::elementwise::Elementwise;
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Kind, Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[0u8, 0, 1, 1])?.cast(DType::Bool);
            let y = Tensor::from_host(rank, &[4], &[0u8, 1, 0, 1])?.cast(DType::Bool);
            assert_eq!(x.logical_and(&y).to_host::<u8>()?, [0, 0, 0, 1]);
            assert_eq!(x.logical_or(&y).to_host::<u8>()?, [0, 1, 1, 1]);
            assert_eq!(x.logical_xor(&y).to_host::<u8>()?, [0, 1, 1, 0]);
            assert_eq!(x.logical_not().to_host::<u8>()?, [1, 1, 0, 0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn non_bool_arguments_are_refused() {
        let error = World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1], &[1.0f32])?;
            let _ = x.logical_not();
            Ok(())
        });
        assert_eq!(error.unwrap_err().kind(), Kind::DType);
    }
}
