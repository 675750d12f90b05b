//! Sum or mean over some dims, and its transpose: expansion along new dims.
//!
//! [`Sum`]: y = c times the sum of x over some dims; a mean is the sum with c = 1 / (the global extent of the summed
//! dims). [`Expand`]: y = c x, repeated along new dims.

use super::labels::{check_dim, check_ndim, invalid_argument, reduction, unsplit};
use super::scale::scale;
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, View, launch};
use crate::layout::Layout;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LeafCut, LocalTensors, Op, OutputLayouts, PlanKey, Vjp,
};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::reduce::{LEAF_SUM, SUM};
use shardgrad_kernels::op::unary::SCALE;
use shardgrad_kernels::{DType, Dims, Scalar, Strides};
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;
use std::rc::Rc;

/// Sum or mean over some dims, which disappear: `a b c -> a c`, `..m d -> ..m`, `..m d -> d`, `..m -> `.
///
/// Any float dtype, summed in the accumulator dtype. Linear; the result is a partial sum over the mesh axes that shard
/// the summed dims. Gradient: dx = c g, expanded along the summed dims.
#[doc(alias = "mean")]
#[doc(alias = "reduce_sum")]
#[derive(Debug)]
pub struct Sum {
    signature: Cow<'static, str>,
    ndim: usize,
    dims: Dims,
    is_mean: bool,
}

impl Sum {
    /// The sum, or the mean if `is_mean`, over some dims of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if a dim is out of range or named twice, or there are more than 12 dims.
    pub fn over(ndim: usize, dims: &[usize], is_mean: bool) -> Result<Sum> {
        let name = if is_mean { "mean" } else { "sum" };
        let mut sorted: Dims = dims.into();
        sorted.sort_unstable();
        check_ndim(name, ndim)?;
        for &d in dims {
            check_dim(name, ndim, d)?;
        }
        if sorted.windows(2).any(|w| w[0] == w[1]) {
            return invalid_argument(format!("{name}: the dims {dims:?} name a dim twice"));
        }
        Ok(Sum::of(ndim, sorted, is_mean))
    }

    /// The sum over the first `count` dims, as in the vjp of a broadcast.
    #[must_use]
    pub fn leading(ndim: usize, count: usize) -> Sum {
        Sum::of(ndim, (0..count).collect(), false)
    }

