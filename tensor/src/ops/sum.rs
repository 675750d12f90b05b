//! Sums over some dims, and their transpose: repetition along new dims.
//!
//! [`Sum`]: y = c times the sum of x over some dims; a mean is the sum with c = 1 / (the global extent of what is summed).
//! [`Expand`]: y = c x, repeated along new dims.

use super::labels::{check_dim, check_ndim, misuse, reduction, whole};
use super::scale::scale;
use super::{Case, Input};
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Fixed, Local, Op, Pieces, Vjp, infer_by_signature};
use crate::piece::{Piece, View, launch};
use crate::refusal::Refusal;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::reduce::SUM;
use shardgrad_kernels::op::unary::SCALE;
use shardgrad_kernels::{DType, Dims, Scalar, Strides};
use std::borrow::Cow;
use std::rc::Rc;

/// `a b c -> a c`, `..m d -> ..m`, `..m d -> d`, `..m -> `: some dims are summed and disappear. Any float, summed in the
/// accumulator. Linear; pending over the axes that split what is summed. dx = c g, repeated along the summed dims.
#[derive(Debug)]
pub struct Sum {
    signature: Cow<'static, str>,
    ndim: usize,
    dims: Dims,
    mean: bool,
}

impl Sum {
    /// The sum, or the mean, over some dims of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if one of them is no dim, or is named twice, or there are more than 12 dims.
    pub fn over(ndim: usize, dims: &[usize], mean: bool) -> Result<Rc<dyn Op>> {
        let name = if mean { "mean" } else { "sum" };
        let mut sorted: Dims = dims.into();
        sorted.sort_unstable();
        check_ndim(name, ndim)?;
        for &d in dims {
            check_dim(name, ndim, d)?;
        }
        if sorted.windows(2).any(|w| w[0] == w[1]) {
            return misuse(format!("{name}: a dim is named twice in {dims:?}"));
        }
        Ok(Sum::of(ndim, sorted, mean))
    }

    /// The sum over the first `count` dims: what the cotangent of a repeated argument is.
    #[must_use]
    pub fn leading(ndim: usize, count: usize) -> Rc<dyn Op> {
        Sum::of(ndim, (0..count).collect(), false)
    }

    fn of(ndim: usize, dims: Dims, mean: bool) -> Rc<dyn Op> {
        let [signature, _] = reduction(ndim, &dims);
        Rc::new(Sum { signature, ndim, dims, mean })
    }
}

impl Op for Sum {
    fn name(&self) -> &'static str {
        if self.mean { "mean" } else { "sum" }
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn fixed(&self) -> Option<Fixed> {
        match self.signature {
            Cow::Borrowed(text) => Some(Fixed::of::<Sum>(text)),
            Cow::Owned(_) => None,
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let count: usize = self.dims.iter().map(|&d| local.inputs[0].extent(d)).product();
        let scale = if self.mean { 1.0 / count as f64 } else { 1.0 };
        let turned = local.noted(x, || {
            let kept = (0..self.ndim).filter(|d| !self.dims.contains(d));
            let order: Dims = kept.chain(self.dims.iter().copied()).collect();
            Turned(x[0].view.permute(&order).into())
        });
        let view = x[0].viewed(turned.0.clone());
        local.launch(&SUM, &[&view], &[Scalar::Int(self.dims.len() as i64), Scalar::Real(scale)])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| {
            let goal = cx.goal(0);
            let count: usize = self.dims.iter().map(|&d| goal.extent(d)).product();
            let scale = if self.mean { 1.0 / count as f64 } else { 1.0 };
            let op = Expand::scaled(&goal.shape(), &self.dims, scale);
            Tensor::apply_with(op, &[&cx.grad(0)], goal)
        })
    }
}

/// The view of an argument whose summed dims come last.
struct Turned(View);

/// The view of an argument with new dims.
struct Repeated(View);

/// `a c -> a b c`, `..m -> ..m d`, `d -> ..m d`, ` -> ..m`: new dims, along which x is repeated without a copy. Any dtype.
/// Linear. A new dim is whole, unless the op stands in a vjp: there it is split as the argument that it serves.
/// dx = c times the sum of g over the new dims.
#[derive(Debug)]
pub struct Expand {
    signature: Cow<'static, str>,
    shape: Dims,
    dims: Dims,
    scale: f64,
}

