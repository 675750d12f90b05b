//! Slices of a tensor along a dim, which disappears, and the transpose: stacking of tensors along a new dim.

use super::labels::{
    check_dim, check_num_tensors, common_dtype, dim_label, dim_labels_with, linear_jointly, unsplit,
};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::op::{CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, OutputLayouts, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use smallvec::{SmallVec, smallvec};
use std::rc::Rc;

/// Slices of a tensor along a dim, which disappears, as views: `a b! c -> a c, a c, ..`.
///
/// One result per element of the dim, which must not be sharded. Any dtype; no element moves. Linear. Gradient: dx =
/// the cotangents of all results, stacked.
#[doc(alias = "unstack")]
#[derive(Debug)]
pub struct Unbind {
    signature: String,
    ndim: usize,
    dim: usize,
    count: usize,
}

impl Unbind {
    /// The `count` slices along dim `dim` of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range or does not have 1 to 16 elements.
    pub fn along(ndim: usize, dim: usize, count: usize) -> Result<Rc<dyn Op>> {
        check_dim("unbind", ndim, dim)?;
        check_num_tensors("unbind", count)?;
        Ok(Unbind::of(ndim, dim, count))
    }

    pub(super) fn of(ndim: usize, dim: usize, count: usize) -> Rc<dyn Op> {
        let unsharded = format!("{}!", dim_label(dim));
        let parts = vec![dim_labels_with(ndim, dim, ""); count].join(", ");
        let signature = format!("{} -> {parts}", dim_labels_with(ndim, dim, &unsharded));
        Rc::new(Unbind { signature, ndim, dim, count })
    }
}

impl Op for Unbind {
    fn name(&self) -> &'static str {
        "unbind"
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

    fn forward(&self, _: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        debug_assert_eq!(x[0].view.shape[self.dim], self.count, "the op was made for this extent");
        Ok((0..self.count).map(|i| x[0].with_view(x[0].view.select(self.dim, i))).collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| {
            let grads: Vec<Tensor> = (0..self.count).map(|i| cx.grad(i)).collect();
            let grads: Vec<&Tensor> = grads.iter().collect();
            let op = Stack::of(self.ndim - 1, self.dim, self.count);
            cx.cotangent(0, op, &grads)
        })
    }
}

/// Stacks tensors along a new dim, which is unsharded: `a c, a c, .. -> a b c`.
///
/// One dtype of any kind. Linear in all arguments jointly. Gradient: the cotangent of an argument is its slice of g.
#[derive(Debug)]
pub struct Stack {
    signature: String,
    dim: usize,
    count: usize,
}

impl Stack {
    /// The stack of `count` tensors of `ndim` dims along a new dim, counted in the result.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range in the result or there are not 1 to 16 arguments.
    pub fn along(ndim: usize, dim: usize, count: usize) -> Result<Rc<dyn Op>> {
        check_dim("stack", ndim + 1, dim)?;
        check_num_tensors("stack", count)?;
        Ok(Stack::of(ndim, dim, count))
    }

    fn of(ndim: usize, dim: usize, count: usize) -> Rc<dyn Op> {
        let parts = vec![dim_labels_with(ndim + 1, dim, ""); count].join(", ");
        let signature = format!("{parts} -> {}", dim_labels_with(ndim + 1, dim, dim_label(dim)));
        Rc::new(Stack { signature, dim, count })
    }
}

impl Op for Stack {
    fn name(&self) -> &'static str {
        "stack"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        linear_jointly(self.count)
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Exact
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        common_dtype(inputs)
    }

    fn default_outputs(&self, args: &[&Layout], dtypes: &[DType]) -> OutputLayouts {
        let mut shape = args[0].shape();
        if shape.len() >= self.dim {
            shape.insert(self.dim, self.count);
        }
        smallvec![unsplit(args[0], dtypes[0], &shape)]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let mut out = local.output(0)?;
        for (i, tensor) in x.iter().enumerate() {
            let at = out.view.select(self.dim, i);
            out.write(local.rank, at, tensor)?;
        }
        Ok([out].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = Unbind::of(cx.output_layouts[0].ndim(), self.dim, self.count);
        let parts = Tensor::apply(op, &[&cx.grad(0)]);
        cx.cotangents(|i| parts[i].clone())
    }
}

pub(super) fn cases() -> Vec<Case> {
    let unbind = |dim: usize, input: Input| {
        let op = Unbind::of(input.shape().len(), dim, input.shape()[dim]);
        Case::fixed_shape(op, vec![input]).exact()
    };
    let stack = |dim, count, shape: &[usize]| {
        Case::new(Stack::of(shape.len(), dim, count), vec![Input::real(shape); count]).exact()
    };
    vec![
        unbind(1, Input::real(&[5, 3])),
        unbind(2, Input::real(&[2, 5, 3, 2])),
        unbind(0, Input::index(&[2, 5], 9)),
        unbind(1, Input::real(&[1, 2, 1])),
        stack(1, 3, &[5, 3]),
        stack(0, 2, &[5]),
        stack(0, 2, &[]),
        unbind(1, Input::real(&[0, 2])),
        stack(1, 2, &[0, 3]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::resharding::Resharding;
    use crate::methods::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_slices_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
            let columns = x.unbind(1);
            assert_eq!(columns.len(), 3);
            assert_eq!(columns[1].to_host::<f32>()?, [2.0, 5.0]);
            assert_eq!(x.unbind(0)[1].to_host::<f32>()?, [4.0, 5.0, 6.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn dim_out_of_range_and_17_slices_are_refused() {
        assert!(Unbind::along(2, 2, 3).is_err());
        assert!(Unbind::along(2, 0, 17).is_err());
    }

    #[test]
    fn lists_of_any_length_are_stacked_and_unbound() {
        let mesh = Mesh::parse("a=2").unwrap();
        World::run(mesh.clone(), |rank| {
            for count in [16, 17, 33, 300] {
                let layout = Layout::parse(&format!("i64[{count}, 3@a]"), &mesh)?;
                let x = Tensor::arange(rank, &layout, 0.0, 1.0)?;
                let rows = x.unbind(0);
                assert_eq!(
                    (rows.len(), rows[count - 1].layout().to_string()),
                    (count, "i64[3@a]".to_string())
                );
                let last = 3 * count as i64;
                assert_eq!(rows[count - 1].to_host::<i64>()?, [last - 3, last - 2, last - 1]);
                let rows: Vec<&Tensor> = rows.iter().collect();
                assert_eq!(Tensor::stack(&rows, 0).to_host::<i64>()?, x.to_host::<i64>()?);
                assert_eq!(Tensor::stack(&rows, 1).to_host::<i64>()?, x.transpose(0, 1).to_host::<i64>()?);
                let whole = x.gathered().unbind(0);
                let joined = Tensor::concat(&whole.iter().collect::<Vec<_>>(), 0);
                assert_eq!(joined.shape().as_slice(), [3 * count]);
                assert_eq!(joined.to_host::<i64>()?, x.to_host::<i64>()?);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn matches_stacks_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[1.0f32, 2.0])?;
            let y = Tensor::from_host(rank, &[2], &[3.0f32, 4.0])?;
            assert_eq!(Tensor::stack(&[&x, &y], 0).to_host::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
            assert_eq!(Tensor::stack(&[&x, &y], 1).to_host::<f32>()?, [1.0, 3.0, 2.0, 4.0]);
            Ok(())
        })
        .unwrap();
    }
}
