//! Cyclic shift along a dim of n elements: y_((i + s) mod n) = x_i.

use super::labels::{check_dim, dim_labels_with};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use std::rc::Rc;

/// Cyclic shift along a dim of n elements: y_((i + s) mod n) = x_i; `a x! c -> a x! c`.
///
/// Any dtype. The dim must not be sharded. Linear. Gradient: dx = g shifted back.
#[doc(alias = "circular shift")]
#[derive(Debug)]
pub struct Roll {
    signature: String,
    dim: usize,
    shift: i64,
}

impl Roll {
    /// The shift by `shift` positions towards higher indices (negative: towards lower) along dim `dim` of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range.
    pub fn along(ndim: usize, dim: usize, shift: i64) -> Result<Rc<dyn Op>> {
        check_dim("roll", ndim, dim)?;
        Ok(Roll::of(ndim, dim, shift))
    }

    fn of(ndim: usize, dim: usize, shift: i64) -> Rc<dyn Op> {
        let tensor = dim_labels_with(ndim, dim, "x!");
        Rc::new(Roll { signature: format!("{tensor} -> {tensor}"), dim, shift })
    }
}

impl Op for Roll {
    fn name(&self) -> &'static str {
        "roll"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs.into())
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let mut out = local.output(0)?;
        let n = x[0].view.shape[self.dim];
        let shift = self.shift.checked_rem_euclid(n as i64).unwrap_or(0) as usize;
        for (from, to) in [(0..n - shift, shift..n), (n - shift..n, 0..shift)] {
            let part = x[0].with_view(x[0].view.narrow(self.dim, from.start, from.end));
            let at = out.view.narrow(self.dim, to.start, to.end);
            out.write(local.rank, at, &part)?;
        }
        Ok([out].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = Roll::of(cx.output_layouts[0].ndim(), self.dim, self.shift.wrapping_neg());
        cx.cotangents(|_| Tensor::apply_one(op.clone(), &[&cx.grad(0)]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |dim, shift, shape: &[usize]| {
        Case::new(Roll::of(shape.len(), dim, shift), vec![Input::real(shape)]).exact()
    };
    vec![case(1, 2, &[5, 7]), case(0, -1, &[3, 5]), case(1, 9, &[2, 4, 3]), case(0, 1, &[0, 3])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::shaping::Shaping;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert_eq!(x.roll(1, 1).to_host::<i64>()?, [3, 1, 2, 6, 4, 5]);
            assert_eq!(x.roll(1, -4).to_host::<i64>()?, [2, 3, 1, 5, 6, 4]);
            assert_eq!(x.roll(0, 2).to_host::<i64>()?, [1, 2, 3, 4, 5, 6]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn dim_out_of_range_is_refused() {
        assert!(Roll::along(2, 2, 1).is_err());
    }
}
