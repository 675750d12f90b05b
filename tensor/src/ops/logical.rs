//! z = x and y, x or y, either x or y, not x, elementwise on truth values. Shapes are aligned at the last dim; missing dims
//! and extents of 1 are repeated.

use super::broadcast::Broadcast;
use super::{Case, Input};
use crate::op::{DTypes, Local, Op, Pieces};
use crate::piece::Piece;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::op::compare_select::{AND, NOT, OR, XOR};
use shardgrad_kernels::{DType, Kernel};
use smallvec::SmallVec;
use std::rc::Rc;

/// Which table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// Both.
    And,
    /// At least one.
    Or,
    /// Exactly one.
    Xor,
}

/// Shapes as [`Add`](super::add::Add); bool in and out. Not differentiable.
#[derive(Debug)]
pub struct Logical {
    table: Table,
    shape: Broadcast,
}

/// `..m -> ..m`: 1 where x is 0, else 0; bool. Not differentiable.
#[derive(Debug)]
pub struct Not;

impl Logical {
    /// The table of tensors of some shapes.
    #[must_use]
    pub fn between(table: Table, first: &[usize], second: &[usize]) -> Rc<dyn Op> {
        Rc::new(Logical { table, shape: Broadcast::between(first, second) })
    }

    fn kernel(&self) -> &'static Kernel {
        match self.table {
            Table::And => &AND,
            Table::Or => &OR,
            Table::Xor => &XOR,
        }
    }
}

/// Refuses what are no truth values.
pub(super) fn check_truth(dtype: DType) -> Result<()> {
    if dtype == DType::Bool {
        return Ok(());
    }
    Err(Error::new(Kind::DType, format!("truth values of {dtype}"))
        .detail("help", "compare first, as in x.ne_scalar(0.0)"))
}

fn truth(inputs: &[DType]) -> Result<DTypes> {
    inputs.iter().try_for_each(|d| check_truth(*d))?;
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
        truth(inputs)
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
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
        truth(inputs)
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&NOT, &[x[0]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |table, x: &[usize], y: &[usize]| {
        Case::fixed(Logical::between(table, x, y), vec![Input::truth(x), Input::truth(y)]).exact()
    };
    vec![
        case(Table::And, &[5, 3], &[5, 3]),
        case(Table::Or, &[5, 1], &[3]),
        case(Table::Xor, &[3], &[5, 3]),
        Case::new(Rc::new(Not), vec![Input::truth(&[5, 3])]).exact(),
    ]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Kind, Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn by_hand() {
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
    fn numbers_are_refused() {
        let error = World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1], &[1.0f32])?;
            let _ = x.logical_not();
            Ok(())
        });
        assert_eq!(error.unwrap_err().kind(), Kind::DType);
    }
}
