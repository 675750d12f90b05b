//! Fills elements with a number where a mask is true: y = c where the mask is true, else x. The mask broadcasts to x.

use super::broadcast::Broadcast;
use super::labels::invalid_argument;
use super::logical::check_bool;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use crate::tensor::{Tensor, check_representable};
use shardgrad_dist::Result;
use shardgrad_kernels::op::compare_select::MASKED_FILL;
use shardgrad_kernels::{DType, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// Fills elements with a number where a mask is true (or, inside vjps, where it is false): y = c there, else x.
///
/// `..m, ..m -> ..m`, x of any dtype and a bool mask, which broadcasts to the shape of x. c is rounded if x is a float;
/// another dtype must represent it exactly. Linear in x if c = 0; otherwise each rank of a partial sum would fill in c,
/// so a partial x is reduced first. Gradient: dx = g, 0 where c was filled in.
#[derive(Debug)]
pub struct MaskedFill {
    shape: Broadcast,
    value: f64,
    /// The value of the mask where `value` is filled in.
    on: bool,
}

impl MaskedFill {
    /// Fills in `value` where a mask is true.
    ///
    /// # Errors
    /// `Kind::Shape` if the mask does not broadcast to x: it has more dims, or an extent other than 1 where x has 1.
    pub fn of(x: &[usize], mask: &[usize], value: f64) -> Result<Rc<dyn Op>> {
        let longer =
            mask.len() > x.len() || x.iter().rev().zip(mask.iter().rev()).any(|(x, m)| *x == 1 && *m != 1);
        if longer {
            return invalid_argument(format!(
                "masked_fill: a mask of shape {mask:?} does not broadcast to a tensor of shape {x:?}"
            ));
        }
        Ok(MaskedFill::with(x, mask, value, true))
    }

    fn with(x: &[usize], mask: &[usize], value: f64, on: bool) -> Rc<dyn Op> {
        Rc::new(MaskedFill { shape: Broadcast::between(x, mask), value, on })
    }
}

/// 0 where a mask equals `on`, else x, for the vjps of other ops; the mask broadcasts to x.
pub(super) fn zeroed(x: &Tensor, mask: &Tensor, on: bool) -> Tensor {
    Tensor::apply_one(MaskedFill::with(&x.shape(), &mask.shape(), 0.0, on), &[x, mask])
}

impl Op for MaskedFill {
    fn name(&self) -> &'static str {
        "masked_fill"
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        if self.value == 0.0 { &[&[0]] } else { &[] }
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[1], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_bool(inputs[1])?;
        check_representable(inputs[0], self.value)?;
        Ok(SmallVec::from_slice(&inputs[..1]))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let scalars = [Scalar::Real(self.value), Scalar::Int(i64::from(self.on))];
        Broadcast::launch(local, &MASKED_FILL, x, &scalars)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| zeroed(&cx.grad(0), cx.input(1), self.on))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |x: &[usize], mask: &[usize], value| {
        let op = MaskedFill::of(x, mask, value).expect("shapes of the case");
        Case::fixed_shape(op, vec![Input::real(x), Input::boolean(mask)]).exact()
    };
    vec![
        case(&[5, 3], &[5, 3], 0.0),
        case(&[5, 3], &[5, 3], -0.75),
        case(&[5, 3], &[5, 1], 0.0),
        case(&[2, 5, 3], &[3], 0.5),
        case(&[5], &[], 0.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::elementwise::Elementwise;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
            let mask = x.gt_scalar(2.5);
            assert_eq!(
                x.masked_fill(&mask, f64::NEG_INFINITY).to_host::<f32>()?[..3],
                [1.0, 2.0, f32::NEG_INFINITY]
            );
            assert_eq!(zeroed(&x, &mask, false).to_host::<f32>()?, [0.0, 0.0, 3.0, 4.0]);
            Ok(())
        })
        .unwrap();
        assert!(MaskedFill::of(&[3], &[2, 3], 0.0).is_err() && MaskedFill::of(&[1], &[2], 0.0).is_err());
    }
}
