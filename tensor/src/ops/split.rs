//! Consecutive ranges of an unsharded dim as separate tensors: the inverse of concatenation.

use super::concat::Concat;
use super::labels::{check_dim, check_num_tensors, dim_labels_with, invalid_argument, unsplit};
use super::{Case, Input};
use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::refusal::Refusal;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, Vjp, infer_by_signature, unwind,
};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::{DType, Dims};
use smallvec::SmallVec;
use std::rc::Rc;

/// Splits a dim into consecutive ranges of given sizes, as views: `a x! c -> a y0 c, a y1 c, ..`.
///
/// Any dtype; no element moves. The dim must not be sharded. Linear. Gradient: dx = the cotangents of all ranges,
/// concatenated.
#[doc(alias = "chunk")]
#[doc(alias = "split_with_sizes")]
#[derive(Debug)]
pub struct Split {
    signature: String,
    dim: usize,
    sizes: Dims,
}

impl Split {
    /// The ranges of sizes `sizes` of dim `dim`, which has `extent` elements, of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range, the sizes do not add up to its extent, or there are not 1 to 16 sizes.
    pub fn along(ndim: usize, extent: usize, dim: usize, sizes: &[usize]) -> Result<Rc<dyn Op>> {
        check_dim("split", ndim, dim)?;
        check_num_tensors("split", sizes.len())?;
        if sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) != Some(extent) {
            return invalid_argument(format!(
                "split: the sizes {sizes:?} do not add up to the {extent} elements of dim {dim}"
            ));
        }
        let parts: Vec<String> =
            (0..sizes.len()).map(|i| dim_labels_with(ndim, dim, &format!("y{i}"))).collect();
        let signature = format!("{} -> {}", dim_labels_with(ndim, dim, "x!"), parts.join(", "));
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

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Exact
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
            unsplit(args[0], dtypes[0], &shape)
        };
        let parts: Vec<Option<Layout>> = self.sizes.iter().map(part).collect();
        infer_by_signature(self, context, args, dtypes, &parts)
    }

    fn forward(&self, _: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let mut start = 0;
        let part = |&size: &usize| {
            start += size;
            x[0].with_view(x[0].view.narrow(self.dim, start - size, start))
        };
        Ok(self.sizes.iter().map(part).collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| {
            let grads: Vec<Tensor> = (0..self.sizes.len()).map(|k| cx.grad(k)).collect();
            let grads: Vec<&Tensor> = grads.iter().collect();
            let op = unwind(Concat::along(cx.input_layouts[0].ndim(), self.dim, grads.len()));
            cx.cotangent(i, op, &grads)
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], dim, sizes: &[usize]| {
        let op = Split::along(shape.len(), shape[dim], dim, sizes).expect("sizes of the case");
        Case::fixed_shape(op, vec![Input::real(shape)]).exact()
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
    use crate::methods::shaping::Shaping;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_ranges_written_by_hand() {
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
