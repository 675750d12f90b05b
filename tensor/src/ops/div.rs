//! z = x / y, elementwise. Shapes are aligned at the last dim; missing dims and extents of 1 are repeated.

use super::broadcast::Broadcast;
use super::mul::mul;
use super::neg::neg;
use super::{Case, Input};
use crate::op::{Cotangents, Fixed, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::DIV;
use std::rc::Rc;

/// Shapes and dtypes as [`Add`](super::add::Add).
///
/// dx = g / y, dy = -(g / y) z; summed over the leading dims for the repeated argument. Linear in x only.
#[derive(Debug)]
pub struct Div {
    shape: Broadcast,
}

impl Div {
    /// The quotient of tensors of some shapes.
    #[must_use]
    pub fn between(first: &[usize], second: &[usize]) -> Div {
        Div { shape: Broadcast::between(first, second) }
    }

    /// The same from numbers of dims alone: no extent of 1 is repeated.
    #[must_use]
    pub fn of(first: usize, second: usize) -> Rc<dyn Op> {
        Rc::new(Div { shape: Broadcast::of(first, second) })
    }
}

/// x / y of plain tensors.
pub(super) fn div(x: &Tensor, y: &Tensor) -> Tensor {
    Tensor::result_of(&Div::between(x.layout().extents(), y.layout().extents()), &[x, y])
}

impl Op for Div {
    fn name(&self) -> &'static str {
        "div"
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn fixed(&self) -> Option<Fixed> {
        self.shape.fixed::<Div>()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[1], outputs: &[0] }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        Broadcast::launch(local, &DIV, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| {
            let of = |x: &Tensor| self.shape.of_terms(x, i);
            let share = div(&of(&cx.grad(0)), &of(cx.input(1)));
            let cotangent = match i {
                0 => share,
                // (g / y) z, since g z may be more than 16 bits hold.
                _ => neg(&mul(&share, &of(cx.output(0)))),
            };
            self.shape.reduced(cx, cotangent, i)
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let (real, positive) = (Input::real, Input::positive);
    vec![
        Case::new(Div::of(2, 2), vec![real(&[5, 3]), positive(&[5, 3])]),
        Case::new(Div::of(2, 1), vec![real(&[5, 8]), positive(&[8])]),
        Case::new(Div::of(1, 2), vec![real(&[5]), positive(&[3, 5])]),
        Case::fixed(Rc::new(Div::between(&[5, 1], &[3])), vec![real(&[5, 1]), positive(&[3])]),
        Case::fixed(Rc::new(Div::between(&[1, 3], &[5, 1])), vec![real(&[1, 3]), positive(&[5, 1])]),
        Case::fixed(Rc::new(Div::between(&[2, 5, 3], &[5, 1])), vec![real(&[2, 5, 3]), positive(&[5, 1])]),
    ]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn quotients_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
            let y = Tensor::from_host(rank, &[2], &[2.0f32, 4.0])?;
            assert_eq!(x.div(&y).to_host::<f32>()?, [0.5, 0.5, 1.5, 1.0]);
            assert_eq!(y.div(&x).to_host::<f32>()?, [2.0, 2.0, 2.0 / 3.0, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
