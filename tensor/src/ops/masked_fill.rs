//! y = c where a mask is true (or where it is not), else x. The mask is aligned at the last dim; its missing dims and
//! extents of 1 are repeated.

use super::broadcast::Broadcast;
use super::labels::misuse;
use super::logical::check_truth;
use super::{Case, Input};
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use crate::tensor::{Tensor, check_held};
use shardgrad_dist::Result;
use shardgrad_kernels::op::compare_select::MASKED_FILL;
use shardgrad_kernels::{DType, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// `..m, ..m -> ..m`, x of any dtype and a bool mask; c is rounded to floats and must be held by others. Linear in x if c is
/// 0; otherwise each rank of a pending sum would fill in c, so the sum is completed. dx = g, 0 where c was filled in.
#[derive(Debug)]
pub struct MaskedFill {
    shape: Broadcast,
    value: f64,
    on: bool,
}

impl MaskedFill {
    /// Fills `value` in where a mask is true.
    ///
    /// # Errors
    /// `Kind::Shape` if the mask has more dims than x, or an extent where x has 1.
    pub fn of(x: &[usize], mask: &[usize], value: f64) -> Result<Rc<dyn Op>> {
        let longer =
            mask.len() > x.len() || x.iter().rev().zip(mask.iter().rev()).any(|(x, m)| *x == 1 && *m != 1);
        if longer {
            return misuse(format!("masked_fill: a mask of {mask:?} for a tensor of {x:?}"));
        }
        Ok(MaskedFill::with(x, mask, value, true))
    }

    fn with(x: &[usize], mask: &[usize], value: f64, on: bool) -> Rc<dyn Op> {
        Rc::new(MaskedFill { shape: Broadcast::between(x, mask), value, on })
    }
}

/// x where a mask is (not) true, else 0, for tensors of one shape but for what is repeated of the mask.
pub(super) fn zeroed(x: &Tensor, mask: &Tensor, on: bool) -> Tensor {
    Tensor::result(MaskedFill::with(&x.shape(), &mask.shape(), 0.0, on), &[x, mask])
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

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[1], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_truth(inputs[1])?;
        check_held(inputs[0], self.value)?;
        Ok(SmallVec::from_slice(&inputs[..1]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let scalars = [Scalar::Real(self.value), Scalar::Int(i64::from(self.on))];
        Broadcast::launch(local, &MASKED_FILL, x, &scalars)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| zeroed(&cx.grad(0), cx.input(1), self.on))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |x: &[usize], mask: &[usize], value| {
        let op = MaskedFill::of(x, mask, value).expect("shapes of the case");
        Case::fixed(op, vec![Input::real(x), Input::truth(mask)]).exact()
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
    use crate::elementwise::Elementwise;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
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
