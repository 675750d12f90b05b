//! The k largest or smallest elements of a dim, which may be sharded, in order, with the indices of their source positions.

use super::labels::{check_dim, dim_labels_with, invalid_argument, unsplit};
use super::reduced_dims::with_invariant_outputs;
use super::shard_candidates::Candidates;
use super::sort::{dim_back, dim_last, sort_prefix, sort_rows, sort_vjp};
use super::{Case, Input};
use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::refusal::Refusal;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp,
    infer_by_signature,
};
use shardgrad_dist::Result;
use shardgrad_kernels::{DType, Strides};
use std::rc::Rc;

/// The k largest (or smallest) elements along a dim: values (any dtype) and the i64 indices of their source positions.
///
/// `a x c -> a y c, a y c`. The largest come in descending order, the smallest in ascending order. Of equal elements
/// (0 and -0 are equal) those with the lowest indices are taken, lowest first, on every layout. NaN is larger than all
/// numbers. Gradient: dx = g of the values, scattered to the source positions, 0 elsewhere.
///
/// The op has its own inference rule: over mesh axes that shard the dim it gathers k elements and indices for each row and rank, two
/// all-gathers, and the results are invariant (`=`) on these axes. A partial x is reduced first.
#[doc(alias = "topk")]
#[derive(Debug)]
pub struct TopK {
    signature: String,
    dim: usize,
    k: usize,
    largest: bool,
}

impl TopK {
    /// The first `k` elements along dim `dim`, which has extent `extent`, of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range or has fewer than `k` elements.
    pub fn along(ndim: usize, extent: usize, dim: usize, k: usize, largest: bool) -> Result<Rc<dyn Op>> {
        check_dim("top_k", ndim, dim)?;
        if k > extent {
            return invalid_argument(format!("top_k: k = {k} exceeds the {extent} elements of dim {dim}"));
        }
        let picked = dim_labels_with(ndim, dim, "y");
        let signature = format!("{} -> {picked}, {picked}", dim_labels_with(ndim, dim, "x"));
        Ok(Rc::new(TopK { signature, dim, k, largest }))
    }
}

impl Op for TopK {
    fn name(&self) -> &'static str {
        "top_k"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[1] }
    }

    // A choice among elements has one result in any order.
    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Own
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok([inputs[0], DType::I64][..].into())
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        _: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        let mut shape = args[0].shape();
        shape[self.dim] = self.k;
        let want = [0, 1].map(|i| unsplit(args[0], dtypes[i], &shape));
        let inferred = infer_by_signature(self, context, args, dtypes, &want)?;
        Ok(with_invariant_outputs(inferred, args[0], &[self.dim]))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let TopK { dim, k, largest, .. } = *self;
        if k == 0 || local.inputs[0].dims()[dim].axes.is_empty() {
            return sort_prefix(local, x[0], dim, k, largest);
        }
        let rows = dim_last(local, x[0], dim)?;
        let (mut shape, last) = (rows.view.shape.clone(), rows.view.ndim() - 1);
        let num_rows: usize = shape[..last].iter().product();
        let num_own = k.min(shape[last]);
        let [values, indices] = sort_rows(local, &rows, num_own, largest)?;
        let values = values.with_view(Strides::contiguous(&[num_rows, num_own]));
        let own = Candidates::in_shard(local, dim, values, &indices)?;
        let all = own.gathered(local, x, dim, k)?;
        let [values, columns] = sort_rows(local, &all.values, k, largest)?;
        let indices = Candidates::pick(local, &all.positions, &columns)?;
        shape[last] = k;
        let outputs = [values, indices].map(|output| output.with_view(Strides::contiguous(&shape)));
        Ok(outputs.iter().map(|output| dim_back(output, dim)).collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        sort_vjp(cx, self.dim)
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |dim, k, largest, shape: &[usize]| {
        let op = TopK::along(shape.len(), shape[dim], dim, k, largest).expect("a dim of the case");
        Case::fixed_shape(op, vec![Input::distinct(shape)]).exact()
    };
    vec![
        case(1, 3, true, &[5, 7]),
        case(0, 2, false, &[4, 3]),
        case(1, 5, true, &[2, 5, 3]),
        case(1, 1, true, &[1, 1]),
        case(1, 0, true, &[3, 2]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::indexing::Indexing;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn the_lowest_index_of_ties_comes_first() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[5], &[1.0f32, 4.0, 2.0, 4.0, 1.0])?;
            let (values, indices) = x.top_k(0, 3, true);
            assert_eq!(values.to_host::<f32>()?, [4.0, 4.0, 2.0]);
            assert_eq!(indices.to_host::<i64>()?, [1, 3, 2]);
            let (values, indices) = x.top_k(0, 1, false);
            assert_eq!((values.to_host::<f32>()?, indices.to_host::<i64>()?), (vec![1.0], vec![0]));
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn ties_and_nan_are_ordered_alike_on_every_layout() {
        let nan = f32::NAN;
        let data = [[4.0f32, 1.0, 4.0, 0.0, 4.0, 1.0], [nan, 2.0, nan, 2.0, -1.0, 2.0]];
        let layouts = [
            ("", "f32[2, 6]"),
            ("a=2", "f32[2, 6@a]"),
            ("a=4", "f32[2, 6@a]"),
            ("a=7", "f32[2, 6@a]"),
            ("a=2,b=2", "f32[2, 6@b@a]"),
            ("a=2,b=3", "f32[2@a, 6@b]"),
        ];
        for (mesh, text) in layouts {
            World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let x = Tensor::from_global(rank, &Layout::parse(text, rank.mesh())?, &data.concat())?;
                let (values, indices) = x.top_k(1, 4, true);
                assert_eq!(indices.to_host::<i64>()?, [0, 2, 4, 1, 0, 2, 1, 3], "{mesh}, {text}");
                assert_eq!(values.to_host::<f32>()?[..4], [4.0, 4.0, 4.0, 1.0], "{mesh}, {text}");
                let (values, indices) = x.top_k(1, 5, false);
                assert_eq!(indices.to_host::<i64>()?, [3, 1, 5, 0, 2, 4, 1, 3, 5, 0], "{mesh}, {text}");
                assert_eq!(values.to_host::<f32>()?[..9], [0.0, 1.0, 1.0, 4.0, 4.0, -1.0, 2.0, 2.0, 2.0]);
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn k_above_the_extent_is_refused() {
        assert!(TopK::along(1, 2, 0, 3, true).is_err());
        assert!(TopK::along(1, 2, 1, 1, true).is_err());
    }
}
