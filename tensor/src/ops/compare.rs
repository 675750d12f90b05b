//! z = whether x == y, x != y, x < y, x <= y, x > y, x >= y, elementwise; y is a tensor or a number. Shapes are aligned at
//! the last dim; missing dims and extents of 1 are repeated.

use super::broadcast::Broadcast;
use super::labels::one_dtype;
use super::{Case, Input};
use crate::op::{DTypes, Local, Op, Pieces};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::truth::{EQ, GE, GT, LE, LT, NE};
use shardgrad_kernels::{DType, Kernel};
use smallvec::SmallVec;
use std::rc::Rc;

/// Which comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// x == y
    Eq,
    /// x != y
    Ne,
    /// x < y
    Lt,
    /// x <= y
    Le,
    /// x > y
    Gt,
    /// x >= y
    Ge,
}

impl Relation {
    fn kernel(self) -> &'static Kernel {
        match self {
            Relation::Eq => &EQ,
            Relation::Ne => &NE,
            Relation::Lt => &LT,
            Relation::Le => &LE,
            Relation::Gt => &GT,
            Relation::Ge => &GE,
        }
    }
}

/// Shapes as [`Add`](super::add::Add), one dtype of any kind; the result is bool. Nothing but `!=` holds of not-a-number.
/// Not differentiable, not linear: pending sums are completed.
#[derive(Debug)]
pub struct Compare {
    relation: Relation,
    shape: Broadcast,
}

/// The same with a number in place of y, rounded to the dtype of x.
#[derive(Debug)]
pub struct CompareScalar {
    /// Which comparison.
    pub relation: Relation,
    /// The number.
    pub number: f64,
}

impl Compare {
    /// The comparison of tensors of some shapes.
    #[must_use]
    pub fn between(relation: Relation, first: &[usize], second: &[usize]) -> Rc<dyn Op> {
        Rc::new(Compare { relation, shape: Broadcast::between(first, second) })
    }
}

impl Op for Compare {
    fn name(&self) -> &'static str {
        self.relation.kernel().name
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false, false]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        one_dtype(inputs)?;
        Ok(SmallVec::from_slice(&[DType::Bool]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        Broadcast::launch(local, self.relation.kernel(), x, &[])
    }
}

impl Op for CompareScalar {
    fn name(&self) -> &'static str {
        self.relation.kernel().name
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&[DType::Bool]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let number = Piece::filled(local.rank, x[0].dtype, &[], self.number)?;
        Broadcast::launch(local, self.relation.kernel(), &[x[0], &number], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    use Relation::{Eq, Ge, Gt, Le, Lt, Ne};
    let case = |relation, x: &[usize], y: &[usize]| {
        let op = Compare::between(relation, x, y);
        Case::fixed(op, vec![Input::real(x), Input::real(y)]).exact()
    };
    let scalar = |relation| {
        Case::new(Rc::new(CompareScalar { relation, number: 0.25 }), vec![Input::real(&[5, 3])]).exact()
    };
    let indices = vec![Input::index(&[5, 3], 4), Input::index(&[3], 4)];
    vec![
        Case::fixed(Compare::between(Eq, &[5, 3], &[3]), indices.clone()).exact(),
        Case::fixed(Compare::between(Ne, &[5, 3], &[3]), indices).exact(),
        case(Lt, &[5, 3], &[5, 3]),
        case(Le, &[5, 1], &[3]),
        case(Gt, &[5], &[2, 5]),
        case(Ge, &[5, 3], &[]),
        scalar(Lt),
        scalar(Ge),
    ]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[1.0f32, 2.0, f32::NAN])?;
            let y = Tensor::from_host(rank, &[3], &[2.0f32, 2.0, 2.0])?;
            for (z, right) in [
                (x.eq(&y), [0u8, 1, 0]),
                (x.ne(&y), [1, 0, 1]),
                (x.lt(&y), [1, 0, 0]),
                (x.le(&y), [1, 1, 0]),
                (x.gt(&y), [0, 0, 0]),
                (y.ge(&x), [1, 1, 0]),
                (x.gt_scalar(1.5), [0, 1, 0]),
                (x.ne_scalar(1.0), [0, 1, 1]),
            ] {
                assert_eq!((z.dtype(), z.to_host::<u8>()?.as_slice()), (DType::Bool, &right[..]));
            }
            Ok(())
        })
        .unwrap();
    }
}
