//! Elements picked along a dim by index, y_(a, n, c) = x_(a, index, c), and the transpose, which adds elements at index
//! positions. The index is one list for all rows (`index_select`, `index_add`) or has the shape of the result
//! (`gather`, `scatter_add`).

use super::embedding::check_index;
use super::labels::{check_dim, dim_labels_with};
use super::reduced_dims::keep_invariant_inputs;
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::dim::Dim;
use crate::layout::infer::Inference;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, OutputLayouts, SavedForBackward, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::{AxisSet, Error, Kind, Result};
use shardgrad_kernels::op::index::{GATHER, SCATTER_ADD};
use shardgrad_kernels::{DType, Kernel, Scalar, Strides};
use smallvec::smallvec;
use std::rc::Rc;

/// Picks elements along a dim by index: y_(a, n, c) = x_(a, index, c).
///
/// `a [v] c, n -> a n c` (`index_select`: one list of indices) or `a [v] c, a n c -> a n c` (`gather`: an index per
/// element). x of any dtype and indices (i64, each in 0..v). Linear in x.
///
/// The dim v may be sharded: a rank gives zeros for positions that it does not hold, so the result is a partial sum
/// with one nonzero term. An index outside of 0..v is an error of kind `Kind::Data`. Gradient: dx = the sum of g over
/// all n with that index.
#[doc(alias = "index_select")]
#[doc(alias = "take_along_dim")]
#[doc(alias = "take_along_axis")]
#[doc(alias = "take")]
#[derive(Debug)]
pub struct Gather {
    signature: String,
    dim: usize,
    /// Whether one list of indices serves all rows.
    is_shared: bool,
}

/// Adds elements at the positions that indices name: the transpose of [`Gather`].
///
/// `a n c, n -> a [v] c` (`index_add`) or `a n c, a n c -> a [v] c` (`scatter_add`) on elements (any float dtype, or
/// i64) and indices (i64, each in 0..v). Elements of one position are added in the order of n; a position without index
/// is 0. Linear in the elements, whose gradient is g at the index.
///
/// Where n is sharded the result is a partial sum. The new dim v is sharded as `output_dim` says, on axes that shard
/// neither argument; otherwise it is unsharded.
#[doc(alias = "index_add")]
#[doc(alias = "scatter_add")]
#[doc(alias = "segment_sum")]
#[derive(Debug)]
pub struct ScatterAdd {
    signature: String,
    dim: usize,
    is_shared: bool,
    output_dim: Dim,
    /// Mesh axes over which the arguments may stay `=` while v is sharded.
    invariant_over: AxisSet,
}

/// The labels of the indexed tensor, of the picked elements and of the index.
fn label_texts(ndim: usize, dim: usize, is_shared: bool) -> [String; 3] {
    let picked = dim_labels_with(ndim, dim, "n");
    let index = if is_shared { "n".to_string() } else { picked.clone() };
    [dim_labels_with(ndim, dim, "[v]"), picked, index]
}

impl Gather {
    /// The op along dim `dim` of a tensor of `ndim` dims; `is_shared` if one list of indices serves all rows.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range.
    pub fn along(ndim: usize, dim: usize, is_shared: bool) -> Result<Rc<dyn Op>> {
        check_dim(if is_shared { "index_select" } else { "gather" }, ndim, dim)?;
        Ok(Gather::of(ndim, dim, is_shared))
    }

    fn of(ndim: usize, dim: usize, is_shared: bool) -> Rc<dyn Op> {
        let [source, picked, index] = label_texts(ndim, dim, is_shared);
        Rc::new(Gather { signature: format!("{source}, {index} -> {picked}"), dim, is_shared })
    }
}

impl ScatterAdd {
    /// The op into dim `dim` of a result of `ndim` dims; `output_dim` states extent and desired sharding of this dim; `is_shared` if
    /// one list of indices serves all rows.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range.
    pub fn along(ndim: usize, dim: usize, output_dim: Dim, is_shared: bool) -> Result<Rc<dyn Op>> {
        check_dim(if is_shared { "index_add" } else { "scatter_add" }, ndim, dim)?;
        Ok(ScatterAdd::of(ndim, dim, output_dim, is_shared))
    }

    /// The same without a check of the dim.
    pub(super) fn of(ndim: usize, dim: usize, output_dim: Dim, is_shared: bool) -> Rc<dyn Op> {
        let [source, picked, index] = label_texts(ndim, dim, is_shared);
        Rc::new(ScatterAdd {
            signature: format!("{picked}, {index} -> {source}"),
            dim,
            is_shared,
            output_dim,
            invariant_over: AxisSet::EMPTY,
        })
    }

