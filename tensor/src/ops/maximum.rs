//! z = the larger, or the smaller, of x and y, elementwise. Shapes are aligned at the last dim; missing dims and extents
//! of 1 are repeated.

use super::broadcast::{Broadcast, PairBackward};
use super::{Case, Input};
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::{MAXIMUM, MAXIMUM_GRAD, MINIMUM, MINIMUM_GRAD};
use std::rc::Rc;

/// Shapes and dtypes as [`Add`](super::add::Add). Not-a-number wins.
///
/// dx = g where x is taken, g / 2 where x and y tie, else 0; dy likewise. Where x or y is not a number, dx = dy = g, as in
/// PyTorch. Summed over the dims along which an argument is repeated.
#[derive(Debug)]
pub struct Maximum {
    shape: Broadcast,
    largest: bool,
}

impl Maximum {
    /// The larger of tensors of some shapes.
    #[must_use]
    pub fn between(first: &[usize], second: &[usize]) -> Rc<dyn Op> {
        Rc::new(Maximum { shape: Broadcast::between(first, second), largest: true })
    }

    /// The smaller.
    #[must_use]
    pub fn least(first: &[usize], second: &[usize]) -> Rc<dyn Op> {
        Rc::new(Maximum { shape: Broadcast::between(first, second), largest: false })
    }
}

impl Op for Maximum {
    fn name(&self) -> &'static str {
        if self.largest { "maximum" } else { "minimum" }
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1], outputs: &[] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        Broadcast::launch(local, if self.largest { &MAXIMUM } else { &MINIMUM }, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let kernel = if self.largest { &MAXIMUM_GRAD } else { &MINIMUM_GRAD };
        cx.each(|i| {
            let cotangent = PairBackward::of(kernel, cx.input(i), cx.input(1 - i), &cx.grad(0));
            self.shape.reduced(cx, cotangent, i)
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |op: fn(&[usize], &[usize]) -> Rc<dyn Op>, x: &[usize], y: &[usize]| {
        Case::fixed(op(x, y), vec![Input::real(x), Input::real(y)]).exact()
    };
    vec![
        case(Maximum::between, &[5, 3], &[5, 3]),
        case(Maximum::between, &[5, 1], &[3]),
        case(Maximum::least, &[5, 8], &[8]),
        case(Maximum::least, &[3], &[2, 5, 1]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[2.0f64, 4.0, 0.0, f64::NAN])?;
            let y = Tensor::from_host(rank, &[4], &[3.0f64, 0.5, 0.0, 2.0])?;
            assert_eq!(x.maximum(&y).to_host::<f64>()?[..3], [3.0, 4.0, 0.0]);
            assert_eq!(y.minimum(&x).to_host::<f64>()?[..3], [2.0, 0.5, 0.0]);
            assert!(
                x.maximum(&y).to_host::<f64>()?[3].is_nan() && y.minimum(&x).to_host::<f64>()?[3].is_nan()
            );
            let share = PairBackward::of(&MAXIMUM_GRAD, &x, &y, &Tensor::full(rank, x.layout(), 1.0)?);
            assert_eq!(share.to_host::<f64>()?, [0.0, 1.0, 0.5, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
