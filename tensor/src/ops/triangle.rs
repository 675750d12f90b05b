//! Upper or lower triangle of matrices: y_(.., i, j) = x_(.., i, j) where j - i >= d (`triu`) or j - i <= d (`tril`),
//! else 0.

use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::triangular::TRIANGULAR;
use shardgrad_kernels::{DType, Scalar};
use std::rc::Rc;

/// Upper or lower triangle of the matrices in the last two dims; elements outside become 0: `..m r c -> ..m r c`.
///
/// Any dtype. Rows and columns are counted in the global tensor, so both may be sharded. Linear. Gradient: dx = the
/// same triangle of g. Elements outside are 0 even where x is NaN.
#[doc(alias = "triu")]
#[doc(alias = "tril")]
#[derive(Clone, Debug)]
pub struct Triangle {
    /// Whether the upper triangle is kept, otherwise the lower.
    pub is_upper: bool,
    /// d, the bounding diagonal, which is kept: 0 for the main one, 1 for the one above it.
    pub diagonal: i64,
}

impl Op for Triangle {
    fn name(&self) -> &'static str {
        if self.is_upper { "triu" } else { "tril" }
    }

    fn signature(&self) -> &str {
        "..m r c -> ..m r c"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs.into())
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let [row, col] = ["r", "c"].map(|label| Scalar::Int(local.label(label).1.start as i64));
        let scalars = [Scalar::Int(self.is_upper.into()), Scalar::Int(self.diagonal), row, col];
        local.launch(&TRIANGULAR, &[&x[0].contiguous(local.rank)?], &scalars)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op: Rc<dyn Op> = Rc::new(self.clone());
        cx.cotangents(|_| Tensor::apply_one(op.clone(), &[&cx.grad(0)]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case =
        |is_upper, diagonal, input| Case::new(Rc::new(Triangle { is_upper, diagonal }), vec![input]).exact();
    vec![
        case(true, 0, Input::real(&[5, 7])),
        case(false, 1, Input::real(&[7, 4])),
        case(false, -1, Input::real(&[2, 5, 3])),
        case(true, -2, Input::index(&[5, 5], 9)),
        case(true, 0, Input::real(&[3, 0])),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::shaping::Shaping;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_triangles_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert_eq!(x.triu(0).to_host::<i64>()?, [1, 2, 3, 0, 5, 6]);
            assert_eq!(x.triu(2).to_host::<i64>()?, [0, 0, 3, 0, 0, 0]);
            assert_eq!(x.tril(0).to_host::<i64>()?, [1, 0, 0, 4, 5, 0]);
            assert_eq!(x.tril(-1).to_host::<i64>()?, [0, 0, 0, 4, 0, 0]);
            Ok(())
        })
        .unwrap();
    }
}
