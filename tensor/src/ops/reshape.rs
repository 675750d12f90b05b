//! The same elements in row-major order under another shape.

use super::labels::{DIMS_MAX, letters, misuse};
use super::{Case, Input};
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use crate::refusal::Refusal;
use crate::reshape_rule::reshape_layout;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::{DType, Dims, Strides};
use std::rc::Rc;

/// Any dims to any dims with as many elements, any dtype. A view where the strides allow it, else a copy. Linear.
/// dx = g under the old shape.
///
/// No signature can say where a split of merged dims lands, so the rule is
/// [`reshape_layout`]: no element moves between ranks, and a cut that falls inside
/// of a row of the new shape is refused.
#[derive(Debug)]
pub struct Reshape {
    signature: String,
    shape: Dims,
    /// For the way back the layout is known: it is where the forward came from.
    layout: Option<Layout>,
}

impl Reshape {
    /// From one global shape to another.
    ///
    /// # Errors
    /// Of kind `Kind::Shape` if they have not the same number of elements.
    pub fn to(from: &[usize], shape: &[usize]) -> Result<Rc<dyn Op>> {
        let numel = shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent));
        if numel != Some(from.iter().product()) {
            return misuse(format!("reshape: {from:?} has not as many elements as {shape:?}"));
        }
        if from.len().max(shape.len()) > DIMS_MAX {
            return misuse(format!(
                "reshape: from {from:?} to {shape:?}; at most {DIMS_MAX} dims are possible"
            ));
        }
        Ok(Reshape::of(from.len(), shape, None))
    }

    fn of(ndim: usize, shape: &[usize], layout: Option<Layout>) -> Rc<dyn Op> {
        let new: Vec<String> = (0..shape.len()).map(|d| format!("n{d}")).collect();
        let signature = format!("{} -> {}", letters(0..ndim), new.join(" "));
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

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let shape = local.inference.outputs[0].local_shape(local.rank.coordinates());
        let y = match x[0].view.reshape(&shape) {
            Some(view) => x[0].viewed(view),
            None => x[0].converted(local.rank, x[0].dtype)?.viewed(Strides::contiguous(&shape)),
        };
        Ok([y].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| {
            let goal = cx.goal(i);
            let op = Reshape::of(self.shape.len(), &goal.shape(), Some(goal));
            Tensor::result(op, &[&cx.grad(0)])
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |from: &[usize], to: &[usize]| {
        Case::fixed(Reshape::to(from, to).expect("shapes of the case"), vec![Input::real(from)]).exact()
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
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn shapes_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert!(x.reshape(&[3, 2]).piece().buffer.same_as(&x.piece().buffer), "a view");
            assert_eq!(x.transpose(0, 1).reshape(&[6]).to_host::<i64>()?, [1, 4, 2, 5, 3, 6]);
            assert_eq!(x.reshape(&[1, 6, 1]).shape().as_slice(), [1, 6, 1]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn other_numbers_of_elements_are_refused() {
        assert!(Reshape::to(&[2, 3], &[7]).is_err());
    }
}