    /// A view of the argument with the summed dims last.
    fn reduced_last(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> LocalTensor {
        let reduced_last = local.memoize(x, || {
            let remaining = (0..self.ndim).filter(|d| !self.dims.contains(d));
            let order: Dims = remaining.chain(self.dims.iter().copied()).collect();
            ReducedLast(x[0].view.permute(&order).into())
        });
        x[0].with_view(reduced_last.0.clone())
    }

    /// The number of summed dims and the factor, as scalars of kernels.
    fn scalars(&self, local: &ForwardContext<'_>) -> [Scalar; 2] {
        let count: usize = self.dims.iter().map(|&d| local.inputs[0].extent(d)).product();
        let scale = if self.is_mean { 1.0 / count as f64 } else { 1.0 };
        [Scalar::Int(self.dims.len() as i64), Scalar::Real(scale)]
    }

    fn of(ndim: usize, dims: Dims, is_mean: bool) -> Sum {
        let [signature, _] = reduction(ndim, &dims);
        Sum { signature, ndim, dims, is_mean }
    }
}

impl Op for Sum {
    fn name(&self) -> &'static str {
        if self.is_mean { "mean" } else { "sum" }
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn plan_key(&self) -> Option<PlanKey> {
        match self.signature {
            Cow::Borrowed(text) => Some(PlanKey::of::<Sum>(text)),
            Cow::Owned(_) => None,
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Leaves
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        local.launch(&SUM, &[&self.reduced_last(local, x)], &self.scalars(local))
    }

    fn forward_of_leaves(
        &self,
        local: &ForwardContext<'_>,
        x: &[&LocalTensor],
        cut: &LeafCut,
    ) -> Option<Result<LocalTensors>> {
        let dim = local.inference.labels().inputs()[0].iter().position(|label| *label == cut.label)?;
        let place = self.dims.iter().position(|d| *d == dim)?;
        let view = self.reduced_last(local, x);
        let place = Scalar::Int((self.ndim - self.dims.len() + place) as i64);
        let scalars: SmallVec<[Scalar; 14]> =
            self.scalars(local).into_iter().chain([place]).chain(cut.leaves.scalars(1)).collect();
        Some(local.launch(&LEAF_SUM, &[&view], &scalars))
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| {
            let goal = cx.cotangent_layout(0);
            let count: usize = self.dims.iter().map(|&d| goal.extent(d)).product();
            let scale = if self.is_mean { 1.0 / count as f64 } else { 1.0 };
            let op = Expand::scaled(&goal.shape(), &self.dims, scale);
            cx.cotangent(0, op, &[&cx.grad(0)])
        })
    }
}

/// The view of an argument with the summed dims last.
struct ReducedLast(View);

/// The view of an argument with new dims.
struct Expanded(View);

/// Expansion along new dims without a copy: `a c -> a b c`, `..m -> ..m d`, `d -> ..m d`, ` -> ..m` (`broadcast_in_dim`
/// of JAX).
///
/// Any dtype. Linear. A new dim is unsharded, except inside a vjp: there it is sharded as the argument whose cotangent
/// it forms. Gradient: dx = c times the sum of g over the new dims.
#[doc(alias = "broadcast_to")]
#[doc(alias = "broadcast_in_dim")]
#[doc(alias = "repeat")]
#[derive(Debug)]
pub struct Expand {
    signature: Cow<'static, str>,
    shape: Dims,
    dims: Dims,
    scale: f64,
}

impl Expand {
    /// The expansion to a result of shape `shape` whose new dims are `dims` (ascending).
    ///
    /// # Errors
    /// `Kind::Shape` if a dim is out of range, the dims do not ascend, or the result has more than 12 dims.
    pub fn to(shape: &[usize], dims: &[usize]) -> Result<Expand> {
        check_ndim("expand", shape.len())?;
        for &d in dims {
            check_dim("expand", shape.len(), d)?;
        }
        if dims.windows(2).any(|w| w[0] >= w[1]) {
            return invalid_argument(format!("expand: the new dims {dims:?} must ascend"));
        }
        Ok(Expand::scaled(shape, dims, 1.0))
    }

    /// The same, multiplied with `scale`.
    fn scaled(shape: &[usize], dims: &[usize], scale: f64) -> Expand {
        let [_, signature] = reduction(shape.len(), dims);
        Expand { signature, shape: shape.into(), dims: dims.into(), scale }
    }
}

impl Op for Expand {
    fn name(&self) -> &'static str {
        "expand"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn plan_key(&self) -> Option<PlanKey> {
        match self.signature {
            Cow::Borrowed(text) => PlanKey::of::<Expand>(text).with_shape(&self.shape),
            Cow::Owned(_) => None,
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs.into())
    }

