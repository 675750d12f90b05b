//! Elementwise power of two tensors: z = x^y. Shapes broadcast as in NumPy.

use super::broadcast::{BinaryBackward, Broadcast};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::{POW, POW_BASE_GRAD, POW_EXPONENT_GRAD};
use std::rc::Rc;

/// Elementwise power of two tensors: z = x^y.
///
/// Shapes and dtypes as for [`Add`](super::add::Add). As IEEE 754 `pow`: 1 where y = 0 or x = 1, NaN where x < 0 and y
/// is not an integer.
///
/// Gradient: dx = g y x^(y - 1), 0 where y = 0; dy = g z ln(x), 0 where x = 0 and y >= 0; summed over the broadcast
/// dims of an argument.
#[doc(alias = "power")]
#[derive(Debug)]
pub struct Pow {
    shape: Broadcast,
}

impl Pow {
    /// The power of two tensors of these shapes.
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

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Broadcast::launch(local, &POW, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| {
            let kernel = if i == 0 { &POW_BASE_GRAD } else { &POW_EXPONENT_GRAD };
            let [x, y, g] =
                [cx.input(0), cx.input(1), &cx.grad(0)].map(|x| self.shape.widen_if_broadcast(x, i));
            self.shape.sum_to_argument(cx, BinaryBackward::of(kernel, &x, &y, &g), i)
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |x: &[usize], y: &[usize]| {
        Case::fixed_shape(Pow::between(x, y), vec![Input::positive(x), Input::real(y)])
    };
    vec![case(&[5, 3], &[5, 3]), case(&[5, 8], &[8]), case(&[5, 1], &[3]), case(&[3], &[2, 5, 1])]
}

#[cfg(test)]
mod tests {
    use crate::methods::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
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