    /// The adjoint of an op that picks elements of a dim, which is sharded as `output_dim` says, and has the same results on all ranks of
    /// these axes.
    pub(super) fn into_shards(ndim: usize, dim: usize, output_dim: Dim) -> Rc<dyn Op> {
        let [source, picked, index] = label_texts(ndim, dim, false);
        let signature = format!("{picked}, {index} -> {source}");
        let invariant_over = output_dim.axes.iter().collect();
        Rc::new(ScatterAdd { signature, dim, is_shared: false, output_dim, invariant_over })
    }

    /// The layout of a result of shape (a, v, c) with v sharded as `output_dim`, up to the first axis that shards an argument.
    fn output_layout(&self, args: &[&Layout], dtype: DType) -> Layout {
        let used = args.iter().fold(AxisSet::EMPTY, |used, l| used.union(l.sharded_axes()));
        let free = self.output_dim.axes.iter().take_while(|a| !used.contains(*a));
        let mut dims: Vec<Dim> = args[0].shape().iter().map(|&n| Dim::unsharded(n)).collect();
        if let Some(dim) = dims.get_mut(self.dim) {
            *dim = Dim { axes: free.collect(), ..self.output_dim };
        }
        Layout::assemble(args[0].mesh(), dtype, dims.into(), AxisSet::EMPTY, AxisSet::EMPTY)
    }
}

/// A contiguous view as three dims: the dims before `dim` merged, the dim, the dims after it merged.
pub(super) fn outer_dim_inner(view: &Strides, dim: usize) -> Strides {
    let shape = &view.shape;
    let three = [shape[..dim].iter().product(), shape[dim], shape[dim + 1..].iter().product()];
    view.reshape(&three).expect("a contiguous view can be reshaped freely")
}

/// Runs the gather or the scatter-add kernel on `(x or g, index)`.
fn run(
    local: &ForwardContext<'_>,
    kernel: &Kernel,
    x: &[&LocalTensor],
    dim: usize,
    is_shared: bool,
) -> Result<LocalTensors> {
    let x = local.contiguous(x)?;
    let (count, range) = local.label("v");
    let scalars = [Scalar::Int(range.start as i64), Scalar::Int(count as i64)];
    let values = x[0].with_view(outer_dim_inner(&x[0].view, dim));
    let index = if is_shared { x[1].clone() } else { x[1].with_view(outer_dim_inner(&x[1].view, dim)) };
    let inputs = if std::ptr::eq(kernel, &raw const GATHER) { [&values, &index] } else { [&index, &values] };
    let mut out = local.output(0)?;
    let three_dims = outer_dim_inner(&out.view, dim);
    let view = std::mem::replace(&mut out.view, three_dims.into());
    launch(local.rank, kernel, &inputs, &mut [&mut out], &scalars)?;
    out.view = view;
    Ok([out].into_iter().collect())
}

impl Op for Gather {
    fn name(&self) -> &'static str {
        if self.is_shared { "index_select" } else { "gather" }
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[1], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_index(inputs[1])?;
        Ok(inputs[..1].into())
    }

    fn estimate_work(&self, _: usize, _: &[&Layout], outputs: &[Layout]) -> usize {
        // Only as many elements of x are read as the result has.
        outputs[0].numel()
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        run(local, &GATHER, x, self.dim, self.is_shared)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let source = &cx.input_layouts[0];
        let op = ScatterAdd::of(source.ndim(), self.dim, source.dims()[self.dim], self.is_shared);
        cx.cotangents(|i| cx.cotangent(i, op.clone(), &[&cx.grad(0), cx.input(1)]))
    }
}