impl Expand {
    /// New dims (ascending, counted in the result) in a result of a shape.
    ///
    /// # Errors
    /// `Kind::Shape` if one of them is no dim of the result, or they do not ascend, or it has more than 12 dims.
    pub fn to(shape: &[usize], dims: &[usize]) -> Result<Rc<dyn Op>> {
        check_ndim("expand", shape.len())?;
        for &d in dims {
            check_dim("expand", shape.len(), d)?;
        }
        if dims.windows(2).any(|w| w[0] >= w[1]) {
            return misuse(format!("expand: the new dims {dims:?} do not ascend"));
        }
        Ok(Expand::scaled(shape, dims, 1.0))
    }

    /// The same with a factor.
    fn scaled(shape: &[usize], dims: &[usize], scale: f64) -> Rc<dyn Op> {
        let [_, signature] = reduction(shape.len(), dims);
        Rc::new(Expand { signature, shape: shape.into(), dims: dims.into(), scale })
    }
}

impl Op for Expand {
    fn name(&self) -> &'static str {
        "expand"
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
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        if !want.is_empty() {
            return infer_by_signature(self, context, args, dtypes, want);
        }
        infer_by_signature(self, context, args, dtypes, &[whole(args[0], dtypes[0], &self.shape)])
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let mut x = x[0].clone();
        if self.scale != 1.0 {
            let mut scaled = x.alike(local.rank, x.dtype)?;
            launch(local.rank, &SCALE, &[&x], &mut [&mut scaled], &[Scalar::Real(self.scale)])?;
            x = scaled;
        }
        let repeated = local.noted(&[&x], || {
            let view = self.dims.iter().fold(Strides::clone(&x.view), |view, &d| view.unsqueeze(d));
            let shape = local.inference.outputs[0].local_shape(local.rank.coordinates());
            let view = view.broadcast(&shape).expect("new dims have extent 1 before they are repeated");
            Repeated(view.into())
        });
        x.view = repeated.0.clone();
        Ok([x].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = Sum::of(self.shape.len(), self.dims.clone(), false);
        cx.each(|_| {
            let sum = Tensor::result(op.clone(), &[&cx.grad(0)]);
            if self.scale == 1.0 { sum } else { scale(&sum, self.scale) }
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let sum = |ndim, dims: &[usize], mean, shape: &[usize]| {
        Case::new(Sum::over(ndim, dims, mean).expect("dims of the case"), vec![Input::real(shape)])
    };
    let expand = |shape: &[usize], dims: &[usize], x: &[usize]| {
        Case::fixed(Expand::to(shape, dims).expect("dims of the case"), vec![Input::real(x)]).exact()
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
        Case::fixed(Expand::scaled(&[2, 3], &[0], 1.0), vec![Input::index(&[3], 9)]).exact(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn sums_and_means_by_hand() {
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
    fn dims_that_are_none_are_refused() {
        assert!(Sum::over(2, &[2], false).is_err());
        assert!(Sum::over(2, &[1, 1], false).is_err());
    }

    #[test]
    fn repetition_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[1.0f32, 2.0])?;
            assert_eq!(x.expand(0, 3).to_host::<f32>()?, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
            assert_eq!(x.expand(1, 3).to_host::<f32>()?, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn new_dims_that_are_none_are_refused() {
        assert!(Expand::to(&[2], &[1]).is_err());
        assert!(Expand::to(&[2, 2], &[1, 0]).is_err());
    }

    #[test]
    fn more_dims_than_there_are_labels_are_refused() {
        use crate::reduction::Reduction;
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
            let made = World::run(Mesh::single(), |rank| {
                case(&Tensor::from_host(rank, &[1; 13], &[1.0f64])?).to_host::<f64>()
            });
            let error = made.unwrap_err();
            assert_eq!(error.kind(), Kind::Shape, "{error}");
            assert_eq!(error.message(), format!("{name}: a tensor of 13 dims; at most 12 are possible"));
        }
        assert!(Expand::to(&[1; 13], &[]).is_err());
    }
}