    fn default_outputs(&self, args: &[&Layout], dtypes: &[DType]) -> OutputLayouts {
        smallvec![unsplit(args[0], dtypes[0], &self.shape)]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let mut x = x[0].clone();
        if self.scale != 1.0 {
            let mut scaled = x.alloc_like(local.rank, x.dtype)?;
            launch(local.rank, &SCALE, &[&x], &mut [&mut scaled], &[Scalar::Real(self.scale)])?;
            x = scaled;
        }
        let repeated = local.memoize(&[&x], || {
            let view = self.dims.iter().fold(Strides::clone(&x.view), |view, &d| view.unsqueeze(d));
            let shape = local.inference.outputs[0].local_shape(local.rank.coordinates());
            let view = view.broadcast(&shape).expect("new dims have extent 1 before they are repeated");
            Expanded(view.into())
        });
        x.view = repeated.0.clone();
        Ok([x].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| {
            let op = Sum::of(self.shape.len(), self.dims.clone(), false);
            let sum = Tensor::apply_one(op, &[&cx.grad(0)]);
            if self.scale == 1.0 { sum } else { scale(&sum, self.scale) }
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let sum = |ndim, dims: &[usize], is_mean, shape: &[usize]| {
        let op = Sum::over(ndim, dims, is_mean).expect("dims of the case");
        Case::new(Rc::new(op), vec![Input::real(shape)])
    };
    let expand = |shape: &[usize], dims: &[usize], x: &[usize]| {
        let op = Expand::to(shape, dims).expect("dims of the case");
        Case::fixed_shape(Rc::new(op), vec![Input::real(x)]).exact()
    };
    vec![
        sum(3, &[1], false, &[2, 5, 3]).exact(),
        sum(2, &[1], false, &[5, 8]).exact(),
        sum(2, &[0], false, &[5, 8]).exact(),
        sum(2, &[0, 1], false, &[5, 3]).exact(),
        sum(3, &[0, 2], true, &[2, 5, 3]),
        sum(2, &[1], true, &[5, 8]),
        sum(2, &[0, 1], true, &[5, 3]),
        expand(&[2, 4, 3], &[1], &[2, 3]),
        expand(&[5, 4], &[1], &[5]),
        expand(&[4, 5], &[0], &[5]),
        expand(&[5, 3], &[0, 1], &[]),
        expand(&[1, 1, 1], &[1], &[1, 1]),
        expand(&[3, 0], &[1], &[3]),
        Case::fixed_shape(Rc::new(Expand::scaled(&[2, 3], &[0], 1.0)), vec![Input::index(&[3], 9)]).exact(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_sums_and_means_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
            assert_eq!(x.sum().to_host::<f32>()?, [21.0]);
            assert_eq!(x.mean().to_host::<f32>()?, [3.5]);
            assert_eq!(x.sum_dims(&[0]).to_host::<f32>()?, [5.0, 7.0, 9.0]);
            assert_eq!(x.sum_dims(&[1]).to_host::<f32>()?, [6.0, 15.0]);
            assert_eq!(x.mean_dims(&[1]).to_host::<f32>()?, [2.0, 5.0]);
            assert_eq!(x.sum_dims(&[]).to_host::<f32>()?, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn dims_out_of_range_or_twice_are_refused() {
        assert!(Sum::over(2, &[2], false).is_err());
        assert!(Sum::over(2, &[1, 1], false).is_err());
    }

    #[test]
    fn matches_expansions_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[1.0f32, 2.0])?;
            assert_eq!(x.expand(0, 3).to_host::<f32>()?, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
            assert_eq!(x.expand(1, 3).to_host::<f32>()?, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn new_dims_out_of_range_or_descending_are_refused() {
        assert!(Expand::to(&[2], &[1]).is_err());
        assert!(Expand::to(&[2, 2], &[1, 0]).is_err());
    }

    #[test]
    fn more_than_12_dims_are_refused() {
        use crate::methods::reduction::Reduction;
        use shardgrad_dist::Kind;
        type Call = fn(&Tensor) -> Tensor;
        let cases: [(&str, Call); 5] = [
            ("sum", |x| x.sum_dims(&[])),
            ("mean", |x| x.mean_dims(&[])),
            ("sum", |x| x.sum()),
            ("amax", |x| x.amax(&[])),
            ("log_sum_exp", |x| x.log_sum_exp(&[])),
        ];
        for (name, case) in cases {
            let result = World::run(Mesh::single(), |rank| {
                case(&Tensor::from_host(rank, &[1; 13], &[1.0f64])?).to_host::<f64>()
            });
            let error = result.unwrap_err();
            assert_eq!(error.kind(), Kind::Shape, "{error}");
            assert_eq!(error.message(), format!("{name}: a tensor of 13 dims, but at most 12 are supported"));
        }
        assert!(Expand::to(&[1; 13], &[]).is_err());
    }
}
