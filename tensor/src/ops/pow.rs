//! z = x^y, elementwise. Shapes are aligned at the last dim; missing dims and extents of 1 are repeated.

use super::broadcast::{Broadcast, PairBackward};
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::{POW, POW_BASE_GRAD, POW_EXPONENT_GRAD};
use std::rc::Rc;

/// Shapes and dtypes as [`Add`](super::add::Add). As IEEE 754 `pow`: 1 where y is 0 or x is 1, not a number for x < 0 and
/// fractions y.
///
/// dx = g y x^(y - 1), 0 where y is 0; dy = g z ln(x), 0 where x is 0 and y is not negative; summed over the dims along
/// which the argument was repeated.
#[derive(Debug)]
pub struct Pow {
    shape: Broadcast,
}

impl Pow {
    /// The power of tensors of some shapes.
    #[must_use]
    pub fn between(first: &[usize], second: &[usize]) -> Rc<dyn Op> {
        Rc::new(Pow { shape: Broadcast::between(first, second) })
    }
}

impl Op for Pow {
    fn name(&self) -> &'static str {
        "pow"
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1], outputs: &[] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        Broadcast::launch(local, &POW, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| {
            let kernel = if i == 0 { &POW_BASE_GRAD } else { &POW_EXPONENT_GRAD };
            let [x, y, g] = [cx.input(0), cx.input(1), &cx.grad(0)].map(|x| self.shape.of_terms(x, i));
            self.shape.reduced(cx, PairBackward::of(kernel, &x, &y, &g), i)
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case =
        |x: &[usize], y: &[usize]| Case::fixed(Pow::between(x, y), vec![Input::positive(x), Input::real(y)]);
    vec![case(&[5, 3], &[5, 3]), case(&[5, 8], &[8]), case(&[5, 1], &[3]), case(&[3], &[2, 5, 1])]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[2.0f64, 4.0, 0.0, -2.0])?;
            let y = Tensor::from_host(rank, &[4], &[3.0f64, 0.5, 0.0, 2.0])?;
            assert_eq!(x.pow(&y).to_host::<f64>()?, [8.0, 2.0, 1.0, 4.0]);
            let half = Tensor::from_host(rank, &[], &[0.5f64])?;
            assert!(x.pow(&half).to_host::<f64>()?[3].is_nan());
            Ok(())
        })
        .unwrap();
    }
}
