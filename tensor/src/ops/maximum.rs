//! Elementwise maximum or minimum of two tensors. Shapes broadcast as in NumPy.

use super::broadcast::{BinaryBackward, Broadcast};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::{MAXIMUM, MAXIMUM_GRAD, MINIMUM, MINIMUM_GRAD};
use std::rc::Rc;

/// Elementwise maximum (or minimum) of two tensors; NaN if either is NaN.
///
/// Shapes and dtypes as for [`Add`](super::add::Add). Gradient: dx = g where x is the result, g / 2 where x = y, else
/// 0; dy likewise. Where x or y is NaN, dx = dy = g, as in PyTorch. Summed over the broadcast dims of an argument.
#[doc(alias = "minimum")]
#[derive(Debug)]
pub struct Maximum {
    shape: Broadcast,
    is_max: bool,
}

impl Maximum {
    /// The maximum of two tensors of these shapes.
    #[must_use]
    pub fn between(first: &[usize], second: &[usize]) -> Rc<dyn Op> {
        Rc::new(Maximum { shape: Broadcast::between(first, second), is_max: true })
    }

    /// The minimum of two tensors of these shapes.
    #[must_use]
    pub fn minimum(first: &[usize], second: &[usize]) -> Rc<dyn Op> {
        Rc::new(Maximum { shape: Broadcast::between(first, second), is_max: false })
    }
}

impl Op for Maximum {
    fn name(&self) -> &'static str {
        if self.is_max { "maximum" } else { "minimum" }
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Broadcast::launch(local, if self.is_max { &MAXIMUM } else { &MINIMUM }, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let kernel = if self.is_max { &MAXIMUM_GRAD } else { &MINIMUM_GRAD };
        cx.cotangents(|i| {
            let cotangent = BinaryBackward::of(kernel, cx.input(i), cx.input(1 - i), &cx.grad(0));
            self.shape.sum_to_argument(cx, cotangent, i)
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |op: fn(&[usize], &[usize]) -> Rc<dyn Op>, x: &[usize], y: &[usize]| {
        Case::fixed_shape(op(x, y), vec![Input::real(x), Input::real(y)]).exact()
    };
    vec![
        case(Maximum::between, &[5, 3], &[5, 3]),
        case(Maximum::between, &[5, 1], &[3]),
        case(Maximum::minimum, &[5, 8], &[8]),
        case(Maximum::minimum, &[3], &[2, 5, 1]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[2.0f64, 4.0, 0.0, f64::NAN])?;
            let y = Tensor::from_host(rank, &[4], &[3.0f64, 0.5, 0.0, 2.0])?;
            assert_eq!(x.maximum(&y).to_host::<f64>()?[..3], [3.0, 4.0, 0.0]);
            assert_eq!(y.minimum(&x).to_host::<f64>()?[..3], [2.0, 0.5, 0.0]);
            assert!(
                x.maximum(&y).to_host::<f64>()?[3].is_nan() && y.minimum(&x).to_host::<f64>()?[3].is_nan()
            );
            let share = BinaryBackward::of(&MAXIMUM_GRAD, &x, &y, &Tensor::full(rank, x.layout(), 1.0)?);
            assert_eq!(share.to_host::<f64>()?, [0.0, 1.0, 0.5, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
