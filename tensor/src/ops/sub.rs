//! z = x - y, elementwise; the argument with fewer dims is repeated along the leading dims of the other.

use super::broadcast::Broadcast;
use super::neg::neg;
use super::{Case, Input};
use crate::op::{Cotangents, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::SUB;
use std::rc::Rc;

/// Shapes and dtypes as [`Add`](super::add::Add).
///
/// dx = g, dy = -g; summed over the leading dims for the repeated argument.
#[derive(Debug)]
pub struct Sub {
    shape: Broadcast,
}

impl Sub {
    /// The difference of tensors with so many dims.
    #[must_use]
    pub fn of(first: usize, second: usize) -> Rc<dyn Op> {
        Rc::new(Sub { shape: Broadcast::of(first, second) })
    }
}

impl Op for Sub {
    fn name(&self) -> &'static str {
        "sub"
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0, 1]]
    }

    fn forward(&self, local: &Local<'_>, x: &[Piece]) -> Result<Pieces> {
        Broadcast::launch(local, &SUB, x)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| {
            let cotangent = self.shape.reduced(cx.grad(0), i);
            if i == 0 { cotangent } else { neg(&cotangent) }
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    vec![
        Case::new(Sub::of(2, 2), vec![real(&[5, 3]), real(&[5, 3])]).exact(),
        Case::new(Sub::of(2, 1), vec![real(&[5, 8]), real(&[8])]).exact(),
        Case::new(Sub::of(1, 2), vec![real(&[5]), real(&[3, 5])]).exact(),
    ]
}

#[cfg(test)]
mod tests {
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn differences_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
            let b = Tensor::from_host(rank, &[2], &[10.0f32, 20.0])?;
            assert_eq!(x.sub(&b).to_host::<f32>()?, [-9.0, -18.0, -7.0, -16.0]);
            assert_eq!(b.sub(&x).to_host::<f32>()?, [9.0, 18.0, 7.0, 16.0]);
            Ok(())
        })
        .unwrap();
    }
}
