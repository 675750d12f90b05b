//! Elementwise product of two tensors: z = x y. Shapes broadcast as in NumPy.

use super::broadcast::Broadcast;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, PlanKey, SavedForBackward, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::MUL;
use std::rc::Rc;

/// Elementwise product of two tensors: z = x y.
///
/// Shapes and dtypes as for [`Add`](super::add::Add). Gradient: dx = g y, dy = g x; summed over the broadcast dims of
/// an argument. Linear in each argument.
#[doc(alias = "multiply")]
#[derive(Debug)]
pub struct Mul {
    shape: Broadcast,
}

impl Mul {
    /// The product of two tensors of these shapes.
    #[must_use]
    pub fn between(first: &[usize], second: &[usize]) -> Mul {
        Mul { shape: Broadcast::between(first, second) }
    }

    /// The same from the numbers of dims: dims of extent 1 are not broadcast.
    #[must_use]
    pub fn of(first: usize, second: usize) -> Rc<dyn Op> {
        Rc::new(Mul { shape: Broadcast::of(first, second) })
    }
}

/// x y, for the vjps of other ops.
pub(super) fn mul(x: &Tensor, y: &Tensor) -> Tensor {
    Tensor::apply_one(Mul::between(x.layout().extents(), y.layout().extents()), &[x, y])
}

impl Op for Mul {
    fn name(&self) -> &'static str {
        "mul"
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn plan_key(&self) -> Option<PlanKey> {
        self.shape.plan_key::<Mul>()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0], &[1]]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: &[] }
    }

    fn saved_for_backward_of(&self, needs_input_grad: &[bool]) -> SavedForBackward {
        SavedForBackward::for_product(needs_input_grad)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Broadcast::launch(local, &MUL, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| {
            let of = |x: &Tensor| self.shape.widen_if_broadcast(x, i);
            self.shape.sum_to_argument(cx, mul(&of(&cx.grad(0)), &of(cx.input(1 - i))), i)
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
        Case::fixed_shape(Rc::new(Mul::between(&[5, 1], &[3])), vec![real(&[5, 1]), real(&[3])]).exact(),
        Case::fixed_shape(Rc::new(Mul::between(&[1, 3], &[5, 1])), vec![real(&[1, 3]), real(&[5, 1])])
            .exact(),
        Case::fixed_shape(Rc::new(Mul::between(&[2, 5, 3], &[5, 1])), vec![real(&[2, 5, 3]), real(&[5, 1])])
            .exact(),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_products_computed_by_hand() {
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
