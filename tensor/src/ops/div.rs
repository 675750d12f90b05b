//! Elementwise quotient of two tensors: z = x / y. Shapes broadcast as in NumPy.

use super::broadcast::Broadcast;
use super::mul::mul;
use super::neg::neg;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, PlanKey, SavedForBackward, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::DIV;
use std::rc::Rc;

/// Elementwise quotient of two tensors: z = x / y.
///
/// Shapes and dtypes as for [`Add`](super::add::Add). Gradient: dx = g / y, dy = -(g / y) z; summed over the broadcast
/// dims of an argument. Linear in x only.
#[doc(alias = "divide")]
#[doc(alias = "true_divide")]
#[derive(Debug)]
pub struct Div {
    shape: Broadcast,
}

impl Div {
    /// The quotient of two tensors of these shapes.
    #[must_use]
    pub fn between(first: &[usize], second: &[usize]) -> Div {
        Div { shape: Broadcast::between(first, second) }
    }

    /// The same from the numbers of dims: dims of extent 1 are not broadcast.
    #[must_use]
    pub fn of(first: usize, second: usize) -> Rc<dyn Op> {
        Rc::new(Div { shape: Broadcast::of(first, second) })
    }
}

/// x / y, for the vjps of other ops.
pub(super) fn div(x: &Tensor, y: &Tensor) -> Tensor {
    Tensor::apply_one(Div::between(x.layout().extents(), y.layout().extents()), &[x, y])
}

impl Op for Div {
    fn name(&self) -> &'static str {
        "div"
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn plan_key(&self) -> Option<PlanKey> {
        self.shape.plan_key::<Div>()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[1], outputs: &[0] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Broadcast::launch(local, &DIV, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| {
            let of = |x: &Tensor| self.shape.widen_if_broadcast(x, i);
            let share = div(&of(&cx.grad(0)), &of(cx.input(1)));
            let cotangent = match i {
                0 => share,
                // (g / y) z, since g z may overflow a 16-bit float.
                _ => neg(&mul(&share, &of(cx.output(0)))),
            };
            self.shape.sum_to_argument(cx, cotangent, i)
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let (real, positive) = (Input::real, Input::positive);
    vec![
        Case::new(Div::of(2, 2), vec![real(&[5, 3]), positive(&[5, 3])]),
        Case::new(Div::of(2, 1), vec![real(&[5, 8]), positive(&[8])]),
        Case::new(Div::of(1, 2), vec![real(&[5]), positive(&[3, 5])]),
        Case::fixed_shape(Rc::new(Div::between(&[5, 1], &[3])), vec![real(&[5, 1]), positive(&[3])]),
        Case::fixed_shape(Rc::new(Div::between(&[1, 3], &[5, 1])), vec![real(&[1, 3]), positive(&[5, 1])]),
        Case::fixed_shape(
            Rc::new(Div::between(&[2, 5, 3], &[5, 1])),
            vec![real(&[2, 5, 3]), positive(&[5, 1])],
        ),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_quotients_computed_by_hand() {
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
