//! The dims of a tensor in another order, as a view; transposition swaps two of them.

use super::labels::{check_dim, dim_labels, invalid_argument};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::{DType, Dims};
use std::rc::Rc;

/// Reorders the dims of a tensor, as a view: `a b -> b a`, `a b c -> c a b`, ...
///
/// Any dtype; no element moves. Linear. Gradient: dx = g with the dims in the old order.
#[doc(alias = "transpose")]
#[doc(alias = "swapaxes")]
#[derive(Debug)]
pub struct Permute {
    signature: String,
    order: Dims,
}

impl Permute {
    /// Dim i of the result is dim `order[i]` of the argument.
    ///
    /// # Errors
    /// `Kind::Shape` if `order` is not a permutation of `0..ndim`.
    pub fn by(ndim: usize, order: &[usize]) -> Result<Rc<dyn Op>> {
        for &d in order {
            check_dim("permute", ndim, d)?;
        }
        if order.len() != ndim || (0..ndim).any(|d| !order.contains(&d)) {
            return invalid_argument(format!(
                "permute: {order:?} is not a permutation of the {ndim} dims of the tensor"
            ));
        }
        Ok(Permute::of(order.into()))
    }

    fn of(order: Dims) -> Rc<dyn Op> {
        let signature = format!("{} -> {}", dim_labels(0..order.len()), dim_labels(order.iter().copied()));
        Rc::new(Permute { signature, order })
    }
}

impl Op for Permute {
    fn name(&self) -> &'static str {
        "permute"
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

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Exact
    }

    fn forward(&self, _: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Ok([x[0].with_view(x[0].view.permute(&self.order))].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let mut back = Dims::from_elem(0, self.order.len());
        for (to, &from) in self.order.iter().enumerate() {
            back[from] = to;
        }
        let op = Permute::of(back);
        cx.cotangents(|_| Tensor::apply_one(op.clone(), &[&cx.grad(0)]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |order: &[usize], input| Case::new(Permute::of(order.into()), vec![input]).exact();
    vec![
        case(&[1, 0], Input::real(&[7, 3])),
        case(&[2, 0, 1], Input::real(&[2, 5, 3])),
        case(&[0, 2, 1], Input::index(&[2, 5, 3], 9)),
        case(&[1, 0], Input::real(&[0, 3])),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_transpositions_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert_eq!(x.transpose(0, 1).to_host::<i64>()?, [1, 4, 2, 5, 3, 6]);
            assert_eq!(x.transpose(1, 0).to_host::<i64>()?, [1, 4, 2, 5, 3, 6]);
            assert_eq!(x.permute(&[1, 0]).permute(&[1, 0]).to_host::<i64>()?, [1, 2, 3, 4, 5, 6]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn orders_that_are_no_permutation_are_refused() {
        assert!(Permute::by(2, &[0, 0]).is_err());
        assert!(Permute::by(2, &[0, 2]).is_err());
        assert!(Permute::by(3, &[0, 1]).is_err());
    }
}
