//! Elementwise difference of two tensors: z = x - y. Shapes broadcast as in NumPy.

use super::broadcast::Broadcast;
use super::neg::neg;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, PlanKey, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::SUB;
use std::rc::Rc;

/// Elementwise difference of two tensors: z = x - y.
///
/// Shapes and dtypes as for [`Add`](super::add::Add). Gradient: dx = g, dy = -g; summed over the broadcast dims of an
/// argument. Linear in both jointly.
#[doc(alias = "subtract")]
#[derive(Debug)]
pub struct Sub {
    shape: Broadcast,
}

impl Sub {
    /// The difference of two tensors of these shapes.
    #[must_use]
    pub fn between(first: &[usize], second: &[usize]) -> Sub {
        Sub { shape: Broadcast::between(first, second) }
    }

    /// The same from the numbers of dims: dims of extent 1 are not broadcast.
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

    fn plan_key(&self) -> Option<PlanKey> {
        self.shape.plan_key::<Sub>()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0, 1]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Broadcast::launch(local, &SUB, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| {
            let cotangent = self.shape.sum_to_argument(cx, cx.grad(0), i);
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
        Case::fixed_shape(Rc::new(Sub::between(&[5, 1], &[3])), vec![real(&[5, 1]), real(&[3])]).exact(),
        Case::fixed_shape(Rc::new(Sub::between(&[1, 3], &[5, 1])), vec![real(&[1, 3]), real(&[5, 1])])
            .exact(),
        Case::fixed_shape(Rc::new(Sub::between(&[2, 5, 3], &[5, 1])), vec![real(&[2, 5, 3]), real(&[5, 1])])
            .exact(),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_differences_computed_by_hand() {
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
