//! The same elements in row-major order with another shape.

use super::labels::{DIMS_MAX, dim_labels, invalid_argument};
use super::{Case, Input};
use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::refusal::Refusal;
use crate::layout::reshape_rule::reshape_layout;
use crate::op::{CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::{DType, Dims, Strides};
use std::rc::Rc;

/// Changes the shape of a tensor; elements keep their row-major order.
///
/// Any dtype; the numbers of elements must be equal. A view where the strides allow it, otherwise a copy. Linear.
/// Gradient: dx = g with the old shape.
///
/// No signature can state how the sharding of merged dims carries over, so the inference rule is [`reshape_layout`]: no
/// element moves between ranks, and a shard boundary inside of a row of the new shape is refused.
#[doc(alias = "view")]
#[doc(alias = "flatten")]
#[derive(Debug)]
pub struct Reshape {
    signature: String,
    shape: Dims,
    /// In a vjp: the layout of the result, which the argument of the forward determines.
    layout: Option<Layout>,
}

impl Reshape {
    /// The op from one global shape to another.
    ///
    /// # Errors
    /// `Kind::Shape` if the numbers of elements differ, or one shape has more than 12 dims.
    pub fn to(from: &[usize], shape: &[usize]) -> Result<Rc<dyn Op>> {
        let numel = shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent));
        if numel != Some(from.iter().product()) {
            return invalid_argument(format!(
                "reshape: shape {from:?} and shape {shape:?} have different numbers of elements"
            ));
        }
        if from.len().max(shape.len()) > DIMS_MAX {
            return invalid_argument(format!(
                "reshape: from {from:?} to {shape:?}, but at most {DIMS_MAX} dims are supported"
            ));
        }
        Ok(Reshape::of(from.len(), shape, None))
    }

    fn of(ndim: usize, shape: &[usize], layout: Option<Layout>) -> Rc<dyn Op> {
        let new: Vec<String> = (0..shape.len()).map(|d| format!("n{d}")).collect();
        let signature = format!("{} -> {}", dim_labels(0..ndim), new.join(" "));
        Rc::new(Reshape { signature, shape: shape.into(), layout })
    }
}

impl Op for Reshape {
    fn name(&self) -> &'static str {
        "reshape"
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

    fn infer(
        &self,
        _: &Context,
        args: &[&Layout],
        _: &[DType],
        _: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        let output = match &self.layout {
            Some(layout) => layout.clone(),
            None => reshape_layout(args[0], &self.shape)?,
        };
        Ok(Rc::new(Inference::direct(1, [output])))
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Exact
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let shape = local.inference.outputs[0].local_shape(local.rank.coordinates());
        let y = match x[0].view.reshape(&shape) {
            Some(view) => x[0].with_view(view),
            None => x[0].to_dtype(local.rank, x[0].dtype)?.with_view(Strides::contiguous(&shape)),
        };
        Ok([y].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| {
            let goal = cx.cotangent_layout(i);
            let op = Reshape::of(self.shape.len(), &goal.shape(), Some(goal));
            Tensor::apply_one(op, &[&cx.grad(0)])
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |from: &[usize], to: &[usize]| {
        Case::fixed_shape(Reshape::to(from, to).expect("shapes of the case"), vec![Input::real(from)]).exact()
    };
    vec![
        case(&[5, 3], &[15]),
        case(&[12], &[4, 3]),
        case(&[2, 6, 3], &[2, 2, 3, 3]),
        case(&[4, 3], &[2, 6]),
        case(&[2, 1, 3], &[2, 3]),
        case(&[3], &[1, 3, 1]),
        case(&[2, 2, 2], &[4, 2]),
        case(&[2, 0, 3], &[0]),
        case(&[1, 1], &[]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_shapes_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert!(x.reshape(&[3, 2]).local().buffer.same_as(&x.local().buffer), "a view");
            assert_eq!(x.transpose(0, 1).reshape(&[6]).to_host::<i64>()?, [1, 4, 2, 5, 3, 6]);
            assert_eq!(x.reshape(&[1, 6, 1]).shape().as_slice(), [1, 6, 1]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn different_numbers_of_elements_are_refused() {
        assert!(Reshape::to(&[2, 3], &[7]).is_err());
    }
}
