//! Range of an unsharded dim, and its transpose: padding before and after the elements of a dim.

use super::labels::{check_dim, dim_labels_with, invalid_argument, unsplit};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::op::{CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, OutputLayouts, Vjp};
use crate::tensor::check_representable;
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use smallvec::smallvec;
use std::ops::Range;
use std::rc::Rc;

/// Range of a dim, as a view: `..m d! -> ..m e`, `a x! c -> a y c`.
///
/// Any dtype; no element moves. The dim must not be sharded. Linear. Gradient: dx = g padded with zeros.
#[doc(alias = "narrow")]
#[doc(alias = "slice_in_dim")]
#[derive(Debug)]
pub struct Slice {
    signature: String,
    extent: usize,
    dim: usize,
    range: Range<usize>,
}

/// The signature of an op that changes the extent of one dim: `..m d! -> ..m e` or `a x! c -> a y c`.
fn resize_signature(ndim: usize, dim: usize) -> String {
    if dim + 1 == ndim {
        return "..m d! -> ..m e".into();
    }
    format!("{} -> {}", dim_labels_with(ndim, dim, "x!"), dim_labels_with(ndim, dim, "y"))
}

impl Slice {
    /// The range `range` of dim `dim`, which has `extent` elements, of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range or does not contain `range`.
    pub fn along(ndim: usize, extent: usize, dim: usize, range: Range<usize>) -> Result<Rc<dyn Op>> {
        check_dim("slice", ndim, dim)?;
        if range.start > range.end || range.end > extent {
            return invalid_argument(format!(
                "slice: the range {range:?} is out of bounds for dim {dim} of {extent} elements"
            ));
        }
        Ok(Slice::of(ndim, extent, dim, range))
    }

    fn of(ndim: usize, extent: usize, dim: usize, range: Range<usize>) -> Rc<dyn Op> {
        Rc::new(Slice { signature: resize_signature(ndim, dim), extent, dim, range })
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

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Exact
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs.into())
    }

    fn default_outputs(&self, args: &[&Layout], dtypes: &[DType]) -> OutputLayouts {
        let mut shape = args[0].shape();
        shape[self.dim] = self.range.len();
        smallvec![unsplit(args[0], dtypes[0], &shape)]
    }

    fn forward(&self, _: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Ok([x[0].with_view(x[0].view.narrow(self.dim, self.range.start, self.range.end))]
            .into_iter()
            .collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let ndim = cx.output_layouts[0].ndim();
        let op = Pad::of(ndim, self.dim, self.range.start, self.extent - self.range.end);
        cx.cotangents(|i| cx.cotangent(i, op.clone(), &[&cx.grad(0)]))
    }
}

/// Pads a dim with a number before and after its elements: `..m d! -> ..m e`, `a x! c -> a y c`.
///
/// Any dtype; the value is rounded if the dtype is a float, another dtype must represent it exactly. The dim must not
/// be sharded. Linear if the value is 0. Gradient: dx = the range of g where x is.
#[doc(alias = "constant_pad")]
#[derive(Debug)]
pub struct Pad {
    signature: String,
    dim: usize,
    before: usize,
    after: usize,
    value: f64,
}

impl Pad {
    /// The padding of dim `dim` of a tensor of `ndim` dims with `before` and `after` elements of `value`.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range.
    pub fn along(ndim: usize, dim: usize, before: usize, after: usize, value: f64) -> Result<Rc<dyn Op>> {
        check_dim("pad", ndim, dim)?;
        Ok(Rc::new(Pad { signature: resize_signature(ndim, dim), dim, before, after, value }))
    }

    fn of(ndim: usize, dim: usize, before: usize, after: usize) -> Rc<dyn Op> {
        Rc::new(Pad { signature: resize_signature(ndim, dim), dim, before, after, value: 0.0 })
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

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Exact
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_representable(inputs[0], self.value)?;
        Ok(inputs.into())
    }

    fn default_outputs(&self, args: &[&Layout], dtypes: &[DType]) -> OutputLayouts {
        let mut shape = args[0].shape();
        // An extent beyond usize saturates, and inference refuses a tensor that large.
        shape[self.dim] = shape[self.dim].saturating_add(self.before).saturating_add(self.after);
        smallvec![unsplit(args[0], dtypes[0], &shape)]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let shape = local.inference.outputs[0].local_shape(local.rank.coordinates());
        let mut out = LocalTensor::full(local.rank, x[0].dtype, &shape, self.value)?;
        let at = out.view.narrow(self.dim, self.before, shape[self.dim] - self.after);
        out.write(local.rank, at, x[0])?;
        Ok([out].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let (ndim, extent) = (cx.output_layouts[0].ndim(), cx.output_layouts[0].extent(self.dim));
        let op = Slice::of(ndim, extent, self.dim, self.before..extent - self.after);
        cx.cotangents(|i| cx.cotangent(i, op.clone(), &[&cx.grad(0)]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let slice = |shape: &[usize], dim: usize, range: Range<usize>| {
        let op = Slice::along(shape.len(), shape[dim], dim, range).expect("a range of the case");
        Case::fixed_shape(op, vec![Input::real(shape)]).exact()
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
    use crate::methods::shaping::Shaping;
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_ranges_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1i64, 2, 3, 4, 5, 6])?;
            assert_eq!(x.slice(1, 1..3).to_host::<i64>()?, [2, 3, 5, 6]);
            assert_eq!(x.slice(0, 0..1).to_host::<i64>()?, [1, 2, 3], "not the rest of the buffer");
            assert_eq!(x.select(0, 1).to_host::<i64>()?, [4, 5, 6]);
            assert_eq!(x.select(0, 1).shape().as_slice(), [3]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn ranges_out_of_bounds_are_refused() {
        assert!(Slice::along(2, 3, 1, 2..4).is_err());
        assert!(Slice::along(2, 3, 2, 0..1).is_err());
    }

    #[test]
    fn matches_padding_written_by_hand() {
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
