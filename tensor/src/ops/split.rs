//! Parts of a whole dim one after another: the inverse of concatenation.

use super::concat::Concat;
use super::labels::{check_count, check_dim, letters_with, misuse, whole};
use super::{Case, Input};
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Local, Op, Pieces, Vjp, infer_by_signature, unwind};
use crate::piece::Piece;
use crate::refusal::Refusal;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::{DType, Dims};
use smallvec::SmallVec;
use std::rc::Rc;

/// `a x! c -> a y0 c, a y1 c, ..`: views, no element moves. Any dtype. Linear. dx = the cotangents of all parts one
/// after another.
#[derive(Debug)]
pub struct Split {
    signature: String,
    dim: usize,
    sizes: Dims,
}

impl Split {
    /// Parts of these sizes of dim `dim`, which has `extent` elements, of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// Of kind `Kind::Shape` if there is no such dim, the sizes do not add up to it, or there are no or more than 16 parts.
    pub fn along(ndim: usize, extent: usize, dim: usize, sizes: &[usize]) -> Result<Rc<dyn Op>> {
        check_dim("split", ndim, dim)?;
        check_count("split", sizes.len())?;
        if sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) != Some(extent) {
            return misuse(format!("split: {sizes:?} do not add up to the {extent} elements of dim {dim}"));
        }
        let parts: Vec<String> =
            (0..sizes.len()).map(|i| letters_with(ndim, dim, &format!("y{i}"))).collect();
        let signature = format!("{} -> {}", letters_with(ndim, dim, "x!"), parts.join(", "));
        Ok(Rc::new(Split { signature, dim, sizes: sizes.into() }))
    }
}

impl Op for Split {
    fn name(&self) -> &'static str {
        "split"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(inputs[0], num_outputs))
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        _: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        let part = |&size: &usize| {
            let mut shape = args[0].shape();
            shape[self.dim] = size;
            whole(args[0], dtypes[0], &shape)
        };
        let parts: Vec<Option<Layout>> = self.sizes.iter().map(part).collect();
        infer_by_signature(self, context, args, dtypes, &parts)
    }

    fn forward(&self, _: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let mut start = 0;
        let part = |&size: &usize| {
            start += size;
            x[0].viewed(x[0].view.narrow(self.dim, start - size, start))
        };
        Ok(self.sizes.iter().map(part).collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| {
            let grads: Vec<Tensor> = (0..self.sizes.len()).map(|k| cx.grad(k)).collect();
            let grads: Vec<&Tensor> = grads.iter().collect();
            let op = unwind(Concat::along(cx.input_layouts[0].ndim(), self.dim, grads.len()));
            Tensor::apply_with(op, &grads, cx.goal(i))
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], dim, sizes: &[usize]| {
        let op = Split::along(shape.len(), shape[dim], dim, sizes).expect("sizes of the case");
        Case::fixed(op, vec![Input::real(shape)]).exact()
    };
    vec![
        case(&[5, 7], 1, &[2, 5]),
        case(&[3, 4, 2], 1, &[1, 0, 3]),
        case(&[3], 0, &[3]),
        case(&[0, 2], 0, &[0, 0]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shaping::Shaping;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn parts_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            let parts = x.split(1, &[1, 2]);
            assert_eq!(parts[0].to_host::<i64>()?, [1, 4]);
            assert_eq!(parts[1].to_host::<i64>()?, [2, 3, 5, 6]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn sizes_that_do_not_add_up_are_refused() {
        assert!(Split::along(2, 3, 1, &[1, 1]).is_err());
        assert!(Split::along(2, 3, 1, &[usize::MAX, 4]).is_err());
        assert!(Split::along(2, 3, 2, &[3]).is_err());
        assert!(Split::along(2, 3, 1, &[]).is_err());
    }
}