impl Op for ScatterAdd {
    fn name(&self) -> &'static str {
        if self.is_shared { "index_add" } else { "scatter_add" }
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[1], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_index(inputs[1])?;
        if inputs[0].is_float() || inputs[0] == DType::I64 {
            return Ok(inputs[..1].into());
        }
        Err(Error::new(
            Kind::DType,
            format!("cannot add elements of {}; i64 and floats can be added", inputs[0]),
        )
        .detail("help", "cast the elements: x.cast(DType::I64)"))
    }

    fn default_outputs(&self, args: &[&Layout], dtypes: &[DType]) -> OutputLayouts {
        smallvec![Some(self.output_layout(args, dtypes[0]))]
    }

    fn adjust_inference(&self, inferred: Rc<Inference>, _: &[&Layout]) -> Rc<Inference> {
        match self.invariant_over.is_empty() {
            true => inferred,
            false => keep_invariant_inputs(inferred, self.invariant_over),
        }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        run(local, &SCATTER_ADD, x, self.dim, self.is_shared)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = Gather::of(cx.output_layouts[0].ndim(), self.dim, self.is_shared);
        cx.cotangents(|_| Tensor::apply_one(op.clone(), &[&cx.grad(0), cx.input(1)]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let gather = |dim, x: Input, index: Input| {
        let op = Gather::of(x.shape().len(), dim, index.shape().len() == 1 && x.shape().len() > 1);
        Case::new(op, vec![x, index]).exact()
    };
    let scatter = |dim, extent, x: Input, index: Input| {
        let is_shared = index.shape().len() == 1 && x.shape().len() > 1;
        let op = ScatterAdd::of(x.shape().len(), dim, Dim::unsharded(extent), is_shared);
        Case::fixed_shape(op, vec![x, index]).exact()
    };
    let (real, index) = (Input::real, Input::index);
    vec![
        gather(1, real(&[2, 7, 3]), index(&[5], 7)),
        gather(0, index(&[7, 3], 9), index(&[5], 7)),
        gather(1, real(&[5, 3]), index(&[0], 3)),
        gather(1, real(&[2, 7, 3]), index(&[2, 5, 3], 7)),
        gather(0, real(&[7]), index(&[5], 7)),
        gather(0, Input::boolean(&[7, 2]), index(&[5], 7)),
        scatter(1, 4, real(&[2, 5, 3]), index(&[5], 4)),
        scatter(0, 3, index(&[5, 2], 9), index(&[5], 3)),
        scatter(1, 4, real(&[2, 5, 3]), index(&[2, 5, 3], 4)),
        scatter(1, 3, index(&[2, 5], 9), index(&[2, 5], 3)),
        scatter(0, 2, real(&[0, 3]), index(&[0, 3], 2)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::indexing::Indexing;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_elements_picked_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
            let list = Tensor::from_host(rank, &[2], &[2i64, 0])?;
            assert_eq!(x.index_select(1, &list).to_host::<f32>()?, [3.0, 1.0, 6.0, 4.0]);
            let table = Tensor::from_host(rank, &[1, 3], &[0i64, 1, 0])?;
            assert_eq!(x.gather(0, &table).to_host::<f32>()?, [1.0, 5.0, 3.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn repeated_indices_add_up() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1, 3], &[100.0f32, 200.0, 300.0])?;
            let parts = Tensor::from_host(rank, &[1, 4], &[1.0f32, 2.0, 3.0, 4.0])?;
            let list = Tensor::from_host(rank, &[4], &[2i64, 0, 2, 2])?;
            assert_eq!(x.index_add(1, &list, &parts).to_host::<f32>()?, [102.0, 200.0, 308.0]);
            let table = Tensor::from_host(rank, &[1, 4], &[1i64, 1, 0, 2])?;
            assert_eq!(x.scatter_add(1, &table, &parts).to_host::<f32>()?, [103.0, 203.0, 304.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn scatter_add_of_integers_is_exact() {
        World::run(Mesh::single(), |rank| {
            let big = (1i64 << 53) + 1;
            let parts = Tensor::from_host(rank, &[3], &[big, 5, 1])?;
            let list = Tensor::from_host(rank, &[3], &[2i64, 0, 2])?;
            for is_shared in [true, false] {
                let op = ScatterAdd::along(1, 0, Dim::unsharded(4), is_shared)?;
                assert_eq!(Tensor::apply_one(op, &[&parts, &list]).to_host::<i64>()?, [5, 0, big + 1, 0]);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn index_add_keeps_the_sharding_of_its_target() {
        let mesh = Mesh::parse("a=2").unwrap();
        World::run(mesh.clone(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse("f64[5@a, 2]", &mesh)?)?;
            let parts = Tensor::from_host(rank, &[3, 2], &[1.0f64, 2.0, 3.0, 4.0, 5.0, 6.0])?;
            let list = Tensor::from_host(rank, &[3], &[4i64, 1, 4])?;
            let sum = x.index_add(0, &list, &parts);
            assert_eq!(sum.layout().to_string(), "f64[5@a, 2]");
            assert_eq!(sum.to_host::<f64>()?, [0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 6.0, 8.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn index_out_of_range_is_an_error_with_op_index_and_range() {
        let error = World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[0.0f32; 3])?;
            let _ = x.gather(0, &Tensor::from_host(rank, &[2], &[0i64, -1])?);
            Ok(())
        })
        .unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert!(error.message() == "gather: index -1 at position 1 is outside of 0..3", "{error}");
        assert!(error.site().is_some_and(|s| s.file().ends_with("gather.rs")), "{error}");
    }
}
