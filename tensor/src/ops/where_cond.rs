//! Elementwise selection by a mask (`torch.where`): z = x where the mask is true, else y. Shapes broadcast as in NumPy.

use super::broadcast::Broadcast;
use super::labels::common_dtype;
use super::logical::check_bool;
use super::masked_fill::zeroed;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use shardgrad_kernels::op::compare_select::WHERE;
use std::rc::Rc;

/// Selects elements by a mask: z = x where the mask is true, else y (`torch.where`, `jnp.where`).
///
/// On a bool mask, x and y; x and y have one dtype of any kind. Shapes broadcast as in NumPy. Linear in x and y
/// jointly.
///
/// Gradient: dx = g where the mask is true, else 0; dy the other way round; summed over the broadcast dims of an
/// argument. An element that is not selected has gradient 0 even if it is NaN.
#[doc(alias = "where")]
#[doc(alias = "select")]
#[doc(alias = "choose")]
#[derive(Debug)]
pub struct WhereCond {
    shape: Broadcast,
}

impl WhereCond {
    /// The selection between tensors of these shapes: mask, x, y.
    #[must_use]
    pub fn among(mask: &[usize], x: &[usize], y: &[usize]) -> Rc<dyn Op> {
        Rc::new(WhereCond { shape: Broadcast::among(&[mask, x, y]) })
    }
}

impl Op for WhereCond {
    fn name(&self) -> &'static str {
        "where_cond"
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1, 2]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false, true, true]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_bool(inputs[0])?;
        common_dtype(&inputs[1..])
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Broadcast::launch(local, &WHERE, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| self.shape.sum_to_argument(cx, zeroed(&cx.grad(0), cx.input(0), i == 2), i))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |mask: &[usize], x: &[usize], y: &[usize]| {
        let op = WhereCond::among(mask, x, y);
        Case::fixed_shape(op, vec![Input::boolean(mask), Input::real(x), Input::real(y)]).exact()
    };
    vec![
        case(&[5, 3], &[5, 3], &[5, 3]),
        case(&[5, 1], &[5, 3], &[3]),
        case(&[3], &[5, 1], &[]),
        case(&[2, 1, 3], &[5, 3], &[2, 5, 1]),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[1.0f32, f32::NAN, 3.0])?;
            let zero = Tensor::from_host(rank, &[], &[0.0f32])?;
            assert_eq!(x.eq(&x).where_cond(&x, &zero).to_host::<f32>()?, [1.0, 0.0, 3.0]);
            Ok(())
        })
        .unwrap();
    }
}
