//! Conversion to another dtype.

use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::rc::Rc;

/// Converts a tensor to another dtype: `..m -> ..m`.
///
/// Float to float rounds to nearest, ties to even; float to integer truncates towards zero; to bool everything but 0 is
/// true, NaN too.
///
/// A cast to a wider float is exact, hence linear: a partial sum stays partial. A cast to a narrower dtype rounds, so a
/// partial sum is reduced first. Gradient: dx = g in the dtype of x. There each rank's term of a partial gradient is
/// rounded, as if the argument had that dtype all along: a vjp must not communicate.
#[doc(alias = "to")]
#[doc(alias = "astype")]
#[doc(alias = "convert_element_type")]
#[derive(Debug)]
pub struct Cast {
    from: DType,
    to: DType,
    is_linear: bool,
}

impl Cast {
    /// The cast from one dtype to another.
    #[must_use]
    pub fn of(from: DType, to: DType) -> Rc<dyn Op> {
        Rc::new(Cast { from, to, is_linear: is_exact(from, to) })
    }
}

/// Whether the dtype `to` represents every value of the float dtype `from` exactly.
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
        if self.is_linear { &[&[0]] } else { &[] }
    }

    fn differentiable(&self) -> &'static [bool] {
        if self.to.is_float() { &[true] } else { &[false] }
    }

    fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&[self.to]))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let y = if self.from == self.to { x[0].clone() } else { x[0].to_dtype(local.rank, self.to)? };
        Ok([y].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| {
            let op: Rc<dyn Op> = Rc::new(Cast { from: self.to, to: self.from, is_linear: true });
            Tensor::apply_one(op, &[&cx.grad(0)])
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
    use crate::methods::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_casts_computed_by_hand() {
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
    fn only_widening_float_casts_are_linear() {
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
