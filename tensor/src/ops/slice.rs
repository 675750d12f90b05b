//! A range of a whole dim, and its transpose: zeros (or another number) before and behind the elements of a dim.

use super::labels::{check_dim, letters_with, misuse, whole};
use super::{Case, Input};
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Local, Op, Pieces, Vjp, infer_by_signature};
use crate::piece::Piece;
use crate::refusal::Refusal;
use crate::tensor::{Tensor, check_held};
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use std::ops::Range;
use std::rc::Rc;

/// `..m d! -> ..m e`, `a x! c -> a y c`: a view, no element moves. Any dtype. Linear. dx = g with zeros around it.
#[derive(Debug)]
pub struct Slice {
    signature: String,
    extent: usize,
    dim: usize,
    range: Range<usize>,
}

/// One dim of a tensor, another extent in its place: `..m d! -> ..m e` or `a x! c -> a y c`.
fn resized(ndim: usize, dim: usize) -> String {
    if dim + 1 == ndim {
        return "..m d! -> ..m e".into();
    }
    format!("{} -> {}", letters_with(ndim, dim, "x!"), letters_with(ndim, dim, "y"))
}

impl Slice {
    /// A range of dim `dim`, which has `extent` elements, of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// Of kind `Kind::Shape` if there is no such dim, or the range does not lie in it.
    pub fn along(ndim: usize, extent: usize, dim: usize, range: Range<usize>) -> Result<Rc<dyn Op>> {
        check_dim("slice", ndim, dim)?;
        if range.start > range.end || range.end > extent {
            return misuse(format!("slice: {range:?} does not lie in dim {dim} of {extent} elements"));
        }
        Ok(Slice::of(ndim, extent, dim, range))
    }

    fn of(ndim: usize, extent: usize, dim: usize, range: Range<usize>) -> Rc<dyn Op> {
        Rc::new(Slice { signature: resized(ndim, dim), extent, dim, range })
    }
}

impl Op for Slice {
    fn name(&self) -> &'static str {
        "slice"
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
        let mut shape = args[0].shape();
        shape[self.dim] = self.range.len();
        infer_by_signature(self, context, args, dtypes, &[whole(args[0], dtypes[0], &shape)])
    }

    fn forward(&self, _: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        Ok([x[0].viewed(x[0].view.narrow(self.dim, self.range.start, self.range.end))].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let ndim = cx.output_layouts[0].ndim();
        let op = Pad::of(ndim, self.dim, self.range.start, self.extent - self.range.end);
        cx.each(|i| Tensor::apply_with(op.clone(), &[&cx.grad(0)], cx.goal(i)))
    }
}

/// `..m d! -> ..m e`, `a x! c -> a y c`. Any dtype; the value is rounded to floats and must be held by others. Linear if it
/// pads with 0. dx = the range of g where x stands.
#[derive(Debug)]
pub struct Pad {
    signature: String,
    dim: usize,
    before: usize,
    after: usize,
    value: f64,
}

impl Pad {
    /// A value so many times before and behind the elements of dim `dim` of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// Of kind `Kind::Shape` if there is no such dim.
    pub fn along(ndim: usize, dim: usize, before: usize, after: usize, value: f64) -> Result<Rc<dyn Op>> {
        check_dim("pad", ndim, dim)?;
        Ok(Rc::new(Pad { signature: resized(ndim, dim), dim, before, after, value }))
    }

    fn of(ndim: usize, dim: usize, before: usize, after: usize) -> Rc<dyn Op> {
        Rc::new(Pad { signature: resized(ndim, dim), dim, before, after, value: 0.0 })
    }
}

impl Op for Pad {
    fn name(&self) -> &'static str {
        "pad"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        if self.value == 0.0 { &[&[0]] } else { &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_held(inputs[0], self.value)?;
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
        let mut shape = args[0].shape();
        // An extent that no usize holds is more than any memory: inference refuses what stands for it.
        shape[self.dim] = shape[self.dim].saturating_add(self.before).saturating_add(self.after);
        infer_by_signature(self, context, args, dtypes, &[whole(args[0], dtypes[0], &shape)])
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let shape = local.inference.outputs[0].local_shape(local.rank.coordinates());
        let mut out = Piece::filled(local.rank, x[0].dtype, &shape, self.value)?;
        let at = out.view.narrow(self.dim, self.before, shape[self.dim] - self.after);
        out.write(local.rank, at, x[0])?;
        Ok([out].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let (ndim, extent) = (cx.output_layouts[0].ndim(), cx.output_layouts[0].extent(self.dim));
        let op = Slice::of(ndim, extent, self.dim, self.before..extent - self.after);
        cx.each(|i| Tensor::apply_with(op.clone(), &[&cx.grad(0)], cx.goal(i)))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let slice = |shape: &[usize], dim: usize, range: Range<usize>| {
        let op = Slice::along(shape.len(), shape[dim], dim, range).expect("a range of the case");
        Case::fixed(op, vec![Input::real(shape)]).exact()
    };
    let pad = |dim, before, after, shape: &[usize]| {
        Case::new(Pad::of(shape.len(), dim, before, after), vec![Input::real(shape)]).exact()
    };
    vec![
        slice(&[5, 8], 1, 1..8),
        slice(&[5, 4, 3], 1, 0..2),
        slice(&[5, 3], 0, 2..2),
        slice(&[1, 2], 1, 1..2),
        pad(1, 1, 0, &[5, 7]),
        pad(0, 2, 1, &[5, 3]),
        pad(1, 0, 0, &[2, 5, 3]),
        pad(0, 1, 2, &[0, 3]),
        Case::new(Pad::along(2, 1, 1, 2, -0.5).expect("a dim of the case"), vec![Input::real(&[5, 3])])
            .exact(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shaping::Shaping;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn ranges_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert_eq!(x.slice(1, 1..3).to_host::<i64>()?, [2, 3, 5, 6]);
            assert_eq!(x.slice(0, 0..1).to_host::<i64>()?, [1, 2, 3], "not what lies behind it");
            assert_eq!(x.select(0, 1).to_host::<i64>()?, [4, 5, 6]);
            assert_eq!(x.select(0, 1).shape().as_slice(), [3]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn ranges_that_lie_outside_are_refused() {
        assert!(Slice::along(2, 3, 1, 2..4).is_err());
        assert!(Slice::along(2, 3, 2, 0..1).is_err());
    }

    #[test]
    fn zeros_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 1], &[1i64, 2])?;
            assert_eq!(x.pad(1, 1, 1).to_host::<i64>()?, [0, 1, 0, 0, 2, 0]);
            assert_eq!(x.pad(0, 0, 1).to_host::<i64>()?, [1, 2, 0]);
            assert_eq!(x.pad_with(1, 0, 1, 7.0).to_host::<i64>()?, [1, 7, 2, 7]);
            Ok(())
        })
        .unwrap();
    }
}
