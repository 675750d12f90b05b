//! y = x in another dtype.

use super::{Case, Input};
use crate::op::{Cotangents, DTypes, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::rc::Rc;

/// `..m -> ..m`: floats to floats round to nearest, ties to even; floats to integers go towards zero; to bool everything but 0
/// is true (not a number too).
///
/// A cast up is exact, hence linear: a pending sum stays pending. A cast down rounds, so the sum is completed first.
/// dx = g in the dtype of x. There each rank's share of a pending gradient is rounded, as it would be had the
/// argument been of that dtype all along: the gradient law allows no collective there.
#[derive(Debug)]
pub struct Cast {
    from: DType,
    to: DType,
    linear: bool,
}

impl Cast {
    /// The cast between two dtypes.
    #[must_use]
    pub fn of(from: DType, to: DType) -> Rc<dyn Op> {
        Rc::new(Cast { from, to, linear: is_exact(from, to) })
    }
}

/// Whether every value of a float dtype is one of another.
pub(super) fn is_exact(from: DType, to: DType) -> bool {
    from == to
        || match to {
            DType::F64 => from.is_float(),
            DType::F32 => matches!(from, DType::BF16 | DType::F16),
            _ => false,
        }
}

impl Op for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        if self.linear { &[&[0]] } else { &[] }
    }

    fn differentiable(&self) -> &'static [bool] {
        if self.to.is_float() { &[true] } else { &[false] }
    }

    fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&[self.to]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let y = if self.from == self.to { x[0].clone() } else { x[0].converted(local.rank, self.to)? };
        Ok([y].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| {
            let op: Rc<dyn Op> = Rc::new(Cast { from: self.to, to: self.from, linear: true });
            Tensor::result(op, &[&cx.grad(0)])
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |to, input| Case::new(Cast::of(DType::F64, to), vec![input]).exact();
    vec![
        case(DType::F64, Input::real(&[5, 3])),
        case(DType::F32, Input::real(&[5, 3])),
        Case::new(Cast::of(DType::I64, DType::F64), vec![Input::index(&[5, 3], 7)]).exact(),
        Case::new(Cast::of(DType::I64, DType::Bool), vec![Input::index(&[5, 3], 3)]).exact(),
        case(DType::Bool, Input::real(&[5, 3])),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn casts_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[1.5f64, -2.7, 1.0 + 2f64.powi(-9)])?;
            assert_eq!(x.cast(DType::I64).to_host::<i64>()?, [1, -2, 1]);
            assert_eq!(x.cast(DType::BF16).to_f64()?, [1.5, -2.703125, 1.0]);
            assert_eq!(x.cast(DType::F32).to_f64()?[0], 1.5);
            let x = Tensor::from_host(rank, &[5], &[0.25f32, 0.0, -0.0, -3.0, f32::NAN])?;
            assert_eq!(x.cast(DType::Bool).to_f64()?, [1.0, 0.0, 0.0, 1.0, 1.0]);
            let x = Tensor::from_host(rank, &[3], &[256i64, 0, -1])?;
            assert_eq!(x.cast(DType::Bool).to_f64()?, [1.0, 0.0, 1.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn casts_up_are_linear_and_casts_down_are_not() {
        use DType::{BF16, F16, F32, F64, I64};
        for (from, to, linear) in [
            (BF16, F32, true),
            (F16, F64, true),
            (F32, F64, true),
            (F64, F32, false),
            (BF16, F16, false),
            (I64, F64, false),
        ] {
            assert_eq!(is_exact(from, to), linear, "{from} {to}");
        }
    }
}
