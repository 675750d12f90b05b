//! z = x where a mask is true, else y, elementwise. Shapes are aligned at the last dim; missing dims and extents of 1 are
//! repeated.

use super::broadcast::Broadcast;
use super::labels::one_dtype;
use super::logical::check_truth;
use super::masked_fill::zeroed;
use super::{Case, Input};
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use shardgrad_kernels::op::compare_select::CHOOSE;
use std::rc::Rc;

/// A bool mask, x and y of one dtype of any kind. Linear in x and y jointly.
///
/// dx = g where the mask is true, else 0; dy the other way round; summed over the dims along which the argument was
/// repeated. What is not chosen gets 0 even if it is not a number.
#[derive(Debug)]
pub struct Choose {
    shape: Broadcast,
}

impl Choose {
    /// The choice between tensors of some shapes: mask, x, y.
    #[must_use]
    pub fn among(mask: &[usize], x: &[usize], y: &[usize]) -> Rc<dyn Op> {
        Rc::new(Choose { shape: Broadcast::among(&[mask, x, y]) })
    }
}

impl Op for Choose {
    fn name(&self) -> &'static str {
        "choose"
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1, 2]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false, true, true]
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_truth(inputs[0])?;
        one_dtype(&inputs[1..])
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        Broadcast::launch(local, &CHOOSE, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| self.shape.reduced(cx, zeroed(&cx.grad(0), cx.input(0), i == 2), i))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |mask: &[usize], x: &[usize], y: &[usize]| {
        let op = Choose::among(mask, x, y);
        Case::fixed(op, vec![Input::truth(mask), Input::real(x), Input::real(y)]).exact()
    };
    vec![
        case(&[5, 3], &[5, 3], &[5, 3]),
        case(&[5, 1], &[5, 3], &[3]),
        case(&[3], &[5, 1], &[]),
        case(&[2, 1, 3], &[5, 3], &[2, 5, 1]),
    ]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[1.0f32, f32::NAN, 3.0])?;
            let zero = Tensor::from_host(rank, &[], &[0.0f32])?;
            assert_eq!(x.eq(&x).choose(&x, &zero).to_host::<f32>()?, [1.0, 0.0, 3.0]);
            Ok(())
        })
        .unwrap();
    }
}
