//! z = x y, elementwise. Shapes are aligned at the last dim; missing dims and extents of 1 are repeated.

use super::broadcast::Broadcast;
use super::{Case, Input};
use crate::op::{Cotangents, Fixed, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::MUL;
use std::rc::Rc;

/// Shapes and dtypes as [`Add`](super::add::Add).
///
/// dx = g y, dy = g x; summed over the leading dims for the repeated argument.
#[derive(Debug)]
pub struct Mul {
    shape: Broadcast,
}

impl Mul {
    /// The product of tensors of some shapes.
    #[must_use]
    pub fn between(first: &[usize], second: &[usize]) -> Mul {
        Mul { shape: Broadcast::between(first, second) }
    }

    /// The same from numbers of dims alone: no extent of 1 is repeated.
    #[must_use]
    pub fn of(first: usize, second: usize) -> Rc<dyn Op> {
        Rc::new(Mul { shape: Broadcast::of(first, second) })
    }
}

/// x y of plain tensors.
pub(super) fn mul(x: &Tensor, y: &Tensor) -> Tensor {
    Tensor::result_of(&Mul::between(x.layout().extents(), y.layout().extents()), &[x, y])
}

impl Op for Mul {
    fn name(&self) -> &'static str {
        "mul"
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn fixed(&self) -> Option<Fixed> {
        self.shape.fixed::<Mul>()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0], &[1]]
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1], outputs: &[] }
    }

    fn keeps_for(&self, wanted: &[bool]) -> Keeps {
        Keeps::of_product(wanted)
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        Broadcast::launch(local, &MUL, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| {
            let of = |x: &Tensor| self.shape.of_terms(x, i);
            self.shape.reduced(cx, mul(&of(&cx.grad(0)), &of(cx.input(1 - i))), i)
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    vec![
        Case::new(Mul::of(2, 2), vec![real(&[5, 3]), real(&[5, 3])]).exact(),
        Case::new(Mul::of(2, 1), vec![real(&[5, 8]), real(&[8])]).exact(),
        Case::new(Mul::of(2, 3), vec![real(&[5, 3]), real(&[2, 5, 3])]).exact(),
        Case::new(Mul::of(1, 0), vec![real(&[5]), real(&[])]).exact(),
        Case::fixed(Rc::new(Mul::between(&[5, 1], &[3])), vec![real(&[5, 1]), real(&[3])]).exact(),
        Case::fixed(Rc::new(Mul::between(&[1, 3], &[5, 1])), vec![real(&[1, 3]), real(&[5, 1])]).exact(),
        Case::fixed(Rc::new(Mul::between(&[2, 5, 3], &[5, 1])), vec![real(&[2, 5, 3]), real(&[5, 1])])
            .exact(),
    ]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn products_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
            let w = Tensor::from_host(rank, &[2], &[10.0f32, 20.0])?;
            assert_eq!(x.mul(&w).to_host::<f32>()?, [10.0, 40.0, 30.0, 80.0]);
            assert_eq!(w.mul(&x).to_host::<f32>()?, [10.0, 40.0, 30.0, 80.0]);
            Ok(())
        })
        .unwrap();
    }
}
